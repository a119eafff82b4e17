// y = W x for 2 to 32 tokens on tensor cores, at the speed at which weights arrive. A warp streams weights through
// stages of its own in shared memory, a chunk (some rows, 256 columns) at a time, and goes on from one item of its
// block (some rows times up to TOKEN_TILE tokens) to the next without a pause; the warps of a block share the columns
// of an item out and add up at its end.
//
// Definitions: COLS, TOKEN_TILE (8, 16), CHUNK_ROWS (16, 32), CHUNKS (of an item), WARPS, STAGES, RESIDENT (blocks of a
// multiprocessor), N_EXPERTS (1: dense), N_USED, EARLY (the chosen experts are known before the inputs are there), GLU.
// With GLU the first half of the chunks is of gate (TYPE_0), the second of up (TYPE_1), the output act(gate) * up as
// codes; ACTIVATION 0 silu, 1 gelu. Without, a launch takes up to three matrices of one input, of types TYPE_0 to
// TYPE_2.
#include "activation.cuh"
#include "few_inputs.cuh"
#include "outputs.cuh"

// The chunks of a warp, in the order in which it takes them: those of a block of columns, blocks of columns, items. Its
// stages are a ring, which is one chunk short of full while the warp works on one.
struct Ring {
  const FewCall& call;
  const SlotTiles& slots;
  u8* stages;
  u8* inputs;
  int n_items;
  int item, block, chunk;        // the chunk to fetch next
  int stage, input, next_input;  // the stages to work on, and the one of inputs to fill next
  bool is_fresh;
  Item at;

  // Before inputs are there, only weights can be fetched.
  INLINE void start() {
    item = blockIdx.x, block = warp_id(), chunk = stage = input = next_input = 0;
    is_fresh = true;
    if (item < n_items) at = item_at(call, slots, item);
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) fetch(stages + s * STAGE_BYTES, false);
  }
  // The inputs that belong to what start() has fetched.
  INLINE void start_inputs() {
    copy_inputs(inputs, call, slots, item_at(call, slots, blockIdx.x).tile, warp_id());
    const int next_block = warp_id() + WARPS < N_BLOCKS ? warp_id() + WARPS : warp_id();
    const int next_item = blockIdx.x + (next_block == (int)warp_id() ? gridDim.x : 0);
    if (INPUT_STAGES == 2 && !KEEPS_INPUTS && next_item < n_items)
      copy_inputs(inputs + INPUT_BYTES, call, slots, item_at(call, slots, next_item).tile, next_block);
    copy_async_commit();
  }
  INLINE const u8* arrived() {
    if (is_fresh) copy_async_wait<0>();  // the inputs came last
    else copy_async_wait<STAGES - 1>();
    is_fresh = false;
    __syncwarp();
    return stages + stage * STAGE_BYTES;
  }
  INLINE const u8* next_inputs() {
    const u8* next = inputs + input * INPUT_BYTES;
    if (INPUT_STAGES == 2) input ^= 1;
    return next;
  }
  INLINE void used() {
    __syncwarp();
    fetch(stages + stage * STAGE_BYTES, !KEEPS_INPUTS);
    if (++stage == STAGES) stage = 0;
  }

  // Starts the copy of the next chunk, or of nothing beyond the last item; a group of copies either way.
  INLINE void fetch(u8* target, bool with_inputs) {
    if (item < n_items) {
      const int index = GLU ? chunk / (CHUNKS / 2) : at.part;
      const int row = at.row + (GLU ? chunk % (CHUNKS / 2) : chunk) * CHUNK_ROWS;
      const FewPart& part = part_of(call, index);
      const u8* weights = part.weights + at.tile.expert * part.expert_bytes;
      if (has_first_type(index)) copy<TYPE_0>(target, weights, row, part.rows);
      else if (has_second_type(index)) copy<TYPE_1>(target, weights, row, part.rows);
      else copy<TYPE_2>(target, weights, row, part.rows);
      if (chunk == 0) {
        if (with_inputs) copy_inputs(inputs + next_input * INPUT_BYTES, call, slots, at.tile, block);
        if (INPUT_STAGES == 2) next_input ^= 1;
      }
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

// Sums of 16 rows; two chains of products where one would be too slow.
constexpr int CHAINS = N_TILES == 1 ? 2 : 1;
typedef float Sums[CHAINS][N_TILES][4];

// 16 rows from row 16 * m of a stage on, times a block of columns.
template <int TYPE>
INLINE void multiply_rows(Sums& sums, const u8* stage, int m, int block, const Inputs& x) {
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
    for (int n = 0; n < N_TILES; n++)
      mma_f16(sums[0][n], upper[0], lower[0], upper[1], lower[1], x.sums[n][0], x.sums[n][1]);
  }
#pragma unroll
  for (int j = 0; j < 16; j++) {
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
      mma_f16(sums[j % CHAINS][n], upper[0], lower[0], upper[1], lower[1], x.fragments[n][j][0], x.fragments[n][j][1]);
  }
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
// A warp stores 32 rows of a token, which are a group of codes.
INLINE void store_group(const FewCall& call, const float* parts, int token, int position, int first_row, int own) {
  static_assert(OWN_ROWS % 32 == 0, "whole groups of codes");
  const FewPart& part = call.parts[0];
  const int row = first_row + own;
  const bool exists = row < part.rows;
  float y = exists ? activate(total(parts, token, own), ACTIVATION) * total(parts, token, OWN_ROWS + own) : 0.f;
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
    const int position = MIXTURE ? slots.order[item.tile.first + token] : item.tile.first + token;
#if GLU
    store_group(call, parts, token, position, item.row, row);
#else
    const FewPart& part = part_of(call, item.part);
    if (item.row + row < part.rows) store_value(call, part, position, item.row + row, total(parts, token, row));
#endif
  }
}

// A chunk times a block of columns. The loops stay loops: code that does not fit into the instruction cache is slower
// than what it saves.
template <int TYPE>
INLINE void multiply_chunk(float* parts, const u8* stage, int chunk, int block, const Inputs& x,
                           const Factors& factors) {
#pragma unroll 1
  for (int m = 0; m < M_TILES; m++) {
    Sums sums = {};
    multiply_rows<TYPE>(sums, stage, m, block, x);
    publish(parts, sums, factors, chunk * CHUNK_ROWS + m * 16, block >= WARPS);
  }
}

// What a warp knows of its tokens, from item to item where they stay the same.
struct Work {
  Tokens tokens;
  Factors factors;
  Inputs x;
};

// This warp's share of an item, into `parts`.
INLINE void multiply_item(Work& work, const FewCall& call, const SlotTiles& slots, const Item& item, Ring& ring,
                          float* parts, bool is_first) {
#pragma unroll 1
  for (int block = warp_id(); block < N_BLOCKS; block += WARPS) {
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const u8* stage = ring.arrived();
      if (chunk == 0 && (is_first || !KEEPS_INPUTS)) {
        const u8* inputs = ring.next_inputs();
        if (block < WARPS && (is_first || MIXTURE)) {
          find_tokens(work.tokens, call, slots, item.tile, inputs);
          find_factors(work.factors, work.tokens);
        }
        take_inputs(work.x, inputs, work.tokens);
      }
      const int part = GLU ? chunk / (CHUNKS / 2) : item.part;
      if (has_first_type(part)) multiply_chunk<TYPE_0>(parts, stage, chunk, block, work.x, work.factors);
      else if (has_second_type(part)) multiply_chunk<TYPE_1>(parts, stage, chunk, block, work.x, work.factors);
      else multiply_chunk<TYPE_2>(parts, stage, chunk, block, work.x, work.factors);
      ring.used();
    }
  }
}

