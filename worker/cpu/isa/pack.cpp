// From the file's row-major blocks to the packed layout (formats.h), 16 rows at a time. One generic packer over
// FileBlock: codes to bytes, a transpose of 4-byte steps, then bits into planes.
#include "isa/file_blocks.h"
#include "isa/rows.h"

namespace pw::PW_ISA {
namespace {

constexpr uint8_t kZeroBlock[256] = {};  // stands for the rows that pad the last group

// Where each of the 16 rows is in the file.
struct RowPointers {
  const uint8_t* row[kRowGroup];
  int32_t n_rows;

  RowPointers(const uint8_t* file, int64_t row_bytes, int32_t n) : n_rows(n) {
    for (int32_t r = 0; r < kRowGroup; r++) row[r] = r < n ? file + r * row_bytes : kZeroBlock;
  }
  void advance(int64_t bytes) {
    for (int32_t r = 0; r < n_rows; r++) row[r] += bytes;
  }
};

// steps[s] = the 4 codes of step s of each row, rows in fours
void transpose_steps(const Codes (&codes)[kRowGroup], __m128i (&steps)[kSteps][4]) {
  for (int quad = 0; quad < 4; quad++) {
    for (int half = 0; half < 2; half++) {
      const Codes* rows = codes + 4 * quad;
      const __m128i low01 = _mm_unpacklo_epi32(rows[0].half[half], rows[1].half[half]);
      const __m128i low23 = _mm_unpacklo_epi32(rows[2].half[half], rows[3].half[half]);
      const __m128i high01 = _mm_unpackhi_epi32(rows[0].half[half], rows[1].half[half]);
      const __m128i high23 = _mm_unpackhi_epi32(rows[2].half[half], rows[3].half[half]);
      steps[4 * half + 0][quad] = _mm_unpacklo_epi64(low01, low23);
      steps[4 * half + 1][quad] = _mm_unpackhi_epi64(low01, low23);
      steps[4 * half + 2][quad] = _mm_unpacklo_epi64(high01, high23);
      steps[4 * half + 3][quad] = _mm_unpackhi_epi64(high01, high23);
    }
  }
}

// Bits [first_bit, first_bit + Bits) of the codes into planes: a byte of a plane holds 8 / Bits consecutive steps.
template <int Bits>
void write_planes(const __m128i (&steps)[kSteps][4], int first_bit, uint8_t* out) {
  constexpr int kPerByte = 8 / Bits;
  const __m128i mask = _mm_set1_epi8(static_cast<char>((1 << Bits) - 1));
  for (int plane = 0; plane < Bits; plane++) {
    for (int quad = 0; quad < 4; quad++) {
      __m128i byte = _mm_setzero_si128();
      for (int i = 0; i < kPerByte; i++) {
        const __m128i code = _mm_and_si128(_mm_srli_epi16(steps[plane * kPerByte + i][quad], first_bit), mask);
        byte = _mm_or_si128(byte, _mm_slli_epi16(code, i * Bits));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + plane * kStepBytes + quad * 16), byte);
    }
  }
}

void gather_halves(const RowPointers& blocks, int offset, uint8_t* out) {
  for (int r = 0; r < kRowGroup; r++) memcpy(out + 2 * r, blocks.row[r] + offset, 2);
}

// Four perfect shuffles of 16 x 16 bytes transpose them.
void transpose_bytes(__m128i (&rows)[kRowGroup]) {
  for (int round = 0; round < 4; round++) {
    __m128i shuffled[kRowGroup];
    for (int i = 0; i < 8; i++) {
      shuffled[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
      shuffled[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
    }
    memcpy(rows, shuffled, sizeof(shuffled));
  }
}

template <class Block>
void pack_sub_scales(const RowPointers& blocks, uint8_t* group) {
  constexpr QuantLayout kLayout = Block::layout;
  __m128i scales[kRowGroup];
  for (int r = 0; r < kRowGroup; r++) scales[r] = Block::sub_scales(blocks.row[r]);
  transpose_bytes(scales);
  for (int g = 0; g < kLayout.groups(); g++, group += kLayout.group_bytes()) {
    memcpy(group, scales + 2 * g, 2 * kRowGroup);
  }
}

template <class Block>
void pack_unit(const RowPointers& blocks, uint8_t* out) {
  constexpr QuantLayout kLayout = Block::layout;
  gather_halves(blocks, kLayout.scale_offset, out);
  if constexpr (kLayout.has_min()) gather_halves(blocks, kLayout.min_offset, out + 2 * kRowGroup);
  uint8_t* group = out + kLayout.header_bytes();
  if constexpr (kLayout.sub_scales != SubScales::none) pack_sub_scales<Block>(blocks, group);
  for (int g = 0; g < kLayout.groups(); g++, group += kLayout.group_bytes()) {
    Codes codes[kRowGroup];
    for (int r = 0; r < kRowGroup; r++) codes[r] = Block::codes(blocks.row[r], g);
    __m128i steps[kSteps][4];
    transpose_steps(codes, steps);
    if constexpr (kLayout.high_bits > 0) {
      write_planes<kLayout.high_bits>(steps, kLayout.low_bits, group + kLayout.high_plane_offset());
    }
    write_planes<kLayout.low_bits>(steps, 0, group + kLayout.low_plane_offset());
  }
}

template <int32_t Type>
void pack_quant(const uint8_t* file, int32_t n_rows, int32_t cols, uint8_t* out) {
  using Block = FileBlock<Type>;
  constexpr QuantLayout kLayout = Block::layout;
  const int n_units = cols / kLayout.unit_cols;
  RowPointers blocks(file, static_cast<int64_t>(n_units) * kLayout.file_bytes, n_rows);
  for (int u = 0; u < n_units; u++, out += kLayout.unit_bytes(), blocks.advance(kLayout.file_bytes)) {
    pack_unit<Block>(blocks, out);
  }
}

// [column][16 rows] elements of `Bytes` bytes: float types, BF16 as pairs of columns
template <int Bytes>
void pack_elements(const uint8_t* file, int64_t row_bytes, int32_t n_rows, int32_t n_elements, uint8_t* out) {
  const RowPointers rows(file, row_bytes, n_rows);
  for (int32_t i = 0; i < n_elements; i++, out += kRowGroup * Bytes) {
    for (int32_t r = 0; r < n_rows; r++) memcpy(out + r * Bytes, rows.row[r] + static_cast<int64_t>(i) * Bytes, Bytes);
    memset(out + n_rows * Bytes, 0, static_cast<size_t>(kRowGroup - n_rows) * Bytes);
  }
}

void pack_bf16(const uint8_t* file, int32_t n_rows, int32_t cols, uint8_t* out) {
  const int64_t row_bytes = 2 * static_cast<int64_t>(cols);
  pack_elements<4>(file, row_bytes, n_rows, cols / 2, out);
  if (cols % 2 == 0) return;
  out += static_cast<int64_t>(cols / 2) * 4 * kRowGroup;
  const RowPointers last(file + row_bytes - 2, row_bytes, n_rows);
  for (int r = 0; r < kRowGroup; r++) {
    memcpy(out + 4 * r, last.row[r], 2);
    memset(out + 4 * r + 2, 0, 2);
  }
}

}  // namespace

void pack_row_group(int32_t type, const uint8_t* file, int32_t n_rows, int32_t cols, uint8_t* packed) {
  switch (type) {
    case kTypeF32: return pack_elements<4>(file, 4 * static_cast<int64_t>(cols), n_rows, cols, packed);
    case kTypeF16: return pack_elements<2>(file, 2 * static_cast<int64_t>(cols), n_rows, cols, packed);
    case kTypeBF16: return pack_bf16(file, n_rows, cols, packed);
    case kTypeQ4_0: return pack_quant<kTypeQ4_0>(file, n_rows, cols, packed);
    case kTypeQ4_1: return pack_quant<kTypeQ4_1>(file, n_rows, cols, packed);
    case kTypeQ5_0: return pack_quant<kTypeQ5_0>(file, n_rows, cols, packed);
    case kTypeQ5_1: return pack_quant<kTypeQ5_1>(file, n_rows, cols, packed);
    case kTypeQ8_0: return pack_quant<kTypeQ8_0>(file, n_rows, cols, packed);
    case kTypeQ2_K: return pack_quant<kTypeQ2_K>(file, n_rows, cols, packed);
    case kTypeQ3_K: return pack_quant<kTypeQ3_K>(file, n_rows, cols, packed);
    case kTypeQ4_K: return pack_quant<kTypeQ4_K>(file, n_rows, cols, packed);
    case kTypeQ5_K: return pack_quant<kTypeQ5_K>(file, n_rows, cols, packed);
    case kTypeQ6_K: return pack_quant<kTypeQ6_K>(file, n_rows, cols, packed);
    default: return;
  }
}

}  // namespace pw::PW_ISA
