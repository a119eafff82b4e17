// The table of this level's kernels (matmul.h): constant data, so nothing wide runs before it is chosen.
#include "isa/matmul_kernels.h"

#include "formats.h"
#include "isa/activations.h"
#include "isa/rows.h"

namespace pw::PW_ISA {
namespace {

TypeKernel find_kernel(int32_t type) {
  TypeKernel kernel = block_kernel(type);
  if (kernel.matmul == nullptr) kernel = super_block_kernel(type);
  if (kernel.matmul == nullptr) kernel = float_kernel(type);
  return kernel;
}

size_t scratch_bytes(int32_t type, int32_t cols) { return find_kernel(type).scratch_bytes(cols); }

void matmul(const Matmul* m, int32_t group_begin, int32_t group_end, void* scratch) {
  find_kernel(m->weight->type).matmul(*m, group_begin, group_end, static_cast<uint8_t*>(scratch));
}

}  // namespace

extern const MatmulKernels kMatmulKernels;
const MatmulKernels kMatmulKernels = {activations_bytes, activations_init, activations_prepare,
                                      scratch_bytes,     matmul,           dequantize_row,
                                      pack_row_group};

}  // namespace pw::PW_ISA
