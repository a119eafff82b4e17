// y = W x for 2 to 32 tokens on tensor cores, at the speed at which weights arrive. A warp streams weights through stages
// of its own in shared memory, a chunk (some rows, 256 columns) at a time, and goes on from one item of its block (some
// rows times up to TOKEN_TILE tokens) to the next without a pause; the warps of a block share the columns of an item out
// and add up at its end. Activations are the 8-bit codes of the other kernels (halves for float weights), turned into
// halves relative to their row's largest scale, so that no value is too large.
//
// Definitions: COLS, TOKEN_TILE (8, 16, 32), CHUNK_ROWS (16, 32), CHUNKS (of an item), PASSES (over a chunk, each for
// a part of the columns), WARPS, STAGES, RESIDENT (blocks of a multiprocessor), N_EXPERTS (1: dense), N_USED, EARLY (the
// chosen experts are known before the inputs are there), GLU. With GLU the
// first half of the chunks is of gate (TYPE_0), the second of up (TYPE_1), the output act(gate) * up as codes; ACTIVATION
// 0 silu, 1 gelu. Without, a launch takes up to three matrices of one input, of types TYPE_0 .. TYPE_2.
#include "quant_mma.cuh"
#include "outputs.cuh"

constexpr int THREADS = WARPS * 32;
#include "slots.cuh"

constexpr int ROWS = CHUNK_ROWS * CHUNKS, OWN_ROWS = GLU ? ROWS / 2 : ROWS;
constexpr int N_TILES = TOKEN_TILE / 8, M_TILES = CHUNK_ROWS / 16;  // of a chunk: groups of 8 tokens, of 16 rows
constexpr int N_BLOCKS = (COLS + 255) / 256, N_UNITS = (COLS + 63) / 64, IN_PASS = 16 / PASSES;
constexpr bool FLOATS = Format<TYPE_0>::IS_FLOAT, MIXTURE = N_EXPERTS > 1;
#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
#ifndef TYPE_2
#define TYPE_2 TYPE_0
#endif
// how many of them differ, if equal ones come first
constexpr int N_KINDS = TYPE_2 != TYPE_1 ? 3 : TYPE_1 != TYPE_0 ? 2 : 1;
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
  float* output_scales; // with GLU: f32 [.][rows / 32]
  int n_tokens;
  int slots_of_input;   // slots of a mixture that share a row of the input: N_USED or 1
  int n_items;          // of all parts of a dense product
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
    int per_tile = blocks_of(call.parts[0]);
    return {0, index % per_tile * OWN_ROWS, slots.tiles[index / per_tile]};
  }
  int first = blocks_of(call.parts[0]), second = GLU ? 0 : blocks_of(call.parts[1]);
  int part = GLU ? 0 : (index >= first) + (index >= first + second);
  int row = index - (part == 0 ? 0 : part == 1 ? first : first + second);
  return {part, row * OWN_ROWS, {0, 0, call.n_tokens}};
}
INLINE const FewPart& part_of(const FewCall& call, int index) {
  return index == 0 ? call.parts[0] : index == 1 ? call.parts[1] : call.parts[2];
}

// The chunks of a warp, in the order in which it takes them: those of a block of columns, blocks of columns, items. Its
// stages are a ring, which is one chunk short of full while the warp works on one.
struct Ring {
  const FewCall& call;
  const SlotTiles& slots;
  u8* stages;
  int n_items;
  int item, block, chunk, stage;  // the chunk to fetch next, and the stage of the chunk to work on
  Item at;

