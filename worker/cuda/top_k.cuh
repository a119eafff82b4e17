// The choice of experts of one token by a block, from router logits: the definition of `choose_experts` in
// worker/ops/reference.py, best first, equal scores to the lower id.
#pragma once
#include "common.cuh"

#ifndef SIGMOID
#define SIGMOID 0     // gating; else softmax
#define BIASED 0      // a bias steers the choice
#define NORMALISED 1  // the weights of the chosen sum to weights_scale
#endif

struct RouterRule {
  const float* logits;
  const float* residual;  // with FOLDED: the row whose 1 / rms the logits still lack; not BIASED then
  const float* bias;
  float epsilon;  // of that rms
  float weights_scale;
};

template <int EXPERT_COUNT>
struct ChoiceMemory {
  static constexpr int KEYS = (EXPERT_COUNT + 15) / 16 * 16;
  float scores[EXPERT_COUNT];    // logits
  __align__(16) int keys[KEYS];  // what ranks them, as integers of the same order; those beyond the experts are least
};

// Above INT_LEAST for everything, not a number included.
constexpr int INT_LEAST = -2147483647 - 1;
INLINE int ordered_key(float value) {
  int bits = __float_as_int(value);
  return max(bits ^ ((bits >> 31) & 0x7fffffff), INT_LEAST + 1);
}

INLINE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// Largest logit and the sum of exponentials above it, in every lane of a warp.
template <int EXPERT_COUNT>
INLINE void softmax_mass(const ChoiceMemory<EXPERT_COUNT>& memory, float logit_scale, float& top, float& total) {
  top = -1e30f, total = 0;
  for (int e = lane_id(); e < EXPERT_COUNT; e += 32) top = fmaxf(top, memory.scores[e]);
  top = warp_max(top);
  for (int e = lane_id(); e < EXPERT_COUNT; e += 32) total += __expf((memory.scores[e] - top) * logit_scale);
  total = warp_sum(total);
}

// Weights of the chosen, by one warp; `logit_scale` is what the logits lack.
template <int EXPERT_COUNT, int USED_COUNT>
INLINE void choice_weights(const ChoiceMemory<EXPERT_COUNT>& memory, const int* ids, float* weights,
                           const RouterRule& rule, float logit_scale) {
  float top = memory.scores[ids[0]], total = 1, sum = 0;
  if (!SIGMOID && (BIASED || !NORMALISED)) softmax_mass(memory, logit_scale, top, total);
  for (int k = lane_id(); k < USED_COUNT; k += 32) {
    const float logit = memory.scores[ids[k]];
    weights[k] = SIGMOID ? sigmoid(logit * logit_scale) : __expf((logit - top) * logit_scale);
    sum += weights[k];
  }
  sum = warp_sum(sum);
  const float factor = __fdividef(rule.weights_scale, NORMALISED ? sum : total);
  for (int k = lane_id(); k < USED_COUNT; k += 32) weights[k] *= factor;
}

// Fills ids [USED_COUNT] and, if not null, weights, in shared memory; the whole block calls, and must not have used
// `memory` since a barrier. Unless BIASED the logits themselves rank. Ends with a barrier.
template <int EXPERT_COUNT, int USED_COUNT, int N_THREADS>
INLINE void choose_experts(ChoiceMemory<EXPERT_COUNT>& memory, int* ids, float* weights, const RouterRule& rule,
                           float logit_scale = 1.f) {
  constexpr int SPLIT = 4, KEYS = ChoiceMemory<EXPERT_COUNT>::KEYS;  // threads that count for one expert
#pragma unroll
  for (int k = 0; k < SHARES<KEYS, N_THREADS>; k++) {
    const int e = shared_out<N_THREADS>(k);
    if (e < EXPERT_COUNT) {
      const float score = load_fresh(rule.logits + e);
      memory.scores[e] = score;
      memory.keys[e] = ordered_key(score);
    } else if (e < KEYS) {
      memory.keys[e] = INT_LEAST;
    }
  }
  __syncthreads();
  if (BIASED) {
    float top, total;
    softmax_mass(memory, logit_scale, top, total);
    for (int e = threadIdx.x; e < EXPERT_COUNT; e += N_THREADS) {
      float score = SIGMOID ? sigmoid(memory.scores[e]) : __expf(memory.scores[e] - top) / total;
      memory.keys[e] = ordered_key(score + rule.bias[e]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int base = 0; base < EXPERT_COUNT * SPLIT; base += N_THREADS) {
    int e = (base + threadIdx.x) / SPLIT, rank = 0;
    int key = e < EXPERT_COUNT ? memory.keys[e] : 0;
#pragma unroll 8
    for (int j = threadIdx.x % SPLIT * 4; j < KEYS; j += SPLIT * 4) {
      const int4 others = *(const int4*)(memory.keys + j);  // an equal one with a lower id goes first
      rank += (others.x > key - (j < e)) + (others.y > key - (j + 1 < e)) + (others.z > key - (j + 2 < e)) +
              (others.w > key - (j + 3 < e));
    }
    rank += __shfl_xor_sync(FULL_WARP, rank, 1);
    rank += __shfl_xor_sync(FULL_WARP, rank, 2);
    if (e < EXPERT_COUNT && rank < USED_COUNT && threadIdx.x % SPLIT == 0) ids[rank] = e;
  }
  __syncthreads();
  if (!weights) return;
  if (threadIdx.x < 32) choice_weights<EXPERT_COUNT, USED_COUNT>(memory, ids, weights, rule, logit_scale);
  __syncthreads();
}
