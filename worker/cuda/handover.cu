// How long a kernel waits for an answer of the CPU: both words lie in pinned memory of the host.
#include "common.cuh"

KERNEL handover(volatile u32* question, volatile u32* answer, u32 rounds) {
  for (u32 round = 1; round <= rounds; round++) {
    *question = round;
    __threadfence_system();
    while (*answer != round) {
    }
  }
}
