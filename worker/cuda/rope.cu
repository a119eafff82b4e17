// Norms and rotary positions of queries and keys, and the write of keys and values into the paged cache: one launch,
// one warp per head of a token. Variants: -DHEAD_DIM, -DKV_Q8 (int8 codes with an f16 scale per 32, else f16).
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_Q8
#define KV_Q8 0
#endif

constexpr int kWarps = 4;
constexpr int kPageTokens = 32;
constexpr int kPairs = (HEAD_DIM / 2 + 31) / 32;  // of one lane

struct RopeSettings {
  const float* inverse_frequencies;
  int rope_dim;
  int style;  // 0: neighbours turn together, 1: a dimension and the one rope_dim / 2 further
  float magnitude;
};

// The two dimensions of pair `pair`; pairs from rope_dim / 2 on do not turn.
INLINE int2 pair_dims(int pair, const RopeSettings& rope) {
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

// Norms (where there is a weight) and turns a head; the result lies in `head`, shared memory of this warp.
INLINE void prepare_head(const float* source, const float* norm, float eps, int position,
                                             const RopeSettings& rope, bool turns, float* head) {
  const int lane = threadIdx.x % 32;
  float2 values[kPairs];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = 32 * i + lane;
    if (pair >= HEAD_DIM / 2) continue;
    const int2 dims = pair_dims(pair, rope);
    values[i] = make_float2(source[dims.x], source[dims.y]);
    squares += values[i].x * values[i].x + values[i].y * values[i].y;
  }
  const float factor = norm ? 1.0f / sqrtf(warp_sum(squares) / (float)HEAD_DIM + eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = 32 * i + lane;
    if (pair >= HEAD_DIM / 2) continue;
    const int2 dims = pair_dims(pair, rope);
    float2 v = values[i];
    if (norm) v = make_float2(v.x * factor * norm[dims.x], v.y * factor * norm[dims.y]);
    if (turns && pair < rope.rope_dim / 2) {
      float2 t = turn(position, rope.inverse_frequencies[pair]);
      t = make_float2(t.x * rope.magnitude, t.y * rope.magnitude);
      v = make_float2(v.x * t.x - v.y * t.y, v.x * t.y + v.y * t.x);
    }
    head[dims.x] = v.x;
    head[dims.y] = v.y;
  }
  __syncwarp();
}

// `slot`: index of (page, kv head, token in the page)
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

KERNEL __launch_bounds__(32 * kWarps)
    rope_store(float* query, const float* key, const float* value, int n_heads, int n_kv_heads, const float* q_norm,
               const float* k_norm, const float* inverse_frequencies, int rope_dim, int style, float eps,
               float magnitude, void* keys, void* values, u16* key_scales, u16* value_scales, const int* positions,
               const int* sequence_of_token, const int* page_tables, int max_pages) {
  __shared__ float heads[kWarps][HEAD_DIM];
  start_after_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y;
  const int index = blockIdx.x * kWarps + warp;
  if (index >= n_heads + 2 * n_kv_heads) return;
  const int position = positions[token];
  const RopeSettings rope = {inverse_frequencies, rope_dim, style, magnitude};
  float* head = heads[warp];
  if (index < n_heads) {
    float* own = query + ((u64)token * n_heads + index) * HEAD_DIM;
    prepare_head(own, q_norm, eps, position, rope, true, head);
    for (int dim = lane; dim < HEAD_DIM; dim += 32) own[dim] = head[dim];
    return;
  }
  const bool is_key = index < n_heads + n_kv_heads;
  const int kv_head = index - n_heads - (is_key ? 0 : n_kv_heads);
  const float* own = (is_key ? key : value) + ((u64)token * n_kv_heads + kv_head) * HEAD_DIM;
  prepare_head(own, is_key ? k_norm : 0, eps, position, rope, is_key, head);
  const int page = page_tables[(u64)sequence_of_token[token] * max_pages + position / kPageTokens];
  const u64 slot = ((u64)page * n_kv_heads + kv_head) * kPageTokens + position % kPageTokens;
  store_head(head, is_key ? keys : values, is_key ? key_scales : value_scales, slot);
}
