// File rows to planar rows (quant.cuh), one thread per unit of 64 weights. WEIGHT_TYPE and COLS are definitions.
#include "quant.cuh"

using F = Format<WEIGHT_TYPE>;
constexpr int N_UNITS = (COLS + 63) / 64;

// The value that `fields` of worker/model/quants_bits.py gives for element e: bytes come in groups of `width`, a group
// gives first the lowest `bits` of each byte, then the next.
INLINE u32 field(const u8* bytes, int bits, int width, int e) {
  int per_group = width * (8 / bits), in_group = e % per_group;
  return (bytes[e / per_group * width + in_group % width] >> (in_group / width * bits)) & ((1 << bits) - 1);
}

// One unit of the file: its 64 codes as unsigned numbers, offsets included.
INLINE u32 file_code(const u8* block, int e) {
#if WEIGHT_TYPE == 2
  return field(block + 2, 4, 16, e);
#elif WEIGHT_TYPE == 3
  return field(block + 4, 4, 16, e);
#elif WEIGHT_TYPE == 6
  return field(block + 6, 4, 16, e) | field(block + 2, 1, 1, e) << 4;
#elif WEIGHT_TYPE == 7
  return field(block + 8, 4, 16, e) | field(block + 4, 1, 1, e) << 4;
#elif WEIGHT_TYPE == 8
  return block[2 + e];
#elif WEIGHT_TYPE == 10
  return field(block + 16, 2, 32, e);
#elif WEIGHT_TYPE == 11
  return field(block + 32, 2, 32, e) | field(block, 1, 32, e) << 2;
#elif WEIGHT_TYPE == 12
  return field(block + 16, 4, 32, e);
#elif WEIGHT_TYPE == 13
  return field(block + 48, 4, 32, e) | field(block + 16, 1, 32, e) << 4;
#else
  return field(block, 4, 64, e) | field(block + 128, 2, 32, e) << 4;
#endif
}

constexpr int BLOCK_WEIGHTS = WEIGHT_TYPE < 10 ? 32 : 256;
constexpr int FILE_BLOCK_BYTES = WEIGHT_TYPE == 2    ? 18
                                 : WEIGHT_TYPE == 3  ? 20
                                 : WEIGHT_TYPE == 6  ? 22
                                 : WEIGHT_TYPE == 7  ? 24
                                 : WEIGHT_TYPE == 8  ? 34
                                 : WEIGHT_TYPE == 10 ? 84
                                 : WEIGHT_TYPE == 11 ? 110
                                 : WEIGHT_TYPE == 12 ? 144
                                 : WEIGHT_TYPE == 13 ? 176
                                                     : 210;
constexpr u32 CODE_BITS = WEIGHT_TYPE == T_Q2_K ? 2 : WEIGHT_TYPE == T_Q3_K ? 3 : WEIGHT_TYPE == T_Q6_K ? 6
                          : WEIGHT_TYPE == T_Q8_0 ? 8 : F::HAS_ONE_BIT ? 5 : 4;
// Signed types are stored with the top bit flipped; Q8_0 is in two's complement already.
constexpr u32 FLIP = F::HAS_MINIMUM || WEIGHT_TYPE == T_Q8_0 ? 0 : 1u << (CODE_BITS - 1);

// Four 2-bit fields to a byte: weights i, 16 + i, 32 + i, 48 + i.
INLINE u8 two_bit_byte(const u8* codes, int i, int shift) {
  return (codes[i] >> shift & 3) | (codes[16 + i] >> shift & 3) << 2 | (codes[32 + i] >> shift & 3) << 4 |
         (codes[48 + i] >> shift & 3) << 6;
}

