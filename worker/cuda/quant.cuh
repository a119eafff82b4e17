// Quantised weights in planar rows: how a lane loads one unit of 64 weights, turns it into bytes, and multiplies it
// with 8-bit activations or makes halves of it.
//
// Planes of a row of n units, in this order (worker/cuda/formats.py has their sizes):
//   low bits   4-bit types: n x 16 bytes of first words, n x 16 of second words. Byte i of the 32 holds weight i in its
//              low nibble and weight 32 + i in its high nibble. 2-bit types: n x 16 bytes, byte i has weights i, 16 + i,
//              32 + i, 48 + i from its lowest bits up. 8 bits: four planes of n x 16.
//   high bits  2-bit (Q6_K): as above. 1-bit (Q5, Q3_K): n x 8 bytes; bit i of byte 4 v + b is weight 32 v + 4 i + b.
//   scales     per unit, then per block of 256.
// Types without a minimum have signed codes: their top bit is stored flipped and their bits are unpacked to the top of
// a byte, so that no offset has to be taken off; the scale takes the power of two back.
#pragma once
#include "common.cuh"

enum { T_F32 = 0, T_F16 = 1, T_Q4_0 = 2, T_Q4_1 = 3, T_Q5_0 = 6, T_Q5_1 = 7, T_Q8_0 = 8, T_Q2_K = 10, T_Q3_K = 11,
       T_Q4_K = 12, T_Q5_K = 13, T_Q6_K = 14, T_BF16 = 30 };

template <int TYPE>
struct Format {
  static constexpr bool IS_FLOAT = TYPE == T_F32 || TYPE == T_F16 || TYPE == T_BF16;
  static constexpr bool HAS_NIBBLES = TYPE == T_Q4_0 || TYPE == T_Q4_1 || TYPE == T_Q5_0 || TYPE == T_Q5_1 ||
                                      TYPE == T_Q4_K || TYPE == T_Q5_K || TYPE == T_Q6_K;
  static constexpr bool HAS_ONE_BIT = TYPE == T_Q5_0 || TYPE == T_Q5_1 || TYPE == T_Q5_K || TYPE == T_Q3_K;
  static constexpr bool HAS_HEADER = TYPE == T_Q4_K || TYPE == T_Q5_K;  // 16 bytes per 256, as in the file
  static constexpr bool HAS_MINIMUM = TYPE == T_Q4_1 || TYPE == T_Q5_1 || HAS_HEADER || TYPE == T_Q2_K;
  static constexpr int N_GROUPS = TYPE == T_Q2_K || TYPE == T_Q3_K || TYPE == T_Q6_K ? 4 : 2;  // scales of a unit
  static constexpr int LOW_BYTES = TYPE == T_Q8_0 ? 64 : HAS_NIBBLES ? 32 : 16;
  static constexpr int HIGH_BYTES = TYPE == T_Q6_K ? 16 : HAS_ONE_BIT ? 8 : 0;
  static constexpr int SCALE_BYTES = HAS_HEADER ? 0 : TYPE == T_Q4_1 || TYPE == T_Q5_1 ? 8 : 4;
  static constexpr int BLOCK_BYTES = HAS_HEADER ? 16 : TYPE == T_Q2_K ? 4 : N_GROUPS == 4 ? 2 : 0;
  static constexpr int ELEMENT_BYTES = TYPE == T_F32 ? 4 : 2;  // of float types
  // what the unpacked codes are too large by
  static constexpr float CODE_SCALE = TYPE == T_Q4_0 ? 1 / 16.f
                                      : TYPE == T_Q5_0 ? 1 / 8.f
                                      : TYPE == T_Q3_K ? 1 / 32.f
                                      : TYPE == T_Q6_K ? 1 / 4.f
                                                       : 1.f;
  __host__ __device__ static constexpr int row_bytes(int cols) {
    int units = (cols + 63) / 64;
    int content = IS_FLOAT ? cols * ELEMENT_BYTES
                           : units * (LOW_BYTES + HIGH_BYTES + SCALE_BYTES) + (units + 3) / 4 * BLOCK_BYTES;
    return (content + 15) / 16 * 16;
  }
};

