// Exact integer dot product of unsigned weight codes with signed activation codes, four columns at a time per row.
// Both levels give the same integer, so results do not depend on the level.
#pragma once
#include "isa/simd.h"

namespace pw::PW_ISA {

// true: `multiply` takes off the zero code (128) by itself, so the sum starts from 0
template <int CodeBits>
constexpr bool kDotIsSigned = kLanes == 8 && CodeBits == 8;

#if PW_ISA_avx512

// VNNI: u8 x i8, four products per 32-bit lane, no intermediate saturation.
template <int CodeBits, int Steps>
struct Dot {
  Ints sum;

  void start(Ints from) { sum = from; }
  void multiply(Ints codes, Ints activations, int) { sum = _mm512_dpbusd_epi32(sum, codes, activations); }
};

#elif PW_ISA_avx2

// maddubs adds two products in 16 bits with saturation: at most 2 * (2^bits - 1) * 127 in size. So many may be added in
// 16 bits before they must be widened: 8 for 4 bits (30480), 4 for 5 bits (31496), 2 for 6 bits (32004).
template <int CodeBits, int Steps>
struct Dot {
  static constexpr int kMostNarrowSteps = CodeBits <= 4 ? 8 : CodeBits == 5 ? 4 : 2;
  static constexpr int kNarrowSteps = kMostNarrowSteps < Steps ? kMostNarrowSteps : Steps;
  Ints sum, narrow;

  void start(Ints from) { sum = from; }
  // `step` counts from 0 to Steps - 1
  void multiply(Ints codes, Ints activations, int step) {
    const Ints products = _mm256_maddubs_epi16(codes, activations);
    narrow = step % kNarrowSteps == 0 ? products : _mm256_add_epi16(narrow, products);
    if (step % kNarrowSteps == kNarrowSteps - 1) widen();
  }
  void widen() { sum = _mm256_add_epi32(sum, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1))); }
};

// 8-bit codes would saturate at once. They stand for signed values (code - 128), and |value| times the activation with
// value's sign is at most 2 * 128 * 127 = 32512. So the start value must be 0, not -128 * sum(activations).
template <int Steps>
struct Dot<8, Steps> {
  Ints sum;

  void start(Ints from) { sum = from; }
  void multiply(Ints codes, Ints activations, int) {
    const Ints values = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
    const Ints products =
        _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_sign_epi8(activations, values));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
};

#endif

}  // namespace pw::PW_ISA
