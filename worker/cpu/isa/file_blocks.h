// How to read one block of a GGUF file: its codes as unsigned bytes in column order and its sub-scales. The packer and
// the row dequantiser are written once over these. Source: the block layouts of GGML.
#pragma once
#include <emmintrin.h>

#include <cstdint>
#include <cstring>

#include "formats.h"

namespace pw::PW_ISA {

// The 32 unsigned codes of a group, columns 0-15 and 16-31.
struct Codes {
  __m128i half[2];
};

inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// `n_bits` bits of each of 16 bytes, from bit `first` on
inline __m128i take_bits(__m128i bytes, int first, int n_bits) {
  const __m128i mask = _mm_set1_epi8(static_cast<char>((1 << n_bits) - 1));
  return _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(first)), mask);
}

inline Codes take_bits(const uint8_t* bytes, int first, int n_bits) {
  return {{take_bits(load_16(bytes), first, n_bits), take_bits(load_16(bytes + 16), first, n_bits)}};
}

inline Codes add_high_bits(Codes low, Codes high, int low_bits) {
  const __m128i shift = _mm_cvtsi32_si128(low_bits);
  for (int i = 0; i < 2; i++) low.half[i] = _mm_or_si128(low.half[i], _mm_sll_epi16(high.half[i], shift));
  return low;
}

// columns 0-15 in the low nibbles, 16-31 in the high ones
inline Codes split_nibbles(const uint8_t* packed) {
  return {{take_bits(load_16(packed), 0, 4), take_bits(load_16(packed), 4, 4)}};
}

// bit i of the 32 becomes bit 4 of code i
inline Codes add_fifth_bit(Codes codes, const uint8_t* bits) {
  int32_t word;
  memcpy(&word, bits, 4);
  __m128i bytes = _mm_cvtsi32_si128(word);
  bytes = _mm_unpacklo_epi8(bytes, bytes);
  bytes = _mm_unpacklo_epi16(bytes, bytes);  // each byte four times
  const __m128i spread[2] = {_mm_shuffle_epi32(bytes, 0x50), _mm_shuffle_epi32(bytes, 0xfa)};
  const __m128i own_bit = _mm_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  for (int i = 0; i < 2; i++) {
    const __m128i is_set = _mm_cmpeq_epi8(_mm_and_si128(spread[i], own_bit), own_bit);
    codes.half[i] = _mm_or_si128(codes.half[i], _mm_and_si128(is_set, _mm_set1_epi8(16)));
  }
  return codes;
}

// `codes` gives a group's codes, `sub_scales` two bytes for each of 8 groups in the meaning of QuantLayout::sub_scales.
template <int32_t Type>
struct FileBlock;

template <>
struct FileBlock<kTypeQ4_0> {
  static constexpr QuantLayout layout = kQ4_0;
  static Codes codes(const uint8_t* block, int) { return split_nibbles(block + 2); }
};

template <>
struct FileBlock<kTypeQ4_1> {
  static constexpr QuantLayout layout = kQ4_1;
  static Codes codes(const uint8_t* block, int) { return split_nibbles(block + 4); }
};

template <>
struct FileBlock<kTypeQ5_0> {
  static constexpr QuantLayout layout = kQ5_0;
  static Codes codes(const uint8_t* block, int) { return add_fifth_bit(split_nibbles(block + 6), block + 2); }
};

template <>
struct FileBlock<kTypeQ5_1> {
  static constexpr QuantLayout layout = kQ5_1;
  static Codes codes(const uint8_t* block, int) { return add_fifth_bit(split_nibbles(block + 8), block + 4); }
};

template <>
struct FileBlock<kTypeQ8_0> {
  static constexpr QuantLayout layout = kQ8_0;
  static Codes codes(const uint8_t* block, int) {
    const __m128i sign = _mm_set1_epi8(static_cast<char>(0x80));
    return {{_mm_xor_si128(load_16(block + 2), sign), _mm_xor_si128(load_16(block + 18), sign)}};
  }
};

