// The choice of experts of one token by a warp, from router logits: the definition of `choose_experts` in
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

constexpr int INT_LEAST = -2147483647 - 1;
// Integers of the same order as the floats, above INT_LEAST for everything, not a number included.
INLINE int ordered_key(float value) {
  int bits = __float_as_int(value);
  return max(bits ^ ((bits >> 31) & 0x7fffffff), INT_LEAST + 1);
}

INLINE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// A warp's choice, without help of others: lane l looks at the experts l * PER_LANE and those after it.
template <int EXPERT_COUNT, int USED_COUNT>
struct WarpChoice {
  static constexpr int PER_LANE = (EXPERT_COUNT + 31) / 32;
  static_assert(USED_COUNT <= 32, "a lane for each chosen expert");
  float logits[PER_LANE];
  int keys[PER_LANE];
  int id;       // of lane k: the k-th best expert
  float logit;  // and its logit

  INLINE static int expert(int i) { return lane_id() * PER_LANE + i; }

  INLINE void load(const float* source) {
    constexpr int STEP = PER_LANE % 4 == 0 && EXPERT_COUNT % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += STEP) {
      float4 v = make_float4(0, 0, 0, 0);
      if (expert(i) < EXPERT_COUNT) {
        if constexpr (STEP == 4) v = load_fresh4(source + expert(i));
        else v.x = load_fresh(source + expert(i));
      }
      logits[i] = v.x;
      if constexpr (STEP == 4) logits[i + 1] = v.y, logits[i + 2] = v.z, logits[i + 3] = v.w;
    }
  }

  // Largest logit and the sum of exponentials above it.
  INLINE void softmax_mass(float logit_scale, float& top, float& total) const {
    top = -1e30f, total = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (expert(i) < EXPERT_COUNT) top = fmaxf(top, logits[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (expert(i) < EXPERT_COUNT) total += __expf((logits[i] - top) * logit_scale);
    total = warp_sum(total);
  }

  INLINE void rank(const RouterRule& rule) {
    float top = 0, total = 1;
    if (BIASED && !SIGMOID) softmax_mass(1.f, top, total);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      float score = logits[i];  // unless BIASED the logits themselves rank
      if (BIASED && expert(i) < EXPERT_COUNT)
        score = (SIGMOID ? sigmoid(score) : __expf(score - top) / total) + rule.bias[expert(i)];
      keys[i] = expert(i) < EXPERT_COUNT ? ordered_key(score) : INT_LEAST;
    }
  }

  // Best first, equal scores to the lower id.
  INLINE void choose() {
#pragma unroll 1  // code is fetched anew in every launch
    for (int k = 0; k < USED_COUNT; k++) {
      int best = keys[0], at = 0;
      float value = logits[0];
#pragma unroll
      for (int i = 1; i < PER_LANE; i++)
        if (keys[i] > best) best = keys[i], at = i, value = logits[i];
      const int winner = __ffs((int)__ballot_sync(FULL_WARP, best == warp_max(best))) - 1;
      const int chosen = __shfl_sync(FULL_WARP, expert(at), winner);
      const float its = __shfl_sync(FULL_WARP, value, winner);
      if ((int)lane_id() == k) id = chosen, logit = its;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (expert(i) == chosen) keys[i] = INT_LEAST;
    }
  }

  // Of lane k: the weight of the k-th best; `logit_scale` is what the logits lack.
  INLINE float weight(const RouterRule& rule, float logit_scale) const {
    float top = __shfl_sync(FULL_WARP, logit, 0), total = 1, own = 0;
    if (!SIGMOID && (BIASED || !NORMALISED)) softmax_mass(logit_scale, top, total);
    if (lane_id() < USED_COUNT) own = SIGMOID ? sigmoid(logit * logit_scale) : __expf((logit - top) * logit_scale);
    return own * __fdividef(rule.weights_scale, NORMALISED ? warp_sum(own) : total);
  }
};
