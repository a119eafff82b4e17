// hidden = act(gate x) * (up x) for the chosen experts of 2 to 32 tokens; an expert's weights are read once for all tokens
// that chose it.
//
// Definitions: those of few_choice.cuh, TYPE_0 of gate, TYPE_1 of up, ACTIVATION (0 silu, 1 gelu), TOGETHER (a power of
// two: so many tokens are multiplied with rows that were unpacked once), STAGE_ROWS (so many of a warp's ROWS are a stage
// of its ring). A block takes tiles of neighbouring rows of one expert: in each, a warp has ROWS rows of gate and the
// same rows of up. Between two tiles there is one barrier, and the rings of copies go on through it.
#include "activation.cuh"
#include "few_choice.cuh"
#include "outputs.cuh"

struct FewGateUpCall {
  Router router;
  const u8* gate;
  const u8* up;
  u64 gate_expert_bytes;
  u64 up_expert_bytes;
  Hidden hidden;
  const i8* codes;
  const float* scales;
  const float* sums;
  int n_tokens;
};

constexpr int GROUP = 16, TILE = WARPS * ROWS, TILES = (MATRIX_ROWS + TILE - 1) / TILE;  // rows that share a scale
constexpr int PAIRS = ROWS * TOGETHER, SPAN = 16 / PAIRS;  // gate and up; lanes that end with the same sum
static_assert(MATRIX_ROWS % GROUP == 0 && TILE % GROUP == 0 && ROWS % STAGE_ROWS == 0, "whole groups");
static_assert(PAIRS <= 16, "a lane for every sum");
constexpr int TOKEN_BYTES = QuantisedToken<COLS>::BYTES;
constexpr int GATE_ROW = Format<TYPE_0>::row_bytes(COLS), UP_ROW = Format<TYPE_1>::row_bytes(COLS);
constexpr int PARTS = ROWS / STAGE_ROWS, GATE_BYTES = STAGE_ROWS * GATE_ROW;  // stages of a tile
constexpr int STAGE_BYTES = GATE_BYTES + STAGE_ROWS * UP_ROW;
constexpr int VALUES = (TOKENS + TOGETHER) * TILE;  // of a tile: [tokens that chose the expert][TILE]

struct Tile {
  int expert, row;
  INLINE Tile(const Groups& groups, int index) : expert(groups.chosen[index / TILES]), row(index % TILES * TILE) {}
};

// The copies of a part of this warp's rows of a tile, or nothing beyond the last tile.
INLINE void fill_stage(const FewGateUpCall& call, const Groups& groups, int index, int part, u8* stage, u64* barrier) {
  if (index < groups.n_chosen * TILES) {
    const Tile tile(groups, index);
    const u64 expert = tile.expert, row = tile.row + warp_id() * ROWS + part * STAGE_ROWS;
    const u32 count = max(0, min(STAGE_ROWS, MATRIX_ROWS - (int)row));
    ring_expect(barrier, count * (GATE_ROW + UP_ROW));
    if (count) {
      ring_copy(stage, call.gate + expert * call.gate_expert_bytes + row * GATE_ROW, count * GATE_ROW, barrier);
      ring_copy(stage + GATE_BYTES, call.up + expert * call.up_expert_bytes + row * UP_ROW, count * UP_ROW, barrier);
    }
  }
  ring_commit();
}

// Where a warp is in its ring: the first stage of a tile, and how often the ring has been around.
struct Turn {
  int stage, round;
  INLINE int stage_of(int part) const { return stage + part < STAGES ? stage + part : stage + part - STAGES; }
  INLINE int round_of(int part) const { return stage + part < STAGES ? round : round + 1; }
  INLINE void advance() {
    round = round_of(PARTS), stage = stage_of(PARTS);
  }
};

template <int TYPE>
struct UnpackedUnit {
  u32 codes[16];
  Scales scales;
  INLINE void load(const u8* row, int unit) {
    RawUnit raw;
    load_unit<TYPE, FromShared>(raw, row, UNITS, unit);
    unit_scales<TYPE>(scales, raw, unit);
#pragma unroll
    for (int j = 0; j < 16; j++) codes[j] = dot_codes<TYPE>(raw, j);
  }
};

// This warp's rows of a tile times up to TOGETHER tokens, the lowest of `tokens`: values [.][TILE].
INLINE void multiply_rows(float* values, const u8* ring, const Turn& turn, u32 tokens, const u8* activations) {
  int token[TOGETHER];
#pragma unroll
  for (int i = 0; i < TOGETHER; i++) token[i] = __ffs((int)tokens) - 1, tokens &= tokens - 1;  // -1: none
  float sums[2 * PAIRS] = {};  // [TOGETHER][ROWS] of gate and of up
#pragma unroll 1
  for (int unit = lane_id(); unit < UNITS; unit += 32) {
    UnpackedUnit<TYPE_0> gate[ROWS];
    UnpackedUnit<TYPE_1> up[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const u8* stage = ring + turn.stage_of(r / STAGE_ROWS) * STAGE_BYTES;
      gate[r].load(stage + r % STAGE_ROWS * GATE_ROW, unit);
      up[r].load(stage + GATE_BYTES + r % STAGE_ROWS * UP_ROW, unit);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      if (token[i] < 0) continue;
      Activations<false> x;
      QuantisedToken<COLS>{(u8*)activations + token[i] * TOKEN_BYTES}.read(x, unit);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        sums[2 * (i * ROWS + r)] += unit_dot<TYPE_0, false>(gate[r].codes, gate[r].scales, x);
        sums[2 * (i * ROWS + r) + 1] += unit_dot<TYPE_1, false>(up[r].codes, up[r].scales, x);
      }
    }
  }
  const float gate = warp_sums(sums), up = __shfl_down_sync(FULL_WARP, gate, SPAN);
  const int pair = lane_id() / (2 * SPAN);
  if (lane_id() % (2 * SPAN) == 0) values[pair / ROWS * TILE + pair % ROWS] = activate<true>(gate, ACTIVATION) * up;
}

