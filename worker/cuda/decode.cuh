// What both forms of decode attention share: the call, what a block is to do, the heads it prepares, and the end.
// -DCLUSTER: all splits of a head are the blocks of one cluster of that size, 0: they meet in global memory.
// -DFUSED: queries and keys come as the projections left them; norms, rotation and the write into the cache happen here.
#pragma once
#include "attention.cuh"
#include "rope.cuh"

#ifndef HEADS
#define HEADS 2
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef FUSED
#define FUSED 0
#endif
#ifndef CLUSTER
#define CLUSTER 0
#endif

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

// Positions, sequences and page tables were written before the first kernel of the graph, and all pages but that of
// the row's own position by earlier graphs: a block reads them before it waits for the kernel in front.
struct DecodeBlock {
  int row, position, kv_head, first_head, n_here;
  Visible visible;
  Cache cache;

  INLINE explicit DecodeBlock(const DecodeCall& call)
      : row(blockIdx.z),
        position(call.positions[blockIdx.z]),
        visible(position, call.window, blockIdx.x, gridDim.x) {
    const int group = call.n_heads / call.n_kv_heads, head_blocks = (group + HEADS - 1) / HEADS;
    const int first_in_group = blockIdx.y % head_blocks * HEADS;
    kv_head = blockIdx.y / head_blocks;
    first_head = kv_head * group + first_in_group;
    n_here = min(HEADS, group - first_in_group);
    cache = {call.keys, call.values, call.key_scales, call.value_scales,
             call.page_tables + (u64)call.sequence_of_token[row] * call.max_pages, call.n_kv_heads, kv_head};
  }
  INLINE int own_page() const { return position / kPageTokens; }  // the one that this step writes to
  INLINE bool has_own_page() const { return visible.first_page <= own_page() && own_page() < visible.last_page; }
};

// The queries of a block, ready for products with keys.
struct Queries {
#if FUSED
  float heads[HEADS][HEAD_DIM];
#endif
  const float* global;

  INLINE const float* head(int index) const {
#if FUSED
    return heads[index];
#else
    return global + index * HEAD_DIM;
#endif
  }
};

#if FUSED
constexpr int kTasks = (HEADS + 2 + WARPS - 1) / WARPS;  // heads that a warp prepares: queries, the key, the value

// What preparing heads needs and the kernel in front does not make.
struct HeadFactors {
  Turns turns;
  LanePairs q_norm, k_norm;

  INLINE HeadFactors(const DecodeCall& call, const DecodeBlock& block) {
    turns.make(block.position, call.rope);
    q_norm.load(call.rope.q_norm, call.rope);
    k_norm.load(block.has_own_page() ? call.rope.k_norm : 0, call.rope);
  }
};

INLINE const float* task_source(const DecodeCall& call, const DecodeBlock& block, int task) {
  if (task < block.n_here)
    return call.query + ((u64)block.row * call.n_heads + block.first_head + task) * HEAD_DIM;
  const float* base = task == block.n_here ? call.rope.key : call.rope.value;
  return base + ((u64)block.row * call.n_kv_heads + block.kv_head) * HEAD_DIM;
}

// All loads of a warp's heads first, then one head after the other.
INLINE void prepare_heads(const DecodeCall& call, const DecodeBlock& block, const HeadFactors& factors,
                          Queries& queries) {
  __shared__ float fresh[2][HEAD_DIM];
  const int n_tasks = block.n_here + (block.has_own_page() ? 2 : 0), first = threadIdx.x / 32;
  LanePairs heads[kTasks];
#pragma unroll
  for (int i = 0; i < kTasks; ++i)
    if (first + i * WARPS < n_tasks) heads[i].load(task_source(call, block, first + i * WARPS), call.rope);
#pragma unroll
  for (int i = 0; i < kTasks; ++i) {
    const int task = first + i * WARPS;
    if (task >= n_tasks) break;
    if (task < block.n_here) {
      finish_head(heads[i], call.rope.q_norm, factors.q_norm, true, factors.turns, call.rope, queries.heads[task]);
      continue;
    }
    const bool is_key = task == block.n_here;
    finish_head(heads[i], is_key && call.rope.k_norm, factors.k_norm, is_key, factors.turns, call.rope, fresh[is_key]);
    store_head(fresh[is_key], is_key ? call.keys : call.values, is_key ? call.key_scales : call.value_scales,
               block.cache.row(block.position));
  }
}
#endif

// Waits for the kernel in front; after this, queries and the cache are complete for this block. Blocks that share the
// row's own page all write the same bytes to it, so that none waits for another.
INLINE void prepare(const DecodeCall& call, const DecodeBlock& block, Queries& queries) {
#if FUSED
  const HeadFactors factors(call, block);
  wait_for_inputs();
  prepare_heads(call, block, factors, queries);
#else
  wait_for_inputs();
  queries.global = call.query + ((u64)block.row * call.n_heads + block.first_head) * HEAD_DIM;
#endif
  __syncthreads();
}

