// Chooses the table of element kernels that fits the instruction set level in use.
#include "element_kernels.h"

#include <cstring>

#include "pw_cpu.h"

namespace pw {

namespace avx2 {
extern const ElementKernels element_table;
}
namespace avx512 {
extern const ElementKernels element_table;
}

const ElementKernels& element_kernels() {
  return std::strcmp(pw_isa(), "avx2") == 0 ? avx2::element_table : avx512::element_table;
}

}  // namespace pw
