// Decode attention for long contexts on tensor cores: the query heads of a kv head are the rows of the product. Each warp
// walks over pages of its own, STAGES of them in its part of shared memory, without a barrier until the end.
// Variants: -DHEAD_DIM, -DKV_Q8, -DHEADS (at most 16), -DWARPS, -DSTAGES, -DFUSED.
#include "attention_tiles.cuh"
#include "decode.cuh"

#ifndef STAGES
#define STAGES 2
#endif

constexpr int kTileHalves = kPageTokens * kRowHalves;
constexpr int kSumStride = HEAD_DIM + 4;  // f32 of one head of one warp; the two halves of a warp hit other banks

INLINE void fetch_page(u16* stage, const Cache& cache, int page) {
  const u64 first = cache.row(page * kPageTokens);
  for (int index = threadIdx.x % 32; index < kPageTokens * kUnits; index += 32) {
    const int row = index / kUnits, unit = index % kUnits;
    u16* target = stage + row * kRowHalves + 8 * unit;
    fetch_unit(target, cache.keys, cache.key_scales, first + row, unit);
    fetch_unit(target + kTileHalves, cache.values, cache.value_scales, first + row, unit);
  }
}

INLINE void absorb_page(RowState& state, const QueryTile& queries, const u16* stage,
                                            const Scoring& scoring, const Visible& visible, int page) {
  const int first = page * kPageTokens;
  const bool masked = first < visible.begin || first + kPageTokens > visible.end;
  const int begin[2] = {visible.begin, visible.begin}, end[2] = {visible.end, visible.end};
  float scores[kPageTokens / 8][4];
  score_tile<kPageTokens>(queries, stage, scores);
  finish_scores<kPageTokens>(scores, scoring, masked, first, begin, end);
  weigh_scores<kPageTokens>(state, scores);
  add_values<kPageTokens>(state, scores, stage + kTileHalves);
}

INLINE void publish(const WarpSums<kSumStride>& warps, const RowState& state) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int head = lane / 4 + 8 * row;
    if (head >= HEADS) continue;
    float* own = warps.of(warp, head) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      *(float2*)(own + 8 * i) = make_float2(state.sums[i][2 * row], state.sums[i][2 * row + 1]);
    if (lane % 4 == 0) warps.mass(warp, head) = make_float2(state.largest[row], state.mass[row]);
  }
}

// Of a warp's first STAGES - 1 pages those between first_page and last_page.
INLINE void fetch_first(u16* stages, const DecodeBlock& block, int first_page, int last_page) {
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    const int page = block.visible.first_page + threadIdx.x / 32 + i * WARPS;
    if (page < block.visible.last_page && first_page <= page && page <= last_page)
      fetch_page(stages + i * 2 * kTileHalves, block.cache, page);
  }
}

// grid: splits, kv heads times blocks of HEADS query heads, rows
KERNEL __launch_bounds__(32 * WARPS) attention_decode_long(const __grid_constant__ DecodeCall call) {
  DYNAMIC_SHARED(shared);
  __shared__ Queries shared_queries;
  let_next_start();
  const DecodeBlock block(call);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u16* stages = (u16*)shared + warp * STAGES * 2 * kTileHalves;
  fetch_first(stages, block, 0, block.own_page() - 1);
  prepare(call, block, shared_queries);
  fetch_first(stages, block, block.own_page(), block.own_page());
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy_async_commit();

  const Scoring scoring(call.scale, call.cap);
  QueryTile queries;  // rows beyond the heads repeat the last one
  queries.load(shared_queries.head(min(lane / 4, block.n_here - 1)),
               shared_queries.head(min(lane / 4 + 8, block.n_here - 1)), scoring.query_factor);
  RowState state;
  state.clear();
  int stage = 0;
  for (int page = block.visible.first_page + warp; page < block.visible.last_page; page += WARPS) {
    const int next = page + (STAGES - 1) * WARPS, free_stage = (stage + STAGES - 1) % STAGES;
    if (next < block.visible.last_page) fetch_page(stages + free_stage * 2 * kTileHalves, block.cache, next);
    copy_async_commit();
    copy_async_wait<STAGES - 1>();
    __syncwarp();
    absorb_page(state, queries, stages + stage * 2 * kTileHalves, scoring, block.visible, page);
    __syncwarp();
    stage = (stage + 1) % STAGES;
  }
  copy_async_wait<0>();
  gather_mass(state);
  __syncthreads();
  const WarpSums<kSumStride> warps = {(float*)shared, (float2*)((float*)shared + WARPS * HEADS * kSumStride)};
  publish(warps, state);
  __syncthreads();
  finish(call, block, warps);
}
