// Flash attention of prompt tokens on tensor cores: a block takes TILE_ROWS tokens of one query head, 16 a warp, and walks
// over the positions that they see; keys and values are fetched one block ahead.
// Variants: -DHEAD_DIM, -DKV_Q8, -DTILE_ROWS, -DSTAGES (2: fetch ahead).
#include "attention_tiles.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 128
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr int kThreads = 2 * TILE_ROWS;
constexpr int kPositions = HEAD_DIM > 128 ? 32 : 64;  // walked over at once
constexpr int kTileHalves = kPositions * kRowHalves;

// Positions beyond the last visible one repeat it: they are masked, but have to be finite.
INLINE void fetch_tile(u16* stage, const Cache& cache, int first, int last_position) {
  for (int index = threadIdx.x; index < kPositions * kUnits; index += kThreads) {
    const int row = index / kUnits, unit = index % kUnits;
    const u64 at = cache.row(min(first + row, last_position));
    u16* target = stage + row * kRowHalves + 8 * unit;
    fetch_unit(target, cache.keys, cache.key_scales, at, unit);
    fetch_unit(target + kTileHalves, cache.values, cache.value_scales, at, unit);
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
KERNEL __launch_bounds__(kThreads)
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
  if (STAGES == 2) fetch_tile(stages, cache, first_block * kPositions, last_position);
  for (int block = first_block; block <= last_block; ++block) {
    const int first = block * kPositions;
    u16* stage = stages + (STAGES == 2 ? (block - first_block) % 2 : 0) * 2 * kTileHalves;
    if (STAGES == 1) fetch_tile(stage, cache, first, last_position);
    if (STAGES == 2 && block < last_block) {
      u16* next = stages + (block - first_block + 1) % 2 * 2 * kTileHalves;
      fetch_tile(next, cache, first + kPositions, last_position);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const bool is_seen = 16 * warp < n_rows && first <= warp_last &&
                         (window <= 0 || first + kPositions > warp_first + 1 - window);
    if (is_seen) {
      const bool masked = first + kPositions - 1 > warp_first || (window > 0 && first <= warp_last - window);
      float scores[kPositions / 8][4];
      score_tile<kPositions>(queries, stage, scores);
      finish_scores<kPositions>(scores, scoring, masked, first, begin, end);
      weigh_scores<kPositions>(state, scores);
      add_values<kPositions>(state, scores, stage + kTileHalves);
    }
    __syncthreads();
  }
  gather_mass(state);
  const OutputRow out = {out_values, out_halves};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (rows[i] < n_rows) store_row(out, ((u64)(tile.x + rows[i]) * n_heads + head) * HEAD_DIM, state, i);
}
