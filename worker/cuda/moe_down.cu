// y (+)= the sum over a token's chosen experts of weight * down hidden; a warp takes one row of all chosen experts.
// Definitions: those of moe.cuh, CHOOSE_EARLY (the router's result is there before the inputs are).
#include "moe.cuh"

struct DownCall {
  Router router;
  const u8* down;
  u64 expert_bytes;
  Hidden hidden;
  const float* residual;  // what the sum is added to, strided as the output and perhaps the same; or null
  float* output;
  int output_stride;
};

typedef QuantisedToken<COLS, true> Token;
constexpr int TOKEN_BYTES = Token::BYTES;
constexpr int EXPERT_STAGE_BYTES = ROWS * Format<TYPE_0>::row_bytes(COLS);
constexpr int STAGE_BYTES = N_USED * EXPERT_STAGE_BYTES, PER_TOKEN = (MATRIX_ROWS + ROWS - 1) / ROWS;

INLINE void fill_row(const DownCall& call, const Experts& experts, int index, int n_groups, u8* stage, u64* barrier) {
  if (index < n_groups) {
    int row = index % PER_TOKEN * ROWS, token = index / PER_TOKEN;
    u32 bytes = min(ROWS, MATRIX_ROWS - row) * Format<TYPE_0>::row_bytes(COLS);
    ring_expect(barrier, bytes * N_USED);
    __syncwarp();
    for (int base = 0; base < N_USED; base += 32) {
      const int k = min(base + (int)lane_id(), N_USED - 1);
      ring_copy_each(stage + k * EXPERT_STAGE_BYTES,
                     call.down + (u64)experts.ids[token * N_USED + k] * call.expert_bytes +
                         (u64)row * Format<TYPE_0>::row_bytes(COLS),
                     bytes, barrier, min(32, N_USED - base));
    }
  }
  ring_commit();
}

// The hidden values of all slots, with the experts' weights in their scales; zeros in the half unit that a row ends in.
INLINE void stage_hidden(const Hidden& hidden, const Experts& experts, u8* memory) {
  constexpr int WORDS = TOKENS * N_USED * UNITS * 4, N = SHARES<WORDS, THREADS>;  // of 16 columns
  int4 codes[N];
  float2 factors[N];
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int i = shared_out<THREADS>(k), slot = i / (UNITS * 4), word = i % (UNITS * 4), at = slot * (COLS / 16) + word;
    const bool inside = i < WORDS && word * 16 < COLS;
    codes[k] = inside ? __ldcg((const int4*)hidden.codes + at) : make_int4(0, 0, 0, 0);
    factors[k] = inside ? make_float2(__ldcg(hidden.scales + at), __ldcg(hidden.sums + at)) : make_float2(0, 0);
  }
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int i = shared_out<THREADS>(k), slot = min(i / (UNITS * 4), TOKENS * N_USED - 1), word = i % (UNITS * 4);
    const float other = __shfl_xor_sync(FULL_WARP, factors[k].y, 1);  // sums are per 32 columns
    if (i >= WORDS) continue;
    const Token token = {memory + slot * TOKEN_BYTES};
    token.codes(word & 3)[word >> 2] = codes[k];
    token.scales()[word] = factors[k].x * experts.weights[slot];
    if (word % 2 == 0) token.sums()[word / 2] = (factors[k].y + other) * experts.weights[slot];
  }
}

// 1 / rms of the row that a folded router did not divide by.
INLINE float logit_scale(const RouterRule& rule) {
#if FOLDED
  __shared__ float scratch[32];
  RowShare<MATRIX_ROWS, THREADS> row;
  row.template load<true>(rule.residual);
  return rsqrtf(block_sum<THREADS>(row.squares(), scratch) * (1.f / MATRIX_ROWS) + rule.epsilon);
#else
  return 1.f;
#endif
}

KERNEL __launch_bounds__(THREADS, blocks_together(TOKENS)) down(const __grid_constant__ DownCall call) {
  DYNAMIC_SHARED(memory);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ Experts lists[EXPERT_LISTS];
  constexpr int n_groups = PER_TOKEN * TOKENS;
  const int first = blockIdx.x + warp_id() * gridDim.x, n_warps = gridDim.x * WARPS;
  u8* ring = memory + TOKENS * N_USED * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  let_next_start();
  if (!(CHOOSE_EARLY || DENSE)) wait_for_inputs();
  Choice choice;
  find_experts(lists, call.router, choice);
  Experts& experts = lists[CHOOSE ? warp_id() : 0];
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_row(call, experts, first + s * n_warps, n_groups, ring + s * STAGE_BYTES, barrier + s);
#if CHOOSE  // the copies are under way: the weights may take their time
  const float weight = choice.weight(call.router.rule, logit_scale(call.router.rule));
  if (lane_id() < N_USED) experts.weights[lane_id()] = weight;
  __syncwarp();
#endif
  // the early choice is sound because gate_up lets this kernel start only after its own wait: the router is done
  if (CHOOSE_EARLY || DENSE) wait_for_inputs();
  stage_hidden(call.hidden, experts, memory);
  __syncthreads();
  int stage = 0, round = 0;
  for (int index = first; index < n_groups; index += n_warps) {
    int token = index / PER_TOKEN, row = index % PER_TOKEN * ROWS;
    const int r = lane_id() / (32 / ROWS);  // whose sum this lane will have
    const u64 at = (u64)token * call.output_stride + row + r;
    bool writes = lane_id() % (32 / ROWS) == 0 && row + r < MATRIX_ROWS;
    float old = writes && call.residual ? __ldcg(call.residual + at) : 0.f;  // on its way while the weights are waited for
    float sums[ROWS] = {};
    ring_wait<STAGES - 1>(barrier + stage, round);
#pragma unroll (unroll_of((N_USED * UNITS + 31) / 32))
    for (int i = lane_id(); i < N_USED * UNITS; i += 32) {
      int slot = i / UNITS, unit = i % UNITS;
      Activations<true> x;
      Token{memory + (token * N_USED + slot) * TOKEN_BYTES}.read(x, unit);
      add_unit<TYPE_0>(sums, ring + stage * STAGE_BYTES + slot * EXPERT_STAGE_BYTES, unit, x);
    }
    __syncwarp();
    fill_row(call, experts, index + STAGES * n_warps, n_groups, ring + stage * STAGE_BYTES, barrier + stage);
    const float y = warp_sums(sums);
    if (writes) call.output[at] = old + y;
    if (++stage == STAGES) stage = 0, round++;
  }
}
