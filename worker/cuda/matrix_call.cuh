// What a product on tensor cores is asked for, and what happens to a finished value. GLU and ACTIVATION are definitions
// of the including source.
#pragma once
#include "activation.cuh"
#include "common.cuh"

struct Tile {
  int expert, first, count, unused;  // first: position of its first token among the sorted ones
};
struct MatrixCall {
  const u8* weights[2];
  u64 expert_bytes[2];
  const u16* input;       // halves [.][COLS], row input_rows[position] / input_divisor, or row position
  const int* input_rows;  // or null
  const Tile* tiles;      // or null: one matrix, tokens in order
  void* output;           // f32 [position][output_stride]; halves with GLU
  const float* bias;      // or null
  int input_divisor;
  int n_tokens;
  int rows;  // of the matrix; with GLU of gate
  int output_stride;
  int accumulate;
  float scale;    // 0: none
  float softcap;  // 0: none
};

INLINE Tile tile_of(const MatrixCall& call, int token_tile) {
  int first = (int)blockIdx.y * token_tile;
  if (call.tiles) {
    int4 stored = __ldcg((const int4*)call.tiles + blockIdx.y);
    return {stored.x, stored.y, stored.z, 0};
  }
  return {0, first, min(token_tile, call.n_tokens - first), 0};
}

// The input row of each token of the tile, -1 beyond its end.
INLINE void find_sources(int* sources, const MatrixCall& call, const Tile& tile, int token_tile, int threads) {
  for (int i = threadIdx.x; i < token_tile; i += threads) {
    int position = tile.first + i;
    sources[i] = i >= tile.count ? -1 : call.input_rows ? __ldcg(call.input_rows + position) / call.input_divisor : position;
  }
}

INLINE void store_value(const MatrixCall& call, int position, int row, float y) {
  if (call.scale != 0) y *= call.scale;
  if (call.bias) y += call.bias[row];
  if (call.softcap != 0) y = call.softcap * tanhf(y / call.softcap);
  float* out = (float*)call.output + (u64)position * call.output_stride + row;
  *out = call.accumulate ? __ldcg(out) + y : y;
}

#if GLU
INLINE void store_gated(const MatrixCall& call, int position, int row, float gate, float up) {
  float y = fminf(fmaxf(activate(gate, ACTIVATION) * up, -65504.f), 65504.f);
  ((u16*)call.output)[(u64)position * call.output_stride + row] = float_to_half(y);
}
#endif
