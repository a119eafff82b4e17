// Weights as tensor-core operands straight from planar rows: lane t of four takes 16 of the 64 weights of a unit, 8 t ..
// 8 t + 7 and 32 + 8 t .. 32 + 8 t + 7. That makes four fragments of 16 columns; which column stands where in a product
// is free as long as the activations are taken in the same order: fragment s of lane t has the four weights from
// first_column(s, t) on, the first two in its first word.
#pragma once
#include "quant.cuh"

// Scales are kept 64 times too large while they are halves: small ones would lose digits.
template <int TYPE>
constexpr float scale_up() { return Format<TYPE>::IS_FLOAT ? 1.f : 64.f; }

INLINE int first_column(int fragment, int t) { return (fragment >> 1) * 32 + 8 * t + (fragment & 1) * 4; }

// The four words of codes of a lane: those of codes 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t (unit_codes).
template <int TYPE>
INLINE void lane_codes(u32 (&out)[4], const u8* row, int n_units, int unit, int t) {
  using F = Format<TYPE>;
  const u8* high = row + n_units * F::LOW_BYTES;
  const int side = (t & 1) * 8, upper = t >> 1;
  if (TYPE == T_Q8_0) {
    uint2 a = *(const uint2*)(row + (upper * n_units + unit) * 16 + side);
    uint2 b = *(const uint2*)(row + ((2 + upper) * n_units + unit) * 16 + side);
    out[0] = a.x, out[1] = a.y, out[2] = b.x, out[3] = b.y;
    return;
  }
  uint2 bits = make_uint2(0, 0);
  if (F::HAS_ONE_BIT) {
    bits = *(const uint2*)(high + unit * 8);
    bits.x >>= 2 * t, bits.y >>= 2 * t;  // bits 0 and 1 of every byte are this lane's, whatever comes above
  }
  if (F::HAS_NIBBLES) {
    uint2 w = *(const uint2*)(row + (upper * n_units + unit) * 16 + side);
    constexpr int UP = TYPE == T_Q4_0 ? 4 : TYPE == T_Q5_0 ? 3 : TYPE == T_Q6_K ? 2 : 0;
    constexpr u32 MASK = 0x0f0f0f0fu << UP;
    out[0] = (w.x << UP) & MASK, out[1] = (w.y << UP) & MASK;
    out[2] = shifted(w.x, UP - 4) & MASK, out[3] = shifted(w.y, UP - 4) & MASK;
    if (TYPE == T_Q6_K) {
      uint2 h = *(const uint2*)(high + unit * 16 + side);
      h.x >>= 2 * upper, h.y >>= 2 * upper;
      out[0] |= (h.x << 6) & 0xc0c0c0c0u, out[1] |= (h.y << 6) & 0xc0c0c0c0u;
      out[2] |= (h.x << 2) & 0xc0c0c0c0u, out[3] |= (h.y << 2) & 0xc0c0c0c0u;
    }
  } else {
    uint2 w = *(const uint2*)(row + unit * 16 + side);
    w.x >>= 2 * upper, w.y >>= 2 * upper;
    constexpr int UP = TYPE == T_Q3_K ? 5 : 0;
    constexpr u32 MASK = 0x03030303u << UP;
    out[0] = (w.x << UP) & MASK, out[1] = (w.y << UP) & MASK;
    out[2] = shifted(w.x, UP - 4) & MASK, out[3] = shifted(w.y, UP - 4) & MASK;
  }
  if (F::HAS_ONE_BIT) {
    constexpr int TOP = F::HAS_MINIMUM ? 4 : 7;  // where the bit belongs
    constexpr u32 MASK = 0x01010101u << TOP;
    out[0] |= (bits.x << TOP) & MASK, out[1] |= (bits.x << (TOP - 1)) & MASK;
    out[2] |= (bits.y << TOP) & MASK, out[3] |= (bits.y << (TOP - 1)) & MASK;
  }
}

// Scales and minimums of the two halves of a unit, as pairs of halves. Four lanes share a row: of the 16-byte headers,
// which are long to decode, lane t decodes unit t of a block of four, and the others get it from there.
struct PairedScales {
  u32 scale, minimum;
};

