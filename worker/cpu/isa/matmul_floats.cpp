// F32, F16 and BF16 weights.
#include "isa/matmul_float.h"
#include "isa/matmul_kernels.h"

namespace pw::PW_ISA {
namespace {

template <class Weights>
TypeKernel kernel() {
  return {matmul_float<Weights>, [](int32_t cols) { return static_cast<size_t>(float_group_bytes<Weights>(cols)); }};
}

}  // namespace

TypeKernel float_kernel(int32_t type) {
  switch (type) {
    case kTypeF32: return kernel<F32Weights>();
    case kTypeF16: return kernel<F16Weights>();
    case kTypeBF16: return kernel<Bf16Weights>();
    default: return {};
  }
}

}  // namespace pw::PW_ISA
