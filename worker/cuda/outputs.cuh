// Writing a result in the forms that the next operation wants: f32, f16, and int8 with a scale per 32 columns.
#pragma once
#include "common.cuh"

struct Outputs {
  float* values;
  u16* halves;
  signed char* codes;
  float* scales;
  float* sums;
};

INLINE u16 clamped_half(float value) {
  return float_to_half(fminf(fmaxf(value, -65504.0f), 65504.0f));
}

// The scale of a group and the sum of its codes from lanes that hold a part each; `Lanes` neighbours make a group.
template <int Lanes>
INLINE float group_max(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}

template <int Lanes>
INLINE int group_sum(int value) {
#pragma unroll
  for (int offset = Lanes / 2; offset; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}

// Four neighbouring values at flat index `first` of [tokens, width]; 8 neighbouring lanes hold a group of 32. Every lane
// of the warp has to come here when there are codes; `valid` counts the values of this lane that exist (0 to 4).
INLINE void store_four(const Outputs& out, u64 first, float4 v, int valid) {
  if (out.values) {
    if (valid == 4 && first % 4 == 0) {
      *(float4*)(out.values + first) = v;
    } else {
      const float parts[4] = {v.x, v.y, v.z, v.w};
      for (int i = 0; i < valid; ++i) out.values[first + i] = parts[i];
    }
  }
  if (out.halves) {
    const float parts[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < valid; ++i) out.halves[first + i] = clamped_half(parts[i]);
  }
  if (!out.codes) return;
  const float largest = group_max<8>(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
  const int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
  const int sum = group_sum<8>(a + b + c + d);
  if (!valid) return;
  *(u32*)(out.codes + first) = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)(d & 255) << 24;
  if (first % 32 == 0) {
    out.scales[first / 32] = scale;
    out.sums[first / 32] = scale * (float)sum;
  }
}
