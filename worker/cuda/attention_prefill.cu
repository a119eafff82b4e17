// Flash attention of prompt tokens on tensor cores: a block takes TILE_ROWS tokens of one query head, 16 a warp, and walks
// over the positions that they see; keys and values are fetched one block ahead.
// Variants: -DHEAD_DIM, -DKV_Q8, -DTILE_ROWS, -DSTAGES (2: fetch ahead).
#include "attention_tiles.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 64
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr int kThreads = 2 * TILE_ROWS;
constexpr int kPositions = HEAD_DIM > 128 ? 32 : 64;  // walked over at once
constexpr int kPages = kPositions / kPageTokens;
constexpr int kStageHalves = 2 * kPages * kTileHalves;  // keys, then values
constexpr int kMinBlocks = HEAD_DIM > 128 ? 2 : 3;      // on a multiprocessor: one multiplies while another waits

// Pages beyond the last one repeat it: their positions are masked, but have to be finite.
INLINE void fetch_block(u16* stage, const Cache& cache, int block, int last_page) {
#pragma unroll
  for (int i = 0; i < kPages; ++i) {
    u16* keys = stage + i * kTileHalves;
    fetch_page<kThreads>(keys, keys + kPages * kTileHalves, cache, min(block * kPages + i, last_page), threadIdx.x);
  }
  copy_async_commit();
}

struct OutputRow {
  float* values;
  u16* halves;
};

INLINE void store_row(const OutputRow& out, u64 first, const RowState& state, int row) {
  const float inverse = 1.0f / state.mass[row];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const float a = state.sums[i][2 * row] * inverse, b = state.sums[i][2 * row + 1] * inverse;
    const u64 at = first + 8 * i + 2 * (threadIdx.x % 4);
    if (out.values) *(float2*)(out.values + at) = make_float2(a, b);
    if (out.halves) *(u32*)(out.halves + at) = (u32)clamped_half(a) | (u32)clamped_half(b) << 16;
  }
}

// grid: query heads, tiles; tiles i32 [n][4]: first row, rows, sequence, position of the first row
KERNEL __launch_bounds__(kThreads, kMinBlocks)
    attention_prefill(const float* query, const int* tiles, int n_heads, int n_kv_heads, const void* keys,
                      const void* values, const u16* key_scales, const u16* value_scales, const int* page_tables,
                      int max_pages, float scale, float cap, int window, float* out_values, u16* out_halves) {
  DYNAMIC_SHARED(shared);
  start_after_previous();
  const int4 tile = *(const int4*)(tiles + 4 * blockIdx.y);
  const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n_rows = tile.y, first_position = tile.w, last_position = first_position + n_rows - 1;
  const Cache cache = {keys, values, key_scales, value_scales, page_tables + (u64)tile.z * max_pages, n_kv_heads,
                       head / (n_heads / n_kv_heads)};
  const Scoring scoring(scale, cap);
  const int rows[2] = {16 * warp + lane / 4, 16 * warp + lane / 4 + 8};
  const int warp_first = first_position + 16 * warp, warp_last = warp_first + 15;
  int begin[2], end[2];
  const float* own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    end[i] = first_position + rows[i] + 1;
    begin[i] = window > 0 ? max(0, end[i] - window) : 0;
    own[i] = query + ((u64)(tile.x + min(rows[i], n_rows - 1)) * n_heads + head) * HEAD_DIM;
  }
  QueryTile queries;
  queries.load(own[0], own[1], scoring.query_factor);
  RowState state;
  state.clear();

  u16* stages = (u16*)shared;
  const int first_block = window > 0 ? max(0, first_position + 1 - window) / kPositions : 0;
  const int last_block = last_position / kPositions;
  const int last_page = last_position / kPageTokens;
  if (STAGES == 2) fetch_block(stages, cache, first_block, last_page);
  for (int block = first_block; block <= last_block; ++block) {
    const int first = block * kPositions;
    u16* stage = stages + (STAGES == 2 ? (block - first_block) % 2 : 0) * kStageHalves;
    if (STAGES == 1) {
      __syncthreads();
      fetch_block(stage, cache, block, last_page);
    }
    copy_async_wait<0>();
    __syncthreads();
    if (STAGES == 2 && block < last_block)
      fetch_block(stages + (block - first_block + 1) % 2 * kStageHalves, cache, block + 1, last_page);
    const bool is_seen = 16 * warp < n_rows && first <= warp_last &&
                         (window <= 0 || first + kPositions > warp_first + 1 - window);
    if (is_seen) {
      const bool masked = first + kPositions - 1 > warp_first || (window > 0 && first <= warp_last - window);
      float scores[kPositions / 8][4];
      score_tile<kPositions>(queries, stage, scores);
      finish_scores<kPositions>(scores, scoring, masked, first, begin, end);
      weigh_scores<kPositions>(state, scores);
      add_values<kPositions>(state, scores, stage + kPages * kTileHalves);
    }
  }
  gather_mass(state);
  const OutputRow out = {out_values, out_halves};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (rows[i] < n_rows) store_row(out, ((u64)(tile.x + rows[i]) * n_heads + head) * HEAD_DIM, state, i);
}
