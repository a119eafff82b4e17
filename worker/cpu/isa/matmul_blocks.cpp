// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 with an f16 scale, some with an f16 min.
#include "isa/matmul_kernels.h"
#include "isa/matmul_quant.h"

namespace pw::PW_ISA {

TypeKernel block_kernel(int32_t type) {
  switch (type) {
    case kTypeQ4_0: return quant_kernel<kQ4_0, kLanes == 16 ? kNoPanel : 32>();
    case kTypeQ4_1: return quant_kernel<kQ4_1, kLanes == 16 ? kNoPanel : 32>();
    case kTypeQ5_0: return quant_kernel<kQ5_0, 64>();
    case kTypeQ5_1: return quant_kernel<kQ5_1, 64>();
    case kTypeQ8_0: return quant_kernel<kQ8_0, kLanes == 16 ? kNoPanel : 32>();
    default: return {};
  }
}

}  // namespace pw::PW_ISA
