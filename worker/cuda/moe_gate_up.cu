// hidden = act(gate x) * (up x) for the chosen experts of a few tokens; weights are read once per expert and token.
// Definitions: those of moe.cuh, TYPE_0 of gate, TYPE_1 of up, ACTIVATION (0 silu, 1 gelu), ROUNDS (tiles of a block).
//
// A block takes tiles of neighbouring rows of an expert, 16 at least, so that it can quantise what they make.
#include "activation.cuh"
#include "moe.cuh"
#include "outputs.cuh"

struct GateUpCall {
  Router router;
  const u8* gate;
  const u8* up;
  u64 gate_expert_bytes;
  u64 up_expert_bytes;
  Hidden hidden;
  const i8* codes;
  const float* scales;
  const float* sums;
  const float* values;
  const float* norm;
  float norm_epsilon;
};

constexpr int TOKEN_BYTES = QuantisedToken<COLS>::BYTES;
constexpr int GATE_BYTES = ROWS * Format<TYPE_0>::row_bytes(COLS), UP_BYTES = ROWS * Format<TYPE_1>::row_bytes(COLS);
constexpr int STAGE_BYTES = GATE_BYTES + UP_BYTES;
constexpr int AT_ONCE = WARPS * ROWS, TILE = AT_ONCE > 16 ? AT_ONCE : 16, PASSES = TILE / AT_ONCE, STEPS = ROUNDS * PASSES;
constexpr int TILES = (MATRIX_ROWS + TILE - 1) / TILE;  // of an expert
static_assert(TILE % 16 == 0 && TILE % AT_ONCE == 0 && MATRIX_ROWS % 16 == 0, "whole groups");

// What a warp does in a step: rows of one of a token's experts.
struct Step {
  int pair, row, count;
  INLINE explicit Step(int step) {
    const int tile = blockIdx.x + step / PASSES * gridDim.x;
    pair = tile / TILES;
    row = tile % TILES * TILE + (step % PASSES * WARPS + (int)warp_id()) * ROWS;
    count = pair < TOKENS * N_USED && step < STEPS ? max(0, min(ROWS, MATRIX_ROWS - row)) : 0;
  }
};

INLINE void fill_pair(const GateUpCall& call, const Experts& experts, int index, u8* stage, u64* barrier) {
  const Step step(index);
  u32 gate_bytes = step.count * Format<TYPE_0>::row_bytes(COLS), up_bytes = step.count * Format<TYPE_1>::row_bytes(COLS);
  if (index < STEPS) ring_expect(barrier, gate_bytes + up_bytes);
  if (step.count) {
    const u64 expert = experts.ids[step.pair], row = step.row;
    ring_copy(stage, call.gate + expert * call.gate_expert_bytes + row * Format<TYPE_0>::row_bytes(COLS), gate_bytes,
              barrier);
    ring_copy(stage + GATE_BYTES, call.up + expert * call.up_expert_bytes + row * Format<TYPE_1>::row_bytes(COLS),
              up_bytes, barrier);
  }
  ring_commit();
}

