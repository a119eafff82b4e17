// What a launch of few.cu is asked for and how it is cut into items. Its definitions are described there.
#pragma once
#include "quant_mma.cuh"

constexpr int THREADS = WARPS * 32;
#include "slots.cuh"

constexpr int ROWS = CHUNK_ROWS * CHUNKS, OWN_ROWS = GLU ? ROWS / 2 : ROWS;
constexpr int N_TILES = TOKEN_TILE / 8, M_TILES = CHUNK_ROWS / 16;  // of a chunk: groups of 8 tokens, of 16 rows
constexpr int N_BLOCKS = (COLS + 255) / 256, N_UNITS = (COLS + 63) / 64;
constexpr bool FLOATS = Format<TYPE_0>::IS_FLOAT, MIXTURE = N_EXPERTS > 1;
#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
#ifndef TYPE_2
#define TYPE_2 TYPE_0
#endif
// The first part whose type each part has: code is made once for each type.
constexpr int KIND_1 = TYPE_1 == TYPE_0 ? 0 : 1, KIND_2 = TYPE_2 == TYPE_0 ? 0 : TYPE_2 == TYPE_1 ? 1 : 2;
INLINE bool has_first_type(int part) {
  return (KIND_1 == 0 && KIND_2 == 0) || part == 0 || (part == 1 ? KIND_1 == 0 : KIND_2 == 0);
}
INLINE bool has_second_type(int part) { return KIND_1 == 1 && (KIND_2 != 2 || part == 1); }  // if not the first
constexpr int larger(int a, int b) { return a > b ? a : b; }
template <int TYPE>
using StageOf = Stage<TYPE, COLS, CHUNK_ROWS>;
constexpr int STAGE_BYTES = larger(StageOf<TYPE_0>::BYTES, larger(StageOf<TYPE_1>::BYTES, StageOf<TYPE_2>::BYTES));
// f32 [warp][token][row] at the end of an item; four more than rows, so that lanes do not meet in a bank
constexpr int SUM_STRIDE = ROWS + 4;

struct FewPart {
  const u8* weights;
  u64 expert_bytes;
  void* output;       // f32 [token or slot][output_stride]; with GLU i8 codes
  const float* bias;  // or null
  int rows;
  int output_stride;
};
struct FewCall {
  FewPart parts[3];
  const i8* codes;      // [.][COLS]
  const float* scales;  // [.][COLS / 32]
  const u16* halves;    // [.][COLS], for float weights
  const int* ids;       // of experts, [n_tokens][N_USED], of a mixture
  float* output_scales;  // with GLU: f32 [.][rows / 32]
  int n_tokens;
  int n_items;  // of a dense product: of all parts and tiles
  int accumulate;
  float scale;    // 0: none
  float softcap;  // 0: none
};

INLINE int blocks_of(const FewPart& part) { return (part.rows + OWN_ROWS - 1) / OWN_ROWS; }

// What an item is: some rows of a matrix, times the tokens of a tile.
struct Item {
  int part, row;
  SlotTile tile;
};
INLINE Item item_at(const FewCall& call, const SlotTiles& slots, int index) {
  if (MIXTURE) {
    const int per_tile = blocks_of(call.parts[0]);
    return {0, index % per_tile * OWN_ROWS, slots.tiles[index / per_tile]};
  }
  // tiles of tokens come first, so that blocks that read the same weights do so at the same time
  const int n_tiles = (call.n_tokens + TOKEN_TILE - 1) / TOKEN_TILE, first_token = index % n_tiles * TOKEN_TILE;
  const int first = blocks_of(call.parts[0]), second = GLU ? 0 : blocks_of(call.parts[1]);
  index /= n_tiles;
  const int part = GLU ? 0 : (index >= first) + (index >= first + second);
  const int row = index - (part == 0 ? 0 : part == 1 ? first : first + second);
  return {part, row * OWN_ROWS, {0, first_token, min(TOKEN_TILE, call.n_tokens - first_token)}};
}
INLINE const FewPart& part_of(const FewCall& call, int index) {
  return index == 0 ? call.parts[0] : index == 1 ? call.parts[1] : call.parts[2];
}
