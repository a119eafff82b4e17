// Activations of gated networks: 0 silu, 1 gelu in its tanh form. QUICK divides in the special function unit (2 ulp), for
// kernels whose results are rounded to 8 bits at once.
#pragma once
#include "common.cuh"

template <bool QUICK = false>
INLINE float activate(float x, int activation) {
  if (activation == 0) return QUICK ? __fdividef(x, 1.f + __expf(-x)) : x / (1.f + __expf(-x));
  return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
