// Kernels that only load or only multiply, to measure what a level of the instruction set can do at most.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pw {

struct MeasureKernels {
  // a sum over the bytes as 64-bit words, in one forward stream; `bytes` a multiple of 64
  uint64_t (*read_sum)(const uint8_t* memory, size_t bytes);
  // int8 multiply-adds in registers; returns how many
  int64_t (*int8_rounds)(int64_t rounds);
};

const MeasureKernels& measure_kernels();  // of the level pw_isa() names

}  // namespace pw
