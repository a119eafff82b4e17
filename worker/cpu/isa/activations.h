// How activations lie in memory for the kernels. Tokens are cut into tiles of kTileTokens; the last one holds the rest.
//   q8:   per group of 32 columns: [8 steps][T tokens][4 codes i8], then per token: scale f32, scale * sum of codes
//         f32, minus the sum of codes 0-15 i32, minus the sum of codes 16-31 i32 (each [T])
//   f32:  [column][T] f32
//   bf16: [column pair][T][2] bf16 on AVX-512, [column][T] f32 rounded to bf16 on AVX2
#pragma once
#include "formats.h"
#include "isa/simd.h"
#include "matmul.h"

namespace pw::PW_ISA {

constexpr int kTileTokens = kLanes / 2;  // as many as the registers hold accumulators for
constexpr int kQ8GroupBytes = 48;  // per token

// 32-bit words of a token in the float forms; bf16 is padded to whole pairs of columns
inline int64_t float_words(ActForm form, int32_t cols) {
  if (form == ActForm::f32) return cols;
  const int64_t pairs = (static_cast<int64_t>(cols) + 1) / 2;
  return kLanes == 16 ? pairs : 2 * pairs;
}

inline int64_t activation_token_bytes(ActForm form, int32_t cols) {
  if (form == ActForm::q8) return static_cast<int64_t>(cols) / kGroupCols * kQ8GroupBytes;
  return 4 * float_words(form, cols);
}

inline int tile_tokens(const Activations& a, int tile) {
  const int rest = a.n_tokens - tile * kTileTokens;
  return rest < kTileTokens ? rest : kTileTokens;
}

inline uint8_t* tile_memory(const Activations& a, int tile) {
  return a.memory + static_cast<int64_t>(tile) * kTileTokens * activation_token_bytes(a.form, a.cols);
}

// One 32-column group of a q8 tile of T tokens.
template <int T>
struct Q8Group {
  static constexpr int kScaleOffset = 32 * T;
  static constexpr int kScaledSumOffset = 36 * T;
  static constexpr int kNegativeSumOffset = 40 * T;
  const uint8_t* p;

  Ints codes(int step, int t) const { return broadcast_int(p + (step * T + t) * 4); }
  Floats scale(int t) const { return broadcast_float(p + kScaleOffset + 4 * t); }
  Floats scaled_sum(int t) const { return broadcast_float(p + kScaledSumOffset + 4 * t); }
  Ints negative_sum(int half, int t) const { return broadcast_int(p + kNegativeSumOffset + 4 * (half * T + t)); }
};

size_t activations_bytes(ActForm form, int32_t n_tokens, int32_t cols);
void activations_init(Activations* a, ActForm form, int32_t n_tokens, int32_t cols, void* memory);
void activations_prepare(const Activations* a, const float* x, int64_t stride, const int32_t* gather,
                         int32_t tile_begin, int32_t tile_end);

}  // namespace pw::PW_ISA
