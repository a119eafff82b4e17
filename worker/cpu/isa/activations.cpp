// Prepares activations for the kernels: quantise or round, and interleave the tokens of a tile (activations.h).
#include "isa/activations.h"

namespace pw::PW_ISA {
namespace {

constexpr int kChunk = 8;  // 32-bit words of a token that are interleaved at a time

// out[word * T + t] = words[t][word]
template <int T>
void store_interleaved(const __m256i (&words)[T], uint32_t* out) {
  uint32_t rows[T][kChunk];
  for (int t = 0; t < T; t++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[t]), words[t]);
  for (int word = 0; word < kChunk; word++) {
    for (int t = 0; t < T; t++) out[word * T + t] = rows[t][word];
  }
}

template <>
void store_interleaved<1>(const __m256i (&words)[1], uint32_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), words[0]);
}

// columns[i] = words i and i + 4 of four tokens, in the low and the high 128 bits
inline void transpose_four(const __m256i* words, __m256i (&columns)[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(words[0], words[1]), high01 = _mm256_unpackhi_epi32(words[0], words[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(words[2], words[3]), high23 = _mm256_unpackhi_epi32(words[2], words[3]);
  columns[0] = _mm256_unpacklo_epi64(low01, low23);
  columns[1] = _mm256_unpackhi_epi64(low01, low23);
  columns[2] = _mm256_unpacklo_epi64(high01, high23);
  columns[3] = _mm256_unpackhi_epi64(high01, high23);
}

template <>
void store_interleaved<4>(const __m256i (&words)[4], uint32_t* out) {
  __m256i columns[4];
  transpose_four(words, columns);
  for (int i = 0; i < 4; i++) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * i), _mm256_castsi256_si128(columns[i]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * i + 16), _mm256_extracti128_si256(columns[i], 1));
  }
}

#if PW_ISA_avx512
template <>
void store_interleaved<8>(const __m256i (&words)[8], uint32_t* out) {
  __m256i first[4], second[4];
  transpose_four(words, first);
  transpose_four(words + 4, second);
  for (int i = 0; i < 4; i++) {
    const __m256i low = _mm256_permute2x128_si256(first[i], second[i], 0x20);
    const __m256i high = _mm256_permute2x128_si256(first[i], second[i], 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * i), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * (i + 4)), high);
  }
}
#endif

// Largest magnitude of 32 floats. Compared as integers, so that a NaN is larger than all and reaches the scale.
inline float largest_magnitude(const float* x) {
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < 4; i++) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + 8 * i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude_bits));
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

