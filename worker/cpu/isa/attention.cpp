// Attention of a tile of query rows over paged keys and values, in splits of kSplitTokens positions.
//
// Splits are counted from position 0 and merged in order. Each one is a complete softmax of its own (largest score, sum,
// weighted values), so one query gets the same bits in a long prompt, in a short chunk and when splits run on many threads.
#include "attention.h"

#include "kernel_list.h"

namespace pw::PW_ISA {
namespace {

constexpr float kNoScore = -1e30f;  // finite, so that the difference of two of them is 0 and not NaN

using ScorePage = void (*)(const KvLayer&, const uint8_t*, const float*, float*);
using ValuePage = void (*)(const KvLayer&, const uint8_t*, const float*, int32_t, int32_t, float*);

template <class Reader>
struct PageKernels {
  static constexpr ScorePage kScore[] = {
      score_page<Reader, 1>, score_page<Reader, 2>, score_page<Reader, 3>,         score_page<Reader, 4>,
      score_page<Reader, 5>, score_page<Reader, 6>,
#ifdef PW_ISA_avx512
      score_page<Reader, 7>, score_page<Reader, 8>,
#endif
  };
  static constexpr ValuePage kValue[] = {
      value_page<Reader, 1>, value_page<Reader, 2>, value_page<Reader, 3>, value_page<Reader, 4>,
      value_page<Reader, 5>, value_page<Reader, 6>,
#ifdef PW_ISA_avx512
      value_page<Reader, 7>, value_page<Reader, 8>,
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

// Scores become weights: e^(score - largest) where the row sees the key, 0 elsewhere in `covered`.
AttentionState weigh_row(float* scores, Range seen, Range covered, float softcap) {
  const Lanes none = splat(kNoScore);
  Lanes largest = none;
  const int32_t begin = covered.begin & ~(kLanes - 1);
  for (int32_t i = begin; i < covered.end; i += kLanes) {
    Lanes s = load(scores + i);
    if (softcap != 0.0f) s = splat(softcap) * tanh(s * splat(1.0f / softcap));
    s = keep(s, seen.begin - i, seen.end - i, none);
    store(scores + i, s);
    largest = max(largest, s);
  }
  const float top = reduce_max(largest);
  Lanes sums = zero();
  for (int32_t i = begin; i < covered.end; i += kLanes) {
    const Lanes weight = keep(exp(load(scores + i) - splat(top)), seen.begin - i, seen.end - i, zero());
    store(scores + i, weight);
    sums = sums + weight;
  }
  return {top, reduce_add(sums)};
}

// Fills work.split and work.sums with the softmax of one split.
template <class Reader>
void run_split(const AttentionTile& tile, const Work& work, int32_t split) {
  const KvLayer& layer = *tile.layer;
  const int32_t start = split * kSplitTokens;
  const Range covered = tile_range(tile, start);
  const int32_t first_page = covered.begin / kPageTokens, end_page = (covered.end + kPageTokens - 1) / kPageTokens;
  const int32_t* pages = tile.pages + start / kPageTokens;
  for (int32_t page = first_page; page < end_page; ++page) {
    const uint8_t* block = layer.block(pages[page], tile.kv_head);
    for (int32_t row = 0; row < work.n_rows; row += kTileRows)
      PageKernels<Reader>::kScore[smaller(kTileRows, work.n_rows - row) - 1](
          layer, block, work.query + row * layer.head_dim, work.scores + row * kSplitTokens + page * kPageTokens);
  }
  for (int32_t row = 0; row < work.n_rows; ++row) {
    const Range seen = visible(tile, tile.first_position + row / tile.n_heads, start);
    work.split[row] = weigh_row(work.scores + row * kSplitTokens, seen, covered, tile.score_softcap);
  }
  for (int32_t i = 0; i < work.n_rows * layer.head_dim; i += kLanes) store(work.sums + i, zero());
  for (int32_t page = first_page; page < end_page; ++page) {
    const uint8_t* block = layer.block(pages[page], tile.kv_head);
    const int32_t begin = larger(0, covered.begin - page * kPageTokens);
    const int32_t end = smaller(kPageTokens, covered.end - page * kPageTokens);
    for (int32_t row = 0; row < work.n_rows; row += kTileRows)
      PageKernels<Reader>::kValue[smaller(kTileRows, work.n_rows - row) - 1](
          layer, block, work.scores + row * kSplitTokens + page * kPageTokens, begin, end,
          work.sums + row * layer.head_dim);
  }
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
  const float largest = total->largest > part.largest ? total->largest : part.largest;
  const Lanes old_factor = exp(splat(total->largest - largest)), new_factor = exp(splat(part.largest - largest));
  const Lanes sum = fma(splat(part.sum), new_factor, splat(total->sum) * old_factor);
  total->sum = _mm256_cvtss_f32(low_half(sum));
  total->largest = largest;
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
