// Flash attention of prompt tokens on tensor cores: a block takes TILE_ROWS tokens of one query head, 16 a warp, and
// walks over the positions that they see; keys and values are fetched one block ahead.
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

struct PrefillCall {  // _PrefillCall in attention.py
  const float* query;  // f32 [token][head][HEAD_DIM]
  const int4* tiles;   // first row, rows, sequence, position of the first row
  const void* keys;
  const void* values;
  const u16* key_scales;
  const u16* value_scales;
  const int* page_tables;
  float* out_values;
  u16* out_halves;
  int n_heads, n_kv_heads, max_pages, window;
  float scale, cap;
};

// The 16 tokens of a warp, two of them this lane's, and what they see.
struct WarpTokens {
  int first, last;          // positions
  int rows[2];              // in the tile
  int begin[2], end[2];     // of the visible positions
  int n_rows, window;

  INLINE WarpTokens(const int4& tile, int window_tokens) : n_rows(tile.y), window(window_tokens) {
    const int first_row = threadIdx.x / 32 * 16;
    first = tile.w + first_row;
    last = first + 15;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = first_row + threadIdx.x % 32 / 4 + 8 * i;
      end[i] = tile.w + rows[i] + 1;
      begin[i] = window > 0 ? max(0, end[i] - window) : 0;
    }
  }
  // whether any of them sees one of the positions from `position` on, whether any does not see all
  INLINE bool sees(int position) const {
    const bool exists = threadIdx.x / 32 * 16 < n_rows;
    return exists && position <= last && (window <= 0 || position + kPositions > first + 1 - window);
  }
  INLINE bool is_masked(int position) const {
    return position + kPositions - 1 > first || (window > 0 && position <= last - window);
  }
};

// The softmax of a warp's 16 tokens and their weighted sums of values, fragments of a product.
struct RowState {
  Softmax<2> softmax;
  float sums[kUnits][4];

  INLINE void clear() {
    softmax.clear();
#pragma unroll
    for (int i = 0; i < kUnits; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
  }
};

// state.sums = state.sums * fades + weights [16 x kPositions] values [kPositions x HEAD_DIM]
INLINE void add_values(RowState& state, const float (&fades)[2], const float (&weights)[kPositions / 8][4],
                       const u16* values) {
  const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8, odd = lane / 16;
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    for (int part = 0; part < 4; ++part) state.sums[i][part] *= fades[part / 2];
#pragma unroll
  for (int step = 0; step < kPositions / 16; ++step) {
    const u32 a[4] = {pack_half2(weights[2 * step][0], weights[2 * step][1]),
                      pack_half2(weights[2 * step][2], weights[2 * step][3]),
                      pack_half2(weights[2 * step + 1][0], weights[2 * step + 1][1]),
                      pack_half2(weights[2 * step + 1][2], weights[2 * step + 1][3])};
#pragma unroll
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      u32 b[4];
      load_tiles_transposed(b, tile_row(values, 16 * step + row, 2 * pair, odd));
      mma_f16(state.sums[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_f16(state.sums[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

INLINE void absorb_block(RowState& state, const QueryTile& queries, const u16* stage, const Scoring& scoring,
                         const WarpTokens& tokens, int first) {
  float scores[kPositions / 8][4];
  score_tile<kPositions, 1>(queries, stage, scores);
  finish_scores<kPositions, 2>(scores, scoring, tokens.is_masked(first), first, tokens.begin, tokens.end);
  float fades[2];
  weigh_scores<kPositions, 2>(state.softmax, scores, fades);
  add_values(state, fades, scores, stage + kPages * kTileHalves);
}

INLINE void store_row(const PrefillCall& call, u64 first, const RowState& state, int row) {
  const float inverse = 1.0f / state.softmax.mass[row];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const float a = state.sums[i][2 * row] * inverse, b = state.sums[i][2 * row + 1] * inverse;
    const u64 at = first + 8 * i + 2 * (threadIdx.x % 4);
    if (call.out_values) *(float2*)(call.out_values + at) = make_float2(a, b);
    if (call.out_halves) *(u32*)(call.out_halves + at) = (u32)clamped_half(a) | (u32)clamped_half(b) << 16;
  }
}

// grid: query heads, tiles
KERNEL __launch_bounds__(kThreads, kMinBlocks) attention_prefill(const __grid_constant__ PrefillCall call) {
  DYNAMIC_SHARED(shared);
  start_after_previous();
  const int4 tile = call.tiles[blockIdx.y];
  const int head = blockIdx.x, last_position = tile.w + tile.y - 1, last_page = last_position / kPageTokens;
  const Cache cache = {call.keys, call.values, call.key_scales, call.value_scales,
                       call.page_tables + (u64)tile.z * call.max_pages, call.n_kv_heads,
                       head / (call.n_heads / call.n_kv_heads)};
  const Scoring scoring(call.scale, call.cap);
  const WarpTokens tokens(tile, call.window);
  const auto row_start = [&](int i) {  // rows beyond the last one repeat it
    return ((u64)(tile.x + min(tokens.rows[i], tile.y - 1)) * call.n_heads + head) * HEAD_DIM;
  };
  QueryTile queries;
  queries.load(call.query + row_start(0), call.query + row_start(1), scoring.query_factor);
  RowState state;
  state.clear();

  u16* stages = (u16*)shared;
  const int first_block = call.window > 0 ? max(0, tile.w + 1 - call.window) / kPositions : 0;
  const int last_block = last_position / kPositions;
  if (STAGES == 2) fetch_block(stages, cache, first_block, last_page);
  for (int block = first_block; block <= last_block; ++block) {
    u16* stage = stages + (STAGES == 2 ? (block - first_block) % 2 : 0) * kStageHalves;
    if (STAGES == 1) {
      __syncthreads();
      fetch_block(stage, cache, block, last_page);
    }
    copy_async_wait<0>();
    __syncthreads();
    if (STAGES == 2 && block < last_block)
      fetch_block(stages + (block - first_block + 1) % 2 * kStageHalves, cache, block + 1, last_page);
    if (tokens.sees(block * kPositions)) absorb_block(state, queries, stage, scoring, tokens, block * kPositions);
  }
  state.softmax.gather_mass();
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (tokens.rows[i] < tile.y) store_row(call, row_start(i), state, i);
}
