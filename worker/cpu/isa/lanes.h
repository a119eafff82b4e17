// Sixteen f32 lanes: one zmm register or two ymm registers. Element kernels are written once against this page.
//
// Every operation gives the same bits for a lane whatever the other lanes hold. No standard library here: an inline
// template compiled with wide instructions could be linked into code that runs on any CPU.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define PW_INLINE static inline __attribute__((always_inline))
#define PW_LAMBDA __attribute__((always_inline))
#define PW_INLINE_MEMBER inline __attribute__((always_inline))

namespace pw::PW_ISA {

constexpr int32_t kLanes = 16;

#ifdef PW_ISA_avx512

struct Lanes {
  __m512 v;
};

PW_INLINE Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
PW_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
PW_INLINE void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
PW_INLINE __mmask16 first(int32_t n) { return n >= kLanes ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }
// the first n of 16 (all where n is 16 or more); the others read as 0 and are not written
PW_INLINE Lanes load_first(const float* p, int32_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
PW_INLINE void store_first(float* p, Lanes a, int32_t n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
PW_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
PW_INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
PW_INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
PW_INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
PW_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PW_INLINE Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
PW_INLINE Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
PW_INLINE Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.v)}; }
PW_INLINE Lanes round_even(Lanes a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
PW_INLINE Lanes times_two_to(Lanes a, Lanes whole) { return {_mm512_scalef_ps(a.v, whole.v)}; }
PW_INLINE Lanes zero_where_less(Lanes x, Lanes a, Lanes b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), x.v)};
}
// lanes in [begin, end) of x, `other` elsewhere
PW_INLINE Lanes keep(Lanes x, int32_t begin, int32_t end, Lanes other) {
  const uint32_t upto = end >= kLanes ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
  const uint32_t from = begin <= 0 ? 0u : begin >= kLanes ? 0xffffu : (1u << begin) - 1;
  return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(upto & ~from), x.v)};
}
PW_INLINE Lanes load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PW_INLINE void store_f16(uint16_t* p, Lanes a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PW_INLINE Lanes load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
PW_INLINE void store_i8(int8_t* p, Lanes a) {  // rounds to nearest even, saturates
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
PW_INLINE Lanes swap_pairs(Lanes a) { return {_mm512_permute_ps(a.v, 0xB1)}; }
PW_INLINE __m256 low_half(Lanes a) { return _mm512_castps512_ps256(a.v); }
PW_INLINE __m256 high_half(Lanes a) { return _mm512_extractf32x8_ps(a.v, 1); }
PW_INLINE uint32_t mask_equal(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
PW_INLINE uint32_t mask_at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
PW_INLINE uint32_t mask_greater(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
PW_INLINE uint32_t mask_nan(Lanes a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }

#else

struct Lanes {
  __m256 lo, hi;
};

PW_INLINE Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PW_INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PW_INLINE void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
PW_INLINE __m256i first8(int32_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PW_INLINE Lanes load_first(const float* p, int32_t n) {
  if (n >= kLanes) return load(p);
  return {_mm256_maskload_ps(p, first8(n)), n > 8 ? _mm256_maskload_ps(p + 8, first8(n - 8)) : _mm256_setzero_ps()};
}
PW_INLINE void store_first(float* p, Lanes a, int32_t n) {
  if (n >= kLanes) return store(p, a);
  _mm256_maskstore_ps(p, first8(n), a.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, first8(n - 8), a.hi);
}
PW_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PW_INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PW_INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PW_INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PW_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PW_INLINE Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PW_INLINE Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PW_INLINE Lanes absolute(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
PW_INLINE Lanes round_even(Lanes a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
PW_INLINE __m256 two_to8(__m256 whole) {  // whole in [-126, 127]
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
PW_INLINE Lanes times_two_to(Lanes a, Lanes whole) {
  return {_mm256_mul_ps(a.lo, two_to8(whole.lo)), _mm256_mul_ps(a.hi, two_to8(whole.hi))};
}
PW_INLINE Lanes zero_where_less(Lanes x, Lanes a, Lanes b) {
  return {_mm256_and_ps(x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ)),
          _mm256_and_ps(x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ))};
}
PW_INLINE __m256 keep8(__m256 x, int32_t begin, int32_t end, __m256 other) {
  const __m256i mask = _mm256_andnot_si256(first8(begin), first8(end));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask));
}
PW_INLINE Lanes keep(Lanes x, int32_t begin, int32_t end, Lanes other) {
  return {keep8(x.lo, begin, end, other.lo), keep8(x.hi, begin - 8, end - 8, other.hi)};
}
PW_INLINE Lanes load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PW_INLINE void store_f16(uint16_t* p, Lanes a) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
PW_INLINE Lanes load_i8(const int8_t* p) {
  const __m128i codes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}
PW_INLINE void store_i8(int8_t* p, Lanes a) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
PW_INLINE Lanes swap_pairs(Lanes a) { return {_mm256_permute_ps(a.lo, 0xB1), _mm256_permute_ps(a.hi, 0xB1)}; }
PW_INLINE __m256 low_half(Lanes a) { return a.lo; }
PW_INLINE __m256 high_half(Lanes a) { return a.hi; }
PW_INLINE uint32_t mask16(__m256 lo, __m256 hi) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
PW_INLINE uint32_t mask_equal(Lanes a, Lanes b) {
  return mask16(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
PW_INLINE uint32_t mask_at_least(Lanes a, Lanes b) {
  return mask16(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
PW_INLINE uint32_t mask_greater(Lanes a, Lanes b) {
  return mask16(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
PW_INLINE uint32_t mask_nan(Lanes a) {
  return mask16(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}

#endif

PW_INLINE Lanes zero() { return splat(0.0f); }

// The order of a horizontal sum is part of the numbers: halves, then quarters, then pairs, on both levels.
PW_INLINE float reduce_add(Lanes a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

PW_INLINE float reduce_max(Lanes a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// e^x within 2 units in the last place; exactly 1 at 0, exactly 0 below -87.3, NaN stays NaN, 2^127 and more saturates.
PW_INLINE Lanes exp(Lanes x) {
  const Lanes lowest = splat(-87.3f);
  const Lanes bounded = max(lowest, min(splat(88.0f), x));
  const Lanes whole = round_even(bounded * splat(1.44269504f));
  const Lanes rest = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), bounded));
  Lanes series = splat(1.9875691500e-4f);
  series = fma(series, rest, splat(1.3981999507e-3f));
  series = fma(series, rest, splat(8.3334519073e-3f));
  series = fma(series, rest, splat(4.1665795894e-2f));
  series = fma(series, rest, splat(1.6666665459e-1f));
  series = fma(series, rest, splat(5.0000001201e-1f));
  const Lanes value = fma(series, rest * rest, rest) + splat(1.0f);
  return zero_where_less(times_two_to(value, whole), x, lowest);
}

// 2^x for x of at most 0, within 2 units in the last place; exactly 1 at 0, exactly 0 below -126, NaN stays NaN. The
// series is Taylor's: its terms from the seventh on are below a rounding for |rest| of at most a half.
PW_INLINE Lanes exp2_negative(Lanes x) {
  const Lanes lowest = splat(-126.0f);
  const Lanes bounded = max(lowest, x);
  const Lanes whole = round_even(bounded);
  const Lanes rest = bounded - whole;
  Lanes series = splat(1.540353039e-4f);
  series = fma(series, rest, splat(1.333355815e-3f));
  series = fma(series, rest, splat(9.618129108e-3f));
  series = fma(series, rest, splat(5.550410866e-2f));
  series = fma(series, rest, splat(2.402265070e-1f));
  series = fma(series, rest, splat(6.931471806e-1f));
  return zero_where_less(times_two_to(fma(series, rest, splat(1.0f)), whole), x, lowest);
}

// tanh x through e^(-2|x|), so that large inputs do not overflow; the sign is put back at the end
PW_INLINE Lanes tanh(Lanes x) {
  const Lanes size = absolute(x);
  const Lanes e = exp(splat(-2.0f) * size);
  const Lanes t = (splat(1.0f) - e) / (splat(1.0f) + e);
  const Lanes sign = max(splat(-1.0f), min(splat(1.0f), x * splat(1e30f)));
  return t * sign;
}

}  // namespace pw::PW_ISA
