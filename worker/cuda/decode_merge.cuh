// The end of decode attention: the parts of warps, of the blocks of a cluster, and of clusters become one result.
// -DCLUSTER: so many splits are the blocks of a cluster and meet in shared memory; clusters meet in global memory.
#pragma once
#include "decode.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif

constexpr int kValues = HEADS * HEAD_DIM, kGroups = (kValues + 31) / 32;  // groups of 32 values, each a warp's
constexpr int kSliceGroups = (kGroups + CLUSTER - 1) / CLUSTER;          // that a block of a cluster finishes
constexpr int kSliceValues = 32 * kSliceGroups;
constexpr int kWarpGroups = (kSliceGroups + WARPS - 1) / WARPS;
static_assert(kWarpGroups <= 32, "a lane for the counter of each group");

struct WarpSums {
  u8* memory;  // of the warps' tiles, which are no longer needed
  int warp_bytes;
  float2 (*masses)[HEADS];  // {largest score, mass} of each warp

  INLINE float* of(int warp, int head) const { return (float*)(memory + warp * warp_bytes) + head * kSumStride; }
};

// The part of a warp: the softmax of head l / 4 + 8 row, and sums of dimensions 16 i + l / 4 (+ 8) of heads
// 2 (l % 4) + 8 row and the next one.
struct WarpState {
  Softmax<kRows> softmax;
  float sums[kRows][kSteps][4];

  INLINE void clear() {
    softmax.clear();
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        sums[row][i][0] = sums[row][i][1] = sums[row][i][2] = sums[row][i][3] = 0.0f;
  }
};

INLINE void publish(const WarpSums& warps, const WarpState& state) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int head = 8 * row + 2 * (lane % 4) + odd;
      if (head >= HEADS) continue;
      float* own = warps.of(warp, head) + lane / 4;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        own[16 * i] = state.sums[row][i][odd];
        own[16 * i + 8] = state.sums[row][i][2 + odd];
      }
    }
    const int head = 8 * row + lane / 4;
    if (head < HEADS && lane % 4 == 0)
      warps.masses[warp][head] = make_float2(state.softmax.largest[row], state.softmax.mass[row]);
  }
}

// How much a part with `largest` counts in a sum whose largest score is `together`.
INLINE float share(float largest, float together) { return exp2_approximate(largest - together); }

// What the blocks of a cluster leave in each block: their parts of the slice that it finishes.
struct Received {
#if CLUSTER > 1
  __align__(16) float sums[CLUSTER][kSliceValues];
  float2 masses[CLUSTER][HEADS];
#endif
};

#if CLUSTER > 1
// The largest score and the mass of a head over the block's warps, with each warp's share.
INLINE float2 block_mass(const WarpSums& warps, int head, float (&shares)[WARPS]) {
  float2 masses[WARPS], total = make_float2(kNoScore, 0.0f);
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    masses[warp] = warps.masses[warp][head];
    total.x = fmaxf(total.x, masses[warp].x);
  }
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    shares[warp] = share(masses[warp].x, total.x);
    total.y += shares[warp] * masses[warp].y;
  }
  return total;
}

// The block's part, the sum of its warps, to the blocks of the cluster that finish it.
INLINE void hand_over(const WarpSums& warps, Received& received) {
  const int own_rank = blockIdx.x % CLUSTER;
  float shares[WARPS];
#pragma unroll
  for (int at = 4 * threadIdx.x; at < kValues; at += 4 * kThreads) {
    const int head = at / HEAD_DIM;
    block_mass(warps, head, shares);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float4 part = *(const float4*)(warps.of(warp, head) + at % HEAD_DIM);
      sum.x += shares[warp] * part.x, sum.y += shares[warp] * part.y;
      sum.z += shares[warp] * part.z, sum.w += shares[warp] * part.w;
    }
    write_cluster4(in_block_of_cluster(&received.sums[own_rank][at % kSliceValues], at / kSliceValues), sum);
  }
  for (int i = threadIdx.x; i < HEADS * CLUSTER; i += kThreads)
    write_cluster2(in_block_of_cluster(&received.masses[own_rank][i % HEADS], i / HEADS),
                   block_mass(warps, i % HEADS, shares));
}
#endif

// One value of a result that is not divided by its mass yet.
struct Part {
  float sum, largest, mass;

  INLINE void clear() { sum = mass = 0.0f, largest = kNoScore; }
  // `n` of the parts that `load` gives, `Batch` loads under way together
  template <int Batch, class Load>
  INLINE void add(int n, Load load) {
    for (int first = 0; first < n; first += Batch) {
      Part parts[Batch];
      float together = largest;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        if (first + i < n) parts[i] = load(first + i);
        else parts[i].clear();
        together = fmaxf(together, parts[i].largest);
      }
      const float fade = share(largest, together);
      sum *= fade, mass *= fade, largest = together;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const float weight = share(parts[i].largest, together);
        sum += weight * parts[i].sum, mass += weight * parts[i].mass;
      }
    }
  }
};

// Unfinished results of clusters: sums [row, head block][cluster][value], then {largest score, mass} of each head.
struct Partials {
  float* sums;
  float2* masses;
  u64 first;

