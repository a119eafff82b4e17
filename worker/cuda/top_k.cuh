// The choice of experts of one token by a block, from router logits: the definition of `choose_experts` in
// worker/ops/reference.py, best first, equal scores to the lower id.
#pragma once
#include "common.cuh"

struct RouterRule {
  const float* logits;
  const float* bias;  // steers the choice; or null
  float weights_scale;
  int sigmoid;  // else softmax
  int normalise;
};

template <int EXPERT_COUNT>
struct ChoiceMemory {
  float scores[EXPERT_COUNT];  // logits, or their sigmoids
  int keys[EXPERT_COUNT];      // what ranks them, as integers of the same order
};

INLINE int ordered_key(float value) {
  int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Largest logit and the sum of exponentials above it, in every lane of a warp.
template <int EXPERT_COUNT>
INLINE void softmax_mass(const ChoiceMemory<EXPERT_COUNT>& memory, float& top, float& total) {
  top = -1e30f, total = 0;
  for (int e = lane_id(); e < EXPERT_COUNT; e += 32) top = fmaxf(top, memory.scores[e]);
  top = warp_max(top);
  for (int e = lane_id(); e < EXPERT_COUNT; e += 32) total += __expf(memory.scores[e] - top);
  total = warp_sum(total);
}

// Weights of the chosen, by the first USED_COUNT threads.
template <int EXPERT_COUNT, int USED_COUNT>
INLINE void choice_weights(const ChoiceMemory<EXPERT_COUNT>& memory, const int* ids, float* weights,
                           const RouterRule& rule) {
  float top = 0, total = 1, sum = 0, own = 0;
  if (!rule.sigmoid && rule.normalise) top = memory.scores[ids[0]];
  if (!rule.sigmoid && (rule.bias || !rule.normalise)) softmax_mass(memory, top, total);
  if (threadIdx.x >= USED_COUNT) return;
#pragma unroll
  for (int k = 0; k < USED_COUNT; k++) {
    float score = memory.scores[ids[k]];
    if (!rule.sigmoid) score = __expf(score - top);
    sum += score;
    if (k == (int)threadIdx.x) own = score;
  }
  weights[threadIdx.x] = own / (rule.normalise ? sum : total) * rule.weights_scale;
}

// Fills ids [USED_COUNT] and, if not null, weights, in shared memory; the whole block calls, and must not have used
// `memory` since a barrier. Ends with a barrier.
template <int EXPERT_COUNT, int USED_COUNT, int N_THREADS>
INLINE void choose_experts(ChoiceMemory<EXPERT_COUNT>& memory, int* ids, float* weights, const RouterRule& rule) {
  constexpr int SPLIT = 4;  // threads that count for one expert
  for (int e = threadIdx.x; e < EXPERT_COUNT; e += N_THREADS) {
    float score = load_fresh(rule.logits + e);
    if (rule.sigmoid) score = 1.f / (1.f + __expf(-score));
    memory.scores[e] = score;
    memory.keys[e] = ordered_key(score);
  }
  __syncthreads();
  if (rule.bias) {
    float top, total;
    softmax_mass(memory, top, total);
    for (int e = threadIdx.x; e < EXPERT_COUNT; e += N_THREADS) {
      float score = rule.sigmoid ? memory.scores[e] : __expf(memory.scores[e] - top) / total;
      memory.keys[e] = ordered_key(score + rule.bias[e]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int base = 0; base < EXPERT_COUNT * SPLIT; base += N_THREADS) {
    int e = (base + threadIdx.x) / SPLIT, rank = 0;
    int key = e < EXPERT_COUNT ? memory.keys[e] : 0;
#pragma unroll 8
    for (int j = threadIdx.x % SPLIT; j < EXPERT_COUNT; j += SPLIT) {
      int other = memory.keys[j];
      rank += other > key || (other == key && j < e);
    }
    rank += __shfl_xor_sync(FULL_WARP, rank, 1);
    rank += __shfl_xor_sync(FULL_WARP, rank, 2);
    if (e < EXPERT_COUNT && rank < USED_COUNT && threadIdx.x % SPLIT == 0) ids[rank] = e;
  }
  __syncthreads();
  if (!weights) return;
  if (threadIdx.x < 32) choice_weights<EXPERT_COUNT, USED_COUNT>(memory, ids, weights, rule);
  __syncthreads();
}
