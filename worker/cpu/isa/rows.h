// Rows of the file: packing 16 of them (layout in formats.h), turning one into f32.
#pragma once
#include <cstdint>

namespace pw::PW_ISA {

// n_rows (1 to 16) rows starting at `file`; missing rows become zeros
void pack_row_group(int32_t type, const uint8_t* file, int32_t n_rows, int32_t cols, uint8_t* packed);
void dequantize_row(int32_t type, const uint8_t* file_row, int32_t cols, float* out);

}  // namespace pw::PW_ISA