// Of unit 4 * block + t of a row, for types with headers; others need nothing.
template <int TYPE>
INLINE PairedScales block_scales(const u8* row, int n_units, int block, int t) {
  using F = Format<TYPE>;
  if (!F::HAS_HEADER || block * 4 >= n_units) return {0, 0};
  Scales all;
  header_scales(all, *(const uint4*)(row + n_units * (F::LOW_BYTES + F::HIGH_BYTES) + block * 16), t);
  constexpr float UP = scale_up<TYPE>();
  return {pack_half2(all.scale[0] * UP, all.scale[1] * UP), pack_half2(all.minimum[0] * -UP, all.minimum[1] * -UP)};
}

// Of one unit, for lane t: of its first eight and of its last eight weights.
template <int TYPE>
INLINE PairedScales lane_scales(const PairedScales& block, const u8* row, int n_units, int unit, int t) {
  using F = Format<TYPE>;
  constexpr float UP = scale_up<TYPE>();
  if (F::HAS_HEADER) {
    int source = (lane_id() & ~3u) + (unit & 3);
    return {__shfl_sync(FULL_WARP, block.scale, source), __shfl_sync(FULL_WARP, block.minimum, source)};
  }
  row += n_units * (F::LOW_BYTES + F::HIGH_BYTES);
  if (F::N_GROUPS == 4) {  // groups t / 2 and 2 + t / 2
    u32 word = *(const u32*)(row + unit * 4) >> (8 * (t >> 1));
    const u8* blocks = row + n_units * 4;
    if (TYPE == T_Q2_K) {
      u32 pair = *(const u32*)(blocks + (unit >> 2) * 4);
      float d = low_half(pair) * UP, d_minimum = high_half(pair) * -UP;
      return {pack_half2(d * (float)(word & 15), d * (float)(word >> 16 & 15)),
              pack_half2(d_minimum * (float)(word >> 4 & 15), d_minimum * (float)(word >> 20 & 15))};
    }
    float d = low_half(*(const u16*)(blocks + (unit >> 2) * 2)) * (F::CODE_SCALE * UP);
    return {pack_half2(d * (float)(i8)word, d * (float)(i8)(word >> 16)), 0};
  }
  if (F::HAS_MINIMUM) {
    uint2 pairs = *(const uint2*)(row + unit * 8);
    return {pack_half2(low_half(pairs.x) * UP, low_half(pairs.y) * UP),
            pack_half2(high_half(pairs.x) * UP, high_half(pairs.y) * UP)};
  }
  u32 pair = *(const u32*)(row + unit * 4);
  return {pack_half2(low_half(pair) * (F::CODE_SCALE * UP), high_half(pair) * (F::CODE_SCALE * UP)), 0};
}

template <int TYPE, int COLS_>
INLINE u32 float_pair(const u8* row, int column) {
  if (column >= COLS_) return 0;
  if (TYPE == T_F16) return *(const u32*)(row + column * 2);
  if (TYPE == T_F32) return pack_half2(((const float*)row)[column], ((const float*)row)[column + 1]);
  u32 pair = *(const u32*)(row + column * 2);
  return pack_half2(bf16_to_float((u16)(pair & 0xffff)), bf16_to_float((u16)(pair >> 16)));
}

// Both words of the four fragments, times scale_up; COLS_ is even.
template <int TYPE, int COLS_>
INLINE void lane_fragments(u32 (&out)[4][2], const PairedScales& block, const u8* row, int n_units, int unit, int t) {
  if constexpr (Format<TYPE>::IS_FLOAT) {
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int word = 0; word < 2; word++)
        out[s][word] = float_pair<TYPE, COLS_>(row, unit * 64 + first_column(s, t) + 2 * word);
  } else {
    u32 codes[4];
    lane_codes<TYPE>(codes, row, n_units, unit, t);
    PairedScales scales = lane_scales<TYPE>(block, row, n_units, unit, t);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 both = s < 2 ? 0x1010 : 0x3232;  // the first or the second half, twice
      codes_to_halves<TYPE>(out[s], codes[s], __byte_perm(scales.scale, 0, both), __byte_perm(scales.minimum, 0, both));
    }
  }
}
