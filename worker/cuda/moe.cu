// Experts of a mixture for a few tokens, weights read once per chosen expert and token: hidden = act(gate x) * (up x),
// then y (+)= sum over the chosen experts of weight * down hidden.
//
// Definitions: COLS (of gate and up in `gate_up`, of down in `down`), TYPE_0 (gate, or down), TYPE_1 (up), TOKENS,
// N_EXPERTS, N_USED, WARPS, STAGES, ROWS, ACTIVATION (0 silu, 1 gelu), PROLOGUE, CHOOSE. With CHOOSE the block finds
// the experts itself from router logits (one token); otherwise ids and weights are given.
#include "activations.cuh"
#include "top_k.cuh"

#define QUANTISED 0
#define PLAIN 1
#define NORMED 2

#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = QuantisedToken<COLS>::UNITS;
constexpr int TOKEN_BYTES = QuantisedToken<COLS>::BYTES;

struct Router {
  const int* ids;        // [TOKENS][N_USED], read unless CHOOSE
  const float* weights;  // [TOKENS][N_USED]
  const float* logits;   // [N_EXPERTS], read with CHOOSE
  const float* bias;     // or null
  float logit_factor;
  float weights_scale;
  int sigmoid;
  int normalise;
};
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
  int rows;
};
struct DownCall {
  Router router;
  const u8* down;
  u64 expert_bytes;
  const float* hidden;  // f32 [TOKENS][N_USED][COLS], or codes
  const i8* codes;
  const float* scales;
  const float* sums;
  float* output;
  int rows;
  int output_stride;
  int accumulate;
};

INLINE float activate(float x) {
#if ACTIVATION == 0
  return x / (1.f + __expf(-x));
#else
  return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
#endif
}

struct Experts {
  int ids[TOKENS * N_USED];
  float weights[TOKENS * N_USED];
};

// ids and weights of all tokens into shared memory; ends with a barrier
INLINE void find_experts(Experts& experts, const Router& router) {
#if CHOOSE
  __shared__ Chosen<N_EXPERTS, N_USED> chosen;
  choose_experts<N_EXPERTS, N_USED, THREADS>(chosen, router.logits, router.bias, router.logit_factor, router.sigmoid,
                                             router.normalise, router.weights_scale);
  if (threadIdx.x < N_USED) {
    experts.ids[threadIdx.x] = chosen.ids[threadIdx.x];
    experts.weights[threadIdx.x] = chosen.weights[threadIdx.x];
  }
#else
  for (int i = threadIdx.x; i < TOKENS * N_USED; i += THREADS) {
    experts.ids[i] = __ldcg(router.ids + i);
    experts.weights[i] = router.weights ? __ldcg(router.weights + i) : 1.f;
  }
#endif
  __syncthreads();
}

// One unit of ROWS rows with one token's activations.
template <int TYPE>
INLINE void add_unit(float (&sums)[ROWS], const u8* rows, int unit, const UnitActivations& x) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    RawUnit raw;
    Scales scales;
    u32 codes[16];
    load_unit<TYPE, FromShared>(raw, rows + r * Format<TYPE>::row_bytes(COLS), UNITS, unit);
    unit_scales<TYPE>(scales, raw, unit);
#pragma unroll
    for (int j = 0; j < 16; j++) codes[j] = unit_codes<TYPE>(raw, j);
    sums[r] += unit_dot<TYPE>(codes, scales, x);
  }
}

#ifdef GATE_UP
constexpr int GATE_BYTES = ROWS * Format<TYPE_0>::row_bytes(COLS), UP_BYTES = ROWS * Format<TYPE_1>::row_bytes(COLS);
constexpr int STAGE_BYTES = GATE_BYTES + UP_BYTES;

