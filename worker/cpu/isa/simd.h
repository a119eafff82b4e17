// The few vector operations that the matrix kernels are written in, one set per instruction set level under the same
// names. `Floats` and `Ints` hold kLanes rows: all 16 of a row group on AVX-512, half of them on AVX2.
// Everything lives in the level's namespace, so that no inline function is shared between levels.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace pw::PW_ISA {

template <class T>
inline T load_as(const void* p) {
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}

#if PW_ISA_avx512

using Floats = __m512;
using Ints = __m512i;
constexpr int kLanes = 16;

inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Floats load_floats(const void* p) { return _mm512_loadu_ps(p); }
inline void store_floats(void* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats broadcast_float(const void* p) { return _mm512_set1_ps(load_as<float>(p)); }
inline Floats set_float(float x) { return _mm512_set1_ps(x); }
inline Floats load_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats negative_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Floats load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_first(float* p, int n, Floats v) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints broadcast_int(const void* p) { return _mm512_set1_epi32(load_as<int32_t>(p)); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints shift_left(Ints a, int n) { return _mm512_slli_epi32(a, n); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
// a | (b & mask)
inline Ints or_masked(Ints a, Ints b, Ints mask) { return _mm512_ternarylogic_epi64(a, b, mask, 0xF8); }
inline Ints set_ints(int x) { return _mm512_set1_epi32(x); }
inline Ints set_bytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline Ints load_unsigned_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Ints load_signed_bytes(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Ints shift_right_ints(Ints a, int n) { return _mm512_srli_epi32(a, n); }

// Shift 16-bit pairs of bytes left (n > 0) or right (n < 0); the caller masks what crosses between bytes.
inline Ints shift_bytes(Ints a, int n) {
  return n > 0 ? _mm512_slli_epi16(a, n) : n < 0 ? _mm512_srli_epi16(a, -n) : a;
}

#elif PW_ISA_avx2

using Floats = __m256;
using Ints = __m256i;
constexpr int kLanes = 8;

inline Floats zero_floats() { return _mm256_setzero_ps(); }
inline Floats load_floats(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline void store_floats(void* p, Floats v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
inline Floats broadcast_float(const void* p) { return _mm256_set1_ps(load_as<float>(p)); }
inline Floats set_float(float x) { return _mm256_set1_ps(x); }
inline Floats load_halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats negative_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }

inline Ints first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_first(float* p, int n, Floats v) { _mm256_maskstore_ps(p, first_lanes(n), v); }

inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const Ints*>(p)); }
inline void store_ints(void* p, Ints v) { _mm256_storeu_si256(static_cast<Ints*>(p), v); }
inline Ints broadcast_int(const void* p) { return _mm256_set1_epi32(load_as<int32_t>(p)); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints shift_left(Ints a, int n) { return _mm256_slli_epi32(a, n); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints and_ints(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints or_masked(Ints a, Ints b, Ints mask) { return _mm256_or_si256(a, _mm256_and_si256(b, mask)); }
inline Ints set_ints(int x) { return _mm256_set1_epi32(x); }
inline Ints set_bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline Ints load_unsigned_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Ints load_signed_bytes(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Ints shift_right_ints(Ints a, int n) { return _mm256_srli_epi32(a, n); }
inline Ints shift_bytes(Ints a, int n) {
  return n > 0 ? _mm256_slli_epi16(a, n) : n < 0 ? _mm256_srli_epi16(a, -n) : a;
}

#endif

}  // namespace pw::PW_ISA
