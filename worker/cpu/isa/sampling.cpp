// Passes over a row of logits: largest, position of it, sums of exponentials, candidates above a threshold.
#include "kernel_list.h"
#include "lanes.h"

namespace pw::PW_ISA {
namespace {

// Which of the 16 lanes from i on are in [low, high), as bits.
PW_INLINE uint32_t found_between(const float* x, int32_t i, int32_t n, float low, float high) {
  const Lanes v = load_first(x + i, n - i);
  const uint32_t found = mask_at_least(v, splat(low)) & mask_greater(splat(high), v);
  return n - i < kLanes ? found & ((1u << (n - i)) - 1) : found;
}

}  // namespace

float row_max(const float* x, int32_t n, bool* has_nan) {
  const Lanes lowest = splat(-__builtin_inff());
  Lanes largest[4] = {lowest, lowest, lowest, lowest};
  uint32_t nan = 0;
  int32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int32_t j = 0; j < 4; ++j) {
      const Lanes v = load(x + i + j * kLanes);
      nan |= mask_nan(v);
      largest[j] = max(v, largest[j]);
    }
  for (; i < n; i += kLanes) {
    const Lanes v = keep(load_first(x + i, n - i), 0, n - i, lowest);
    nan |= mask_nan(v);
    largest[0] = max(v, largest[0]);
  }
  *has_nan = nan != 0;
  return reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

int32_t first_equal(const float* x, int32_t n, float value) {
  const Lanes wanted = splat(value);
  for (int32_t i = 0; i < n; i += kLanes) {
    uint32_t found = mask_equal(load_first(x + i, n - i), wanted);
    if (n - i < kLanes) found &= (1u << (n - i)) - 1;
    if (found) return i + __builtin_ctz(found);
  }
  return n;
}

void exp_sums(const float* x, int32_t n, float largest, float inverse_temperature, float floor, double* chunk_sums) {
  for (int32_t begin = 0; begin < n; begin += kSumChunk) {
    const int32_t end = n - begin < kSumChunk ? n : begin + kSumChunk;
    Lanes sums[2] = {zero(), zero()};
    for (int32_t i = begin, j = 0; i < end; i += kLanes, j ^= 1) {
      const Lanes v = load_first(x + i, end - i);
      const Lanes e = exp((v - splat(largest)) * splat(inverse_temperature));
      sums[j] = sums[j] + keep(zero_where_less(e, v, splat(floor)), 0, end - i, zero());
    }
    chunk_sums[begin / kSumChunk] = static_cast<double>(reduce_add(sums[0] + sums[1]));
  }
}

void block_max(const float* x, int32_t n, float* maxima) {
  const Lanes lowest = splat(-__builtin_inff());
  for (int32_t begin = 0; begin < n; begin += kMaxBlock) {
    Lanes largest = lowest;
    for (int32_t i = begin; i < begin + kMaxBlock && i < n; i += kLanes)
      largest = max(keep(load_first(x + i, n - i), 0, n - i, lowest), largest);
    maxima[begin / kMaxBlock] = reduce_max(largest);
  }
}

int32_t count_between(const float* x, int32_t n, float low, float high) {
  int32_t count = 0;
  for (int32_t i = 0; i < n; i += kLanes) count += __builtin_popcount(found_between(x, i, n, low, high));
  return count;
}

int32_t collect_between(const float* x, int32_t n, float low, float high, int32_t* ids) {
  int32_t count = 0;
  for (int32_t i = 0; i < n; i += kLanes)
    for (uint32_t found = found_between(x, i, n, low, high); found; found &= found - 1)
      ids[count++] = i + __builtin_ctz(found);
  return count;
}

}  // namespace pw::PW_ISA
