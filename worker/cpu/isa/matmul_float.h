// The kernels of F32, F16 and BF16 weights: [column][16 rows] times broadcast activations. Two partial sums per result
// (even and odd columns or column pairs) hide the latency of the FMA when there is one token.
#pragma once
#include "isa/matmul_job.h"

namespace pw::PW_ISA {

struct F32Weights {
  static constexpr int kColsPerStep = 1, kStepBytes = 64, kWordsPerStep = 1, kFileBytes = 4;

  template <int T>
  static Floats multiply(const uint8_t* step, int lane, const uint8_t* x, int t, Floats sum) {
    return fma(load_floats(step + 4 * lane), broadcast_float(x + 4 * t), sum);
  }
};

struct F16Weights {
  static constexpr int kColsPerStep = 1, kStepBytes = 32, kWordsPerStep = 1, kFileBytes = 2;

  template <int T>
  static Floats multiply(const uint8_t* step, int lane, const uint8_t* x, int t, Floats sum) {
    return fma(load_halves(step + 2 * lane), broadcast_float(x + 4 * t), sum);
  }
};

#if PW_ISA_avx512
struct Bf16Weights {
  static constexpr int kColsPerStep = 2, kStepBytes = 64, kWordsPerStep = 1, kFileBytes = 2;

  template <int T>
  static Floats multiply(const uint8_t* step, int, const uint8_t* x, int t, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)load_ints(step), (__m512bh)broadcast_int(x + 4 * t));
  }
};
#else
struct Bf16Weights {  // the activations are f32 that were rounded to bf16
  static constexpr int kColsPerStep = 2, kStepBytes = 64, kWordsPerStep = 2, kFileBytes = 2;

  template <int T>
  static Floats multiply(const uint8_t* step, int lane, const uint8_t* x, int t, Floats sum) {
    const Ints pair = load_ints(step + 4 * lane);
    const Floats even = _mm256_castsi256_ps(shift_left(pair, 16));
    const Floats odd = _mm256_castsi256_ps(and_ints(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    return fma(odd, broadcast_float(x + 4 * (T + t)), fma(even, broadcast_float(x + 4 * t), sum));
  }
};
#endif

template <class Weights, int V, int T>
inline void dot_floats(const uint8_t* step, int first_lane, int32_t cols, const uint8_t* x, Floats (&total)[V][T]) {
  Floats odd[V][T];
  for (int v = 0; v < V; v++) {
    for (int t = 0; t < T; t++) total[v][t] = odd[v][t] = zero_floats();
  }
  const auto add_step = [&](Floats(&sums)[V][T]) __attribute__((always_inline)) {
    if constexpr (kPrefetches<T>) prefetch_ahead(step, Weights::kStepBytes);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      for (int v = 0; v < V; v++) {
        sums[v][t] = Weights::template multiply<T>(step, first_lane + v * kLanes, x, t, sums[v][t]);
      }
    }
    step += Weights::kStepBytes;
    x += Weights::kWordsPerStep * T * 4;
  };
  const int32_t n_steps = (cols + Weights::kColsPerStep - 1) / Weights::kColsPerStep;  // an odd last column is padded
  for (int32_t s = 0; s + 2 <= n_steps; s += 2) {
    add_step(total);
    add_step(odd);
  }
  if (n_steps % 2 != 0) add_step(total);
  for (int v = 0; v < V; v++) {
    for (int t = 0; t < T; t++) total[v][t] = add(total[v][t], odd[v][t]);
  }
}

template <class Weights, int T>
void float_tile(const TileJob& job) {
  constexpr int V = kPassVectors<T>;
  for (int lane = 0; lane < kRowGroup; lane += V * kLanes) {
    Floats total[V][T];
    dot_floats<Weights>(job.group, lane, job.m->weight->cols, job.activations, total);
    store_tile(job, lane, total);
  }
}

template <class Weights>
struct FloatTiles {
  static constexpr TileKernel kernels[] = {
      float_tile<Weights, 1>, float_tile<Weights, 2>, float_tile<Weights, 3>, float_tile<Weights, 4>,
#if PW_ISA_avx512
      float_tile<Weights, 5>, float_tile<Weights, 6>, float_tile<Weights, 7>, float_tile<Weights, 8>,
#endif
  };
};

template <class Weights>
int64_t float_group_bytes(int32_t cols) {
  return static_cast<int64_t>((cols + Weights::kColsPerStep - 1) / Weights::kColsPerStep) * Weights::kStepBytes;
}

template <class Weights>
void matmul_float(const Matmul& m, int32_t group_begin, int32_t group_end, uint8_t* scratch) {
  const int64_t row_bytes = static_cast<int64_t>(m.weight->cols) * Weights::kFileBytes;
  const int64_t group_bytes = float_group_bytes<Weights>(m.weight->cols);
  for (int32_t group = group_begin; group < group_end; group++) {
    const uint8_t* packed = find_packed_group(m, group, group_bytes, row_bytes, scratch);
    run_tiles(m, group, packed, FloatTiles<Weights>::kernels);
  }
}

}  // namespace pw::PW_ISA