// The stored words of one unit; a type uses some of them.
struct RawUnit {
  uint4 low[4];
  uint4 high;
  uint4 header;
  uint2 scales;
  u32 block;
};

struct FromGlobal {
  INLINE static uint4 words4(const u8* p) { return load_once(p); }
  INLINE static uint4 header(const u8* p) { return __ldg((const uint4*)p); }
  INLINE static uint2 words2(const u8* p) { return __ldg((const uint2*)p); }
  INLINE static u32 word(const u8* p) { return __ldg((const u32*)p); }
  INLINE static u32 half(const u8* p) { return __ldg((const u16*)p); }
};
struct FromShared {
  INLINE static uint4 words4(const u8* p) { return *(const uint4*)p; }
  INLINE static uint4 header(const u8* p) { return *(const uint4*)p; }
  INLINE static uint2 words2(const u8* p) { return *(const uint2*)p; }
  INLINE static u32 word(const u8* p) { return *(const u32*)p; }
  INLINE static u32 half(const u8* p) { return *(const u16*)p; }
};

template <int TYPE, class From>
INLINE void load_unit(RawUnit& raw, const u8* row, int n_units, int unit) {
  using F = Format<TYPE>;
#pragma unroll
  for (int plane = 0; plane < F::LOW_BYTES / 16; plane++) raw.low[plane] = From::words4(row + (plane * n_units + unit) * 16);
  row += n_units * F::LOW_BYTES;
  if (F::HIGH_BYTES == 16) raw.high = From::words4(row + unit * 16);
  if (F::HIGH_BYTES == 8) {
    uint2 bits = From::words2(row + unit * 8);
    raw.high.x = bits.x, raw.high.y = bits.y;
  }
  row += n_units * F::HIGH_BYTES;
  if (F::HAS_HEADER) raw.header = From::header(row + (unit >> 2) * 16);
  if (F::SCALE_BYTES == 8) raw.scales = From::words2(row + unit * 8);
  if (F::SCALE_BYTES == 4) raw.scales.x = From::word(row + unit * 4);
  row += n_units * F::SCALE_BYTES;
  if (F::BLOCK_BYTES == 2) raw.block = From::half(row + (unit >> 2) * 2);
  if (F::BLOCK_BYTES == 4) raw.block = From::word(row + (unit >> 2) * 4);
}

// value = scales[g] * code - minimums[g], where g counts groups of 64 / N_GROUPS weights
struct Scales {
  float scale[4];
  float minimum[4];
};

// Scales and minimums of sub-blocks 2 j and 2 j + 1 from a Q4_K or Q5_K header: d, dmin, twelve bytes of six-bit values.
INLINE void header_scales(Scales& out, uint4 header, int j) {
  int shift = (j & 1) * 16;
  u32 first = header.y >> shift, second = header.z >> shift, last = header.w >> shift;
  u32 scales = first & 0x3f3f, minimums = second & 0x3f3f;
  if (j >= 2) {
    scales = (last & 0x0f0f) | ((first & 0xc0c0) >> 2);
    minimums = ((last >> 4) & 0x0f0f) | ((second & 0xc0c0) >> 2);
  }
  float d = low_half(header.x), d_minimum = high_half(header.x);
  out.scale[0] = d * (float)(scales & 0xff), out.scale[1] = d * (float)((scales >> 8) & 0xff);
  out.minimum[0] = d_minimum * (float)(minimums & 0xff), out.minimum[1] = d_minimum * (float)((minimums >> 8) & 0xff);
}

