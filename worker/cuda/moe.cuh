// What the two kernels of a mixture share: which experts, and a unit of a row times a token.
//
// Definitions: COLS, MATRIX_ROWS, TYPE_0, TOKENS, N_EXPERTS, N_USED, WARPS, STAGES, ROWS (a power of two), PROLOGUE,
// CHOOSE, FOLDED, and those of top_k.cuh. With CHOOSE a warp finds the experts itself from router logits (one token), with FOLDED from those
// of a folded router; otherwise ids and weights are given. N_EXPERTS 1 is a dense network: nothing is chosen, and its
// weights can be fetched before the inputs are there.
#pragma once
#include "activations.cuh"
#include "top_k.cuh"

#define QUANTISED 0
#define PLAIN 1
#define NORMED 2

constexpr bool DENSE = N_EXPERTS == 1;
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = QuantisedToken<COLS>::UNITS;

// The values between the two kernels: 8-bit codes, a scale per 16 columns, and scale * sum of the codes. The first
// kernel knows a block's rows together and writes them so, because all blocks of the second read all of them.
struct Hidden {
  i8* codes;      // [TOKENS][N_USED][n_ff]
  float* scales;  // [TOKENS][N_USED][n_ff / 16]
  float* sums;
};

struct Router {
  const int* ids;        // [TOKENS][N_USED], read unless CHOOSE
  const float* weights;  // [TOKENS][N_USED]
  RouterRule rule;       // read with CHOOSE
};

struct Experts {
  int ids[TOKENS * N_USED];
  float weights[TOKENS * N_USED];
};

// Chosen by each warp for itself, or read once for the block.
constexpr int EXPERT_LISTS = CHOOSE ? WARPS : 1;

// ids of all tokens into the warp's list, or the block's: then with a barrier
template <class Choice>
INLINE void find_experts(Experts* lists, const Router& router, Choice& choice) {
  if constexpr (CHOOSE) {
    choice.load(router.rule.logits);
    choice.rank(router.rule);
    choice.choose();
    if (lane_id() < N_USED) lists[warp_id()].ids[lane_id()] = choice.id;
    __syncwarp();
  } else {
    for (int i = threadIdx.x; i < TOKENS * N_USED; i += THREADS) {
      lists->ids[i] = DENSE ? 0 : __ldcg(router.ids + i);
      lists->weights[i] = DENSE ? 1.f : __ldcg(router.weights + i);
    }
    __syncthreads();
  }
}
#if CHOOSE
typedef WarpChoice<N_EXPERTS, N_USED> Choice;
#else
struct Choice {};
#endif

// One unit of ROWS rows with one token's activations.
template <int TYPE, bool FINE>
INLINE void add_unit(float* sums, const u8* rows, int unit, const Activations<FINE>& x) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    RawUnit raw;
    Scales scales;
    u32 codes[16];
    load_unit<TYPE, FromShared>(raw, rows + r * Format<TYPE>::row_bytes(COLS), UNITS, unit);
    unit_scales<TYPE>(scales, raw, unit);
#pragma unroll
    for (int j = 0; j < 16; j++) codes[j] = dot_codes<TYPE>(raw, j);
    sums[r] += unit_dot<TYPE, FINE>(codes, scales, x);
  }
}
