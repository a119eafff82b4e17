// Activations of few.cu: from memory into a stage of a warp, and from there into fragments that match those of
// quant_mma.cuh: 8-bit codes as halves relative to the largest scale of their row, so that no value is too large.
#pragma once
#include "few_call.cuh"

// Inputs of a block of columns in a stage of their own: 16-byte pieces [of a unit][token][unit], then f32 scales
// [token][group of 32]. One stage is enough where the next inputs are fetched after those before have been taken.
constexpr int INPUT_PIECES = FLOATS ? 8 : 4, INPUT_BYTES = TOKEN_TILE * (INPUT_PIECES * 64 + (FLOATS ? 0 : 32));
constexpr int INPUT_STAGES = CHUNKS >= STAGES ? 1 : 2;
static_assert(CHUNKS * INPUT_STAGES >= STAGES, "inputs of all chunks under way");
// Whether inputs stay the same from item to item: a warp has one block of columns, and the grid is a multiple of tiles.
constexpr bool KEEPS_INPUTS = !MIXTURE && N_BLOCKS <= WARPS;

// Row of the input of a token of the tile, -1 beyond its end; in a mixture gate and up have a row for all slots of a
// token, down one for each.
INLINE int source_of(const FewCall& call, const SlotTiles& slots, const SlotTile& tile, int token) {
  if (token >= tile.count) return -1;
  return MIXTURE ? slots.order[tile.first + token] / (GLU ? N_USED : 1) : tile.first + token;
}

// Scales of eight groups for each token. Nothing may come through L1, where older values can be.
INLINE void copy_scales(float* stage, const FewCall& call, const SlotTiles& slots, const SlotTile& tile, int block) {
  constexpr bool ALIGNED = COLS % 128 == 0;  // rows of scales begin at multiples of 16 bytes
  constexpr int IN_TOKEN = ALIGNED ? 2 : 8, WIDTH = 8 / IN_TOKEN;
  const int group = block * 8 + lane_id() % IN_TOKEN * WIDTH;
#pragma unroll
  for (int token = lane_id() / IN_TOKEN; token < TOKEN_TILE; token += 32 / IN_TOKEN) {
    const int source = source_of(call, slots, tile, token);
    float* target = stage + token * 8 + lane_id() % IN_TOKEN * WIDTH;
    const float* scales = call.scales + (u64)max(source, 0) * (COLS / 32) + group;
    const bool exists = source >= 0 && group < COLS / 32;
    if (ALIGNED) copy_async16(target, scales, exists);
    else *target = exists ? __ldcg(scales) : 0.f;
  }
}

INLINE void copy_inputs(u8* stage, const FewCall& call, const SlotTiles& slots, const SlotTile& tile, int block) {
  constexpr int IN_TOKEN = INPUT_PIECES * 4, STEP = 32 / IN_TOKEN, BYTES = FLOATS ? 2 : 1;
  const int piece = lane_id() % IN_TOKEN, column = block * 256 + piece * (16 / BYTES);
  const u8* inputs = FLOATS ? (const u8*)call.halves : (const u8*)call.codes;
#pragma unroll
  for (int token = lane_id() / IN_TOKEN; token < TOKEN_TILE; token += STEP) {
    const int source = source_of(call, slots, tile, token);
    copy_async16(stage + ((piece % INPUT_PIECES * TOKEN_TILE + token) * 4 + piece / INPUT_PIECES) * 16,
                 inputs + ((u64)max(source, 0) * COLS + column) * BYTES, source >= 0 && column < COLS);
  }
  if (!FLOATS) copy_scales((float*)(stage + TOKEN_TILE * 256), call, slots, tile, block);
}

// Of the tokens whose columns this lane brings, 8 n + lane / 4 for each n: the largest scale of the row in the columns
// of this warp, by which its halves are divided. Tokens that do not exist have zeros only.
struct Tokens {
  float largest[N_TILES];
};
INLINE float2 scales_in(const u8* stage, int token) {
  return ((const float2*)(stage + TOKEN_TILE * 256))[token * 4 + (lane_id() & 3)];
}
INLINE float scale_at(const FewCall& call, int source, int group) {
  return source >= 0 && group < COLS / 32 ? __ldcg(call.scales + (u64)source * (COLS / 32) + group) : 0.f;
}
// `stage` holds the inputs of this warp's first block of columns.
INLINE void find_tokens(Tokens& tokens, const FewCall& call, const SlotTiles& slots, const SlotTile& tile,
                        const u8* stage) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const int token = n * 8 + (lane_id() >> 2);
    tokens.largest[n] = 1.f;
    if (FLOATS) continue;
    const float2 scales = scales_in(stage, token);
    float largest = fmaxf(scales.x, scales.y);
    const int source = N_BLOCKS > WARPS ? source_of(call, slots, tile, token) : -1;
    for (int block = warp_id() + WARPS; block < N_BLOCKS; block += WARPS) {
      const int group = (block * 4 + (lane_id() & 3)) * 2;
      largest = fmaxf(largest, fmaxf(scale_at(call, source, group), scale_at(call, source, group + 1)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    tokens.largest[n] = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
  }
}

// Activations as fragments, and the sums of 16 columns of each.
struct Inputs {
  u32 fragments[N_TILES][16][2];
  u32 sums[N_TILES][2];
};
INLINE void take_codes(Inputs& x, const u8* stage, const Tokens& tokens) {
  const u32 magic = in_register(0x64806480);
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const int token = n * 8 + (lane_id() >> 2);
    const float2 scales = scales_in(stage, token);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float relative = tokens.largest[n] > 0 ? (half ? scales.y : scales.x) / tokens.largest[n] : 0.f;
      const u32 scale = twice(half ? relative / LAST_HALF : relative);
      int sums[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint4 piece = *(const uint4*)(stage + ((half * 2 + i / 4) * TOKEN_TILE * 4 + n * 32 + lane_id()) * 16);
        const u32 codes = word_of(piece, i % 4);
        u32(&out)[2] = x.fragments[n][half * 8 + i];
        sums[i / 4] = __dp4a((int)codes, 0x01010101, sums[i / 4]);
        bytes_to_halves(out, codes, magic);
        out[0] = half2_mul(out[0], scale), out[1] = half2_mul(out[1], scale);
      }
      x.sums[n][half] = pack_half2((float)sums[0] * relative, (float)sums[1] * relative);
    }
  }
}
INLINE void take_halves(Inputs& x, const u8* stage) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const uint2 v = *(const uint2*)(stage + (j / 2 * TOKEN_TILE * 4 + n * 32 + lane_id()) * 16 + j % 2 * 8);
      x.fragments[n][j][0] = __byte_perm(v.x, v.y, 0x5410), x.fragments[n][j][1] = __byte_perm(v.x, v.y, 0x7632);
    }
}
INLINE void take_inputs(Inputs& x, const u8* stage, const Tokens& tokens) {
  if (FLOATS) take_halves(x, stage);
  else take_codes(x, stage, tokens);
}

// What turns a lane's sums into values: the largest scales of tokens 8 n + 2 t and the one after it.
struct Factors {
  float of[N_TILES][2];
};
INLINE void find_factors(Factors& factors, const Tokens& tokens) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
      factors.of[n][odd] = __shfl_sync(FULL_WARP, tokens.largest[n], (2 * (lane_id() & 3) + odd) * 4);
}
