// The kernels of one level by weight type. The types are spread over several source files to keep compile times short.
#pragma once
#include "matmul.h"

namespace pw::PW_ISA {

struct TypeKernel {
  void (*matmul)(const Matmul& m, int32_t group_begin, int32_t group_end, uint8_t* scratch);
  size_t (*scratch_bytes)(int32_t cols);
};

// Each returns the kernel of a type it holds, or one of null pointers.
TypeKernel block_kernel(int32_t type);        // Q4_0 to Q8_0
TypeKernel super_block_kernel(int32_t type);  // Q2_K to Q6_K
TypeKernel float_kernel(int32_t type);

}  // namespace pw::PW_ISA