  INLINE Partials(float* memory, int n_clusters)
      : sums(memory),
        masses((float2*)(sums + (u64)gridDim.z * gridDim.y * n_clusters * kValues)),
        first(((u64)blockIdx.z * gridDim.y + blockIdx.y) * n_clusters) {}
  INLINE void store(int cluster, int value, const Part& part) const {
    sums[(first + cluster) * kValues + value] = part.sum;
    masses[(first + cluster) * HEADS + value / HEAD_DIM] = make_float2(part.largest, part.mass);
  }
  INLINE Part load(int cluster, int value) const {
    const float2 mass = __ldcg(masses + (first + cluster) * HEADS + value / HEAD_DIM);
    return {__ldcg(sums + (first + cluster) * kValues + value), mass.x, mass.y};
  }
};

// A group of 32 values of the result, one of each lane.
INLINE void store_group(const DecodeCall& call, const DecodeBlock& block, int value, const Part& part) {
  const bool exists = value < block.n_here * HEAD_DIM;
  const u64 at = ((u64)block.row * call.n_heads + block.first_head) * HEAD_DIM + value;
  const float result = exists ? __fdividef(part.sum, part.mass) : 0.0f;
  if (exists && call.out.values) call.out.values[at] = result;
  if (exists && call.out.halves) call.out.halves[at] = clamped_half(result);
  if (!call.out.codes) return;
  const float largest = warp_max_magnitude(result);
  const int code = __float2int_rn(result * (largest > 0.0f ? __fdividef(127.0f, largest) : 0.0f));
  const int sum = warp_sum_int(code);
  if (!exists) return;
  call.out.codes[at] = (signed char)code;
  if (threadIdx.x % 32) return;
  call.out.scales[at / 32] = largest * (1.0f / 127.0f);
  call.out.sums[at / 32] = largest * (1.0f / 127.0f) * (float)sum;
}

// Counts this block in at the counters of a warp's groups: lane l has the counter of the warp's group number l, where
// there is one. Bit l of the answer: this was the last of `n` blocks there, and the counter is 0 again.
INLINE u32 count_in(u32* counter, u32 n) {
  __syncwarp();
  bool is_last = false;
  if (counter) {
    __threadfence();
    is_last = atomicInc(counter, n - 1) == n - 1;
    __threadfence();
  }
  const u32 last = __ballot_sync(FULL_WARP, is_last);
  __syncwarp();
  return last;
}

// The groups of a warp, in the block's slice.
struct WarpGroups {
  int first, n;  // of all groups; every WARPS-th

  INLINE WarpGroups() : first(blockIdx.x % CLUSTER * kSliceGroups + threadIdx.x / 32) {
    const int end = min((int)(blockIdx.x % CLUSTER + 1) * kSliceGroups, kGroups);
    n = first < end ? (end - first + WARPS - 1) / WARPS : 0;
  }
  INLINE int value(int number) const { return 32 * (first + number * WARPS) + threadIdx.x % 32; }
};

// This lane's value of a group, over the blocks of the cluster; a block alone takes its warps' parts as they are.
INLINE Part cluster_part(const WarpSums& warps, const Received& received, int value) {
  const int head = min(value / HEAD_DIM, HEADS - 1);
  Part part;
  part.clear();
#if CLUSTER > 1
  part.add<CLUSTER>(CLUSTER, [&](int from) {
    const float2 mass = received.masses[from][head];
    return Part{received.sums[from][value % kSliceValues], mass.x, mass.y};
  });
#else
  part.add<WARPS>(WARPS, [&](int warp) {
    const float2 mass = warps.masses[warp][head];
    return Part{warps.of(warp, head)[value % HEAD_DIM], mass.x, mass.y};
  });
#endif
  return part;
}

// Leaves the parts of this cluster; the last of the clusters finishes a group.
INLINE void merge_clusters(const DecodeCall& call, const DecodeBlock& block, const WarpGroups& groups,
                           const WarpSums& warps, const Received& received) {
  const int n_clusters = gridDim.x / CLUSTER, lane = threadIdx.x % 32;
  const Partials partials(call.partials, n_clusters);
#pragma unroll
  for (int i = 0; i < kWarpGroups; ++i) {
    const int value = groups.value(i);
    if (i >= groups.n || value >= kValues) continue;
    partials.store(blockIdx.x / CLUSTER, value, cluster_part(warps, received, value));
  }
  u32* counters = call.counters + (blockIdx.z * gridDim.y + blockIdx.y) * kGroups + groups.first;
  const u32 last = count_in(lane < groups.n ? counters + lane * WARPS : 0, n_clusters);
  for (int i = 0; i < groups.n; ++i) {
    if (!(last >> i & 1)) continue;
    const int value = groups.value(i);
    Part part;
    part.clear();
    part.add<8>(n_clusters, [&](int from) { return partials.load(from, min(value, kValues - 1)); });
    store_group(call, block, value, part);
  }
}

// After this nobody reads what the other blocks of the cluster have: they may be gone.
INLINE void finish(const DecodeCall& call, const DecodeBlock& block, const WarpSums& warps, Received& received) {
#if CLUSTER > 1
  await_cluster();  // all its blocks have begun: their memory is there
  hand_over(warps, received);
  __syncwarp();  // a warp comes to the barrier as one
  meet_in_cluster();
#endif
  const WarpGroups groups;
  if (gridDim.x > CLUSTER) {
    merge_clusters(call, block, groups, warps, received);
    return;
  }
  for (int i = 0; i < groups.n; ++i)
    store_group(call, block, groups.value(i), cluster_part(warps, received, groups.value(i)));
}
