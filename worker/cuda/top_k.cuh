// The choice of experts of one token by a block, from router logits: the definition of `choose_experts` in
// worker/ops/reference.py, best first, equal scores to the lower id.
#pragma once
#include "common.cuh"

template <int EXPERT_COUNT, int USED_COUNT>
struct Chosen {
  float logits[EXPERT_COUNT];
  int keys[EXPERT_COUNT];  // scores that steer the choice, as integers of the same order
  int ids[USED_COUNT];
  float weights[USED_COUNT];
};

INLINE int ordered_key(float value) {
  int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Fills ids and weights; starts and ends with a barrier of the block. `bias` may be null. The router's inputs may come
// without 1 / rms applied: `logit_factor` is that factor.
template <int EXPERT_COUNT, int USED_COUNT, int N_THREADS>
INLINE void choose_experts(Chosen<EXPERT_COUNT, USED_COUNT>& chosen, const float* logits, const float* bias, float logit_factor,
                           bool sigmoid, bool normalise, float weights_scale) {
  constexpr int SPLIT = 4;  // threads that count for one expert
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERT_COUNT; e += N_THREADS) {
    float logit = load_fresh(logits + e) * logit_factor;
    chosen.logits[e] = sigmoid ? 1.f / (1.f + __expf(-logit)) : logit;
  }
  __syncthreads();
  float top = -1e30f, total = 0;
  if (!sigmoid && (bias || !normalise)) {  // only then is the sum over all experts needed
    for (int e = lane_id(); e < EXPERT_COUNT; e += 32) top = fmaxf(top, chosen.logits[e]);
    top = warp_max(top);
    for (int e = lane_id(); e < EXPERT_COUNT; e += 32) total += __expf(chosen.logits[e] - top);
    total = warp_sum(total);
  }
  for (int e = threadIdx.x; e < EXPERT_COUNT; e += N_THREADS) {
    float score = chosen.logits[e];
    if (bias) score = (sigmoid ? score : __expf(score - top) / total) + bias[e];
    chosen.keys[e] = ordered_key(score);
  }
  __syncthreads();
  for (int base = 0; base < EXPERT_COUNT * SPLIT; base += N_THREADS) {
    int e = (base + threadIdx.x) / SPLIT, rank = 0;
    int key = e < EXPERT_COUNT ? chosen.keys[e] : 0;
    for (int j = threadIdx.x % SPLIT; j < EXPERT_COUNT; j += SPLIT) {
      int other = chosen.keys[j];
      rank += other > key || (other == key && j < e);
    }
    rank += __shfl_xor_sync(FULL_WARP, rank, 1);
    rank += __shfl_xor_sync(FULL_WARP, rank, 2);
    if (e < EXPERT_COUNT && rank < USED_COUNT && threadIdx.x % SPLIT == 0) chosen.ids[rank] = e;
  }
  __syncthreads();
  if (threadIdx.x < USED_COUNT) {
    float sum = 0, own = 0;
    float reference = sigmoid ? 0 : bias || !normalise ? top : chosen.logits[chosen.ids[0]];
    for (int k = 0; k < USED_COUNT; k++) {
      float score = chosen.logits[chosen.ids[k]];
      if (!sigmoid) score = __expf(score - reference);
      sum += score;
      if (k == (int)threadIdx.x) own = score;
    }
    float divisor = normalise ? sum : sigmoid ? 1.f : total;
    chosen.weights[threadIdx.x] = own / divisor * weights_scale;
  }
  __syncthreads();
}
