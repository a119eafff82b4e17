// One row of a matrix from file order to f32, for the embedding. Same operations in the same order as the reference
// dequantisers (scale times sub-scale, times code, minus min), so the values are equal to the last bit.
#include "isa/file_blocks.h"
#include "isa/rows.h"

namespace pw::PW_ISA {
namespace {

float half_to_float(const uint8_t* bytes) {
  uint16_t half;
  memcpy(&half, bytes, 2);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x0400) {
    bits = (magnitude << 13) + ((127 - 15) << 23);
  } else {  // subnormal: magnitude * 2^-24 is exact
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

struct HalfGroupScale {
  float scale;
  float min;  // to subtract
};

template <class Block>
HalfGroupScale half_group_scale(const uint8_t* block, const uint8_t* sub_scales, int group, int half) {
  constexpr QuantLayout kLayout = Block::layout;
  const float scale = half_to_float(block + kLayout.scale_offset);
  const float min = kLayout.has_min() ? half_to_float(block + (kLayout.has_min() ? kLayout.min_offset : 0)) : 0.0f;
  const uint8_t* pair = sub_scales + 2 * group;
  switch (kLayout.sub_scales) {
    case SubScales::scale_and_min:
      return {scale * static_cast<float>(pair[0]), min * static_cast<float>(pair[1])};
    case SubScales::two_signed:
      return {scale * static_cast<float>(static_cast<int8_t>(pair[half])), 0.0f};
    case SubScales::two_nibbles:
      return {scale * static_cast<float>(pair[half] & 15), min * static_cast<float>(pair[half] >> 4)};
    default:
      return {scale, -min};
  }
}

template <class Block>
void dequantize_block(const uint8_t* block, float* out) {
  constexpr QuantLayout kLayout = Block::layout;
  uint8_t sub_scales[16] = {};
  if constexpr (kLayout.sub_scales != SubScales::none) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sub_scales), Block::sub_scales(block));
  }
  for (int g = 0; g < kLayout.groups(); g++) {
    uint8_t codes[kGroupCols];
    const Codes packed = Block::codes(block, g);
    memcpy(codes, &packed, sizeof(codes));
    for (int half = 0; half < 2; half++) {
      const HalfGroupScale s = half_group_scale<Block>(block, sub_scales, g, half);
      for (int i = 16 * half; i < 16 * half + 16; i++) {
        const float product = s.scale * static_cast<float>(codes[i] - kLayout.zero_code);
        out[g * kGroupCols + i] = kLayout.has_min() ? product - s.min : product;
      }
    }
  }
}

template <int32_t Type>
void dequantize_quant(const uint8_t* row, int32_t cols, float* out) {
  using Block = FileBlock<Type>;
  constexpr QuantLayout kLayout = Block::layout;
  for (int32_t u = 0; u < cols / kLayout.unit_cols; u++) {
    dequantize_block<Block>(row + static_cast<int64_t>(u) * kLayout.file_bytes, out + u * kLayout.unit_cols);
  }
}

void dequantize_f16(const uint8_t* row, int32_t cols, float* out) {
  for (int32_t i = 0; i < cols; i++) out[i] = half_to_float(row + 2 * i);
}

void dequantize_bf16(const uint8_t* row, int32_t cols, float* out) {
  for (int32_t i = 0; i < cols; i++) {
    uint16_t high;
    memcpy(&high, row + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(high) << 16;
    memcpy(out + i, &bits, 4);
  }
}

}  // namespace

void dequantize_row(int32_t type, const uint8_t* row, int32_t cols, float* out) {
  switch (type) {
    case kTypeF32: memcpy(out, row, 4 * static_cast<size_t>(cols)); return;
    case kTypeF16: return dequantize_f16(row, cols, out);
    case kTypeBF16: return dequantize_bf16(row, cols, out);
    case kTypeQ4_0: return dequantize_quant<kTypeQ4_0>(row, cols, out);
    case kTypeQ4_1: return dequantize_quant<kTypeQ4_1>(row, cols, out);
    case kTypeQ5_0: return dequantize_quant<kTypeQ5_0>(row, cols, out);
    case kTypeQ5_1: return dequantize_quant<kTypeQ5_1>(row, cols, out);
    case kTypeQ8_0: return dequantize_quant<kTypeQ8_0>(row, cols, out);
    case kTypeQ2_K: return dequantize_quant<kTypeQ2_K>(row, cols, out);
    case kTypeQ3_K: return dequantize_quant<kTypeQ3_K>(row, cols, out);
    case kTypeQ4_K: return dequantize_quant<kTypeQ4_K>(row, cols, out);
    case kTypeQ5_K: return dequantize_quant<kTypeQ5_K>(row, cols, out);
    case kTypeQ6_K: return dequantize_quant<kTypeQ6_K>(row, cols, out);
    default: return;
  }
}

}  // namespace pw::PW_ISA
