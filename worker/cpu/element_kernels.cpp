// Chooses the table of element kernels that fits the instruction set level in use.
#include "element_kernels.h"

#include "isa.h"

namespace pw {

namespace avx2 {
extern const ElementKernels element_table;
}
namespace avx512 {
extern const ElementKernels element_table;
}

const ElementKernels& element_kernels() {
  return isa_level() == IsaLevel::avx512 ? avx512::element_table : avx2::element_table;
}

}  // namespace pw
