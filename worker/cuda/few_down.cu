// y (+)= the sum over a token's chosen experts of weight * down hidden, for 2 to 32 tokens. A warp takes ROWS rows of all
// chosen experts of a token; tokens of the same rows come right after each other, so that a row that several of them
// want comes from memory once and from the L2 cache after that.
//
// Definitions: those of few_choice.cuh; a block has TOKENS tokens here, and blockIdx.y counts the groups of so many.
#include "few_choice.cuh"

struct FewDownCall {
  Router router;
  const u8* down;
  u64 expert_bytes;
  Hidden hidden;
  const float* residual;  // what the sum is added to, strided as the output and perhaps the same; or null
  float* output;
  int output_stride;
  int n_tokens;
};

typedef QuantisedToken<COLS, true> Token;
constexpr int TOKEN_BYTES = Token::BYTES;
constexpr int EXPERT_STAGE_BYTES = ROWS * Format<TYPE_0>::row_bytes(COLS), STAGE_BYTES = N_USED * EXPERT_STAGE_BYTES;
constexpr int ROW_GROUPS = (MATRIX_ROWS + ROWS - 1) / ROWS;

INLINE void fill_rows(const FewDownCall& call, const u16* ids, int index, int n_own, u8* stage, u64* barrier) {
  if (index < ROW_GROUPS * n_own) {
    const int row = index / n_own * ROWS, token = index % n_own;
    const u32 bytes = min(ROWS, MATRIX_ROWS - row) * Format<TYPE_0>::row_bytes(COLS);
    ring_expect(barrier, bytes * N_USED);
    __syncwarp();
    const int k = min((int)lane_id(), N_USED - 1);
    ring_copy_each(stage + k * EXPERT_STAGE_BYTES,
                   call.down + (u64)ids[token * N_USED + k] * call.expert_bytes +
                       (u64)row * Format<TYPE_0>::row_bytes(COLS),
                   bytes, barrier, N_USED);
  }
  ring_commit();
}

// The hidden values of the block's slots, with the experts' weights in their scales; zeros in the half unit that a row
// ends in.
INLINE void stage_hidden(const Hidden& hidden, const float* weights, int first_slot, int n_slots, u8* memory) {
  constexpr int PIECES = UNITS * 4;  // of 16 columns
#pragma unroll 4
  for (int i = threadIdx.x; i < (n_slots * PIECES + 31) / 32 * 32; i += THREADS) {
    const int slot = min(i / PIECES, n_slots - 1), piece = i % PIECES;
    const bool inside = i < n_slots * PIECES && piece * 16 < COLS;
    const u64 at = (u64)(first_slot + slot) * (COLS / 16) + piece;
    const int4 codes = inside ? __ldcg((const int4*)hidden.codes + at) : make_int4(0, 0, 0, 0);
    const float scale = inside ? __ldcg(hidden.scales + at) : 0.f, sum = inside ? __ldcg(hidden.sums + at) : 0.f;
    const float other = __shfl_xor_sync(FULL_WARP, sum, 1);  // sums are per 32 columns
    if (i >= n_slots * PIECES) continue;
    const Token token = {memory + slot * TOKEN_BYTES};
    token.codes(piece & 3)[piece >> 2] = codes;
    token.scales()[piece] = scale * weights[slot];
    if (piece % 2 == 0) token.sums()[piece / 2] = (sum + other) * weights[slot];
  }
}

KERNEL __launch_bounds__(THREADS, 1) few_down(const __grid_constant__ FewDownCall call) {
  DYNAMIC_SHARED(memory);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ float weights[TOKENS * N_USED];
  __shared__ u16 ids[TOKENS * N_USED];
  static_assert(TOKENS <= WARPS, "a warp for each token");
  const int first_token = blockIdx.y * TOKENS, n_own = min(TOKENS, call.n_tokens - first_token);
  const int first = blockIdx.x + warp_id() * gridDim.x, n_warps = gridDim.x * WARPS;
  u8* ring = memory + TOKENS * N_USED * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  let_next_start();
  // reading the router's result so early is sound because few_gate_up lets this kernel start only after its own wait
  Choice choice;
  find_choices(ids, call.router, first_token, n_own, [&](int, int, const Choice& own) { choice = own; });
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_rows(call, ids, first + s * n_warps, n_own, ring + s * STAGE_BYTES, barrier + s);
  if ((int)warp_id() < n_own) {  // the copies are under way: the weights may take their time
    const float weight = choice_weight(call.router, choice, first_token + warp_id());
    if (lane_id() < N_USED) weights[warp_id() * N_USED + lane_id()] = weight;
  }
  wait_for_inputs();
  __syncthreads();
  stage_hidden(call.hidden, weights, first_token * N_USED, n_own * N_USED, memory);
  __syncthreads();
  int stage = 0, round = 0;
  for (int index = first; index < ROW_GROUPS * n_own; index += n_warps) {
    const int row = index / n_own * ROWS, token = index % n_own;
    const int r = lane_id() / (32 / ROWS);  // whose sum this lane will have
    const u64 at = (u64)(first_token + token) * call.output_stride + row + r;
    const bool writes = lane_id() % (32 / ROWS) == 0 && row + r < MATRIX_ROWS;
    const float old = writes && call.residual ? __ldcg(call.residual + at) : 0.f;  // on its way while weights are
    float sums[ROWS] = {};
    ring_wait<STAGES - 1>(barrier + stage, round);
#pragma unroll (unroll_of((N_USED * UNITS + 31) / 32))
    for (int i = lane_id(); i < N_USED * UNITS; i += 32) {
      const int slot = i / UNITS, unit = i % UNITS;
      Activations<true> x;
      Token{memory + (token * N_USED + slot) * TOKEN_BYTES}.read(x, unit);
      add_unit<TYPE_0>(sums, ring + stage * STAGE_BYTES + slot * EXPERT_STAGE_BYTES, unit, x);
    }
    __syncwarp();
    fill_rows(call, ids, index + STAGES * n_warps, n_own, ring + stage * STAGE_BYTES, barrier + stage);
    const float y = warp_sums(sums);
    if (writes) call.output[at] = old + y;
    if (++stage == STAGES) stage = 0, round++;
  }
}