  INLINE void start() {
    item = blockIdx.x, block = warp_id(), chunk = stage = 0;
    if (item < n_items) at = item_at(call, slots, item);
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) fetch(stages + s * STAGE_BYTES);
  }
  INLINE const u8* arrived() {
    copy_async_wait<STAGES - 1>();
    __syncwarp();
    return stages + stage * STAGE_BYTES;
  }
  INLINE void used() {
    __syncwarp();
    fetch(stages + stage * STAGE_BYTES);
    if (++stage == STAGES) stage = 0;
  }

  // Starts the copy of the next chunk, or of nothing beyond the last item; a group of copies either way.
  INLINE void fetch(u8* target) {
#if PROBE == 2
    if (item < n_items) advance();
    if (n_items < 0)
#else
    if (item < n_items)
#endif
    {
      const int index = GLU ? chunk / (CHUNKS / 2) : at.part;
      const int row = at.row + (GLU ? chunk % (CHUNKS / 2) : chunk) * CHUNK_ROWS;
      const FewPart& part = part_of(call, index);
      const u8* weights = part.weights + at.tile.expert * part.expert_bytes;
      if (N_KINDS == 1 || index == 0) copy<TYPE_0>(target, weights, row, part.rows);
      else if (N_KINDS == 2 || index == 1) copy<TYPE_1>(target, weights, row, part.rows);
      else copy<TYPE_2>(target, weights, row, part.rows);
      advance();
    }
    copy_async_commit();
  }
  template <int TYPE>
  INLINE void copy(u8* target, const u8* weights, int row, int n_rows) {
    StageOf<TYPE>::copy(target, weights + (u64)row * StageOf<TYPE>::ROW_BYTES, n_rows - row, block);
  }
  INLINE void advance() {
    if (++chunk < CHUNKS) return;
    chunk = 0, block += WARPS;
    if (block < N_BLOCKS) return;
    block = warp_id(), item += gridDim.x;
    if (item < n_items) at = item_at(call, slots, item);
  }
};

// The tokens whose columns this lane brings, 8 n + lane / 4 for each n: row of the input or -1, and the largest scale of
// the row in the columns of this warp, by which its halves are divided.
struct Tokens {
  int source[N_TILES];
  float largest[N_TILES];
};
INLINE void find_tokens(Tokens& tokens, const FewCall& call, const SlotTiles& slots, const SlotTile& tile) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const int index = n * 8 + (lane_id() >> 2);
    const int slot = index >= tile.count ? -1 : MIXTURE ? slots.order[tile.first + index] : index;
    tokens.source[n] = MIXTURE && slot >= 0 ? slot / call.slots_of_input : slot;
  }
}

// What a pass reads of this lane's unit: of both halves of it a run of codes (of all tokens) and a scale.
constexpr int RUN = IN_PASS / 2;  // words of codes
struct Codes {
  u32 words[N_TILES][2][RUN];
  float scales[N_TILES][2];
};
INLINE float scale_at(const FewCall& call, int source, int group) {
  return source >= 0 && group < COLS / 32 ? __ldcg(call.scales + (u64)source * (COLS / 32) + group) : 0.f;
}
INLINE void load_run(u32 (&out)[RUN], const i8* source, bool exists) {
  if constexpr (RUN == 2) {
    const uint2 v = exists ? __ldcg((const uint2*)source) : make_uint2(0, 0);
    out[0] = v.x, out[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < RUN; i += 4) {
      const uint4 v = exists ? __ldcg((const uint4*)source + i / 4) : make_uint4(0, 0, 0, 0);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  }
}
INLINE void load_codes(Codes& codes, const FewCall& call, const Tokens& tokens, int block, int pass) {
  const int unit = block * 4 + (lane_id() & 3);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int source = tokens.source[n], column = unit * 64 + half * 32;
      load_run(codes.words[n][half], call.codes + (u64)max(source, 0) * COLS + column + pass * (RUN * 4),
               source >= 0 && column < COLS);
      codes.scales[n][half] = scale_at(call, source, unit * 2 + half);
    }
}