template <int TYPE>
INLINE void unit_scales(Scales& out, const RawUnit& raw, int unit) {
  using F = Format<TYPE>;
  if (F::HAS_HEADER) {
    header_scales(out, raw.header, unit & 3);
  } else if (TYPE == T_Q2_K) {
    float d = low_half(raw.block), d_minimum = high_half(raw.block);
#pragma unroll
    for (int g = 0; g < 4; g++) {
      out.scale[g] = d * (float)((raw.scales.x >> (8 * g)) & 15);
      out.minimum[g] = d_minimum * (float)((raw.scales.x >> (8 * g + 4)) & 15);
    }
  } else if (F::N_GROUPS == 4) {
    float d = low_half(raw.block) * F::CODE_SCALE;
#pragma unroll
    for (int g = 0; g < 4; g++) out.scale[g] = d * (float)(i8)(raw.scales.x >> (8 * g));
  } else if (F::HAS_MINIMUM) {
    out.scale[0] = low_half(raw.scales.x), out.scale[1] = low_half(raw.scales.y);
    out.minimum[0] = -high_half(raw.scales.x), out.minimum[1] = -high_half(raw.scales.y);
  } else {
    out.scale[0] = low_half(raw.scales.x) * F::CODE_SCALE, out.scale[1] = high_half(raw.scales.x) * F::CODE_SCALE;
  }
}

INLINE u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// shift left by n, or right by -n
INLINE u32 shifted(u32 v, int n) { return n >= 0 ? v << n : v >> -n; }

// Codes of weights 4 j .. 4 j + 3 of a unit as four bytes; j is a compile-time constant after unrolling.
template <int TYPE>
INLINE u32 unit_codes(const RawUnit& raw, int j) {
  using F = Format<TYPE>;
  if (TYPE == T_Q8_0) return word_of(raw.low[j >> 2], j & 3);
  u32 bit_word = j < 8 ? raw.high.x : raw.high.y;
  if (TYPE == T_Q2_K) return (word_of(raw.low[0], j & 3) >> (2 * (j >> 2))) & 0x03030303;
  if (TYPE == T_Q3_K)
    return (shifted(word_of(raw.low[0], j & 3), 5 - 2 * (j >> 2)) & 0x60606060) |
           (shifted(bit_word, 7 - (j & 7)) & 0x80808080);
  u32 nibbles = word_of(raw.low[(j >> 2) & 1], j & 3);
  int up = j < 8 ? 0 : -4;  // the high nibbles come down
  if (TYPE == T_Q4_0) return shifted(nibbles, up + 4) & 0xf0f0f0f0;
  if (TYPE == T_Q5_0) return (shifted(nibbles, up + 3) & 0x78787878) | (shifted(bit_word, 7 - (j & 7)) & 0x80808080);
  if (TYPE == T_Q6_K)
    return (shifted(nibbles, up + 2) & 0x3c3c3c3c) | (shifted(word_of(raw.high, j & 3), 6 - 2 * (j >> 2)) & 0xc0c0c0c0);
  u32 codes = shifted(nibbles, up) & 0x0f0f0f0f;
  if (F::HAS_ONE_BIT) codes |= shifted(bit_word, 4 - (j & 7)) & 0x10101010;
  return codes;
}

// 8-bit activations of the 64 columns of a unit: codes, a scale per 32 columns or, FINE, per 16, and per 32 columns
// scale * sum of the codes.
template <bool FINE>
struct Activations {
  int4 codes[4];
  float scales[FINE ? 4 : 2];
  float2 sums;
  INLINE float scale(int group) const { return scales[FINE ? group : group >> 1]; }  // of 16 columns
};

// Codes for unit_dot: as unit_codes, but the high nibbles of types with a minimum stay in place, 16 times too large.
template <int TYPE>
constexpr bool KEEPS_HIGH = TYPE == T_Q4_K || TYPE == T_Q4_1;
template <int TYPE>
INLINE u32 dot_codes(const RawUnit& raw, int j) {
  if (KEEPS_HIGH<TYPE> && j >= 8) return word_of(raw.low[(j >> 2) & 1], j & 3) & 0xf0f0f0f0;
  return unit_codes<TYPE>(raw, j);
}

