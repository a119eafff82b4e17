// hidden = act(gate x) * (up x) for the chosen experts of a few tokens; weights are read once per expert and token.
// Definitions: those of moe.cuh, TYPE_0 of gate, TYPE_1 of up, ACTIVATION (0 silu, 1 gelu).
#include "moe.cuh"

struct GateUpCall {
  Router router;
  const u8* gate;
  const u8* up;
  u64 gate_expert_bytes;
  u64 up_expert_bytes;
  float* hidden;  // [TOKENS][N_USED][rows]
  const i8* codes;
  const float* scales;
  const float* sums;
  const float* values;
  const float* norm;
  float norm_epsilon;
};

INLINE float activate(float x) {
#if ACTIVATION == 0
  return x / (1.f + __expf(-x));
#else
  return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
#endif
}

constexpr int GATE_BYTES = ROWS * Format<TYPE_0>::row_bytes(COLS), UP_BYTES = ROWS * Format<TYPE_1>::row_bytes(COLS);
constexpr int STAGE_BYTES = GATE_BYTES + UP_BYTES, PER_EXPERT = (MATRIX_ROWS + ROWS - 1) / ROWS;

INLINE void fill_pair(const GateUpCall& call, const Experts& experts, int index, int n_groups, u8* stage, u64* barrier) {
  if (index < n_groups) {
    int row = index % PER_EXPERT * ROWS, count = min(ROWS, MATRIX_ROWS - row);
    u64 expert = experts.ids[index / PER_EXPERT];
    u32 gate_bytes = count * Format<TYPE_0>::row_bytes(COLS), up_bytes = count * Format<TYPE_1>::row_bytes(COLS);
    ring_expect(barrier, gate_bytes + up_bytes);
    ring_copy(stage, call.gate + expert * call.gate_expert_bytes + (u64)row * Format<TYPE_0>::row_bytes(COLS), gate_bytes,
              barrier);
    ring_copy(stage + GATE_BYTES, call.up + expert * call.up_expert_bytes + (u64)row * Format<TYPE_1>::row_bytes(COLS),
              up_bytes, barrier);
  }
  ring_commit();
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
    float inverse_rms = rsqrtf(block_sum<THREADS>(ahead.row.squares(), scratch) * (1.f / COLS) + call.norm_epsilon);
    ahead.row.normalise(ahead.norm, inverse_rms);
    if (TOKENS > 1) __syncthreads();
#endif
    ahead.row.quantise(token, 1.f);
#endif
  }
}

KERNEL __launch_bounds__(THREADS) gate_up(const __grid_constant__ GateUpCall call) {
  DYNAMIC_SHARED(memory);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ float scratch[32];
  __shared__ Experts experts;
  constexpr int n_groups = PER_EXPERT * TOKENS * N_USED;
  const int first = blockIdx.x + warp_id() * gridDim.x, n_warps = gridDim.x * WARPS;
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
  find_experts(experts, call.router, false);
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_pair(call, experts, first + s * n_warps, n_groups, ring + s * STAGE_BYTES, barrier + s);
  if (DENSE) {
    wait_for_inputs();
    fetch_row(ahead, call);
  }
  stage_inputs(call, ahead, memory, scratch);
  __syncthreads();
  int stage = 0, round = 0;
  for (int index = first; index < n_groups; index += n_warps) {
    ring_wait<STAGES - 1>(barrier + stage, round);
    int pair = index / PER_EXPERT, row = index % PER_EXPERT * ROWS;
    QuantisedToken<COLS> token = {memory + pair / N_USED * TOKEN_BYTES};
    float sums[2 * ROWS] = {};  // of gate, of up
#pragma unroll (UNROLL)
    for (int unit = lane_id(); unit < UNITS; unit += 32) {
      UnitActivations x;
      token.read(x, unit);
      add_unit<TYPE_0>(sums, ring + stage * STAGE_BYTES, unit, x);
      add_unit<TYPE_1>(sums + ROWS, ring + stage * STAGE_BYTES + GATE_BYTES, unit, x);
    }
    __syncwarp();
    fill_pair(call, experts, index + STAGES * n_warps, n_groups, ring + stage * STAGE_BYTES, barrier + stage);
    const float gate = warp_sums(sums), up = __shfl_down_sync(FULL_WARP, gate, 16);
    const int r = lane_id() / (16 / ROWS);
    if (lane_id() % (16 / ROWS) == 0 && r < ROWS && row + r < MATRIX_ROWS)
      call.hidden[(u64)pair * MATRIX_ROWS + row + r] = activate(gate) * up;
    if (++stage == STAGES) stage = 0, round++;
  }
}