template <>
struct FileBlock<kTypeQ2_K> {
  static constexpr QuantLayout layout = kQ2_K;
  static Codes codes(const uint8_t* block, int group) {
    return take_bits(block + 16 + 32 * (group / 4), 2 * (group % 4), 2);
  }
  static __m128i sub_scales(const uint8_t* block) { return load_16(block); }
};

template <>
struct FileBlock<kTypeQ3_K> {
  static constexpr QuantLayout layout = kQ3_K;
  static Codes codes(const uint8_t* block, int group) {
    const Codes low = take_bits(block + 32 + 32 * (group / 4), 2 * (group % 4), 2);
    return add_high_bits(low, take_bits(block, group, 1), 2);
  }
  // 16 scales of 6 bits: 8 bytes with two low nibbles each, 4 bytes with four pairs of high bits; stored plus 32
  static __m128i sub_scales(const uint8_t* block) {
    uint64_t nibbles;
    uint32_t pairs;
    memcpy(&nibbles, block + 96, 8);
    memcpy(&pairs, block + 104, 4);
    const __m128i low = _mm_set_epi64x(static_cast<int64_t>(nibbles >> 4 & 0x0f0f0f0f0f0f0f0f),
                                       static_cast<int64_t>(nibbles & 0x0f0f0f0f0f0f0f0f));
    const auto high_of = [&](int i) { return static_cast<int>((pairs >> 2 * i & 0x03030303) << 4); };
    const __m128i high = _mm_setr_epi32(high_of(0), high_of(1), high_of(2), high_of(3));
    return _mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32));
  }
};

// 8 scales and 8 mins of 6 bits in 12 bytes, as Q4_K and Q5_K have them, to scale and min of each group in turn
inline __m128i unpack_6_bit_scales(const uint8_t* packed) {
  uint32_t words[3];
  memcpy(words, packed, 12);
  const auto high_bits = [](uint32_t word) { return (word >> 6 & 0x03030303) << 4; };
  const int scales[2] = {static_cast<int>(words[0] & 0x3f3f3f3f),
                         static_cast<int>((words[2] & 0x0f0f0f0f) | high_bits(words[0]))};
  const int mins[2] = {static_cast<int>(words[1] & 0x3f3f3f3f),
                       static_cast<int>((words[2] >> 4 & 0x0f0f0f0f) | high_bits(words[1]))};
  const __m128i all_scales = _mm_setr_epi32(scales[0], scales[1], 0, 0);
  return _mm_unpacklo_epi8(all_scales, _mm_setr_epi32(mins[0], mins[1], 0, 0));
}

template <>
struct FileBlock<kTypeQ4_K> {
  static constexpr QuantLayout layout = kQ4_K;
  static Codes codes(const uint8_t* block, int group) {
    return take_bits(block + 16 + 32 * (group / 2), 4 * (group % 2), 4);
  }
  static __m128i sub_scales(const uint8_t* block) { return unpack_6_bit_scales(block + 4); }
};

template <>
struct FileBlock<kTypeQ5_K> {
  static constexpr QuantLayout layout = kQ5_K;
  static Codes codes(const uint8_t* block, int group) {
    const Codes low = take_bits(block + 48 + 32 * (group / 2), 4 * (group % 2), 4);
    return add_high_bits(low, take_bits(block + 16, group, 1), 4);
  }
  static __m128i sub_scales(const uint8_t* block) { return unpack_6_bit_scales(block + 4); }
};

template <>
struct FileBlock<kTypeQ6_K> {
  static constexpr QuantLayout layout = kQ6_K;
  static Codes codes(const uint8_t* block, int group) {
    const int quarter = group % 4;
    const Codes low = take_bits(block + 64 * (group / 4) + 32 * (quarter % 2), 4 * (quarter / 2), 4);
    return add_high_bits(low, take_bits(block + 128 + 32 * (group / 4), 2 * quarter, 2), 4);
  }
  static __m128i sub_scales(const uint8_t* block) { return load_16(block + 192); }
};

}  // namespace pw::PW_ISA
