// Tokens of a mixture sorted by expert, and the sum over their experts afterwards.
#include "common.cuh"

struct Tile {
  int expert, first, count, unused;
};

// One block. ids i32 [n_slots], slot = token * n_used + k. order[position] = slot, position_of[slot] = position, sorted
// by expert; tiles of at most `tile_tokens` positions of one expert, the rest of `tiles` [max_tiles] empty.
// Dynamic shared memory: 2 * n_experts + 2 ints. Positions within an expert are in any order: no result depends on it.
KERNEL __launch_bounds__(1024) sort_slots(const int* __restrict__ ids, int* __restrict__ order,
                                          int* __restrict__ position_of, Tile* __restrict__ tiles, int n_slots,
                                          int n_experts, int tile_tokens, int max_tiles) {
  DYNAMIC_SHARED(memory);
  int* counts = (int*)memory;
  int* cursors = counts + n_experts;
  int* total_tiles = cursors + n_experts;
  let_next_start();
  wait_for_inputs();
  for (int e = threadIdx.x; e < n_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n_slots; i += blockDim.x) atomicAdd(counts + __ldcg(ids + i), 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int position = 0, n_tiles = 0;
    for (int e = 0; e < n_experts; e++) {
      cursors[e] = position;
      for (int done = 0; done < counts[e]; done += tile_tokens)
        tiles[n_tiles++] = {e, position + done, min(tile_tokens, counts[e] - done), 0};
      position += counts[e];
    }
    *total_tiles = n_tiles;
  }
  __syncthreads();
  for (int i = *total_tiles + threadIdx.x; i < max_tiles; i += blockDim.x) tiles[i] = {0, 0, 0, 0};
  for (int i = threadIdx.x; i < n_slots; i += blockDim.x) {
    int position = atomicAdd(cursors + __ldcg(ids + i), 1);
    order[position] = i;
    position_of[i] = position;
  }
}

// output[token] (+)= sum over k of weights[token, k] * rows[position_of[token, k]], in the order of k; without
// position_of rows are in the order of slots. Four columns a thread, blockIdx.y the token.
KERNEL combine(const float* rows, const int* position_of, const float* weights, float* output, int n_used, int width,
               int accumulate) {
  let_next_start();
  wait_for_inputs();
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * 4, token = blockIdx.y;
  if (column >= width) return;
  float4* out = (float4*)(output + (u64)token * width + column);
  float4 sum = accumulate ? load_fresh4((const float*)out) : make_float4(0, 0, 0, 0);
  for (int k = 0; k < n_used; k++) {
    float weight = __ldcg(weights + token * n_used + k);
    const int slot = token * n_used + k, position = position_of ? __ldcg(position_of + slot) : slot;
    float4 v = load_fresh4(rows + (u64)position * width + column);
    sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
  }
  *out = sum;
}
