// Decode attention for long contexts on tensor cores: the query heads of a kv head are the rows of the product. Each warp
// walks over pages of its own, STAGES of them in its part of shared memory, without a barrier until the end.
// Variants: -DHEAD_DIM, -DKV_Q8, -DHEADS (at most 16), -DWARPS, -DSTAGES.
#include "attention_tiles.cuh"

#ifndef HEADS
#define HEADS 8
#endif
#ifndef WARPS
#define WARPS 4
#endif
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

// What the warps of a block leave for the merge, over the memory of the pages.
struct WarpSums {
  float* sums;     // [WARPS][HEADS][kSumStride]
  float2* masses;  // [WARPS][HEADS]

  INLINE explicit WarpSums(void* memory)
      : sums((float*)memory), masses((float2*)(sums + WARPS * HEADS * kSumStride)) {}
};

INLINE void publish(const WarpSums& block, const RowState& state, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int head = lane / 4 + 8 * row;
    if (head >= HEADS) continue;
    float* own = block.sums + (warp * HEADS + head) * kSumStride + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      *(float2*)(own + 8 * i) = make_float2(state.sums[i][2 * row], state.sums[i][2 * row + 1]);
    if (lane % 4 == 0) block.masses[warp * HEADS + head] = make_float2(state.largest[row], state.mass[row]);
  }
}

INLINE void write_partials(const WarpSums& block, const Partials& partials, int row,
                                               int first_head, int n_here, int split) {
  for (int index = threadIdx.x; index < n_here * HEAD_DIM; index += blockDim.x) {
    const int head = index / HEAD_DIM, dim = index % HEAD_DIM;
    float largest = kNoScore, mass = 0.0f, sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, block.masses[warp * HEADS + head].x);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float2 own = block.masses[warp * HEADS + head];
      const float fade = exp2f(own.x - largest);
      mass += fade * own.y;
      sum += fade * block.sums[(warp * HEADS + head) * kSumStride + dim];
    }
    const u64 at = partials.index(row, first_head + head, split);
    partials.sums[at * HEAD_DIM + dim] = sum;
    if (dim == 0) partials.masses[at] = make_float2(largest, mass);
  }
}

// grid: splits, kv heads times blocks of HEADS query heads, rows
KERNEL __launch_bounds__(32 * WARPS)
    attention_decode_long(const float* query, int n_heads, int n_kv_heads, const void* keys, const void* values,
                          const u16* key_scales, const u16* value_scales, const int* positions,
                          const int* sequence_of_token, const int* page_tables, int max_pages, float scale, float cap,
                          int window, float* workspace, u32* counters, float* out_values, u16* out_halves,
                          signed char* out_codes, float* out_scales, float* out_sums) {
  DYNAMIC_SHARED(shared);
  start_after_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.z;
  const int group = n_heads / n_kv_heads, head_blocks = (group + HEADS - 1) / HEADS;
  const int kv_head = blockIdx.y / head_blocks, first_in_group = blockIdx.y % head_blocks * HEADS;
  const int first_head = kv_head * group + first_in_group, n_here = min(HEADS, group - first_in_group);
  const Visible visible(positions[row], window, blockIdx.x, gridDim.x);
  const Cache cache = {keys, values, key_scales, value_scales,
                       page_tables + (u64)sequence_of_token[row] * max_pages, n_kv_heads, kv_head};
  const Scoring scoring(scale, cap);

  u16* stages = (u16*)shared + warp * STAGES * 2 * kTileHalves;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    const int page = visible.first_page + warp + i * WARPS;
    if (page < visible.last_page) fetch_page(stages + i * 2 * kTileHalves, cache, page);
    copy_async_commit();
  }
  const float* first_query = query + ((u64)row * n_heads + first_head) * HEAD_DIM;
  QueryTile queries;  // rows beyond the heads repeat the last one
  queries.load(first_query + min(lane / 4, n_here - 1) * HEAD_DIM,
               first_query + min(lane / 4 + 8, n_here - 1) * HEAD_DIM, scoring.query_factor);
  RowState state;
  state.clear();
  int stage = 0;
  for (int page = visible.first_page + warp; page < visible.last_page; page += WARPS) {
    const int next = page + (STAGES - 1) * WARPS, free_stage = (stage + STAGES - 1) % STAGES;
    if (next < visible.last_page) fetch_page(stages + free_stage * 2 * kTileHalves, cache, next);
    copy_async_commit();
    copy_async_wait<STAGES - 1>();
    __syncwarp();
    absorb_page(state, queries, stages + stage * 2 * kTileHalves, scoring, visible, page);
    __syncwarp();
    stage = (stage + 1) % STAGES;
  }
  copy_async_wait<0>();
  gather_mass(state);
  __syncthreads();
  const WarpSums block(shared);
  publish(block, state, warp);
  __syncthreads();
  const Partials partials(workspace, gridDim.z, n_heads, gridDim.x);
  write_partials(block, partials, row, first_head, n_here, blockIdx.x);
  if (!is_last_block(counters + row * gridDim.y + blockIdx.y, gridDim.x)) return;
  const Outputs out = {out_values, out_halves, out_codes, out_scales, out_sums};
  merge_splits<HEADS>(partials, row, first_head, n_here, out);
}
