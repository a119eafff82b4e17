// What a block of decode attention is to do, and the heads that it prepares.
// -DFUSED: queries and keys come as the projections left them; norms, rotation and the write into the cache are here.
#pragma once
#include "attention_tiles.cuh"
#include "outputs.cuh"
#include "rope.cuh"

#ifndef HEADS
#define HEADS 8
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef FUSED
#define FUSED 0
#endif

constexpr int kThreads = 32 * WARPS;
constexpr int kTile = 16;                   // positions that a warp takes at once
constexpr int kRows = HEADS > 8 ? 2 : 1;    // of a lane in the products: those of l / 4 and, with two, l / 4 + 8
constexpr int kQueryHalves = HEAD_DIM + 8;  // of a row of queries: eight rows of a tile hit all banks
constexpr int kSumStride = HEAD_DIM + 4;  // f32 of one head of one warp at the end; the stores of a warp hit all banks
constexpr int kSumsBytes = (4 * HEADS * kSumStride + 127) / 128 * 128;

struct DecodeCall {  // _DecodeCall in attention.py
  const float* query;  // f32 [row][head][HEAD_DIM]
  void* keys;
  void* values;
  u16* key_scales;
  u16* value_scales;
  const int* positions;
  const int* sequence_of_token;
  const int* page_tables;
  float* partials;
  u32* counters;
  Outputs out;
  Rope rope;
  int n_heads, n_kv_heads, max_pages, window;
  float scale, cap;
};

// A block's share of one token's positions, in tiles: split x of gridDim.x. The last split has the token's own.
// Positions, sequences and page tables were written before the first kernel of the graph, and all positions but the
// token's own by earlier graphs: a block reads them before it waits for the kernel in front.
struct DecodeBlock {
  int row, position, kv_head, first_head, n_here;
  int begin, end;             // visible positions
  int first_tile, last_tile;  // of this split; last_tile is one past the end
  bool writes_cache;          // one block of those that share the token's own key and value
  Cache cache;

  INLINE explicit DecodeBlock(const DecodeCall& call) : row(blockIdx.z), position(call.positions[blockIdx.z]) {
    const int group = call.n_heads / call.n_kv_heads, head_blocks = (group + HEADS - 1) / HEADS;
    const int first_in_group = blockIdx.y % head_blocks * HEADS;
    kv_head = blockIdx.y / head_blocks;
    first_head = kv_head * group + first_in_group;
    n_here = min(HEADS, group - first_in_group);
    end = position + 1;
    begin = call.window > 0 && end > call.window ? end - call.window : 0;
    const int first = begin / kTile, n_tiles = (end + kTile - 1) / kTile - first;
    first_tile = first + n_tiles * (int)blockIdx.x / (int)gridDim.x;
    last_tile = first + n_tiles * ((int)blockIdx.x + 1) / (int)gridDim.x;
    writes_cache = has_own() && first_in_group == 0;
    cache = {call.keys, call.values, call.key_scales, call.value_scales,
             call.page_tables + (u64)call.sequence_of_token[row] * call.max_pages, call.n_kv_heads, kv_head};
  }
  INLINE bool has_own() const { return blockIdx.x == gridDim.x - 1; }
};

// The queries of a block as the rows of a product, and the token's own key and value as the cache holds them.
struct Prepared {
  __align__(16) u16 queries[8 * kRows][kQueryHalves];
  __align__(16) u8 own[2][kCacheRowBytes];
  u16 own_scales[2][kScales > 0 ? kScales : 1];
};

// Rows of the products that no query uses.
INLINE void clear_unused(Prepared& prepared) {
  for (int i = threadIdx.x; i < (8 * kRows - HEADS) * HEAD_DIM; i += kThreads)
    prepared.queries[HEADS + i / HEAD_DIM][i % HEAD_DIM] = 0;
}

// The rows of `prepared.queries` as fragments; with eight of them the others are zeros.
INLINE void load_queries(QueryTile& tile, const Prepared& prepared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kSteps; step += 3 - kRows) {
    if (kRows == 2) {
      load_tiles(tile.fragments[step], &prepared.queries[lane % 16][16 * step + lane / 16 * 8]);
      continue;
    }
    u32 tiles[4];  // of this step and the next one
    load_tiles(tiles, &prepared.queries[lane % 8][min(16 * step + lane / 8 * 8, HEAD_DIM - 8)]);
#pragma unroll
    for (int i = 0; i < 2 && step + i < kSteps; ++i) {
      tile.fragments[step + i][0] = tiles[2 * i], tile.fragments[step + i][2] = tiles[2 * i + 1];
      tile.fragments[step + i][1] = tile.fragments[step + i][3] = 0;
    }
  }
}

#if FUSED
constexpr int kQueriesOfWarp = (HEADS + WARPS - 1) / WARPS;

// The heads that a warp prepares: queries, and where the block has the token's own position the last warp its key, the
// one before its value. Everything that the kernel in front does not make is ready when its end is waited for.
struct WarpHeads {
  const float* queries[kQueriesOfWarp];
  const float* own;  // null: none
  bool is_key;
  Turns turns;
  LanePairs q_norm, k_norm;

