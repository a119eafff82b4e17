// Which instruction set level the library runs on. Every table of kernels is chosen by this one answer.
#pragma once

namespace pw {

enum class IsaLevel { none, avx2, avx512 };

// The best level of this CPU and system, unless pw_set_isa chose another. `none`: the library cannot run here.
IsaLevel isa_level();

}  // namespace pw
