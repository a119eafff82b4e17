// f32 to halves, planar weights to halves, and what a plain matrix product leaves out: bias and soft cap.
#include "quant.cuh"

#ifndef WEIGHT_TYPE
#define WEIGHT_TYPE 2
#define COLS 64
#endif

// Values beyond the range of halves are clamped; four a thread.
KERNEL to_halves(const float* __restrict__ values, u16* __restrict__ halves, u64 n) {
  let_next_start();
  wait_for_inputs();
  u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (i >= n) return;
  float4 v = load_fresh4(values + i);
  uint2 pairs;
  pairs.x = pack_half2(fminf(fmaxf(v.x, -65504.f), 65504.f), fminf(fmaxf(v.y, -65504.f), 65504.f));
  pairs.y = pack_half2(fminf(fmaxf(v.z, -65504.f), 65504.f), fminf(fmaxf(v.w, -65504.f), 65504.f));
  *(uint2*)(halves + i) = pairs;
}

INLINE float float_weight(const u8* row, int column) {
  if (WEIGHT_TYPE == T_F32) return ((const float*)row)[column];
  u16 bits = ((const u16*)row)[column];
  return WEIGHT_TYPE == T_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// [n_rows][COLS] halves; four threads share a unit, each unpacks 16 weights.
KERNEL weights_to_halves(const u8* __restrict__ planar, u16* __restrict__ halves, u64 n_rows) {
  using F = Format<WEIGHT_TYPE>;
  constexpr int N_UNITS = (COLS + 63) / 64;
  let_next_start();
  wait_for_inputs();
  u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= n_rows * N_UNITS * 4) return;
  int part = (int)(index % 4), unit = (int)(index / 4 % N_UNITS), column = unit * 64 + part * 16;
  u64 row_index = index / 4 / N_UNITS;
  const u8* row = planar + row_index * F::row_bytes(COLS);
  u16* out = halves + row_index * COLS + column;
  if constexpr (F::IS_FLOAT) {
    for (int i = 0; i < 16 && column + i < COLS; i++) out[i] = float_to_half(float_weight(row, column + i));
  } else {
    if (column >= COLS) return;
    RawUnit raw;
    Scales scales;
    load_unit<WEIGHT_TYPE, FromGlobal>(raw, row, N_UNITS, unit);
    unit_scales<WEIGHT_TYPE>(scales, raw, unit);
    float scale = 0, minimum = 0;
#pragma unroll
    for (int g = 0; g < F::N_GROUPS; g++)
      if (g == (F::N_GROUPS == 4 ? part : part >> 1)) scale = scales.scale[g], minimum = F::HAS_MINIMUM ? scales.minimum[g] : 0;
    u32 words[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 codes = unit_codes<WEIGHT_TYPE>(raw, part * 4 + j);
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        u32 first = codes >> (16 * pair) & 0xff, second = codes >> (16 * pair + 8) & 0xff;
        float a = F::HAS_MINIMUM ? (float)first : (float)(i8)first, b = F::HAS_MINIMUM ? (float)second : (float)(i8)second;
        words[2 * j + pair] = pack_half2(scale * a - minimum, scale * b - minimum);
      }
    }
    ((uint4*)out)[0] = make_uint4(words[0], words[1], words[2], words[3]);
    ((uint4*)out)[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
}

// output[token][row] = cap(output + bias), in place; bias may be null, softcap 0 is none
KERNEL add_bias(float* __restrict__ output, const float* __restrict__ bias, float softcap, int rows, int output_stride) {
  wait_for_inputs();
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float* out = output + (u64)blockIdx.y * output_stride + row;
  float y = *out + (bias ? bias[row] : 0.f);
  *out = softcap != 0 ? softcap * tanhf(y / softcap) : y;
}
