// Kernels that only measure: how fast memory can be read, and what an empty launch costs.
#include "common.cuh"

// Reads `n` 16-byte words, four at a time per thread; the sum keeps the loads alive.
KERNEL __launch_bounds__(512) read_all(const uint4* __restrict__ words, u32* __restrict__ sink, u64 n) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  u32 sum = 0;
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 a = load_once(words + i), b = load_once(words + i + stride);
    uint4 c = load_once(words + i + 2 * stride), d = load_once(words + i + 3 * stride);
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < n; i += stride) {
    uint4 a = load_once(words + i);
    sum += a.x ^ a.y ^ a.z ^ a.w;
  }
  if (sum == 0x12345678) *sink = sum;
}

KERNEL nothing() {
  let_next_start();
  wait_for_inputs();
}