KERNEL __launch_bounds__(THREADS, RESIDENT) few_tokens(const __grid_constant__ FewCall call) {
  DYNAMIC_SHARED(memory);  // sums, then of each warp its stages of weights and of inputs
  __shared__ SlotTiles slots;
  constexpr int WARP_BYTES = STAGES * STAGE_BYTES + INPUT_STAGES * INPUT_BYTES;
  float* parts = (float*)memory;
  u8* stages = memory + WARPS * TOKEN_TILE * SUM_STRIDE * 4 + warp_id() * WARP_BYTES;
  int n_items = call.n_items;
  if (MIXTURE && !EARLY) wait_for_inputs();
  let_next_start();  // in a mixture not before the wait: the kernel behind reads the chosen experts without waiting
  if (MIXTURE) {
    find_tiles(slots, call.ids, call.n_tokens * N_USED);
    n_items = slots.n_tiles * blocks_of(call.parts[0]);
  }
  Ring ring = {call, slots, stages, stages + STAGES * STAGE_BYTES, n_items};
  ring.start();
  if (!MIXTURE || EARLY) wait_for_inputs();
  if ((int)blockIdx.x >= n_items) return;
  ring.start_inputs();
  Work work;
#pragma unroll 1
  for (int index = blockIdx.x; index < n_items; index += gridDim.x) {
    const Item item = item_at(call, slots, index);
    multiply_item(work, call, slots, item, ring, parts, index == (int)blockIdx.x);
    __syncthreads();
    finish(call, slots, item, parts);
    __syncthreads();
  }
  copy_async_wait<0>();
}
