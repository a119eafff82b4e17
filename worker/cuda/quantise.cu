// f32 rows to 8-bit codes with a scale and scale * sum per 32 columns; eight threads a group.
#include "common.cuh"

KERNEL quantise(const float* __restrict__ values, i8* __restrict__ codes, float* __restrict__ scales,
                float* __restrict__ sums, int n_groups) {
  let_next_start();
  wait_for_inputs();
  int group = (blockIdx.x * blockDim.x + threadIdx.x) / 8, part = threadIdx.x & 7;
  bool inside = group < n_groups;
  float4 v = inside ? load_fresh4(values + (u64)group * 32 + part * 4) : make_float4(0, 0, 0, 0);
  float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
  float inverse = largest > 0 ? 127.f / largest : 0.f, scale = largest * (1.f / 127.f);
  int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
  int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
  int sum = a + b + c + d;
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
  if (!inside) return;
  ((int*)codes)[(u64)group * 8 + part] = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
  if (part == 0) scales[group] = scale, sums[group] = scale * (float)sum;
}
