// Quantised weights as tensor-core operands, from stages in shared memory: a stage holds 256 columns (four units) of
// some rows in the planes of quant.cuh, as if it were one row of 4 * ROWS units. Lane t of four takes the whole unit t
// of its row, so that it decodes its own scales. Which column stands where in a product is free as long as activations
// are taken in the same order: fragment j has columns 4 j and 4 j + 2 in its first word, 4 j + 1 and 4 j + 3 in its
// second.
#pragma once
#include "quant.cuh"

// Stages of ROWS rows (a multiple of 16) of a matrix with N_COLS columns.
template <int TYPE, int N_COLS, int ROWS>
struct Stage {
  using F = Format<TYPE>;
  static constexpr int N_UNITS = (N_COLS + 63) / 64, STAGED_UNITS = 4 * ROWS;
  static constexpr int PIECES = F::IS_FLOAT ? 4 * F::ELEMENT_BYTES : F::LOW_BYTES / 16;  // of 16 bytes, of a unit
  static constexpr int HIGH = PIECES * 16 * STAGED_UNITS;
  static constexpr int SCALES = HIGH + (F::IS_FLOAT ? 0 : F::HIGH_BYTES * STAGED_UNITS);
  static constexpr int BLOCKS = SCALES + (F::IS_FLOAT ? 0 : F::SCALE_BYTES * STAGED_UNITS);
  static constexpr int BYTES = BLOCKS + (F::IS_FLOAT ? 0 : F::HAS_HEADER ? 16 * ROWS : F::BLOCK_BYTES ? 4 * ROWS : 0);
  // where planes begin in a row in memory
  static constexpr int ROW_HIGH = N_UNITS * F::LOW_BYTES, ROW_SCALES = ROW_HIGH + N_UNITS * F::HIGH_BYTES;
  static constexpr int ROW_BLOCKS = ROW_SCALES + N_UNITS * F::SCALE_BYTES, ROW_BYTES = F::row_bytes(N_COLS);

  // `count` rows from `rows` on, columns from 256 * block on; all lanes of a warp. What lies beyond the matrix is left
  // as it was or zero: sums of such rows are not used, and scales of units that do not exist are taken as zero.
  INLINE static void copy(u8* stage, const u8* rows, int count, int block) {
    if (count >= ROWS) copy_rows<true>(stage, rows, count, block);
    else copy_rows<false>(stage, rows, count, block);
  }
  template <bool ALL>
  INLINE static void copy_rows(u8* stage, const u8* rows, int count, int block) {
    const int unit = block * 4 + (lane_id() & 3), left = count - (lane_id() >> 2);
    const u8* own = rows + (lane_id() >> 2) * ROW_BYTES + (F::IS_FLOAT ? unit * PIECES * 16 : unit * 16);
    u8* target = stage + lane_id() * 16;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int row = 0; row < ROWS; row += 8)
        if (ALL || row < left)
          copy_async16(target + (piece * STAGED_UNITS + row * 4) * 16,
                       own + row * ROW_BYTES + (F::IS_FLOAT ? piece : piece * N_UNITS) * 16,
                       F::IS_FLOAT ? unit * 64 + piece * (16 / F::ELEMENT_BYTES) < N_COLS
                                   : N_UNITS % 4 == 0 || unit < N_UNITS);
    if constexpr (F::IS_FLOAT) return;
    if constexpr (F::HIGH_BYTES != 0) copy_plane<ALL, F::HIGH_BYTES, 16>(stage + HIGH, rows + ROW_HIGH, count, block);
    if constexpr (F::SCALE_BYTES != 0)
      copy_plane<ALL, F::SCALE_BYTES, ROW_SCALES % 16 ? 8 : 16>(stage + SCALES, rows + ROW_SCALES, count, block);
    const int row = lane_id();
    if (row >= ROWS || (!ALL && row >= count)) return;
    const u8* source = rows + row * ROW_BYTES + ROW_BLOCKS + block * F::BLOCK_BYTES;
    if (F::HAS_HEADER) copy_async16(stage + BLOCKS + row * 16, source, true);
    else if (F::BLOCK_BYTES) copy_async_small<4>(stage + BLOCKS + row * 4, source - block_misalignment(block));
  }
  // A plane with UNIT bytes for each unit, in pieces of PIECE bytes.
  template <bool ALL, int UNIT, int PIECE>
  INLINE static void copy_plane(u8* plane, const u8* rows, int count, int block) {
    constexpr int IN_ROW = 4 * UNIT / PIECE, STEP = 32 / IN_ROW;  // pieces of a row, rows at a time
    const int first = lane_id() / IN_ROW, offset = (block * IN_ROW + lane_id() % IN_ROW) * PIECE;
    const bool exists = N_UNITS % 4 == 0 || offset < N_UNITS * UNIT;
    const u8* own = rows + first * ROW_BYTES + offset;
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP) {
      if ((STEP > ROWS && first >= ROWS) || (!ALL && row + first >= count) || !exists) continue;
      u8* target = plane + (row * IN_ROW + lane_id()) * PIECE;
      if (PIECE == 16) copy_async16(target, own + row * ROW_BYTES, true);
      else copy_async_small<8>(target, own + row * ROW_BYTES);
    }
  }
  // Scales of a block of 256 may be two bytes, at an address that is no multiple of four.
  INLINE static int block_misalignment(int block) { return (ROW_BLOCKS + block * F::BLOCK_BYTES) & 3; }

  INLINE static void load(RawUnit& raw, const u8* stage, int unit, int block) {
    using S = FromShared;
#pragma unroll
    for (int piece = 0; piece < (F::IS_FLOAT ? 0 : PIECES); piece++)
      raw.low[piece] = S::words4(stage + (piece * STAGED_UNITS + unit) * 16);
    if (F::HIGH_BYTES == 16) raw.high = S::words4(stage + HIGH + unit * 16);
    if (F::HIGH_BYTES == 8) {
      uint2 bits = S::words2(stage + HIGH + unit * 8);
      raw.high.x = bits.x, raw.high.y = bits.y;
    }
    if (F::SCALE_BYTES == 8) raw.scales = S::words2(stage + SCALES + unit * 8);
    if (F::SCALE_BYTES == 4) raw.scales.x = S::word(stage + SCALES + unit * 4);
    if (F::HAS_HEADER) raw.header = S::header(stage + BLOCKS + (unit >> 2) * 16);
    else if (F::BLOCK_BYTES) raw.block = S::word(stage + BLOCKS + (unit >> 2) * 4) >> (8 * block_misalignment(block));
  }
};

