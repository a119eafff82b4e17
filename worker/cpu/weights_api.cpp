// The C ABI of weights: which types there are, their sizes, and packing (pw_cpu.h).
#include "formats.h"
#include "isa.h"
#include "matmul.h"
#include "pw_cpu.h"

namespace {

// Sizes that make sense for a type: whole blocks, no overflow further on.
const pw::TypeInfo* checked_type(int32_t type, int32_t rows, int32_t cols) {
  const pw::TypeInfo* info = pw::find_type(type);
  if (info == nullptr || rows < 0 || cols < 0 || cols % info->unit_cols != 0) return nullptr;
  return info;
}

}  // namespace

extern "C" {

int32_t pw_type_supported(int32_t type) { return pw::find_type(type) != nullptr; }

int64_t pw_file_bytes(int32_t type, int32_t rows, int32_t cols) {
  const pw::TypeInfo* info = checked_type(type, rows, cols);
  if (info == nullptr) return PW_E_UNSUPPORTED;
  return rows * pw::file_row_bytes(*info, cols);
}

int64_t pw_packed_bytes(int32_t type, int32_t rows, int32_t cols) {
  const pw::TypeInfo* info = checked_type(type, rows, cols);
  if (info == nullptr) return PW_E_UNSUPPORTED;
  const int64_t n_groups = (static_cast<int64_t>(rows) + pw::kRowGroup - 1) / pw::kRowGroup;
  return n_groups * pw::packed_group_bytes(*info, cols);
}

int32_t pw_pack(int32_t type, int32_t rows, int32_t cols, const uint8_t* file, uint8_t* packed, int32_t row_begin,
                int32_t row_end) {
  const pw::TypeInfo* info = checked_type(type, rows, cols);
  if (info == nullptr) return PW_E_UNSUPPORTED;
  const bool ends_well = row_end == rows || row_end % pw::kRowGroup == 0;
  if (row_begin < 0 || row_begin > row_end || row_end > rows || row_begin % pw::kRowGroup != 0 || !ends_well) {
    return PW_E_ARGUMENT;
  }
  if (pw::isa_level() == pw::IsaLevel::none) return PW_E_UNSUPPORTED;
  const pw::MatmulKernels& kernels = pw::matmul_kernels();
  const int64_t row_bytes = pw::file_row_bytes(*info, cols), group_bytes = pw::packed_group_bytes(*info, cols);
  for (int32_t row = row_begin; row < row_end; row += pw::kRowGroup) {
    const int32_t n_rows = row_end - row < pw::kRowGroup ? row_end - row : pw::kRowGroup;
    kernels.pack_row_group(type, file + row * row_bytes, n_rows, cols, packed + row / pw::kRowGroup * group_bytes);
  }
  return PW_OK;
}

}  // extern "C"