// The largest scales; `codes` are those of this warp's first block of columns.
INLINE void find_largest(Tokens& tokens, const FewCall& call, const Codes& codes) {
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    float largest = fmaxf(codes.scales[n][0], codes.scales[n][1]);
    for (int block = warp_id() + WARPS; block < N_BLOCKS; block += WARPS) {
      const int group = (block * 4 + (lane_id() & 3)) * 2;
      largest = fmaxf(largest, fmaxf(scale_at(call, tokens.source[n], group), scale_at(call, tokens.source[n], group + 1)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    tokens.largest[n] = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
  }
}

// Activations as fragments, and the sums of 16 columns of each.
struct Inputs {
  u32 fragments[N_TILES][IN_PASS][2];
  u32 sums[N_TILES][2];
};
INLINE void convert_codes(Inputs& x, const Codes& codes, const Tokens& tokens, int pass) {
  const u32 magic = in_register(0x64806480);
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    const float inverse = tokens.largest[n] > 0 ? 1.f / tokens.largest[n] : 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float relative = codes.scales[n][half] * inverse;
      const u32 scale = twice(half ? relative / LAST_HALF : relative);
      int sums[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        int& sum = sums[(pass * RUN + i) / 4];
        sum = dot4(codes.words[n][half][i], 0x01010101, sum);
        u32(&out)[2] = x.fragments[n][half * RUN + i];
        bytes_to_halves(out, codes.words[n][half][i], magic);
        out[0] = half2_mul(out[0], scale), out[1] = half2_mul(out[1], scale);
      }
      x.sums[n][half] = pack_half2((float)sums[0] * relative, (float)sums[1] * relative);
    }
  }
}
INLINE void read_halves(Inputs& x, const FewCall& call, const Tokens& tokens, int block, int pass) {
  const int unit = block * 4 + (lane_id() & 3);
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        int column = unit * 64 + half * 32 + pass * (RUN * 4) + i * 4;
        bool exists = tokens.source[n] >= 0 && column < COLS;
        uint2 v = exists ? __ldcg((const uint2*)(call.halves + (u64)tokens.source[n] * COLS + column)) : make_uint2(0, 0);
        x.fragments[n][half * RUN + i][0] = __byte_perm(v.x, v.y, 0x5410);
        x.fragments[n][half * RUN + i][1] = __byte_perm(v.x, v.y, 0x7632);
      }
}

// Sums of 16 rows; two chains of products where one would be too slow.
constexpr int CHAINS = N_TILES == 1 ? 2 : 1;
typedef float Sums[CHAINS][N_TILES][4];

// 16 rows from row 16 * m of a stage on, times the columns of a pass.
template <int TYPE>
INLINE void multiply_rows(Sums& sums, const u8* stage, int m, int block, int pass, const Inputs& x) {
  using S = StageOf<TYPE>;
  const int t = lane_id() & 3, first = m * 64 + lane_id(), second = first + 32;  // units of the stage
  const u32 magic = in_register(code_magic<TYPE>());
  RawUnit raw[2];
  PairedScales scales[2];
  if (!Format<TYPE>::IS_FLOAT) {
    const bool exists = N_UNITS % 4 == 0 || block * 4 + t < N_UNITS;
    S::load(raw[0], stage, first, block);
    S::load(raw[1], stage, second, block);
    paired_scales<TYPE>(scales[0], raw[0], t, exists);
    paired_scales<TYPE>(scales[1], raw[1], t, exists);
  }
  if constexpr (!Format<TYPE>::IS_FLOAT && !is_centred<TYPE>()) {
    u32 upper[2], lower[2];
    minimum_fragment<TYPE>(upper, scales[0]);
    minimum_fragment<TYPE>(lower, scales[1]);
#pragma unroll
    for (int n = 0; n < N_TILES; n++) mma_f16(sums[0][n], upper[0], lower[0], upper[1], lower[1], x.sums[n][0], x.sums[n][1]);
  }
#pragma unroll
  for (int i = 0; i < IN_PASS; i++) {
    const int j = i / RUN * 8 + pass * RUN + i % RUN;
    u32 upper[2], lower[2];
    if constexpr (Format<TYPE>::IS_FLOAT) {
      float_fragment<TYPE, S::STAGED_UNITS>(upper, stage, first, j);
      float_fragment<TYPE, S::STAGED_UNITS>(lower, stage, second, j);
    } else {
      fragment<TYPE>(upper, raw[0], scales[0], j, magic);
      fragment<TYPE>(lower, raw[1], scales[1], j, magic);
    }
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
      mma_f16(sums[i % CHAINS][n], upper[0], lower[0], upper[1], lower[1], x.fragments[n][i][0], x.fragments[n][i][1]);
  }
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

// Stores or adds this warp's sums of 16 rows from `row` of the item on.
INLINE void publish(float* parts, const Sums& sums, const Factors& factors, int row, bool adds) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  float* own = parts + (warp_id() * TOKEN_TILE + 2 * t) * SUM_STRIDE + row + g;
#pragma unroll
  for (int n = 0; n < N_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float* place = own + (n * 8 + (i & 1)) * SUM_STRIDE + (i >> 1) * 8;
      float sum = sums[0][n][i] + (CHAINS == 2 ? sums[CHAINS - 1][n][i] : 0.f);
      *place = (adds ? *place : 0.f) + sum * factors.of[n][i & 1];
    }
}