// The block's values [ROUNDS][TILE], four a thread, four threads a group.
INLINE void publish(const Hidden& hidden, const float* values) {
#pragma unroll
  for (int k = 0; k < SHARES<ROUNDS * TILE / 4, THREADS>; k++) {
    const int own = shared_out<THREADS>(k) * 4, at = own < ROUNDS * TILE ? own : 0;  // all lanes exchange values
    const int tile = blockIdx.x + at / TILE * gridDim.x, pair = tile / TILES, row = tile % TILES * TILE + at % TILE;
    const float4 v = *(const float4*)(values + at);
    const float largest = group_max<4>(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    const float inverse = largest > LEAST_QUANTISED ? __fdividef(127.f, largest) : 0.f, scale = largest * (1 / 127.f);
    const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
    const int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
    const int sum = group_sum<4>(a + b + c + d);
    if (own != at || pair >= TOKENS * N_USED || row >= MATRIX_ROWS) continue;
    const u64 index = (u64)pair * MATRIX_ROWS + row;
    *(u32*)(hidden.codes + index) = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (u32)(d & 255) << 24;
    if (row % 16 == 0) hidden.scales[index / 16] = scale, hidden.sums[index / 16] = scale * (float)sum;
  }
}

// What of the first token is fetched ahead: its row as soon as the inputs are there, the norm before.
struct Ahead {
#if PROLOGUE != QUANTISED
  RowShare<COLS, THREADS> row;
#endif
#if PROLOGUE == NORMED
  RowShare<COLS, THREADS> norm;
#endif
};
INLINE void fetch_norm(Ahead& ahead, const GateUpCall& call) {
#if PROLOGUE == NORMED
  ahead.norm.template load<false>(call.norm);
#endif
}
INLINE void fetch_row(Ahead& ahead, const GateUpCall& call) {
#if PROLOGUE != QUANTISED
  ahead.row.template load<true>(call.values);
#endif
}

INLINE void stage_inputs(const GateUpCall& call, Ahead& ahead, u8* memory, float* scratch) {
  for (int t = 0; t < TOKENS; t++) {
    QuantisedToken<COLS> token = {memory + t * TOKEN_BYTES};
#if PROLOGUE == QUANTISED
    stage_quantised<COLS, THREADS>(token, call.codes + (u64)t * COLS, call.scales + t * (COLS / 32),
                                   call.sums + t * (COLS / 32));
#else
    if (t > 0) ahead.row.template load<true>(call.values + (u64)t * COLS);
#if PROLOGUE == NORMED
    static_assert(TOKENS == 1, "a norm is for one token");
    const float squares = warp_sum(ahead.row.squares());
    if (lane_id() == 0) scratch[warp_id()] = squares;
    ahead.row.weigh(ahead.norm);
#endif
    ahead.row.quantise(token, 1.f);
#endif
  }
}

KERNEL __launch_bounds__(THREADS, blocks_together(TOKENS)) gate_up(const __grid_constant__ GateUpCall call) {
  DYNAMIC_SHARED(memory);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ float scratch[32];
  __shared__ Experts lists[EXPERT_LISTS];
  __shared__ __align__(16) float values[ROUNDS * TILE];
  u8* ring = memory + TOKENS * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  Ahead ahead;
  fetch_norm(ahead, call);
  if (!DENSE) {
    wait_for_inputs();
    fetch_row(ahead, call);
  }
  let_next_start();  // in a mixture not before the wait: the kernel behind reads the router's result without waiting
  Choice choice;
  find_experts(lists, call.router, choice);
  const Experts& experts = lists[CHOOSE ? warp_id() : 0];
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_pair(call, experts, s, ring + s * STAGE_BYTES, barrier + s);
  if (DENSE) {
    wait_for_inputs();
    fetch_row(ahead, call);
  }
  stage_inputs(call, ahead, memory, scratch);
  __syncthreads();
  const float factor = PROLOGUE == NORMED ? inverse_rms<COLS, WARPS>(scratch, call.norm_epsilon) : 1.f;
  constexpr bool HELD = UNITS <= 32 && TOKENS == 1;  // a lane's activations are the same in all steps
  Activations<false> held;
  if (HELD) QuantisedToken<COLS>{memory}.read(held, min((int)lane_id(), UNITS - 1));
  for (int index = 0; index < STEPS; index++) {
    const Step step(index);
    const int stage = index % STAGES;
    ring_wait<STAGES - 1>(barrier + stage, index / STAGES);
    QuantisedToken<COLS> token = {memory + min(step.pair / N_USED, TOKENS - 1) * TOKEN_BYTES};
    float sums[2 * ROWS] = {};  // of gate, of up
#pragma unroll (unroll_of((UNITS + 31) / 32))
    for (int unit = lane_id(); unit < UNITS; unit += 32) {
      Activations<false> x = held;
      if (!HELD) token.read(x, unit);
      add_unit<TYPE_0>(sums, ring + stage * STAGE_BYTES, unit, x);
      add_unit<TYPE_1>(sums + ROWS, ring + stage * STAGE_BYTES + GATE_BYTES, unit, x);
    }
    if (STEPS > STAGES) {
      __syncwarp();
      fill_pair(call, experts, index + STAGES, ring + stage * STAGE_BYTES, barrier + stage);
    } else {
      ring_commit();
    }
#pragma unroll
    for (int i = 0; i < 2 * ROWS; i++) sums[i] *= factor;
    const float gate = warp_sums(sums), up = __shfl_down_sync(FULL_WARP, gate, 16);
    const int r = lane_id() / (16 / ROWS);
    if (lane_id() % (16 / ROWS) == 0 && r < ROWS)
      values[index * AT_ONCE + warp_id() * ROWS + r] = r < step.count ? activate<true>(gate, ACTIVATION) * up : 0.f;
  }
  __syncthreads();
  publish(call.hidden, values);
}
