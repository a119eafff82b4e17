// Norms and rotary positions of heads, and the write of keys and values into the cache; a warp does a head.
// With -DHEAD_DIM and -DKV_Q8 (int8 codes with an f16 scale per 32, else f16).
#pragma once
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_Q8
#define KV_Q8 0
#endif

// What the heads of a layer have in common, and where the new keys and values are.
struct Rope {
  const float* key;    // f32 [token][kv head][HEAD_DIM]
  const float* value;  // likewise
  const float* q_norm;  // f32 [HEAD_DIM] or null
  const float* k_norm;
  const float* inverse_frequencies;  // f32 [rope_dim / 2]
  int rope_dim;
  int style;  // 0: neighbours turn together, 1: a dimension and the one rope_dim / 2 further
  float eps;
  float magnitude;
};

constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32;  // of one lane

// The two dimensions of pair `pair`; pairs from rope_dim / 2 on do not turn.
INLINE int2 pair_dims(int pair, const Rope& rope) {
  const int half = rope.rope_dim / 2;
  if (rope.style == 1 && pair < half) return make_int2(pair, pair + half);
  return make_int2(2 * pair, 2 * pair + 1);
}

// cos and sin of position * frequency. The product's rounding error is added back: at position 100,000 it would be
// as large as 0.004 radians.
INLINE float2 turn(int position, float frequency) {
  const float angle = (float)position * frequency;
  const float rest = fmaf((float)position, frequency, -angle);
  float sine, cosine;
  sincosf(angle, &sine, &cosine);
  return make_float2(cosine - rest * sine, sine + rest * cosine);
}

// cos and sin for this lane's pairs at a position: the same for all heads of a layer.
struct Turns {
  float2 values[kPairs];

  INLINE void make(int position, const Rope& rope) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = 32 * i + threadIdx.x % 32;
      values[i] = make_float2(1.0f, 0.0f);
      if (pair >= rope.rope_dim / 2) continue;
      const float2 t = turn(position, rope.inverse_frequencies[pair]);
      values[i] = make_float2(t.x * rope.magnitude, t.y * rope.magnitude);
    }
  }
};

// Two values for each of this lane's pairs: of a head, or of a norm's weights.
struct LanePairs {
  float2 values[kPairs];

  INLINE void load(const float* source, const Rope& rope) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = 32 * i + threadIdx.x % 32;
      values[i] = make_float2(0.0f, 0.0f);
      if (!source || pair >= HEAD_DIM / 2) continue;
      const int2 dims = pair_dims(pair, rope);
      values[i] = make_float2(source[dims.x], source[dims.y]);
    }
  }
  INLINE float squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum += values[i].x * values[i].x + values[i].y * values[i].y;
    return sum;
  }
};

// Norms a head where `has_norm`, turns it where `has_turns`; the result lies in `out`, shared memory of this warp.
INLINE void finish_head(const LanePairs& head, bool has_norm, const LanePairs& norm, bool has_turns,
                        const Turns& turns, const Rope& rope, float* out) {
  const float factor = has_norm ? 1.0f / sqrtf(warp_sum(head.squares()) / (float)HEAD_DIM + rope.eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = 32 * i + threadIdx.x % 32;
    if (pair >= HEAD_DIM / 2) continue;
    const int2 dims = pair_dims(pair, rope);
    float2 v = head.values[i];
    if (has_norm) v = make_float2(v.x * factor * norm.values[i].x, v.y * factor * norm.values[i].y);
    if (has_turns && pair < rope.rope_dim / 2) {
      const float2 t = turns.values[i];
      v = make_float2(v.x * t.x - v.y * t.y, v.x * t.y + v.y * t.x);
    }
    out[dims.x] = v.x;
    out[dims.y] = v.y;
  }
  __syncwarp();
}

// A head into the cache; `slot`: index of (page, kv head, token in the page).
INLINE void store_head(const float* head, void* codes, u16* scales, u64 slot) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < HEAD_DIM; first += 32) {
    const int dim = first + lane;
#if KV_Q8
    const float value = head[dim];
    const float scale = warp_max(fabsf(value)) / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    ((signed char*)codes)[slot * HEAD_DIM + dim] = (signed char)__float2int_rn(value * inverse);
    if (lane == 0) scales[slot * (HEAD_DIM / 32) + first / 32] = float_to_half(scale);
#else
    if (dim < HEAD_DIM) ((u16*)codes)[slot * HEAD_DIM + dim] = float_to_half(head[dim]);
#endif
  }
}
