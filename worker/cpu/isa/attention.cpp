// Attention of a tile of query rows over paged keys and values, in splits of kSplitTokens positions.
//
// Splits are counted from position 0 and merged in order. Each one is a complete softmax of its own (largest score, sum,
// weighted values), so one query gets the same bits in a long prompt, in a short chunk and when splits run on many threads.
#include "attention.h"

#include "kernel_list.h"

namespace pw::PW_ISA {
namespace {

constexpr float kNoScore = -1e30f;  // finite, so that the difference of two of them is 0 and not NaN

using ScorePage = void (*)(const KvLayer&, const uint8_t*, const float*, float*, const Ahead*);
using WeighValues = void (*)(const SplitPages&, const float*, int32_t, float*);

// The inner loops by number of rows, from 1 to kTileRows.
template <class Reader>
struct RowKernels {
  static constexpr ScorePage kScore[] = {
      score_page<Reader, 1>, score_page<Reader, 2>, score_page<Reader, 3>,
      score_page<Reader, 4>, score_page<Reader, 5>, score_page<Reader, 6>,
#ifdef PW_ISA_avx512
      score_page<Reader, 7>, score_page<Reader, 8>,
#endif
  };
  static constexpr WeighValues kWeigh[] = {
      weigh_values<Reader, 1, kTileLanes>, weigh_values<Reader, 2, kTileLanes>, weigh_values<Reader, 3, kTileLanes>,
      weigh_values<Reader, 4, kTileLanes>, weigh_values<Reader, 5, kTileLanes>, weigh_values<Reader, 6, kTileLanes>,
#ifdef PW_ISA_avx512
      weigh_values<Reader, 7, kTileLanes>, weigh_values<Reader, 8, kTileLanes>,
#endif
  };
  static constexpr WeighValues kWeighLast[] = {  // 16 dimensions that are left over
      weigh_values<Reader, 1, 1>, weigh_values<Reader, 2, 1>, weigh_values<Reader, 3, 1>,
      weigh_values<Reader, 4, 1>, weigh_values<Reader, 5, 1>, weigh_values<Reader, 6, 1>,
#ifdef PW_ISA_avx512
      weigh_values<Reader, 7, 1>, weigh_values<Reader, 8, 1>,
#endif
  };
};

// Working memory of a tile.
struct Work {
  int32_t n_rows;
  float* query;            // per group of kTileRows rows: [head_dim][rows of the group], scaled
  float* scores;           // [n_rows][kSplitTokens]
  float* sums;             // [n_rows][head_dim]
  AttentionState* split;   // [n_rows]
  AttentionState* total;   // [n_rows]
};

struct Range {
  int32_t begin, end;
};

PW_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
PW_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

Work carve(const AttentionTile& tile) {
  const int32_t head_dim = tile.layer->head_dim, n_rows = tile.n_tokens * tile.n_heads;
  Work work;
  work.n_rows = n_rows;
  work.scores = static_cast<float*>(tile.scratch);
  work.query = work.scores + n_rows * kSplitTokens;
  work.sums = work.query + n_rows * head_dim;
  work.split = reinterpret_cast<AttentionState*>(work.sums + n_rows * head_dim);
  work.total = work.split + n_rows;
  return work;
}

PW_INLINE const float* query_row(const AttentionTile& tile, int32_t row) {
  return tile.query + row / tile.n_heads * tile.token_stride + row % tile.n_heads * tile.layer->head_dim;
}

void pack_query(const AttentionTile& tile, const Work& work) {
  const int32_t head_dim = tile.layer->head_dim;
  for (int32_t group = 0; group < work.n_rows; group += kTileRows) {
    const int32_t rows = smaller(kTileRows, work.n_rows - group);
    float* packed = work.query + group * head_dim;
    for (int32_t r = 0; r < rows; ++r) {
      const float* row = query_row(tile, group + r);
      for (int32_t dim = 0; dim < head_dim; ++dim) packed[dim * rows + r] = row[dim] * tile.score_scale;
    }
  }
}

// Positions that the query at `position` sees within the split that starts at `start`, counted from there.
PW_INLINE Range visible(const AttentionTile& tile, int32_t position, int32_t start) {
  const int32_t oldest = tile.window_tokens > 0 ? larger(0, position - tile.window_tokens + 1) : 0;
  return {larger(0, oldest - start), smaller(kSplitTokens, position + 1 - start)};
}

// What any row of the tile sees of the split.
PW_INLINE Range tile_range(const AttentionTile& tile, int32_t start) {
  return {visible(tile, tile.first_position, start).begin,
          visible(tile, tile.first_position + tile.n_tokens - 1, start).end};
}

PW_INLINE int32_t lanes_down(int32_t n) { return n & ~(kLanes - 1); }
PW_INLINE int32_t lanes_up(int32_t n) { return (n + kLanes - 1) & ~(kLanes - 1); }

PW_INLINE void fill_zero(float* x, int32_t begin, int32_t end) {
  for (int32_t i = begin; i < end; i += kLanes) store(x + i, zero());
}

// Takes scores that the row does not see, or that never were written, out of the vectors at both ends of `seen`.
PW_INLINE void mask_ends(float* scores, Range seen) {
  const Lanes none = splat(kNoScore);
  const int32_t first = lanes_down(seen.begin), last = lanes_down(seen.end - 1);
  store(scores + first, keep(load(scores + first), seen.begin - first, kLanes, none));
  store(scores + last, keep(load(scores + last), 0, seen.end - last, none));
}

// Scores become weights: e^(score - largest) where the row sees the key, 0 elsewhere in `covered`.
AttentionState weigh_row(float* scores, Range seen, Range covered, float softcap) {
  const int32_t begin = lanes_down(covered.begin), end = lanes_up(covered.end);
  if (seen.begin >= seen.end) {
    fill_zero(scores, begin, end);
    return {kNoScore, 0.0f};
  }
  const int32_t seen_begin = lanes_down(seen.begin), seen_end = lanes_up(seen.end);
  fill_zero(scores, begin, seen_begin);
  fill_zero(scores, seen_end, end);
  if (softcap != 0.0f) soft_cap(scores + seen_begin, seen_end - seen_begin, softcap);
  mask_ends(scores, seen);
  Lanes largest = splat(kNoScore);
  for (int32_t i = seen_begin; i < seen_end; i += kLanes) largest = max(largest, load(scores + i));
  const float top = reduce_max(largest);
  Lanes sums = zero();
  for (int32_t i = seen_begin; i < seen_end; i += kLanes) {
    const Lanes weight = exp(load(scores + i) - splat(top));
    store(scores + i, weight);
    sums = sums + weight;
  }
  return {top, reduce_add(sums)};
}

template <class Reader>
void score_rows(const Work& work, const SplitPages& split, const uint8_t* after_split) {
  const KvLayer& layer = *split.layer;
  const int32_t end_page = (split.end + kPageTokens - 1) / kPageTokens;
  for (int32_t page = split.begin / kPageTokens; page < end_page; ++page) {
    const uint8_t* block = split.block(page);
    const uint8_t* next = page + 1 < end_page ? split.block(page + 1) : after_split;
    const Ahead ahead{block + layer.key_bytes, next, layer.key_bytes / layer.head_dim};
    for (int32_t row = 0; row < work.n_rows; row += kTileRows)
      RowKernels<Reader>::kScore[smaller(kTileRows, work.n_rows - row) - 1](
          layer, block, work.query + row * layer.head_dim, work.scores + row * kSplitTokens + page * kPageTokens,
          row == 0 ? &ahead : nullptr);
  }
}

template <class Reader>
void weigh_rows(const Work& work, const SplitPages& split) {
  const int32_t head_dim = split.layer->head_dim;
  for (int32_t dim = 0; dim < head_dim; dim += kTileLanes * kLanes) {
    const bool is_whole = dim + kTileLanes * kLanes <= head_dim;
    const WeighValues* kernels = is_whole ? RowKernels<Reader>::kWeigh : RowKernels<Reader>::kWeighLast;
    for (int32_t row = 0; row < work.n_rows; row += kTileRows)
      kernels[smaller(kTileRows, work.n_rows - row) - 1](split, work.scores + row * kSplitTokens, dim,
                                                         work.sums + row * head_dim);
  }
}

// The first block after a split, to be fetched early; the split's own last one where the sequence ends with it.
PW_INLINE const uint8_t* block_after(const AttentionTile& tile, int32_t split) {
  const int32_t last_page = (tile.first_position + tile.n_tokens - 1) / kPageTokens;
  const int32_t next_page = (split + 1) * (kSplitTokens / kPageTokens);
  return tile.layer->block(tile.pages[smaller(next_page, last_page)], tile.kv_head);
}

// Fills work.split and work.sums with the softmax of one split.
template <class Reader>
void run_split(const AttentionTile& tile, const Work& work, int32_t split) {
  const int32_t start = split * kSplitTokens;
  const Range covered = tile_range(tile, start);
  const SplitPages pages{tile.layer, tile.pages + start / kPageTokens, tile.kv_head, covered.begin, covered.end};
  score_rows<Reader>(work, pages, block_after(tile, split));
  for (int32_t row = 0; row < work.n_rows; ++row) {
    const Range seen = visible(tile, tile.first_position + row / tile.n_heads, start);
    work.split[row] = weigh_row(work.scores + row * kSplitTokens, seen, covered, tile.score_softcap);
  }
  weigh_rows<Reader>(work, pages);
}

void run_split_of_type(const AttentionTile& tile, const Work& work, int32_t split) {
  if (tile.layer->type == PW_KV_F16)
    run_split<F16Reader>(tile, work, split);
  else
    run_split<Q8Reader>(tile, work, split);
}

// Adds the softmax of a split to the total of the splits before it.
void merge(AttentionState* total, float* total_values, const AttentionState& part, const float* values,
           int32_t head_dim) {
  if (total->sum == 0.0f) {  // what the general case comes to, without its cost
    *total = part;
    for (int32_t dim = 0; dim < head_dim; dim += kLanes) store(total_values + dim, load(values + dim));
    return;
  }
  const float largest = total->largest > part.largest ? total->largest : part.largest;
  const Lanes old_factor = exp(splat(total->largest - largest)), new_factor = exp(splat(part.largest - largest));
  const Lanes sum = fma(splat(part.sum), new_factor, splat(total->sum) * old_factor);
  *total = {largest, _mm256_cvtss_f32(low_half(sum))};
  for (int32_t dim = 0; dim < head_dim; dim += kLanes)
    store(total_values + dim, fma(load(values + dim), new_factor, load(total_values + dim) * old_factor));
}

void start_total(AttentionState* total, float* values, int32_t head_dim) {
  *total = {kNoScore, 0.0f};
  for (int32_t dim = 0; dim < head_dim; dim += kLanes) store(values + dim, zero());
}

void finish_total(const AttentionState& total, float* values, int32_t head_dim) {
  scale(values, head_dim, 1.0f / total.sum);
}

}  // namespace

size_t attention_scratch_bytes(int32_t n_rows, int32_t head_dim) {
  const size_t floats = static_cast<size_t>(n_rows) * (kSplitTokens + 2 * head_dim);
  return floats * sizeof(float) + 2 * static_cast<size_t>(n_rows) * sizeof(AttentionState);
}

void attend(const AttentionTile& tile) {
  const Work work = carve(tile);
  const int32_t head_dim = tile.layer->head_dim;
  float* const output = tile.output;
  const auto output_row = [&](int32_t row) PW_LAMBDA {
    return output + row / tile.n_heads * tile.token_stride + row % tile.n_heads * head_dim;
  };
  pack_query(tile, work);
  for (int32_t row = 0; row < work.n_rows; ++row) start_total(&work.total[row], output_row(row), head_dim);
  const int32_t first_split = tile_range(tile, 0).begin / kSplitTokens;
  const int32_t last_split = (tile.first_position + tile.n_tokens - 1) / kSplitTokens;
  for (int32_t split = first_split; split <= last_split; ++split) {
    run_split_of_type(tile, work, split);
    for (int32_t row = 0; row < work.n_rows; ++row)
      merge(&work.total[row], output_row(row), work.split[row], work.sums + row * head_dim, head_dim);
  }
  for (int32_t row = 0; row < work.n_rows; ++row) finish_total(work.total[row], output_row(row), head_dim);
}

void attend_split(const AttentionTile& tile, int32_t split, AttentionState* states, float* values, int64_t stride) {
  const Work work = carve(tile);
  const int32_t head_dim = tile.layer->head_dim;
  pack_query(tile, work);
  run_split_of_type(tile, work, split);
  for (int32_t row = 0; row < work.n_rows; ++row) {
    states[row * stride] = work.split[row];
    float* to = values + row * stride * head_dim;
    for (int32_t dim = 0; dim < head_dim; dim += kLanes) store(to + dim, load(work.sums + row * head_dim + dim));
  }
}

void merge_splits(const AttentionState* states, const float* values, int32_t n, int32_t head_dim, float* output) {
  AttentionState total;
  start_total(&total, output, head_dim);
  for (int32_t i = 0; i < n; ++i) merge(&total, output, states[i], values + int64_t{i} * head_dim, head_dim);
  finish_total(total, output, head_dim);
}

}  // namespace pw::PW_ISA
