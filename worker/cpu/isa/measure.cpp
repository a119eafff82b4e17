// The loops behind pw_read_bandwidth and pw_int8_peak.
#include "measure_kernels.h"

#include <immintrin.h>

namespace pw::PW_ISA {
namespace {

constexpr int32_t kChains = 12;  // independent sums: enough to fill the pipeline

uint64_t sum_lanes(__m256i a) {
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

#ifdef PW_ISA_avx512

uint64_t read_sum(const uint8_t* memory, size_t bytes) {
  __m512i sum = _mm512_setzero_si512();
  for (size_t i = 0; i < bytes; i += 64) sum = _mm512_add_epi64(sum, _mm512_loadu_si512(memory + i));
  return sum_lanes(_mm256_add_epi64(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1)));
}

int64_t int8_rounds(int64_t rounds) {
  __m512i sums[kChains];
#pragma GCC unroll 12
  for (int32_t i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);  // differ, or they would become one
  const __m512i a = _mm512_set1_epi8(3);
  __m512i b = _mm512_set1_epi8(5);
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+v"(b));  // keeps the compiler from folding the rounds; the sums stay in registers
#pragma GCC unroll 12
    for (int32_t i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
#pragma GCC unroll 12
  for (int32_t i = 1; i < kChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  asm volatile("" : : "v"(sums[0]));
  return rounds * kChains * 64;
}

#else

uint64_t read_sum(const uint8_t* memory, size_t bytes) {
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (size_t i = 0; i < bytes; i += 64)
    for (int32_t half = 0; half < 2; ++half)
      sums[half] =
          _mm256_add_epi64(sums[half], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(memory + i + 32 * half)));
  return sum_lanes(_mm256_add_epi64(sums[0], sums[1]));
}

int64_t int8_rounds(int64_t rounds) {
  __m256i sums[kChains];
#pragma GCC unroll 12
  for (int32_t i = 0; i < kChains; ++i) sums[i] = _mm256_set1_epi32(i);
  const __m256i a = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  __m256i b = _mm256_set1_epi8(5);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int32_t i = 0; i < kChains; ++i) {
      asm volatile("" : "+x"(b));  // a new value each time, as far as the compiler knows
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
#pragma GCC unroll 12
  for (int32_t i = 1; i < kChains; ++i) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
  asm volatile("" : : "x"(sums[0]));
  return rounds * kChains * 32;
}

#endif

}  // namespace

extern const MeasureKernels measure_table;
const MeasureKernels measure_table = {read_sum, int8_rounds};

}  // namespace pw::PW_ISA