  INLINE WarpHeads(const DecodeCall& call, const DecodeBlock& block) : turns(call.rope) {
    const int warp = threadIdx.x / 32;
    const float* first = call.query + ((u64)block.row * call.n_heads + block.first_head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < kQueriesOfWarp; ++i) queries[i] = first + min(warp + i * WARPS, block.n_here - 1) * HEAD_DIM;
    is_key = warp == WARPS - 1;
    const u64 kv_row = (u64)block.row * call.n_kv_heads + block.kv_head;
    own = block.has_own() && warp >= WARPS - 2 ? (is_key ? call.rope.key : call.rope.value) + kv_row * HEAD_DIM : 0;
    if (Q_NORM) q_norm.load(call.rope.q_norm);
    if (K_NORM) k_norm.load(call.rope.k_norm);
  }
  INLINE void make_turns(const DecodeCall& call, const DecodeBlock& block) { turns.make(block.position, call.rope); }
};

// The token's own key or value, as the cache holds rows but in plain order.
INLINE void finish_own(const WarpHeads& heads, const LanePairs& own, float norm, Prepared& prepared) {
  const bool is_key = heads.is_key, has_norm = K_NORM && is_key;
#if KV_Q8
  __shared__ float rows[2][HEAD_DIM];
  float* row = rows[is_key];
  finish_head(own, has_norm, norm, heads.k_norm, is_key, heads.turns, [&](int dim, float v) { row[dim] = v; });
  __syncwarp();
  store_head(row, prepared.own[!is_key], prepared.own_scales[!is_key], 0);
#else
  u16* row = (u16*)prepared.own[!is_key];
  finish_head(own, has_norm, norm, heads.k_norm, is_key, heads.turns,
              [&](int dim, float v) { row[dim] = float_to_half(v); });
#endif
}

// All loads of a warp's heads first, then their norms side by side.
INLINE void prepare_heads(const DecodeCall& call, const DecodeBlock& block, const WarpHeads& heads, float factor,
                          Prepared& prepared) {
  const int warp = threadIdx.x / 32;
  LanePairs pairs[kQueriesOfWarp], own;
  float norms[kQueriesOfWarp];
#pragma unroll
  for (int i = 0; i < kQueriesOfWarp; ++i) pairs[i].load(heads.queries[i]);
  own.clear();
  if (heads.own) own.load(heads.own);
#pragma unroll
  for (int i = 0; i < kQueriesOfWarp; ++i) norms[i] = Q_NORM ? pairs[i].inverse_norm(call.rope.eps) : 1.0f;
  const float own_norm = K_NORM ? own.inverse_norm(call.rope.eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kQueriesOfWarp; ++i) {
    if (HEADS % WARPS && warp + i * WARPS >= HEADS) break;
    u16* target = prepared.queries[warp + i * WARPS];
    finish_head(pairs[i], Q_NORM, norms[i], heads.q_norm, true, heads.turns,
                [&](int dim, float v) { target[dim] = float_to_half(v * factor); });
  }
  if (heads.own) finish_own(heads, own, own_norm, prepared);
}

// The token's own key and value into the cache, by one warp.
INLINE void store_own(const DecodeCall& call, const DecodeBlock& block, const Prepared& prepared) {
  const int lane = threadIdx.x % 32, token = block.position % kPageTokens;
  const u64 row = block.cache.first_row(block.cache.pages[block.position / kPageTokens]) + token;
  for (int i = lane; i < 2 * kCacheRowBytes / 16; i += 32) {
    const int which = i * 16 / kCacheRowBytes, unit = i % (kCacheRowBytes / 16);
    const int at = KV_Q8 ? unit : swizzled(unit, token);
    u8* target = (u8*)(which ? call.values : call.keys) + row * kCacheRowBytes;
    *(uint4*)(target + 16 * at) = *(const uint4*)(prepared.own[which] + 16 * unit);
  }
#if KV_Q8
  if (lane < kScales) {
    call.key_scales[row * kScales + lane] = prepared.own_scales[0][lane];
    call.value_scales[row * kScales + lane] = prepared.own_scales[1][lane];
  }
#endif
}
#else
// The queries are turned already, and the cache has the token's own key and value from the kernel in front.
struct WarpHeads {
  INLINE WarpHeads(const DecodeCall& call, const DecodeBlock& block) { wait_for_inputs(); }
  INLINE void make_turns(const DecodeCall& call, const DecodeBlock& block) {}
};

INLINE void prepare_heads(const DecodeCall& call, const DecodeBlock& block, const WarpHeads& heads, float factor,
                          Prepared& prepared) {
  const float* queries = call.query + ((u64)block.row * call.n_heads + block.first_head) * HEAD_DIM;
  for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += kThreads)
    prepared.queries[i / HEAD_DIM][i % HEAD_DIM] =
        float_to_half(queries[min(i / HEAD_DIM, block.n_here - 1) * HEAD_DIM + i % HEAD_DIM] * factor);
}

INLINE void store_own(const DecodeCall& call, const DecodeBlock& block, const Prepared& prepared) {}
#endif
