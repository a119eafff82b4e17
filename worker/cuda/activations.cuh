// Activations of a few tokens in a block's shared memory, laid out for conflict-free reads: 8-bit codes with scales
// for quantised weights, f32 for float weights. They come quantised from global memory, or as f32 that the block
// quantises itself, with an RMS norm in front if asked.
#pragma once
#include "quant.cuh"

// Blocks that should fit on a multiprocessor together: with one token registers are kept few enough that the kernel
// behind finds room, which is worth more than what they would save here.
constexpr int blocks_together(int tokens) { return tokens == 1 ? 2 : 1; }

// How often a lane's loop over units is unrolled: few rounds wholly, so that their loads go out together.
constexpr int unroll_of(int rounds) { return rounds <= 4 ? rounds : 2; }

// One token: int4 codes[4][units]; then per unit two scales, or four if FINE; then float2 sums[units].
template <int N_COLS, bool FINE = false>
struct QuantisedToken {
  static constexpr int UNITS = (N_COLS + 63) / 64, SCALES = FINE ? 4 : 2;
  static constexpr int BYTES = (UNITS * (72 + 4 * SCALES) + 15) / 16 * 16;
  u8* memory;
  INLINE int4* codes(int plane) const { return (int4*)memory + plane * UNITS; }
  INLINE float* scales() const { return (float*)(memory + UNITS * 64); }
  INLINE float* sums() const { return (float*)(memory + UNITS * (64 + 4 * SCALES)); }
  INLINE void read(Activations<FINE>& x, int unit) const {
#pragma unroll
    for (int plane = 0; plane < 4; plane++) x.codes[plane] = codes(plane)[unit];
    if constexpr (FINE) *(float4*)x.scales = ((const float4*)scales())[unit];
    else *(float2*)x.scales = ((const float2*)scales())[unit];
    x.sums = ((const float2*)sums())[unit];
  }
};

// From global memory: codes [N_COLS], scales and sums [N_COLS / 32]; half a unit at the end is filled with zeros.
template <int N_COLS, int N_THREADS>
INLINE void stage_quantised(QuantisedToken<N_COLS> token, const i8* codes, const float* scales, const float* sums) {
  constexpr int UNITS = QuantisedToken<N_COLS>::UNITS;
  constexpr int WORDS = SHARES<UNITS * 4, N_THREADS>, GROUPS = SHARES<UNITS * 2, N_THREADS>;
  int4 words[WORDS];
  float2 factors[GROUPS];
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    const int i = shared_out<N_THREADS>(k);
    words[k] = i * 16 < N_COLS ? __ldcg((const int4*)codes + i) : make_int4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    const int i = shared_out<N_THREADS>(k);
    const bool inside = i * 32 < N_COLS;
    factors[k] = make_float2(inside ? __ldcg(scales + i) : 0.f, inside ? __ldcg(sums + i) : 0.f);
  }
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    const int i = shared_out<N_THREADS>(k);
    if (i < UNITS * 4) token.codes(i & 3)[i >> 2] = words[k];
  }
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    const int i = shared_out<N_THREADS>(k);
    if (i < UNITS * 2) token.scales()[i] = factors[k].x, token.sums()[i] = factors[k].y;
  }
}

// Groups whose largest value is below this become zeros: the fast division would overflow.
#define LEAST_QUANTISED 1e-30f

// Four consecutive values per lane, eight lanes a group of 32; all lanes of a warp call. `column` is the first of the
// four; `inside` false stores zeros into the half unit that the row ends in.
template <int N_COLS>
INLINE void quantise4(QuantisedToken<N_COLS> token, float4 v, int column, float multiplier) {
  float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
  float inverse = largest > LEAST_QUANTISED ? __fdividef(127.f, largest) : 0.f, scale = largest * (1.f / 127.f) * multiplier;
  int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
  int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
  int sum = a + b + c + d;
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
  if (column >= QuantisedToken<N_COLS>::UNITS * 64) return;
  ((int*)(token.codes((column >> 4) & 3) + (column >> 6)))[(column >> 2) & 3] =
      (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
  if ((column & 31) == 0) {
    token.scales()[column >> 5] = scale;
    token.sums()[column >> 5] = scale * (float)sum;
  }
}

// 1 / rms of a row from the sums of squares of N_WARPS warps' shares of it.
template <int N_COLS, int N_WARPS>
INLINE float inverse_rms(const float* squares, float epsilon) {
  return rsqrtf(warp_sum(lane_id() < N_WARPS ? squares[lane_id()] : 0.f) * (1.f / N_COLS) + epsilon);
}

// A thread's share of a row: every N_THREADS-th group of four columns.
template <int N_COLS, int N_THREADS>
struct RowShare {
  static constexpr int COUNT = (N_COLS + N_THREADS * 4 - 1) / (N_THREADS * 4);
  float4 v[COUNT];
  INLINE static int column(int i) { return (threadIdx.x + i * N_THREADS) * 4; }
  template <bool FRESH>
  INLINE void load(const float* row) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      v[i] = make_float4(0, 0, 0, 0);
      if (column(i) < N_COLS) v[i] = FRESH ? __ldcg((const float4*)(row + column(i))) : *(const float4*)(row + column(i));
    }
  }
  INLINE float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    return sum;
  }
  // Times the norm's weights. What the norm divides by is left to the products' end, which saves a barrier: the codes
  // are the same.
  INLINE void weigh(const RowShare& weights) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      v[i].x *= weights.v[i].x, v[i].y *= weights.v[i].y, v[i].z *= weights.v[i].z, v[i].w *= weights.v[i].w;
  }
  INLINE void quantise(QuantisedToken<N_COLS> token, float multiplier) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) quantise4<N_COLS>(token, v[i], column(i), multiplier);
  }
};
