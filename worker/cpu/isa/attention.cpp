// Attention of a tile of query rows over paged keys and values, in splits of kSplitTokens positions.
//
// Splits are counted from position 0, each is a complete softmax of its own (largest score, sum, weighted values) over
// its pages in order, and they are merged in order. So one query gets the same bits in a long prompt, in a short chunk
// and when splits run on many threads.
#include "attention.h"

#include "kernel_list.h"

namespace pw::PW_ISA {
namespace {

using AttendPage = void (*)(const KvLayer&, const uint8_t*, int32_t, const Rows&);

// The inner loop by number of rows, from 1 to kTileRows.
template <class Reader>
struct PageKernels {
  static constexpr AttendPage kByRows[] = {
      attend_page<Reader, 1>, attend_page<Reader, 2>, attend_page<Reader, 3>,
      attend_page<Reader, 4>, attend_page<Reader, 5>, attend_page<Reader, 6>,
#ifdef PW_ISA_avx512
      attend_page<Reader, 7>, attend_page<Reader, 8>,
#endif
  };
};

const AttendPage* page_kernels(int32_t type, bool is_expanded) {
  if (is_expanded) return PageKernels<F32Reader>::kByRows;
  return type == PW_KV_F16 ? PageKernels<F16Reader>::kByRows : PageKernels<Q8Reader>::kByRows;
}

const uint8_t* expanded(const KvLayer& layer, const uint8_t* block, float* page) {
  if (layer.type == PW_KV_F16)
    expand_page<F16Reader>(layer, block, page);
  else
    expand_page<Q8Reader>(layer, block, page);
  return reinterpret_cast<const uint8_t*>(page);
}

// Working memory of a tile, by row.
struct Work {
  int32_t n_rows;
  float* page;             // one page expanded to f32
  float* query;            // per group of kTileRows rows: [head_dim][rows of the group], scaled
  float* sums;             // [n_rows][head_dim] of the split in work
  float* lane_sums;        // [n_rows][16]
  float* largest;          // [n_rows]
  int32_t* positions;      // [n_rows]
  AttentionState* totals;  // [n_rows] of the splits before
};

Work carve(const AttentionTile& tile) {
  const int32_t head_dim = tile.layer->head_dim, n_rows = tile.n_tokens * tile.n_heads;
  Work work;
  work.n_rows = n_rows;
  work.page = static_cast<float*>(tile.scratch);
  work.query = work.page + 2 * kPageTokens * head_dim;
  work.sums = work.query + n_rows * head_dim;
  work.lane_sums = work.sums + n_rows * head_dim;
  work.largest = work.lane_sums + n_rows * kLanes;
  work.positions = reinterpret_cast<int32_t*>(work.largest + n_rows);
  work.totals = reinterpret_cast<AttentionState*>(work.positions + n_rows);
  return work;
}

PW_INLINE int64_t row_offset(const AttentionTile& tile, int32_t row) {
  return row / tile.n_heads * tile.token_stride + row % tile.n_heads * tile.layer->head_dim;
}

void start_tile(const AttentionTile& tile, const Work& work) {
  const int32_t head_dim = tile.layer->head_dim;
  const float scale_log2 = tile.score_scale * kLog2E;
  for (int32_t group = 0; group < work.n_rows; group += kTileRows) {
    const int32_t rows = smaller(kTileRows, work.n_rows - group);
    float* packed = work.query + group * head_dim;
    for (int32_t r = 0; r < rows; ++r) {
      const float* row = tile.query + row_offset(tile, group + r);
      for (int32_t dim = 0; dim < head_dim; ++dim) packed[dim * rows + r] = row[dim] * scale_log2;
    }
  }
  for (int32_t row = 0; row < work.n_rows; ++row) work.positions[row] = tile.first_position + row / tile.n_heads;
}

void start_split(const Work& work, int32_t head_dim) {
  for (int32_t i = 0; i < work.n_rows * head_dim; i += kLanes) store(work.sums + i, zero());
  for (int32_t row = 0; row < work.n_rows; ++row) {
    store(work.lane_sums + row * kLanes, zero());
    work.largest[row] = kNoScore;
  }
}

// Positions that any row of the tile sees.
PW_INLINE Range tile_range(const AttentionTile& tile) {
  const int32_t oldest = tile.first_position - tile.window_tokens + 1;
  return {tile.window_tokens > 0 ? larger(0, oldest) : 0, tile.first_position + tile.n_tokens};
}

// Leaves the softmax of one split in work.sums, work.lane_sums and work.largest.
void run_split(const AttentionTile& tile, const Work& work, int32_t split) {
  const KvLayer& layer = *tile.layer;
  const bool expands = work.n_rows > kTileRows && (kConversionCosts || layer.type != PW_KV_F16);
  const AttendPage* kernels = page_kernels(layer.type, expands);
  const Range range = tile_range(tile);
  const int32_t begin = larger(range.begin, split * kSplitTokens);
  const int32_t end = smaller(range.end, (split + 1) * kSplitTokens);
  start_split(work, layer.head_dim);
  for (int32_t page = begin / kPageTokens; page * kPageTokens < end; ++page) {
    const uint8_t* block = layer.block(tile.pages[page], tile.kv_head);
    if (expands) block = expanded(layer, block, work.page);
    for (int32_t row = 0; row < work.n_rows; row += kTileRows) {
      const Rows rows{work.query + row * layer.head_dim,
                      work.positions + row,
                      work.sums + row * layer.head_dim,
                      work.largest + row,
                      work.lane_sums + row * kLanes,
                      tile.window_tokens,
                      tile.score_softcap};
      const int32_t n_rows = smaller(kTileRows, work.n_rows - row), start = page * kPageTokens;
      if (sees_page(rows, n_rows, start)) kernels[n_rows - 1](layer, block, start, rows);
    }
  }
}

PW_INLINE AttentionState split_state(const Work& work, int32_t row) {
  return {work.largest[row], reduce_add(load(work.lane_sums + row * kLanes))};
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
  const Lanes old_factor = exp2_negative(splat(total->largest - largest));
  const Lanes new_factor = exp2_negative(splat(part.largest - largest));
  const Lanes sum = fma(splat(part.sum), new_factor, splat(total->sum) * old_factor);
  *total = {largest, _mm256_cvtss_f32(low_half(sum))};
  for (int32_t dim = 0; dim < head_dim; dim += kLanes)
    store(total_values + dim, fma(load(values + dim), new_factor, load(total_values + dim) * old_factor));
}

}  // namespace

size_t attention_scratch_bytes(int32_t n_rows, int32_t head_dim) {
  const size_t row_floats = 2 * static_cast<size_t>(head_dim) + kLanes + 2;
  const size_t page_floats = 2 * static_cast<size_t>(kPageTokens) * head_dim;
  return (n_rows * row_floats + page_floats) * sizeof(float) + n_rows * sizeof(AttentionState);
}

void attend(const AttentionTile& tile) {
  const Work work = carve(tile);
  const int32_t head_dim = tile.layer->head_dim;
  const Range range = tile_range(tile);
  start_tile(tile, work);
  for (int32_t row = 0; row < work.n_rows; ++row) work.totals[row] = {kNoScore, 0.0f};
  for (int32_t split = range.begin / kSplitTokens; split * kSplitTokens < range.end; ++split) {
    run_split(tile, work, split);
    for (int32_t row = 0; row < work.n_rows; ++row)
      merge(&work.totals[row], tile.output + row_offset(tile, row), split_state(work, row), work.sums + row * head_dim,
            head_dim);
  }
  for (int32_t row = 0; row < work.n_rows; ++row)
    scale(tile.output + row_offset(tile, row), head_dim, 1.0f / work.totals[row].sum);
}

void attend_split(const AttentionTile& tile, int32_t split, AttentionState* states, float* values, int64_t stride) {
  const Work work = carve(tile);
  const int32_t head_dim = tile.layer->head_dim;
  start_tile(tile, work);
  run_split(tile, work, split);
  for (int32_t row = 0; row < work.n_rows; ++row) {
    states[row * stride] = split_state(work, row);
    float* to = values + row * stride * head_dim;
    for (int32_t dim = 0; dim < head_dim; dim += kLanes) store(to + dim, load(work.sums + row * head_dim + dim));
  }
}

void merge_splits(const AttentionState* states, const float* values, int32_t n, int32_t head_dim, float* output) {
  AttentionState total{kNoScore, 0.0f};
  for (int32_t i = 0; i < n; ++i) merge(&total, output, states[i], values + int64_t{i} * head_dim, head_dim);
  scale(output, head_dim, 1.0f / total.sum);
}

}  // namespace pw::PW_ISA
