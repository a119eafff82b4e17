// A router inside of the product in front of it: y = r + W a is what the router multiplies, so its logits are
// R r + (R W) a, and nobody has to wait for y. R holds the norm's weights; the division by y's rms is left to the
// readers, because it changes no order.
#pragma once
#include "quant.cuh"

struct FoldedRouter {     // _FoldedStruct in router_fold.py
  const u16* rows;        // halves [n_experts][cols of W + rows of W]: R W, then R
  const float* residual;  // r, f32 [rows of W]
  float* logits;          // f32 [n_experts], without 1 / rms
  int n_experts;
};

// Warps of a block, from FIRST_WARP on, that make its N_ROWS logits (block, block + grid, ...) while the others multiply.
template <int N_COLS, int N_RESIDUAL, int N_ROWS, int FIRST_WARP, int N_WARPS>
struct RouterWarps {
  static constexpr int ROW = N_COLS + N_RESIDUAL, CHUNKS = ROW / 8, SHARE = (CHUNKS + N_WARPS * 32 - 1) / (N_WARPS * 32);
  static_assert(N_COLS % 32 == 0 && N_RESIDUAL % 8 == 0, "whole chunks of eight columns");
  uint4 weights[SHARE];

  INLINE static int chunk(int i) { return (int)threadIdx.x - FIRST_WARP * 32 + i * N_WARPS * 32; }

  INLINE void fetch(const FoldedRouter& router, int expert) {
#pragma unroll
    for (int i = 0; i < SHARE; i++)
      weights[i] = expert < router.n_experts && chunk(i) < CHUNKS
                       ? load_once(router.rows + (u64)expert * ROW + chunk(i) * 8)
                       : make_uint4(0, 0, 0, 0);
  }

  // Eight columns of (a, r) times their weights; a comes as codes and scales.
  INLINE static float product(uint4 w, int index, const FoldedRouter& router, const i8* codes, const float* scales) {
    float x[8], scale = 1, sum = 0;
    if (index < N_COLS / 8) {
      const int2 words = __ldcg((const int2*)codes + index);
      scale = __ldcg(scales + index / 4);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = (float)(i8)((i < 4 ? words.x : words.y) >> (8 * (i & 3)));
    } else {
      const float* residual = router.residual + (index - N_COLS / 8) * 8;
      *(float4*)x = load_fresh4(residual);
      *(float4*)(x + 4) = load_fresh4(residual + 4);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 pair = word_of(w, i);
      sum += low_half(pair) * x[2 * i] + high_half(pair) * x[2 * i + 1];
    }
    return scale * sum;
  }

  INLINE void run(const FoldedRouter& router, const i8* codes, const float* scales) {
    __shared__ float parts[N_WARPS];
    fetch(router, blockIdx.x);
    wait_for_inputs();
#pragma unroll 1
    for (int row = 0; row < N_ROWS; row++) {
      const int expert = blockIdx.x + row * gridDim.x;
      if (row) fetch(router, expert);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SHARE; i++)
        if (chunk(i) < CHUNKS) sum += product(weights[i], chunk(i), router, codes, scales);
      sum = warp_sum(sum);
      if (row) meet_threads<2, N_WARPS * 32>();  // the sums before have been read
      if (lane_id() == 0) parts[warp_id() - FIRST_WARP] = sum;
      meet_threads<2, N_WARPS * 32>();
      if (warp_id() != FIRST_WARP || lane_id() || expert >= router.n_experts) continue;
      float logit = 0;
#pragma unroll
      for (int i = 0; i < N_WARPS; i++) logit += parts[i];
      router.logits[expert] = logit;
    }
  }
};