INLINE u32 without_lowest(u32 bits, int count) {
  for (int i = 0; i < count; i++) bits &= bits - 1;
  return bits;
}

// A tile's values as codes: half a warp a group of a token.
INLINE void publish(const Hidden& hidden, const float* values, const u16* ids, const Tile& tile, u32 tokens) {
  constexpr int GROUPS = TILE / GROUP;
  const int column = lane_id() % GROUP, half = lane_id() / GROUP, n = __popc(tokens) * GROUPS;
  for (int base = warp_id() * 2; base < n; base += WARPS * 2) {
    const int own = min(base + half, n - 1), rank = own / GROUPS, row = own % GROUPS * GROUP + column;
    const int first_slot = (__ffs((int)without_lowest(tokens, rank)) - 1) * N_USED;
    int slot = first_slot;
#pragma unroll
    for (int k = 0; k < N_USED; k += GROUP) {
      const bool is_it = k + column < N_USED && ids[first_slot + min(k + column, N_USED - 1)] == tile.expert;
      const u32 found = __ballot_sync(FULL_WARP, is_it) >> (half * GROUP) & 0xffff;
      if (found) slot = first_slot + k + __ffs((int)found) - 1;
    }
    const float v = values[rank * TILE + row];
    const float largest = group_max<GROUP>(fabsf(v)), scale = largest * (1 / 127.f);
    const int code = __float2int_rn(v * (largest > LEAST_QUANTISED ? __fdividef(127.f, largest) : 0.f));
    const int sum = group_sum<GROUP>(code);
    if (base + half >= n || tile.row + row >= MATRIX_ROWS) continue;
    const u64 index = (u64)slot * MATRIX_ROWS + tile.row + row;
    hidden.codes[index] = (i8)code;
    if (column == 0) hidden.scales[index / GROUP] = scale, hidden.sums[index / GROUP] = scale * (float)sum;
  }
}

// Codes of all tokens into shared memory; zeros in the half unit that a row ends in.
INLINE void stage_inputs(const FewGateUpCall& call, u8* memory) {
  constexpr int PIECES = UNITS * 4, SCALES = UNITS * 2;
#pragma unroll 4
  for (int i = threadIdx.x; i < call.n_tokens * PIECES; i += THREADS) {
    const int t = i / PIECES, piece = i % PIECES;
    const bool inside = piece * 16 < COLS;
    QuantisedToken<COLS>{memory + t * TOKEN_BYTES}.codes(piece & 3)[piece >> 2] =
        inside ? __ldcg((const int4*)call.codes + t * (COLS / 16) + piece) : make_int4(0, 0, 0, 0);
  }
#pragma unroll 2
  for (int i = threadIdx.x; i < call.n_tokens * SCALES; i += THREADS) {
    const int t = i / SCALES, group = i % SCALES, at = t * (COLS / 32) + group;
    const bool inside = group * 32 < COLS;
    const QuantisedToken<COLS> token = {memory + t * TOKEN_BYTES};
    token.scales()[group] = inside ? __ldcg(call.scales + at) : 0.f;
    ((float*)token.sums())[group] = inside ? __ldcg(call.sums + at) : 0.f;
  }
}

KERNEL __launch_bounds__(THREADS, 1) few_gate_up(const __grid_constant__ FewGateUpCall call) {
  DYNAMIC_SHARED(memory);  // activations, rings, values of two tiles
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ Groups groups;
  __shared__ u16 ids[TOKENS * N_USED];
  u8* ring = memory + TOKENS * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  float* values = (float*)(memory + TOKENS * TOKEN_BYTES + WARPS * STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  for (int i = threadIdx.x; i < N_EXPERTS; i += THREADS) groups.tokens[i] = 0;
  __syncthreads();
  wait_for_inputs();
  let_next_start();  // not before the wait: the kernel behind reads the router's result without waiting
  find_choices(ids, call.router, 0, call.n_tokens, [&](int t, int id, const Choice&) {
    if (lane_id() < N_USED) atomicOr(groups.tokens + id, 1u << t);
  });
  __syncthreads();
  if (warp_id() == 0) list_chosen(groups);
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STAGES; s++)
    fill_stage(call, groups, blockIdx.x + s / PARTS * gridDim.x, s % PARTS, ring + s * STAGE_BYTES, barrier + s);
  stage_inputs(call, memory);
  __syncthreads();
  Turn turn = {0, 0};
  int side = 0;
  for (int index = blockIdx.x; index < groups.n_chosen * TILES; index += gridDim.x) {
    const Tile tile(groups, index);
    const u32 tokens = groups.tokens[tile.expert];
    float *own = values + side * VALUES, *target = own + warp_id() * ROWS;
#pragma unroll
    for (int p = 0; p < PARTS; p++) ring_wait<STAGES - PARTS>(barrier + turn.stage_of(p), turn.round_of(p));
    for (u32 left = tokens; left; left = without_lowest(left, TOGETHER), target += TOGETHER * TILE)
      multiply_rows(target, ring, turn, left, memory);
    __syncwarp();
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const int ahead = p + STAGES, s = turn.stage_of(p);
      fill_stage(call, groups, index + ahead / PARTS * gridDim.x, ahead % PARTS, ring + s * STAGE_BYTES, barrier + s);
    }
    turn.advance();
    __syncthreads();
    publish(call.hidden, own, ids, tile, tokens);  // while others begin the next tile, on the other side
    side ^= 1;
  }
}
