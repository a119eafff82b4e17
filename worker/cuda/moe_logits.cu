// Router logits of one token, its RMS norm inside: logits[e] = sum of matrix[e] * norm * x / rms(x). A block a row; the
// row times the norm is fetched before the inputs are there, and every block finds the rms by itself.
//
// Definitions: COLS (a multiple of 4), WEIGHT_TYPE (a float type), WARPS.
#include "quant.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int SHARE = (COLS + THREADS * 4 - 1) / (THREADS * 4);

INLINE float4 weights_at(const u8* row, int column) {
  if (WEIGHT_TYPE == T_F32) return __ldg((const float4*)((const float*)row + column));
  uint2 pairs = __ldg((const uint2*)((const u16*)row + column));
  if (WEIGHT_TYPE == T_F16)
    return make_float4(low_half(pairs.x), high_half(pairs.x), low_half(pairs.y), high_half(pairs.y));
  return make_float4(bf16_to_float((u16)pairs.x), bf16_to_float((u16)(pairs.x >> 16)), bf16_to_float((u16)pairs.y),
                     bf16_to_float((u16)(pairs.y >> 16)));
}

KERNEL __launch_bounds__(THREADS) logits_of_one(const u8* matrix, const float* norm, const float* values, float* logits,
                                                float epsilon) {
  __shared__ float dots[32], squares[32];
  let_next_start();
  const u8* row = matrix + (u64)blockIdx.x * Format<WEIGHT_TYPE>::row_bytes(COLS);
  float4 w[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    int column = (threadIdx.x + i * THREADS) * 4;
    w[i] = make_float4(0, 0, 0, 0);
    if (column >= COLS) continue;
    float4 a = weights_at(row, column), n = *(const float4*)(norm + column);
    w[i] = make_float4(a.x * n.x, a.y * n.y, a.z * n.z, a.w * n.w);
  }
  wait_for_inputs();
  float dot = 0, square = 0;
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    int column = (threadIdx.x + i * THREADS) * 4;
    float4 x = column < COLS ? load_fresh4(values + column) : make_float4(0, 0, 0, 0);
    dot += w[i].x * x.x + w[i].y * x.y + w[i].z * x.z + w[i].w * x.w;
    square += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  }
  dot = warp_sum(dot), square = warp_sum(square);
  if (lane_id() == 0) dots[warp_id()] = dot, squares[warp_id()] = square;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float all = 0, mass = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) all += dots[i], mass += squares[i];
  logits[blockIdx.x] = all * rsqrtf(mass * (1.f / COLS) + epsilon);
}