// A code becomes a half in one step: its bits in the mantissa of 1024 are 1024 + code, and times scale - 1024 * scale
// is exact but for one rounding (scales have to be below 64, and weights below 900). What is left over, minimums
// and the biases of signed codes, is a product of its own, with the sums of 16 columns of the activations. Q8_0, whose
// bias is too large for that, is centred first.
template <int TYPE>
constexpr bool is_centred() { return TYPE == T_Q8_0; }

// What a signed code is stored too large by, once its flipped top bit is flipped back.
template <int TYPE>
constexpr int code_bias() {
  return TYPE == T_Q4_0 ? 8 : TYPE == T_Q5_0 ? 16 : TYPE == T_Q8_0 ? 128 : TYPE == T_Q3_K ? 4 : TYPE == T_Q6_K ? 32 : 0;
}
// 1024 in two halves, and the bias that flips the top bit back
template <int TYPE>
constexpr u32 code_magic() { return 0x64006400u + 0x10001u * code_bias<TYPE>(); }

// The last 32 weights of a unit are 16 times as large, which leaves high nibbles where they lie: their activations are
// divided by it.
constexpr int LAST_HALF_BITS = 4;
constexpr float LAST_HALF = 1 << LAST_HALF_BITS;

// A constant that the compiler can not see through, so that it stays in a register instead of being loaded for every
// use. All lanes of a warp call it.
INLINE u32 in_register(u32 value) { return __shfl_sync(FULL_WARP, value, 0); }

// Of the groups of a unit, each twice in a word as halves: the scale, -1024 times it, and the negated minimum.
struct PairedScales {
  u32 scale[4], offset[4], minimum[4];
};

INLINE u32 twice(float value) { return pack_half2(value, value); }

// Of the header's sub-blocks 2 t and 2 t + 1, in halves from the start.
INLINE void paired_header(PairedScales& out, uint4 header, int t) {
  int shift = (t & 1) * 16;
  u32 first = header.y >> shift, second = header.z >> shift, last = header.w >> shift;
  u32 scales = t < 2 ? first & 0x3f3f : (last & 0x0f0f) | ((first & 0xc0c0) >> 2);
  u32 minimums = t < 2 ? second & 0x3f3f : ((last >> 4) & 0x0f0f) | ((second & 0xc0c0) >> 2);
  const u32 magic = 0x64006400, negative = 0x80008000;
  u32 s = half2_mul(half2_sub(__byte_perm(scales, magic, 0x5150), magic), __byte_perm(header.x, 0, 0x1010));
  u32 m = half2_mul(half2_sub(__byte_perm(minimums, magic, 0x5150), magic),
                    __byte_perm(header.x, 0, 0x3232) ^ negative);
  u32 offsets = half2_mul(s, magic ^ negative);
#pragma unroll
  for (int g = 0; g < 2; g++) {
    const u32 both = g ? 0x3232 : 0x1010;
    out.scale[g] = __byte_perm(s, 0, both), out.offset[g] = __byte_perm(offsets, 0, both);
    out.minimum[g] = __byte_perm(m, 0, both);
  }
}

