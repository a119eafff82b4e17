// How to read one block of a GGUF file: its codes as unsigned bytes in column order and its sub-scales. The packer and
// the row dequantiser are written once over these. Sources: the block layouts of the GGML format.
#pragma once
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace pw {

// `codes` writes the 32 unsigned codes of a group. `sub_scales` writes two bytes per group (8 groups), in the meaning of
// QuantLayout::sub_scales. Both are plain loops of fixed length, which the compiler turns into vector code.
template <int32_t Type>
struct FileBlock;

inline void split_nibbles(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = packed[i] & 15;
    codes[i + 16] = packed[i] >> 4;
  }
}

// bit i of `bits` becomes bit 4 of code i
inline void add_fifth_bit(const uint8_t* bits, uint8_t* codes) {
  static constexpr uint8_t kMask[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  for (int half = 0; half < 2; half++) {
    uint8_t spread[16];
    for (int i = 0; i < 16; i++) spread[i] = bits[2 * half + i / 8];
    for (int i = 0; i < 16; i++) codes[16 * half + i] |= (spread[i] & kMask[i]) != 0 ? 16 : 0;
  }
}

template <>
struct FileBlock<kTypeQ4_0> {
  static constexpr QuantLayout layout = kQ4_0;
  static void codes(const uint8_t* block, int, uint8_t* out) { split_nibbles(block + 2, out); }
};

template <>
struct FileBlock<kTypeQ4_1> {
  static constexpr QuantLayout layout = kQ4_1;
  static void codes(const uint8_t* block, int, uint8_t* out) { split_nibbles(block + 4, out); }
};

template <>
struct FileBlock<kTypeQ5_0> {
  static constexpr QuantLayout layout = kQ5_0;
  static void codes(const uint8_t* block, int, uint8_t* out) {
    split_nibbles(block + 6, out);
    add_fifth_bit(block + 2, out);
  }
};

template <>
struct FileBlock<kTypeQ5_1> {
  static constexpr QuantLayout layout = kQ5_1;
  static void codes(const uint8_t* block, int, uint8_t* out) {
    split_nibbles(block + 8, out);
    add_fifth_bit(block + 4, out);
  }
};

template <>
struct FileBlock<kTypeQ8_0> {
  static constexpr QuantLayout layout = kQ8_0;
  static void codes(const uint8_t* block, int, uint8_t* out) {
    for (int i = 0; i < 32; i++) out[i] = block[2 + i] ^ 0x80;
  }
};

template <>
struct FileBlock<kTypeQ2_K> {
  static constexpr QuantLayout layout = kQ2_K;
  static void codes(const uint8_t* block, int group, uint8_t* out) {
    const uint8_t* low = block + 16 + 32 * (group / 4);
    for (int i = 0; i < 32; i++) out[i] = low[i] >> (2 * (group % 4)) & 3;
  }
  static void sub_scales(const uint8_t* block, uint8_t* out) { memcpy(out, block, 16); }
};

template <>
struct FileBlock<kTypeQ3_K> {
  static constexpr QuantLayout layout = kQ3_K;
  static void codes(const uint8_t* block, int group, uint8_t* out) {
    const uint8_t *high = block, *low = block + 32 + 32 * (group / 4);
    for (int i = 0; i < 32; i++) {
      out[i] = static_cast<uint8_t>((low[i] >> (2 * (group % 4)) & 3) | (high[i] >> group & 1) << 2);
    }
  }
  static void sub_scales(const uint8_t* block, uint8_t* out) {
    const uint8_t* packed = block + 96;
    for (int i = 0; i < 16; i++) {
      const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
      const int high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
      out[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
  }
};

// 8 scales and 8 mins of 6 bits in 12 bytes, as Q4_K and Q5_K have them
inline void unpack_6_bit_scales(const uint8_t* packed, uint8_t* out) {
  for (int i = 0; i < 4; i++) {
    out[2 * i] = packed[i] & 63;
    out[2 * i + 1] = packed[i + 4] & 63;
    out[2 * i + 8] = static_cast<uint8_t>((packed[i + 8] & 15) | (packed[i] >> 6) << 4);
    out[2 * i + 9] = static_cast<uint8_t>((packed[i + 8] >> 4) | (packed[i + 4] >> 6) << 4);
  }
}

template <>
struct FileBlock<kTypeQ4_K> {
  static constexpr QuantLayout layout = kQ4_K;
  static void codes(const uint8_t* block, int group, uint8_t* out) {
    const uint8_t* low = block + 16 + 32 * (group / 2);
    for (int i = 0; i < 32; i++) out[i] = low[i] >> (4 * (group % 2)) & 15;
  }
  static void sub_scales(const uint8_t* block, uint8_t* out) { unpack_6_bit_scales(block + 4, out); }
};

template <>
struct FileBlock<kTypeQ5_K> {
  static constexpr QuantLayout layout = kQ5_K;
  static void codes(const uint8_t* block, int group, uint8_t* out) {
    const uint8_t *high = block + 16, *low = block + 48 + 32 * (group / 2);
    for (int i = 0; i < 32; i++) {
      out[i] = static_cast<uint8_t>((low[i] >> (4 * (group % 2)) & 15) | (high[i] >> group & 1) << 4);
    }
  }
  static void sub_scales(const uint8_t* block, uint8_t* out) { unpack_6_bit_scales(block + 4, out); }
};

template <>
struct FileBlock<kTypeQ6_K> {
  static constexpr QuantLayout layout = kQ6_K;
  static void codes(const uint8_t* block, int group, uint8_t* out) {
    const int quarter = group % 4;
    const uint8_t* low = block + 64 * (group / 4) + 32 * (quarter % 2);
    const uint8_t* high = block + 128 + 32 * (group / 4);
    for (int i = 0; i < 32; i++) {
      const int low_bits = low[i] >> (4 * (quarter / 2)) & 15;
      out[i] = static_cast<uint8_t>(low_bits | (high[i] >> (2 * quarter) & 3) << 4);
    }
  }
  static void sub_scales(const uint8_t* block, uint8_t* out) { memcpy(out, block + 192, 16); }
};

}  // namespace pw
