// Q2_K to Q6_K: blocks of 256 with f16 scales and small integer sub-scales for 16 or 32 columns.
#include "isa/matmul_kernels.h"
#include "isa/matmul_quant.h"

namespace pw::PW_ISA {

TypeKernel super_block_kernel(int32_t type) {
  switch (type) {
    case kTypeQ2_K: return quant_kernel<kQ2_K, 64>();
    case kTypeQ3_K: return quant_kernel<kQ3_K, 64>();
    case kTypeQ4_K: return quant_kernel<kQ4_K, 64>();
    case kTypeQ5_K: return quant_kernel<kQ5_K, 64>();
    case kTypeQ6_K: return quant_kernel<kQ6_K, 64>();
    default: return {};
  }
}

}  // namespace pw::PW_ISA
