// Norms and rotary positions of heads, and the write of keys and values into the cache; a warp does a head.
// With -DROPE_DIM, -DROPE_STYLE (0: neighbours turn together, 1: a dimension and the one ROPE_DIM / 2 further), -DNORMS
// (1: of queries, 2: of keys, 3: both).
#pragma once
#include "kv_rows.cuh"

#ifndef ROPE_DIM
#define ROPE_DIM HEAD_DIM
#endif
#ifndef ROPE_STYLE
#define ROPE_STYLE 1
#endif
#ifndef NORMS
#define NORMS 3
#endif
#define Q_NORM (NORMS & 1)
#define K_NORM (NORMS & 2)

// What the heads of a layer have in common, and where the new keys and values are.
struct Rope {
  const float* key;    // f32 [token][kv head][HEAD_DIM]
  const float* value;  // likewise
  const float* q_norm;  // f32 [HEAD_DIM], where there is one
  const float* k_norm;
  const float* inverse_frequencies;  // f32 [ROPE_DIM / 2]
  float eps;
  float magnitude;
};

constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32;  // of one lane

// The two dimensions of pair `pair`; pairs from ROPE_DIM / 2 on do not turn.
INLINE int2 pair_dims(int pair) {
  if (ROPE_STYLE == 1 && pair < ROPE_DIM / 2) return make_int2(pair, pair + ROPE_DIM / 2);
  return make_int2(2 * pair, 2 * pair + 1);
}
INLINE int lane_pair(int index) { return 32 * index + threadIdx.x % 32; }

// cos and sin of position * frequency. The product's rounding error is added back: at position 100,000 it would be
// as large as 0.004 radians.
INLINE float2 turn(int position, float frequency) {
  const float angle = (float)position * frequency;
  const float rest = fmaf((float)position, frequency, -angle);
  float sine, cosine;
  sincosf(angle, &sine, &cosine);
  return make_float2(cosine - rest * sine, sine + rest * cosine);
}

// cos and sin for this lane's pairs at a position: the same for all heads of a layer. The frequencies first.
struct Turns {
  float frequencies[kPairs];
  float2 values[kPairs];

  INLINE explicit Turns(const Rope& rope) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      frequencies[i] = lane_pair(i) < ROPE_DIM / 2 ? rope.inverse_frequencies[lane_pair(i)] : 0.0f;
  }
  INLINE void make(int position, const Rope& rope) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 t = turn(position, frequencies[i]);
      values[i] = make_float2(t.x * rope.magnitude, t.y * rope.magnitude);
    }
  }
};

// Two values for each of this lane's pairs: of a head, or of a norm's weights.
struct LanePairs {
  float2 values[kPairs];

  INLINE void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) values[i] = make_float2(0.0f, 0.0f);
  }
  INLINE void load(const float* source) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      values[i] = make_float2(0.0f, 0.0f);
      if (lane_pair(i) >= HEAD_DIM / 2) continue;
      const int2 dims = pair_dims(lane_pair(i));
      values[i] = make_float2(source[dims.x], source[dims.y]);
    }
  }
  INLINE float squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum += values[i].x * values[i].x + values[i].y * values[i].y;
    return sum;
  }
  // 1 / root mean square of the head; all lanes of the warp
  INLINE float inverse_norm(float eps) const { return rsqrtf(warp_sum(squares()) * (1.0f / HEAD_DIM) + eps); }
};

// Multiplies a head by `factor` and the norm's weights where `has_norm`, turns it where `has_turns`, and gives `store`
// each of this lane's values with its dimension.
template <class Store>
INLINE void finish_head(const LanePairs& head, bool has_norm, float factor, const LanePairs& norm, bool has_turns,
                        const Turns& turns, Store store) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (lane_pair(i) >= HEAD_DIM / 2) continue;
    const int2 dims = pair_dims(lane_pair(i));
    float2 v = head.values[i];
    if (has_norm) v = make_float2(v.x * factor * norm.values[i].x, v.y * factor * norm.values[i].y);
    if (has_turns && lane_pair(i) < ROPE_DIM / 2) {
      const float2 t = turns.values[i];
      v = make_float2(v.x * t.x - v.y * t.y, v.x * t.y + v.y * t.x);
    }
    store(dims.x, v.x);
    store(dims.y, v.y);
  }
}

// A head into row `row` of the cache: the index of (page, kv head, token in the page).
INLINE void store_head(const float* head, void* codes, u16* scales, u64 row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < HEAD_DIM; first += 32) {
    const int dim = first + lane;
#if KV_Q8
    const float value = head[dim];
    const float scale = warp_max(fabsf(value)) / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    ((signed char*)codes)[row * HEAD_DIM + dim] = (signed char)__float2int_rn(value * inverse);
    if (lane == 0) scales[row * kScales + first / 32] = float_to_half(scale);
#else
    const int at = swizzled(dim / 8, row % 8) * 8 + dim % 8;
    if (dim < HEAD_DIM) ((u16*)codes)[row * HEAD_DIM + at] = float_to_half(head[dim]);
#endif
  }
}