// For unit t of its block; zeros where `exists` is false, whatever was loaded.
template <int TYPE>
INLINE void paired_scales(PairedScales& out, const RawUnit& raw, int t, bool exists) {
  using F = Format<TYPE>;
  if (F::HAS_HEADER) {
    paired_header(out, raw.header, t);
  } else {
    Scales scales;
    unit_scales<TYPE>(scales, raw, t);
#pragma unroll
    for (int g = 0; g < F::N_GROUPS; g++) {
      const float scale = scales.scale[g] / F::CODE_SCALE;  // codes are taken as they are, not as large as bytes
      const u32 rounded = twice(is_centred<TYPE>() && g >= F::N_GROUPS / 2 ? scale * LAST_HALF : scale);
      out.scale[g] = rounded, out.offset[g] = half2_mul(rounded, 0xe400e400);  // -1024
      out.minimum[g] = F::HAS_MINIMUM ? twice(-scales.minimum[g]) : half2_mul(rounded, twice(-code_bias<TYPE>()));
    }
  }
#pragma unroll
  for (int g = 0; g < F::N_GROUPS; g++)
    if (!exists) out.scale[g] = out.offset[g] = out.minimum[g] = 0;
}

// Four signed bytes to two pairs of halves, exactly: bytes 0 and 2, then 1 and 3, in the mantissas of 1024 + 128 +
// byte; `magic` is that without the byte, twice.
INLINE void bytes_to_halves(u32 (&out)[2], u32 bytes, u32 magic) {
  out[0] = half2_sub((bytes & 0x00ff00ff) ^ magic, magic);
  out[1] = half2_sub((bytes >> 8 & 0x00ff00ff) ^ magic, magic);
}

// Codes 4 j + odd and 4 j + odd + 2 of a unit in the mantissas of `magic`, which is kept in a register: an instruction
// has room for one constant, and that is the mask.
template <int TYPE>
INLINE u32 code_pair(const RawUnit& raw, int j, int odd, u32 magic) {
  using F = Format<TYPE>;
  if (TYPE == T_Q8_0) return (word_of(raw.low[j >> 2], j & 3) >> (8 * odd) & 0x00ff00ff) ^ magic;
  constexpr u32 MASK = F::HAS_NIBBLES ? 0xf000f : 0x30003, BIAS = 0x10001u * code_bias<TYPE>();
  const int up = j < 8 ? 0 : LAST_HALF_BITS, down = 8 * odd - up;  // from where the lowest bits lie in a byte
  const int at = F::HAS_NIBBLES ? 4 * (j >> 3) : 2 * (j >> 2);
  const u32 low = word_of(raw.low[F::HAS_NIBBLES ? (j >> 2) & 1 : 0], j & 3);
  u32 pair = (shifted(low, -(at + down)) & MASK << up) ^ (j < 8 ? magic : magic ^ (BIAS ^ BIAS << LAST_HALF_BITS));
  if (TYPE == T_Q6_K) pair ^= shifted(word_of(raw.high, j & 3), 4 - 2 * (j >> 2) - down) & 0x300030u << up;
  if (F::HAS_ONE_BIT) {
    constexpr int TARGET = TYPE == T_Q3_K ? 2 : 4;
    pair ^= shifted(j < 8 ? raw.high.x : raw.high.y, TARGET - (j & 7) - down) & 0x10001u << (TARGET + up);
  }
  return pair;
}

// Fragment j of a lane's unit without minimums; `magic` is code_magic.
template <int TYPE>
INLINE void fragment(u32 (&out)[2], const RawUnit& raw, const PairedScales& scales, int j, u32 magic) {
  const int group = Format<TYPE>::N_GROUPS == 4 ? j >> 2 : j >> 3;
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    const u32 code = code_pair<TYPE>(raw, j, odd, magic);
    out[odd] = is_centred<TYPE>() ? half2_mul(half2_sub(code, magic), scales.scale[group])
                                  : half2_fma(code, scales.scale[group], scales.offset[group]);
  }
}
// The minimums of a lane's unit as a fragment whose columns are its four groups of 16.
template <int TYPE>
INLINE void minimum_fragment(u32 (&out)[2], const PairedScales& scales) {
  constexpr bool FOUR = Format<TYPE>::N_GROUPS == 4;
  out[0] = FOUR ? __byte_perm(scales.minimum[0], scales.minimum[1], 0x5410) : scales.minimum[0];
  out[1] = FOUR ? __byte_perm(scales.minimum[2], scales.minimum[3], 0x5410) : scales.minimum[1];
}

// A fragment of float weights, of their own size, straight from a stage; `unit` as in Stage::load.
template <int TYPE, int STAGED_UNITS>
INLINE void float_fragment(u32 (&out)[2], const u8* stage, int unit, int j) {
  if (TYPE == T_F32) {
    float4 v = *(const float4*)(stage + (j * STAGED_UNITS + unit) * 16);
    out[0] = pack_half2(v.x, v.z), out[1] = pack_half2(v.y, v.w);
    return;
  }
  uint2 v = *(const uint2*)(stage + ((j >> 1) * STAGED_UNITS + unit) * 16 + (j & 1) * 8);
  out[0] = __byte_perm(v.x, v.y, 0x5410), out[1] = __byte_perm(v.x, v.y, 0x7632);
  if (TYPE == T_F16) return;
#pragma unroll
  for (int word = 0; word < 2; word++)
    out[word] = pack_half2(bf16_to_float((u16)(out[word] & 0xffff)), bf16_to_float((u16)(out[word] >> 16)));
}
