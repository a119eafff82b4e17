// The table of weight types that have kernels, and their sizes in the file and packed.
#include "formats.h"

#include "pw_cpu.h"

namespace pw {
namespace {

consteval TypeInfo quant_info(QuantLayout layout) {
  return {layout.type, layout.unit_cols, layout.file_bytes, layout.unit_bytes()};
}

constexpr TypeInfo kTypes[] = {
    {kTypeF32, 1, 4, 64},  {kTypeF16, 1, 2, 32},  {kTypeBF16, 1, 2, 32},  // BF16: packed in pairs of columns
    quant_info(kQ4_0), quant_info(kQ4_1), quant_info(kQ5_0), quant_info(kQ5_1), quant_info(kQ8_0),
    quant_info(kQ2_K), quant_info(kQ3_K), quant_info(kQ4_K), quant_info(kQ5_K), quant_info(kQ6_K),
};

}  // namespace

const TypeInfo* find_type(int32_t type) {
  for (const TypeInfo& info : kTypes) {
    if (info.type == type) return &info;
  }
  return nullptr;
}

int64_t file_row_bytes(const TypeInfo& info, int32_t cols) {
  return static_cast<int64_t>(cols) / info.unit_cols * info.file_unit_bytes;
}

int64_t packed_group_bytes(const TypeInfo& info, int32_t cols) {
  const int64_t padded = info.type == kTypeBF16 ? static_cast<int64_t>(cols) + cols % 2 : cols;
  return padded / info.unit_cols * info.packed_unit_bytes;
}

}  // namespace pw
