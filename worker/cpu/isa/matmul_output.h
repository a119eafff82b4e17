// What happens to a finished product: scale, bias, accumulation, and only rows that exist are written.
#pragma once
#include "isa/simd.h"
#include "matmul.h"

namespace pw::PW_ISA {

// `values` are rows [row, row + kLanes) of one token.
inline void store_product(const Matmul& m, int32_t token, int32_t row, Floats values) {
  const int n_rows = m.weight->rows - row;
  if (n_rows <= 0) return;
  const int n = n_rows < kLanes ? n_rows : kLanes;
  const int64_t output_row = m.output_rows != nullptr ? m.output_rows[token] : token;
  float* out = m.output + output_row * m.output_stride + row;
  Floats result = mul(values, set_float(m.scale));
  if (m.bias != nullptr) result = add(result, load_first(m.bias + row, n));
  if (m.accumulate) result = add(result, load_first(out, n));
  if (n == kLanes) return store_floats(out, result);
  store_first(out, n, result);
}

}  // namespace pw::PW_ISA
