// What each weight type looks like in a GGUF file and in the packed layout. Constants only: this header is compiled for
// every instruction set level, so nothing in it may become code (all functions are consteval).
//
// Packed layout. Rows are taken 16 at a time (a row group), columns 32 at a time (a group). A vector of 64 bytes holds,
// for each of the 16 rows, 4 consecutive codes: one "step". A group is 8 steps, its bytes in the order they are read:
//   [sub-scales 2 x 16 bytes, K types only] [high-bit planes] [low-bit planes]
// A unit is what a block of the file covers (32 or 256 columns): [scales f16 x 16] [mins f16 x 16, if any] [groups].
// Low planes: with b bits a byte holds 8 / b consecutive steps, lowest bits first. High planes: likewise.
// Float types have no units: F32 and F16 are [column][16 rows], BF16 is [column pair][16 rows][2].
#pragma once
#include <cstdint>

namespace pw {

constexpr int kRowGroup = 16;
constexpr int kGroupCols = 32;
constexpr int kSteps = 8;
constexpr int kStepBytes = 64;

enum TypeId : int32_t {
  kTypeF32 = 0,
  kTypeF16 = 1,
  kTypeQ4_0 = 2,
  kTypeQ4_1 = 3,
  kTypeQ5_0 = 6,
  kTypeQ5_1 = 7,
  kTypeQ8_0 = 8,
  kTypeQ2_K = 10,
  kTypeQ3_K = 11,
  kTypeQ4_K = 12,
  kTypeQ5_K = 13,
  kTypeQ6_K = 14,
  kTypeBF16 = 30,
};

// What the two sub-scale bytes of a (row, group) mean.
enum class SubScales {
  none,           // the block's scale and min are the group's
  scale_and_min,  // unsigned scale, unsigned min, of all 32 columns
  two_signed,     // signed scale of columns 0-15, of columns 16-31
  two_nibbles,    // scale (low nibble) and min (high nibble) of columns 0-15, of columns 16-31
};

struct QuantLayout {
  int32_t type;
  int unit_cols;
  int file_bytes;    // of one block of the file
  int scale_offset;  // of the f16 scale in the file's block
  int min_offset;    // of the f16 min, -1 when the type has none
  SubScales sub_scales;
  int low_bits;
  int high_bits;
  int zero_code;  // the unsigned code that stands for 0

  consteval int code_bits() const { return low_bits + high_bits; }
  consteval bool has_min() const { return min_offset >= 0; }
  consteval int groups() const { return unit_cols / kGroupCols; }
  consteval int scales_per_group() const {
    return sub_scales == SubScales::two_signed || sub_scales == SubScales::two_nibbles ? 2 : 1;
  }
  consteval int header_bytes() const { return (has_min() ? 2 : 1) * 2 * kRowGroup; }
  consteval int sub_scale_bytes() const { return sub_scales == SubScales::none ? 0 : 2 * kRowGroup; }
  consteval int high_plane_offset() const { return sub_scale_bytes(); }
  consteval int low_plane_offset() const { return sub_scale_bytes() + kStepBytes * high_bits; }
  consteval int group_bytes() const { return low_plane_offset() + kStepBytes * low_bits; }
  consteval int unit_bytes() const { return header_bytes() + groups() * group_bytes(); }
};

//                              type       cols file d  min  sub-scales           low high zero
constexpr QuantLayout kQ4_0{kTypeQ4_0, 32, 18, 0, -1, SubScales::none, 4, 0, 8};
constexpr QuantLayout kQ4_1{kTypeQ4_1, 32, 20, 0, 2, SubScales::none, 4, 0, 0};
constexpr QuantLayout kQ5_0{kTypeQ5_0, 32, 22, 0, -1, SubScales::none, 4, 1, 16};
constexpr QuantLayout kQ5_1{kTypeQ5_1, 32, 24, 0, 2, SubScales::none, 4, 1, 0};
constexpr QuantLayout kQ8_0{kTypeQ8_0, 32, 34, 0, -1, SubScales::none, 8, 0, 128};
constexpr QuantLayout kQ2_K{kTypeQ2_K, 256, 84, 80, 82, SubScales::two_nibbles, 2, 0, 0};
constexpr QuantLayout kQ3_K{kTypeQ3_K, 256, 110, 108, -1, SubScales::two_signed, 2, 1, 4};
constexpr QuantLayout kQ4_K{kTypeQ4_K, 256, 144, 0, 2, SubScales::scale_and_min, 4, 0, 0};
constexpr QuantLayout kQ5_K{kTypeQ5_K, 256, 176, 0, 2, SubScales::scale_and_min, 4, 1, 0};
constexpr QuantLayout kQ6_K{kTypeQ6_K, 256, 210, 208, -1, SubScales::two_signed, 4, 2, 32};

// The same facts for code that only knows the type at run time (formats.cpp).
struct TypeInfo {
  int32_t type;
  int32_t unit_cols;
  int32_t file_unit_bytes;    // of one row's block
  int32_t packed_unit_bytes;  // of 16 rows' blocks
};

const TypeInfo* find_type(int32_t type);  // nullptr when there are no kernels for it
int64_t file_row_bytes(const TypeInfo& info, int32_t cols);
int64_t packed_group_bytes(const TypeInfo& info, int32_t cols);  // 16 rows

}  // namespace pw