// 32 codes: x * inverse_scale rounded to the nearest even, in column order
inline __m256i round_to_codes(const float* x, float inverse_scale) {
  const __m256 factor = _mm256_set1_ps(inverse_scale);
  __m256i ints[4];
  for (int i = 0; i < 4; i++) ints[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
  const __m256i bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(ints[0], ints[1]), _mm256_packs_epi32(ints[2], ints[3]));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline __m256i sums_of_four(__m256i codes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
}

template <int T>
void store_sums(const __m256i (&codes)[T], const float (&scale)[T], uint8_t* group) {
  __m256i partial[T];
  for (int t = 0; t < T; t++) partial[t] = sums_of_four(codes[t]);
  uint32_t sums[kChunk * T];
  store_interleaved<T>(partial, sums);
  int32_t negative[2][T];
  float scaled[T];
  for (int t = 0; t < T; t++) {
    for (int half = 0; half < 2; half++) {
      const uint32_t* s = sums + 4 * half * T + t;
      negative[half][t] = -static_cast<int32_t>(s[0] + s[T] + s[2 * T] + s[3 * T]);
    }
    scaled[t] = scale[t] * static_cast<float>(-(negative[0][t] + negative[1][t]));
  }
  memcpy(group + Q8Group<T>::kScaledSumOffset, scaled, sizeof(scaled));
  memcpy(group + Q8Group<T>::kNegativeSumOffset, negative, sizeof(negative));
}

// Below this magnitude 127 / largest would overflow; such a group counts as zero.
constexpr float kTiny = 1e-35f;

template <int T>
void quantize_group(const float* const (&rows)[T], int32_t col, uint8_t* group) {
  float largest[T], scale[T], inverse[T];
  for (int t = 0; t < T; t++) largest[t] = largest_magnitude(rows[t] + col);
  for (int t = 0; t < T; t++) {
    const bool is_zero = largest[t] < kTiny;
    scale[t] = is_zero ? 0.0f : largest[t] / 127.0f;
    inverse[t] = is_zero ? 0.0f : 127.0f / largest[t];
  }
  __m256i codes[T];
  for (int t = 0; t < T; t++) codes[t] = round_to_codes(rows[t] + col, inverse[t]);
  store_interleaved<T>(codes, reinterpret_cast<uint32_t*>(group));
  memcpy(group + Q8Group<T>::kScaleOffset, scale, sizeof(scale));
  store_sums<T>(codes, scale, group);
}

struct PlainFloats {
  static constexpr int kColsPerWord = 1;
  static __m256i words(const float* x, int n) {
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_castps_si256(_mm256_maskload_ps(x, mask));
  }
};

#if PW_ISA_avx512
struct Bf16Words {
  static constexpr int kColsPerWord = 2;
  static __m256i words(const float* x, int n) {
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_lanes(n), x));
  }
};
#else
struct Bf16Words {  // f32 values rounded to the nearest even bf16; NaN stays NaN
  static constexpr int kColsPerWord = 1;
  static __m256i words(const float* x, int n) {
    const __m256i bits = PlainFloats::words(x, n);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 x8 = _mm256_castsi256_ps(bits);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x8, x8, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(rounded, bits, is_nan);
    return _mm256_and_si256(kept, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  }
};
#endif

template <class Words, int T>
void interleave_floats(const float* const (&rows)[T], int32_t cols, int64_t n_words, uint8_t* out) {
  constexpr int kCols = kChunk * Words::kColsPerWord;
  const auto chunk = [&](int32_t col, int n, uint32_t* to) {
    __m256i words[T];
    for (int t = 0; t < T; t++) words[t] = Words::words(rows[t] + col, n);
    store_interleaved<T>(words, to);
  };
  const int32_t n_chunks = cols / kCols;
  for (int32_t i = 0; i < n_chunks; i++) chunk(i * kCols, kCols, reinterpret_cast<uint32_t*>(out) + i * kChunk * T);
  const int64_t done = static_cast<int64_t>(n_chunks) * kChunk;
  if (done == n_words) return;
  uint32_t last[kChunk * T];
  chunk(n_chunks * kCols, cols - n_chunks * kCols, last);
  memcpy(out + done * T * 4, last, static_cast<size_t>(n_words - done) * T * 4);
}

template <int T>
void prepare_tile(const Activations& a, const float* const* row_pointers, uint8_t* out) {
  const float* rows[T];
  for (int t = 0; t < T; t++) rows[t] = row_pointers[t];
  const int64_t n_words = float_words(a.form, a.cols);
  if (a.form == ActForm::f32) return interleave_floats<PlainFloats, T>(rows, a.cols, n_words, out);
  if (a.form == ActForm::bf16) return interleave_floats<Bf16Words, T>(rows, a.cols, n_words, out);
  for (int32_t col = 0; col < a.cols; col += kGroupCols, out += kQ8GroupBytes * T) quantize_group<T>(rows, col, out);
}

using PrepareTile = void (*)(const Activations&, const float* const*, uint8_t*);
constexpr PrepareTile kPrepareTile[] = {
    prepare_tile<1>, prepare_tile<2>, prepare_tile<3>, prepare_tile<4>,
#if PW_ISA_avx512
    prepare_tile<5>, prepare_tile<6>, prepare_tile<7>, prepare_tile<8>,
#endif
};
static_assert(sizeof(kPrepareTile) / sizeof(PrepareTile) == kTileTokens);

}  // namespace

size_t activations_bytes(ActForm form, int32_t n_tokens, int32_t cols) {
  return static_cast<size_t>(n_tokens) * static_cast<size_t>(activation_token_bytes(form, cols));
}

void activations_init(Activations* a, ActForm form, int32_t n_tokens, int32_t cols, void* memory) {
  *a = {form, n_tokens, cols, (n_tokens + kTileTokens - 1) / kTileTokens, static_cast<uint8_t*>(memory)};
}

void activations_prepare(const Activations* a, const float* x, int64_t stride, const int32_t* gather,
                         int32_t tile_begin, int32_t tile_end) {
  for (int32_t tile = tile_begin; tile < tile_end; tile++) {
    const int n = tile_tokens(*a, tile);
    const float* rows[kTileTokens];
    for (int t = 0; t < n; t++) {
      const int32_t token = tile * kTileTokens + t;
      rows[t] = x + (gather != nullptr ? gather[token] : token) * stride;
    }
    kPrepareTile[n - 1](*a, rows, tile_memory(*a, tile));
  }
}

}  // namespace pw::PW_ISA
