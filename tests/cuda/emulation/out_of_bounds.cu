// Writes a word of an array and of both kinds of shared memory where it is told to. Only for the test of the memory check.
#include "common.cuh"

template <int N>
INLINE void write_fixed(u32* array, int at) {
  __shared__ u32 fixed[N];
  fixed[at] = 3;
  array[0] += fixed[0] + fixed[at];  // what nobody reads would not be written
}

KERNEL write_words(u32* array, int at, int shared_at, int fixed_at) {
  DYNAMIC_SHARED(memory);
  if (threadIdx.x == 0) {
    ((u32*)memory)[shared_at] = 1;
    array[at] = 2;
    write_fixed<7>(array, fixed_at);
  }
}
