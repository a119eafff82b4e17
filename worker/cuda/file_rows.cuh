// One value of a matrix row in the order of the GGUF file, for looking up embeddings. Same operations in the same order
// as the reference dequantisers, so values are equal to the last bit. Type numbers and block layouts are GGML's.
#pragma once
#include "common.cuh"

INLINE float file_half(const u8* bytes) { return half_to_float((u16)(bytes[0] | bytes[1] << 8)); }

// scale times code, then plus or minus the offset: __fmul_rn keeps the compiler from fusing them
INLINE float plus_minimum(float scale, int code, float minimum) {
  return __fadd_rn(__fmul_rn(scale, (float)code), minimum);
}

INLINE int nibble(const u8* bytes, int index) {  // 16 low nibbles, then 16 high ones
  return index < 16 ? bytes[index] & 15 : bytes[index - 16] >> 4;
}

INLINE int fifth_bit(const u8* bits, int index) { return (bits[index / 8] >> index % 8 & 1) << 4; }

// scale and minimum `group` of the 12 bytes with eight 6-bit pairs
INLINE void six_bit_pair(const u8* packed, int group, int& scale, int& minimum) {
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
    minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4;
  }
}

INLINE float q2_k(const u8* block, int column) {
  const int half = column / 128, within = column % 128;
  const int code = block[16 + 32 * half + within % 32] >> 2 * (within / 32) & 3;
  const int packed = block[column / 16];
  const float scale = __fmul_rn(file_half(block + 80), (float)(packed & 15));
  const float minimum = __fmul_rn(file_half(block + 82), (float)(packed >> 4));
  return plus_minimum(scale, code, -minimum);
}

INLINE float q3_k(const u8* block, int column) {
  const int half = column / 128, within = column % 128, group = column / 16;
  const int low = block[32 + 32 * half + within % 32] >> 2 * (within / 32) & 3;
  const int high = block[column % 32] >> (column / 32) & 1;
  const int nibbles = group < 8 ? block[96 + group] & 15 : block[96 + group - 8] >> 4;
  const int pairs = block[104 + group % 4] >> 2 * (group / 4) & 3;
  const float scale = __fmul_rn(file_half(block + 108), (float)((nibbles | pairs << 4) - 32));
  return __fmul_rn(scale, (float)((low | high << 2) - 4));
}

INLINE float q4_k(const u8* block, int column) {
  const int group = column / 32;
  const int byte = block[16 + 32 * (group / 2) + column % 32];
  int scale, minimum;
  six_bit_pair(block + 4, group, scale, minimum);
  return plus_minimum(__fmul_rn(file_half(block), (float)scale), group % 2 ? byte >> 4 : byte & 15,
                      -__fmul_rn(file_half(block + 2), (float)minimum));
}

INLINE float q5_k(const u8* block, int column) {
  const int group = column / 32;
  const int byte = block[48 + 32 * (group / 2) + column % 32];
  const int high = (block[16 + column % 32] >> group & 1) << 4;
  int scale, minimum;
  six_bit_pair(block + 4, group, scale, minimum);
  return plus_minimum(__fmul_rn(file_half(block), (float)scale), (group % 2 ? byte >> 4 : byte & 15) | high,
                      -__fmul_rn(file_half(block + 2), (float)minimum));
}

INLINE float q6_k(const u8* block, int column) {
  const int half = column / 128, quarter = column % 128 / 32, within = column % 32;
  const int byte = block[64 * half + 32 * (quarter % 2) + within];
  const int high = (block[128 + 32 * half + within] >> 2 * quarter & 3) << 4;
  const int code = ((quarter / 2 ? byte >> 4 : byte & 15) | high) - 32;
  return __fmul_rn(__fmul_rn(file_half(block + 208), (float)(signed char)block[192 + column / 16]), (float)code);
}

template <int Type>
INLINE float file_value(const u8* row, int column) {
  if (Type == 0) return *(const float*)(row + 4 * (u64)column);
  if (Type == 1) return file_half(row + 2 * (u64)column);
  if (Type == 30) return __int_as_float((int)((row[2 * (u64)column] | row[2 * (u64)column + 1] << 8) << 16));
  const int in_32 = column % 32, in_256 = column % 256;
  const u64 block_32 = column / 32, block_256 = column / 256;
  switch (Type) {
    case 2: row += 18 * block_32; return __fmul_rn(file_half(row), (float)(nibble(row + 2, in_32) - 8));
    case 3: row += 20 * block_32; return plus_minimum(file_half(row), nibble(row + 4, in_32), file_half(row + 2));
    case 6:
      row += 22 * block_32;
      return __fmul_rn(file_half(row), (float)((nibble(row + 6, in_32) | fifth_bit(row + 2, in_32)) - 16));
    case 7:
      row += 24 * block_32;
      return plus_minimum(file_half(row), nibble(row + 8, in_32) | fifth_bit(row + 4, in_32), file_half(row + 2));
    case 8: row += 34 * block_32; return __fmul_rn(file_half(row), (float)(signed char)row[2 + in_32]);
    case 10: return q2_k(row + 84 * block_256, in_256);
    case 11: return q3_k(row + 110 * block_256, in_256);
    case 12: return q4_k(row + 144 * block_256, in_256);
    case 13: return q5_k(row + 176 * block_256, in_256);
    case 14: return q6_k(row + 210 * block_256, in_256);
    default: return 0.0f;
  }
}