INLINE float total(const float* parts, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += parts[(w * TOKEN_TILE + token) * SUM_STRIDE + row];
  return sum;
}

#if GLU
INLINE float activate(float x) {
#if ACTIVATION == 0
  return x / (1.f + __expf(-x));
#else
  return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
#endif
}
// A warp stores 32 rows of a token, which are a group of codes.
INLINE void store_group(const FewCall& call, const float* parts, int token, int position, int first_row, int own) {
  static_assert(OWN_ROWS % 32 == 0, "whole groups of codes");
  const FewPart& part = call.parts[0];
  const int row = first_row + own;
  const bool exists = row < part.rows;
  float y = exists ? activate(total(parts, token, own)) * total(parts, token, OWN_ROWS + own) : 0.f;
  float largest = group_max<32>(fabsf(y));
  int code = __float2int_rn(y * (largest > 0 ? 127.f / largest : 0.f));
  if (!exists) return;
  ((i8*)part.output)[(u64)position * part.output_stride + row] = (i8)code;
  if (lane_id() == 0) call.output_scales[(u64)position * (part.output_stride / 32) + row / 32] = largest / 127.f;
}
#endif

INLINE void store_value(const FewCall& call, const FewPart& part, int position, int row, float y) {
  if (call.scale != 0) y *= call.scale;
  if (part.bias) y += part.bias[row];
  if (call.softcap != 0) y = call.softcap * tanhf(y / call.softcap);
  float* out = (float*)part.output + (u64)position * part.output_stride + row;
  *out = call.accumulate ? __ldcg(out) + y : y;
}

INLINE void finish(const FewCall& call, const SlotTiles& slots, const Item& item, const float* parts) {
  for (int o = threadIdx.x; o < TOKEN_TILE * OWN_ROWS; o += THREADS) {
    const int token = o / OWN_ROWS, row = o % OWN_ROWS;
    if (token >= item.tile.count) return;
    const int position = MIXTURE ? slots.order[item.tile.first + token] : token;
#if GLU
    store_group(call, parts, token, position, item.row, row);
#else
    const FewPart& part = part_of(call, item.part);
    if (item.row + row < part.rows) store_value(call, part, position, item.row + row, total(parts, token, row));
#endif
  }
}

INLINE void read_inputs(Inputs& x, const FewCall& call, const Tokens& tokens, int block, int pass) {
  if (FLOATS) {
    read_halves(x, call, tokens, block, pass);
  } else {
    Codes codes;
    load_codes(codes, call, tokens, block, pass);
    convert_codes(x, codes, tokens, pass);
  }
}

// A chunk times the columns of a pass. The loops stay loops: code that does not fit into the instruction cache is slower
// than what it saves.
template <int TYPE>
INLINE void multiply_chunk(float* parts, const u8* stage, int chunk, int block, int pass, const Inputs& x,
                           const Factors& factors) {
#if PROBE == 1
  if (factors.of[0][0] != 1e30f) return;
#endif
#pragma unroll 1
  for (int m = 0; m < M_TILES; m++) {
    Sums sums = {};
    multiply_rows<TYPE>(sums, stage, m, block, pass, x);
    publish(parts, sums, factors, chunk * CHUNK_ROWS + m * 16, block >= WARPS || pass > 0);
  }
}

