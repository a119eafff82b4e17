// A router inside of the product in front of it: y = r + W a is what the router multiplies, so its logits are
// R r + (R W) a, and nobody has to wait for y. R holds the norm's weights; the division by y's rms is left to the
// readers, because it changes no order.
#pragma once
#include "quant.cuh"

struct FoldedRouter {   // _FoldedStruct in router_fold.py
  const u16* rows;        // halves [n_experts][cols of W + rows of W]: R W, then R
  const float* residual;  // r, f32 [rows of W]
  float* logits;          // f32 [n_experts], without 1 / rms
  int n_experts;
};

// A thread's share of the N_ROWS router rows of a block (block, block + grid, ...), eight columns at a time.
template <int N_COLS, int N_RESIDUAL, int N_THREADS, int N_ROWS>
struct RouterShare {
  static constexpr int ROW = N_COLS + N_RESIDUAL, CHUNKS = ROW / 8, SHARE = (CHUNKS + N_THREADS - 1) / N_THREADS;
  static_assert(N_COLS % 32 == 0 && N_RESIDUAL % 8 == 0, "whole chunks");
  uint4 weights[N_ROWS][SHARE];

  INLINE static int chunk(int i) { return threadIdx.x + i * N_THREADS; }
  INLINE static int expert(int row) { return blockIdx.x + row * gridDim.x; }

  INLINE void fetch(const FoldedRouter& router) {
#pragma unroll
    for (int row = 0; row < N_ROWS; row++)
#pragma unroll
      for (int i = 0; i < SHARE; i++)
        weights[row][i] = expert(row) < router.n_experts && chunk(i) < CHUNKS
                              ? load_once(router.rows + (u64)expert(row) * ROW + chunk(i) * 8)
                              : make_uint4(0, 0, 0, 0);
  }

  // Columns 8 index .. of (a, r); a comes as codes and scales.
  INLINE static void read(float (&x)[8], int index, const FoldedRouter& router, const i8* codes, const float* scales) {
    if (index < N_COLS / 8) {
      const int2 words = __ldcg((const int2*)codes + index);
      const float scale = __ldcg(scales + index / 4);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = scale * (float)(i8)((i < 4 ? words.x : words.y) >> (8 * (i & 3)));
      return;
    }
    const float* residual = router.residual + (index - N_COLS / 8) * 8;
    *(float4*)x = load_fresh4(residual);
    *(float4*)(x + 4) = load_fresh4(residual + 4);
  }

  // Leaves the warps' parts of the logits in `parts` f32 [N_ROWS][32]; a barrier, then `finish`.
  INLINE void multiply(float* parts, const FoldedRouter& router, const i8* codes, const float* scales) const {
    float sums[N_ROWS] = {};
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      float x[8];
      if (chunk(i) < CHUNKS) read(x, chunk(i), router, codes, scales);
      else
        for (int j = 0; j < 8; j++) x[j] = 0;
#pragma unroll
      for (int row = 0; row < N_ROWS; row++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 pair = word_of(weights[row][i], j);
          sums[row] += low_half(pair) * x[2 * j] + high_half(pair) * x[2 * j + 1];
        }
    }
#pragma unroll
    for (int row = 0; row < N_ROWS; row++) {
      const float sum = warp_sum(sums[row]);
      if (lane_id() == 0) parts[row * 32 + warp_id()] = sum;
    }
  }

  INLINE static void finish(const float* parts, const FoldedRouter& router) {
    const int row = warp_id();
    if (row >= N_ROWS || expert(row) >= router.n_experts) return;
    const float sum = warp_sum(lane_id() < N_THREADS / 32 ? parts[row * 32 + lane_id()] : 0.f);
    if (lane_id() == 0) router.logits[expert(row)] = sum;
  }
};
