// Decode attention on tensor cores: the query heads of a kv head are the rows of the products. Splits share the visible
// positions of a token; each warp of a split walks over tiles of its own without a barrier until the end.
// Variants: -DHEAD_DIM, -DKV_Q8, -DHEADS (at most 16), -DWARPS (2 or more), -DSTAGES, -DCLUSTER, -DFUSED, and those of
// rope.cuh.
#include "decode_merge.cuh"
#include "decode_tiles.cuh"

constexpr int kAhead = kSteps < 8 ? kSteps : 8;  // products whose keys, or values, are loaded together

// sums = sums * fades + values' [HEAD_DIM x kTile] weights' [kTile x heads]: turned over, heads are the columns, so
// that few of them waste little.
INLINE void add_values(WarpState& state, const float (&fades)[kRows], const float (&weights)[kTile / 8][4],
                       const u16* values) {
  const int lane = threadIdx.x % 32, value_row = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float even = __shfl_sync(FULL_WARP, fades[row], lane % 4 * 8);
    const float odd = __shfl_sync(FULL_WARP, fades[row], lane % 4 * 8 + 4);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float(&sums)[4] = state.sums[row][i];
      sums[0] *= even, sums[1] *= odd, sums[2] *= even, sums[3] *= odd;
    }
  }
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    u32 b[kRows][2];
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        b[row][half] = pack_half2(weights[2 * step + half][2 * row], weights[2 * step + half][2 * row + 1]);
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
      u32 a[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead && first + i < kSteps; ++i)
        load_tiles_transposed(a[i], tile_row(values, 16 * step + value_row, 2 * (first + i), odd));
#pragma unroll
      for (int i = 0; i < kAhead && first + i < kSteps; ++i)
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          mma_f16(state.sums[row][first + i], a[i][0], a[i][1], a[i][2], a[i][3], b[row][0], b[row][1]);
    }
  }
}

INLINE void absorb_tile(WarpState& state, const QueryTile& queries, const u16* halves, const Scoring& scoring,
                        const DecodeBlock& block, int tile) {
  const int first = tile * kTile;
  const bool masked = first < block.begin || first + kTile > block.end;
  int begin[kRows], end[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) begin[row] = block.begin, end[row] = block.end;
  float scores[kTile / 8][4], fades[kRows];
  score_tile<kTile, kAhead>(queries, halves, scores);
  finish_scores<kTile, kRows>(scores, scoring, masked, first, begin, end);
  weigh_scores<kTile, kRows>(state.softmax, scores, fades);
  add_values(state, fades, scores, halves + kTile * HEAD_DIM);
}

// All tiles of a warp; a stage is filled again as soon as its tile is read.
INLINE void walk(WarpState& state, WarpTiles& tiles, const QueryTile& queries, const Scoring& scoring,
                 const Prepared& prepared) {
  const DecodeBlock& block = tiles.block;
  int stage = 0;
  for (int number = 0; tiles.has(number); ++number) {
    const int tile = tiles.tile(number);
    tiles.wait();
    if (FUSED && tile == block.position / kTile) patch_own(tiles.stage(stage), block.position % kTile, prepared);
#if KV_Q8
    u16* halves = (u16*)tiles.stage(STAGES);
    expand_tile(halves, tiles.stage(stage));
    __syncwarp();
    tiles.fetch(number + STAGES, stage);
    absorb_tile(state, queries, halves, scoring, block, tile);
    __syncwarp();
#else
    absorb_tile(state, queries, (const u16*)tiles.stage(stage), scoring, block, tile);
    __syncwarp();
    tiles.fetch(number + STAGES, stage);
#endif
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
}

// Few registers, so that a block finds room beside those of the kernel in front and fetches meanwhile.
constexpr int kMinBlocks = HEAD_DIM > 128 || kRows > 1 ? 1 : 512 / kThreads;

// grid: splits, kv heads times blocks of HEADS query heads, rows
KERNEL __launch_bounds__(kThreads, kMinBlocks) attention_decode(const __grid_constant__ DecodeCall call) {
  DYNAMIC_SHARED(shared);
  __shared__ Prepared prepared;
  __shared__ Received received;
  __shared__ float2 masses[WARPS][HEADS];
  let_next_start();
  const DecodeBlock block(call);
  const Scoring scoring(call.scale, call.cap);
  WarpHeads heads(call, block);  // its loads go ahead of the many of the tiles
  WarpTiles tiles(block, shared);
  heads.make_turns(call, block);
  clear_unused(prepared);
  if (CLUSTER > 1) arrive_in_cluster();

  wait_for_inputs();
  prepare_heads(call, block, heads, scoring.query_factor, prepared);
  __syncthreads();
  if (block.writes_cache && threadIdx.x / 32 == WARPS - 1) store_own(call, block, prepared);
  QueryTile queries;
  load_queries(queries, prepared);
  WarpState state;
  state.clear();
  walk(state, tiles, queries, scoring, prepared);
  state.softmax.gather_mass();
  const WarpSums warps = {shared, kWarpBytes, masses};
  publish(warps, state);
  __syncthreads();
  finish(call, block, warps, received);
}