// Whether inputs stay the same from item to item: a warp has one block of columns and all of its tokens.
constexpr bool KEEPS_INPUTS = !MIXTURE && N_BLOCKS <= WARPS && PASSES == 1;

// This warp's share of an item, into `parts`; `x` comes with the inputs of its first block of columns, if PASSES is 1.
INLINE void multiply_item(const FewCall& call, const Item& item, const Tokens& tokens, Inputs& x, Ring& ring,
                          float* parts) {
  Factors factors;
  find_factors(factors, tokens);
#pragma unroll 1
  for (int block = warp_id(); block < N_BLOCKS; block += WARPS) {
    if (PASSES == 1 && block >= WARPS) read_inputs(x, call, tokens, block, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const u8* stage = ring.arrived();
      const int kind = GLU ? chunk / (CHUNKS / 2) : item.part;
#pragma unroll
      for (int pass = 0; pass < PASSES; pass++) {
        if (PASSES > 1) read_inputs(x, call, tokens, block, pass);
        if (N_KINDS == 1 || kind == 0) multiply_chunk<TYPE_0>(parts, stage, chunk, block, pass, x, factors);
        else if (N_KINDS == 2 || kind == 1) multiply_chunk<TYPE_1>(parts, stage, chunk, block, pass, x, factors);
        else multiply_chunk<TYPE_2>(parts, stage, chunk, block, pass, x, factors);
      }
      ring.used();
    }
  }
}

// Tokens and the inputs of this warp's first block of columns, in two steps: what is asked for in the first has time to
// arrive before the second.
INLINE void ask_inputs(Tokens& tokens, Codes& codes, const FewCall& call, const SlotTiles& slots, const SlotTile& tile) {
  find_tokens(tokens, call, slots, tile);
  if (!FLOATS) load_codes(codes, call, tokens, warp_id(), 0);
}
INLINE void take_inputs(Inputs& x, Tokens& tokens, const Codes& codes, const FewCall& call) {
  if (FLOATS) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) tokens.largest[n] = 1.f;
    if (PASSES == 1) read_halves(x, call, tokens, warp_id(), 0);
  } else {
    find_largest(tokens, call, codes);
    if (PASSES == 1) convert_codes(x, codes, tokens, 0);
  }
}

KERNEL __launch_bounds__(THREADS, RESIDENT) few_tokens(const __grid_constant__ FewCall call) {
  DYNAMIC_SHARED(memory);  // sums, then the rings of the warps
  __shared__ SlotTiles slots;
  float* parts = (float*)memory;
  u8* stages = memory + WARPS * TOKEN_TILE * SUM_STRIDE * 4 + warp_id() * (STAGES * STAGE_BYTES);
  int n_items = call.n_items;
  if (MIXTURE && !EARLY) wait_for_inputs();
  let_next_start();  // in a mixture not before the wait: the kernel behind reads the chosen experts without waiting
  if (MIXTURE) {
    find_tiles(slots, call.ids, call.n_tokens * N_USED);
    n_items = slots.n_tiles * blocks_of(call.parts[0]);
  }
  Ring ring = {call, slots, stages, n_items};
  ring.start();
  if (!MIXTURE || EARLY) wait_for_inputs();
  if ((int)blockIdx.x >= n_items) return;
  Tokens tokens;
  Codes codes;
  Inputs x;
  Item item = item_at(call, slots, blockIdx.x);
  ask_inputs(tokens, codes, call, slots, item.tile);
  take_inputs(x, tokens, codes, call);
#pragma unroll 1
  for (int index = blockIdx.x;;) {
    multiply_item(call, item, tokens, x, ring, parts);
    const Item done = item;
    index += gridDim.x;
    if (index < n_items) {
      item = item_at(call, slots, index);
      if (!KEEPS_INPUTS) ask_inputs(tokens, codes, call, slots, item.tile);
    }
    __syncthreads();
    finish(call, slots, done, parts);
    if (index >= n_items) break;
    if (!KEEPS_INPUTS) take_inputs(x, tokens, codes, call);
    __syncthreads();
  }
  copy_async_wait<0>();
}