INLINE void fill_pair(const GateUpCall& call, const Experts& experts, int index, int n_groups, u8* stage, u64* barrier) {
  if (index < n_groups) {
    const int per_expert = (call.rows + ROWS - 1) / ROWS;
    int row = index % per_expert * ROWS, count = min(ROWS, call.rows - row);
    u64 expert = experts.ids[index / per_expert];
    u32 gate_bytes = count * Format<TYPE_0>::row_bytes(COLS), up_bytes = count * Format<TYPE_1>::row_bytes(COLS);
    ring_expect(barrier, gate_bytes + up_bytes);
    ring_copy(stage, call.gate + expert * call.gate_expert_bytes + (u64)row * Format<TYPE_0>::row_bytes(COLS), gate_bytes,
              barrier);
    ring_copy(stage + GATE_BYTES, call.up + expert * call.up_expert_bytes + (u64)row * Format<TYPE_1>::row_bytes(COLS),
              up_bytes, barrier);
  }
  ring_commit();
}

INLINE void stage_inputs(const GateUpCall& call, u8* memory, float* scratch) {
  for (int t = 0; t < TOKENS; t++) {
    QuantisedToken<COLS> token = {memory + t * TOKEN_BYTES};
#if PROLOGUE == QUANTISED
    stage_quantised<COLS, THREADS>(token, call.codes + (u64)t * COLS, call.scales + t * (COLS / 32),
                                   call.sums + t * (COLS / 32));
#else
    RowShare<COLS, THREADS> row;
    row.template load<true>(call.values + (u64)t * COLS);
#if PROLOGUE == NORMED
    RowShare<COLS, THREADS> norm;
    norm.template load<false>(call.norm);
    float inverse_rms = rsqrtf(block_sum<THREADS>(row.squares(), scratch) * (1.f / COLS) + call.norm_epsilon);
    row.normalise(norm, inverse_rms);
    if (TOKENS > 1) __syncthreads();
#endif
    row.quantise(token, 1.f);
#endif
  }
}

KERNEL __launch_bounds__(THREADS) gate_up(const __grid_constant__ GateUpCall call) {
  DYNAMIC_SHARED(memory);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ float scratch[32];
  __shared__ Experts experts;
  const int per_expert = (call.rows + ROWS - 1) / ROWS, n_groups = per_expert * TOKENS * N_USED;
  const int first = blockIdx.x + warp_id() * gridDim.x, n_warps = gridDim.x * WARPS;
  u8* ring = memory + TOKENS * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  wait_for_inputs();
  let_next_start();  // not before: the kernel behind reads the router's result without waiting for this one
  find_experts(experts, call.router);
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_pair(call, experts, first + s * n_warps, n_groups, ring + s * STAGE_BYTES, barrier + s);
  stage_inputs(call, memory, scratch);
  __syncthreads();
  int stage = 0, round = 0;
  for (int index = first; index < n_groups; index += n_warps) {
    ring_wait<STAGES - 1>(barrier + stage, round);
    int pair = index / per_expert, row = index % per_expert * ROWS;
    QuantisedToken<COLS> token = {memory + pair / N_USED * TOKEN_BYTES};
    float gate[ROWS] = {}, up[ROWS] = {};
    for (int unit = lane_id(); unit < UNITS; unit += 32) {
      UnitActivations x;
      token.read(x, unit);
      add_unit<TYPE_0>(gate, ring + stage * STAGE_BYTES, unit, x);
      add_unit<TYPE_1>(up, ring + stage * STAGE_BYTES + GATE_BYTES, unit, x);
    }
    __syncwarp();
    fill_pair(call, experts, index + STAGES * n_warps, n_groups, ring + stage * STAGE_BYTES, barrier + stage);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float g = warp_sum(gate[r]), u = warp_sum(up[r]);
      if (lane_id() == r && row + r < call.rows) call.hidden[(u64)pair * call.rows + row + r] = activate(g) * u;
    }
    if (++stage == STAGES) stage = 0, round++;
  }
}
#else  // down
constexpr int EXPERT_STAGE_BYTES = ROWS * Format<TYPE_0>::row_bytes(COLS);
constexpr int STAGE_BYTES = N_USED * EXPERT_STAGE_BYTES;

INLINE void fill_row(const DownCall& call, const Experts& experts, int index, int n_groups, u8* stage, u64* barrier) {
  if (index < n_groups) {
    const int per_token = (call.rows + ROWS - 1) / ROWS;
    int row = index % per_token * ROWS, token = index / per_token;
    u32 bytes = min(ROWS, call.rows - row) * Format<TYPE_0>::row_bytes(COLS);
    ring_expect(barrier, bytes * N_USED);
    for (int k = 0; k < N_USED; k++)
      ring_copy(stage + k * EXPERT_STAGE_BYTES,
                call.down + (u64)experts.ids[token * N_USED + k] * call.expert_bytes +
                    (u64)row * Format<TYPE_0>::row_bytes(COLS),
                bytes, barrier);
  }
  ring_commit();
}