template <int TYPE>
INLINE int dot4(u32 weights, int activations, int sum) {
  if (Format<TYPE>::HAS_MINIMUM) return dot4_unsigned(weights, activations, sum);
  return __dp4a((int)weights, activations, sum);
}

// The dot product of one unit (dot_codes) with one token's activations.
template <int TYPE, bool FINE>
INLINE float unit_dot(const u32 (&codes)[16], const Scales& w, const Activations<FINE>& x) {
  using F = Format<TYPE>;
  constexpr float HIGH = KEEPS_HIGH<TYPE> ? 1 / 16.f : 1.f;
  float sum = 0;
  int dots[4];
#pragma unroll
  for (int g = 0; g < 4; g++) {
    int d = dot4<TYPE>(codes[4 * g], x.codes[g].x, 0);
    d = dot4<TYPE>(codes[4 * g + 1], x.codes[g].y, d);
    d = dot4<TYPE>(codes[4 * g + 2], x.codes[g].z, d);
    dots[g] = dot4<TYPE>(codes[4 * g + 3], x.codes[g].w, d);
  }
  if (F::N_GROUPS == 2 && !FINE) {
    sum += w.scale[0] * x.scale(0) * (float)(dots[0] + dots[1]);
    sum += w.scale[1] * (x.scale(2) * HIGH) * (float)(dots[2] + dots[3]);
  } else if (F::N_GROUPS == 2) {
    sum += w.scale[0] * (x.scale(0) * (float)dots[0] + x.scale(1) * (float)dots[1]);
    sum += w.scale[1] * (x.scale(2) * HIGH * (float)dots[2] + x.scale(3) * HIGH * (float)dots[3]);
  } else {
#pragma unroll
    for (int g = 0; g < 4; g++) sum += w.scale[g] * x.scale(g) * (float)dots[g];
  }
  if (F::HAS_MINIMUM && F::N_GROUPS == 2) {
    sum -= w.minimum[0] * x.sums.x + w.minimum[1] * x.sums.y;
  } else if (F::HAS_MINIMUM) {
#pragma unroll
    for (int g = 0; g < 4; g++) {  // sums of halves are not stored: a product with ones
      int d = dot4<TYPE>(0x01010101, x.codes[g].x, 0);
      d = dot4<TYPE>(0x01010101, x.codes[g].y, d);
      d = dot4<TYPE>(0x01010101, x.codes[g].z, d);
      d = dot4<TYPE>(0x01010101, x.codes[g].w, d);
      sum -= w.minimum[g] * x.scale(g) * (float)d;
    }
  }
  return sum;
}

// Weight bytes to pairs of halves, exactly: the byte becomes the mantissa of 1024 + byte. `out[0]` has weights
// 4 j and 4 j + 1 as scale * code - minimum, `out[1]` the other two; scale and minimum are pairs of equal halves.
template <int TYPE>
INLINE void codes_to_halves(u32 (&out)[2], u32 codes, u32 scale, u32 minimum) {
  constexpr bool SIGNED = !Format<TYPE>::HAS_MINIMUM;
  const u32 offset = SIGNED ? 0x64806480u : 0x64006400u;  // 1152 or 1024, twice
  if (SIGNED) codes ^= 0x80808080u;
  u32 low = half2_sub(__byte_perm(codes, 0x64646464u, 0x4140), offset);
  u32 high = half2_sub(__byte_perm(codes, 0x64646464u, 0x4342), offset);
  out[0] = SIGNED ? half2_mul(low, scale) : half2_fma(low, scale, minimum);
  out[1] = SIGNED ? half2_mul(high, scale) : half2_fma(high, scale, minimum);
}