// Sums and masses of the block's warps in shared memory: sums [WARPS][HEADS][Stride], masses [WARPS][HEADS].
template <int Stride>
struct WarpSums {
  float* sums;
  float2* masses;

  INLINE float* of(int warp, int head) const { return sums + (warp * HEADS + head) * Stride; }
  INLINE float2& mass(int warp, int head) const { return masses[warp * HEADS + head]; }
};

// A block's part of a result: the sum of its warps.
struct BlockPart {
  float largest, mass, sum;
};

template <int Stride>
INLINE BlockPart merge_warps(const WarpSums<Stride>& warps, int head, int dim) {
  BlockPart part = {kNoScore, 0.0f, 0.0f};
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) part.largest = fmaxf(part.largest, warps.mass(warp, head).x);
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    const float2 own = warps.mass(warp, head);
    const float fade = exp2f(own.x - part.largest);
    part.mass += fade * own.y;
    part.sum += fade * warps.of(warp, head)[dim];
  }
  return part;
}

#if CLUSTER
// The blocks of a cluster read each other's parts; each finishes every CLUSTER-th group of 32 values. Four groups of 8
// lanes share the blocks of one such group.
template <int Stride>
INLINE void finish(const DecodeCall& call, const DecodeBlock& block, const WarpSums<Stride>& warps) {
  __shared__ __align__(16) float sums[HEADS][HEAD_DIM];
  __shared__ __align__(16) float2 masses[HEADS];
  for (int index = threadIdx.x; index < block.n_here * HEAD_DIM; index += 32 * WARPS) {
    const BlockPart part = merge_warps(warps, index / HEAD_DIM, index % HEAD_DIM);
    sums[index / HEAD_DIM][index % HEAD_DIM] = part.sum;
    if (index % HEAD_DIM == 0) masses[index / HEAD_DIM] = make_float2(part.largest, part.mass);
  }
  if (CLUSTER > 1) meet_in_cluster();
  else __syncthreads();
  const int lane = threadIdx.x % 32, vectors = block.n_here * HEAD_DIM / 4;
  for (int group = blockIdx.x + threadIdx.x / 32 * CLUSTER; group < (vectors + 7) / 8; group += WARPS * CLUSTER) {
    const int vector = min(8 * group + lane % 8, vectors - 1), head = 4 * vector / HEAD_DIM;
    float2 parts[CLUSTER];
    float largest = kNoScore, mass = 0.0f;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
      parts[rank] = CLUSTER > 1 ? read_cluster2(in_block_of_cluster(&masses[head], rank)) : masses[head];
      largest = fmaxf(largest, parts[rank].x);
    }
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
      const float weight = exp2f(parts[rank].x - largest);
      mass += weight * parts[rank].y;
      if (rank % 4 != lane / 8) continue;
      const float* own = &sums[head][4 * vector % HEAD_DIM];
      const float4 sum = CLUSTER > 1 ? read_cluster4(in_block_of_cluster(own, rank)) : *(const float4*)own;
      total = make_float4(total.x + weight * sum.x, total.y + weight * sum.y, total.z + weight * sum.z,
                          total.w + weight * sum.w);
    }
#pragma unroll
    for (int offset = 8; offset < 32; offset <<= 1) {
      total.x += __shfl_xor_sync(FULL_WARP, total.x, offset);
      total.y += __shfl_xor_sync(FULL_WARP, total.y, offset);
      total.z += __shfl_xor_sync(FULL_WARP, total.z, offset);
      total.w += __shfl_xor_sync(FULL_WARP, total.w, offset);
    }
    const float inverse = 1.0f / mass;
    total = make_float4(total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse);
    const bool stores = lane < 8 && 8 * group + lane < vectors;
    store_four(call.out, ((u64)block.row * call.n_heads + block.first_head) * HEAD_DIM + 4 * (u64)vector, total,
               stores ? 4 : 0);
  }
  if (CLUSTER > 1) meet_in_cluster();  // nobody may still read from a block that is gone
}
#else
// Leaves the block's part for the merge of the splits, and does that where it is the last block.
template <int Stride>
INLINE void finish(const DecodeCall& call, const DecodeBlock& block, const WarpSums<Stride>& warps) {
  const Partials partials(call.partials, gridDim.z, call.n_heads, gridDim.x);
  for (int index = threadIdx.x; index < block.n_here * HEAD_DIM; index += 32 * WARPS) {
    const int head = index / HEAD_DIM, dim = index % HEAD_DIM;
    const BlockPart part = merge_warps(warps, head, dim);
    const u64 at = partials.index(block.row, block.first_head + head, blockIdx.x);
    partials.sums[at * HEAD_DIM + dim] = part.sum;
    if (dim == 0) partials.masses[at] = make_float2(part.largest, part.mass);
  }
  if (!is_last_block(call.counters + block.row * gridDim.y + blockIdx.y, gridDim.x)) return;
  merge_splits<HEADS, 32 * WARPS>(partials, block.row, block.first_head, block.n_here, call.out);
}
#endif