// The hidden values of all slots, with the experts' weights in their scales.
INLINE void stage_hidden(const DownCall& call, const Experts& experts, u8* memory) {
  for (int slot = 0; slot < TOKENS * N_USED; slot++) {
    QuantisedToken<COLS> token = {memory + slot * TOKEN_BYTES};
#if PROLOGUE == QUANTISED
    stage_quantised<COLS, THREADS>(token, call.codes + (u64)slot * COLS, call.scales + slot * (COLS / 32),
                                   call.sums + slot * (COLS / 32));
#endif
  }
#if PROLOGUE == QUANTISED
  __syncthreads();
  for (int i = threadIdx.x; i < TOKENS * N_USED * UNITS * 2; i += THREADS) {
    int slot = i / (UNITS * 2), group = i % (UNITS * 2);
    QuantisedToken<COLS> token = {memory + slot * TOKEN_BYTES};
    token.scales()[group] *= experts.weights[slot];
    token.sums()[group] *= experts.weights[slot];
  }
#else
  constexpr int CHUNKS = UNITS * 16;  // of four columns
  for (int base = 0; base < TOKENS * N_USED * CHUNKS; base += THREADS) {
    int i = base + threadIdx.x, slot = min(i / CHUNKS, TOKENS * N_USED - 1), column = i % CHUNKS * 4;
    bool inside = i < TOKENS * N_USED * CHUNKS && column < COLS;
    float4 v = inside ? load_fresh4(call.hidden + (u64)slot * COLS + column) : make_float4(0, 0, 0, 0);
    if (i >= TOKENS * N_USED * CHUNKS) column = UNITS * 64;  // stores nothing
    quantise4<COLS>(QuantisedToken<COLS>{memory + slot * TOKEN_BYTES}, v, column, experts.weights[slot]);
  }
#endif
}

KERNEL __launch_bounds__(THREADS) down(const __grid_constant__ DownCall call) {
  DYNAMIC_SHARED(memory);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ Experts experts;
  const int per_token = (call.rows + ROWS - 1) / ROWS, n_groups = per_token * TOKENS;
  const int first = blockIdx.x + warp_id() * gridDim.x, n_warps = gridDim.x * WARPS;
  u8* ring = memory + TOKENS * N_USED * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  let_next_start();
#if !CHOOSE_EARLY
  wait_for_inputs();
#endif
  find_experts(experts, call.router);
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_row(call, experts, first + s * n_warps, n_groups, ring + s * STAGE_BYTES, barrier + s);
#if CHOOSE_EARLY  // sound because gate_up lets this kernel start only after its own wait: the router is done
  wait_for_inputs();
#endif
  stage_hidden(call, experts, memory);
  __syncthreads();
  int stage = 0, round = 0;
  for (int index = first; index < n_groups; index += n_warps) {
    ring_wait<STAGES - 1>(barrier + stage, round);
    int token = index / per_token, row = index % per_token * ROWS;
    float sums[ROWS] = {};
    for (int i = lane_id(); i < N_USED * UNITS; i += 32) {
      int slot = i / UNITS, unit = i % UNITS;
      UnitActivations x;
      QuantisedToken<COLS>{memory + (token * N_USED + slot) * TOKEN_BYTES}.read(x, unit);
      add_unit<TYPE_0>(sums, ring + stage * STAGE_BYTES + slot * EXPERT_STAGE_BYTES, unit, x);
    }
    __syncwarp();
    fill_row(call, experts, index + STAGES * n_warps, n_groups, ring + stage * STAGE_BYTES, barrier + stage);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float y = warp_sum(sums[r]);
      if (lane_id() != r || row + r >= call.rows) continue;
      float* out = call.output + (u64)token * call.output_stride + row + r;
      *out = call.accumulate ? __ldcg(out) + y : y;
    }
    if (++stage == STAGES) stage = 0, round++;
  }
}
#endif