INLINE void store_codes(u8* row, int unit, const u8* codes) {
  u8* high = row + N_UNITS * F::LOW_BYTES;
  for (int i = 0; i < F::LOW_BYTES; i++) {
    u8* plane = row + (i / 16 * N_UNITS + unit) * 16 + i % 16;
    if (WEIGHT_TYPE == T_Q8_0) *plane = codes[i];
    else if (F::HAS_NIBBLES) *plane = (codes[i] & 15) | (codes[32 + i] & 15) << 4;
    else *plane = two_bit_byte(codes, i, 0);
  }
  if (F::HIGH_BYTES == 16)
    for (int i = 0; i < 16; i++) high[unit * 16 + i] = two_bit_byte(codes, i, 4);
  if (F::HAS_ONE_BIT)
    for (int i = 0; i < 8; i++) {
      u32 bits = 0;
      for (int b = 0; b < 8; b++) bits |= (codes[i / 4 * 32 + 4 * b + i % 4] >> (CODE_BITS - 1) & 1) << b;
      high[unit * 8 + i] = bits;
    }
}

// Six-bit scale g of a Q3_K block, less 32: low nibbles in 8 bytes, the upper two bits in the next 4.
INLINE u8 q3_scale(const u8* packed, int g) {
  return (u8)((field(packed, 4, 8, g) | field(packed + 8, 2, 4, g) << 4) - 32);
}

// Scales of a unit whose first block of the file is `block`; `has_second` is false where a row ends in half a unit.
INLINE void store_scales(u8* scales, int unit, const u8* block, bool has_second) {
  u8* blocks = scales + N_UNITS * F::SCALE_BYTES;
  const u8* second = block + FILE_BLOCK_BYTES;
#if WEIGHT_TYPE == 3 || WEIGHT_TYPE == 7
  for (int i = 0; i < 4; i++) scales[unit * 8 + i] = block[i], scales[unit * 8 + 4 + i] = has_second ? second[i] : 0;
#elif WEIGHT_TYPE < 10
  for (int i = 0; i < 2; i++) scales[unit * 4 + i] = block[i], scales[unit * 4 + 2 + i] = has_second ? second[i] : 0;
#elif WEIGHT_TYPE == 12 || WEIGHT_TYPE == 13
  for (int i = unit % 4 * 4; i < unit % 4 * 4 + 4; i++) blocks[unit / 4 * 16 + i] = block[i];
#else
  for (int i = 0; i < 4; i++) {
    int g = unit % 4 * 4 + i;
    scales[unit * 4 + i] = WEIGHT_TYPE == 10 ? block[g] : WEIGHT_TYPE == 11 ? q3_scale(block + 96, g) : block[192 + g];
  }
  const int offset = WEIGHT_TYPE == 10 ? 80 : WEIGHT_TYPE == 11 ? 108 : 208;
  if (unit % 4 == 0)
    for (int i = 0; i < F::BLOCK_BYTES; i++) blocks[unit / 4 * F::BLOCK_BYTES + i] = block[offset + i];
#endif
}

KERNEL repack(const u8* __restrict__ file, u8* __restrict__ planar, u64 n_rows) {
  u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= n_rows * N_UNITS) return;
  int unit = (int)(index % N_UNITS);
  const u8* file_row = file + index / N_UNITS * ((u64)COLS / BLOCK_WEIGHTS * FILE_BLOCK_BYTES);
  u8* row = planar + index / N_UNITS * F::row_bytes(COLS);
  const u8* block = file_row + unit * 64 / BLOCK_WEIGHTS * FILE_BLOCK_BYTES;
  u8 codes[64];
  for (int e = 0; e < 64; e++) {
    const u8* source = block + (BLOCK_WEIGHTS == 32 ? e / 32 * FILE_BLOCK_BYTES : 0);
    int element = BLOCK_WEIGHTS == 32 ? e % 32 : unit % 4 * 64 + e;
    codes[e] = unit * 64 + e < COLS ? file_code(source, element) ^ FLIP : 0;
  }
  store_codes(row, unit, codes);
  store_scales(row + N_UNITS * (F::LOW_BYTES + F::HIGH_BYTES), unit, block, unit * 64 + 32 < COLS);
}

// Rows of a float type, padded with zeros to whole 16 bytes; sizes in 2-byte words.
KERNEL copy_rows(const u16* __restrict__ file, u16* __restrict__ planar, int file_words, int planar_words, u64 n_rows) {
  u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= n_rows * planar_words) return;
  int word = (int)(index % planar_words);
  planar[index] = word < file_words ? file[index / planar_words * file_words + word] : 0;
}
