// y = W x for 1 to 8 tokens and up to three matrices of one input in a launch (Q, K and V; gate and up).
//
// Definitions: COLS, TOKENS, N_PARTS, TYPE_0 .. TYPE_2 (ggml types), WARPS of a block, STAGES of a warp's ring, ROWS a
// warp takes at once, PROLOGUE (below). A warp owns whole rows: it fills its ring before it waits for the inputs, so
// that weights arrive while the kernel in front still runs. ROUTER_ROWS, ROUTER_COLS: the router rows of a block and
// the width of the residual, where a router rides along (router_fold.cuh; one token, QUANTISED). HAS_BIAS, HAS_SCALE: there may
// be a bias; a scale or a soft cap.
#include "activations.cuh"
#include "router_fold.cuh"

#define QUANTISED 0  // activations come as codes, scales, sums
#define PLAIN 1      // as f32; the block quantises
#define NORMED 2     // as f32; the block normalises, then quantises

#ifndef TYPE_1
#define TYPE_1 TYPE_0
#endif
#ifndef TYPE_2
#define TYPE_2 TYPE_0
#endif
#ifndef ROUTER_ROWS
#define ROUTER_ROWS 0
#define ROUTER_COLS 0
#endif
constexpr int THREADS = WARPS * 32;
constexpr int ROUTER_WARPS = ROUTER_ROWS ? 4 : 0;  // after the others
constexpr bool FLOATS = Format<TYPE_0>::IS_FLOAT;  // all parts or none

struct Part {
  const u8* weights;
  float* output;
  const float* residual;  // what the product is added to, strided as the output and perhaps the same; or null
  const float* bias;      // or null
  int rows;
  int output_stride;  // floats between tokens
};
struct Call {
  Part parts[3];
  const i8* codes;
  const float* scales;
  const float* sums;
  const float* values;  // f32 [TOKENS][COLS]
  const float* norm;    // weights of the norm [COLS]
  float norm_epsilon;
  float scale;    // 0: none
  float softcap;  // 0: none
  FoldedRouter router;
};

constexpr int largest(int a, int b) { return a > b ? a : b; }
constexpr int STAGE_BYTES =
    ROWS * largest(Format<TYPE_0>::row_bytes(COLS), largest(Format<TYPE_1>::row_bytes(COLS), Format<TYPE_2>::row_bytes(COLS)));
constexpr int FLOAT_COLS = (COLS + 7) / 8 * 8;
constexpr int TOKEN_BYTES = FLOATS ? FLOAT_COLS * 4 : QuantisedToken<COLS>::BYTES;

struct Group {
  int part, row, count;
};
INLINE Group group_at(const Call& call, int index) {
  Group group = {0, 0, 0};
#pragma unroll
  for (int p = 0; p < N_PARTS; p++) {
    int groups = (call.parts[p].rows + ROWS - 1) / ROWS;
    if (index >= 0 && index < groups) group = {p, index * ROWS, min(ROWS, call.parts[p].rows - index * ROWS)};
    index -= groups;
  }
  return group;
}
INLINE int group_count(const Call& call) {
  int count = 0;
#pragma unroll
  for (int p = 0; p < N_PARTS; p++) count += (call.parts[p].rows + ROWS - 1) / ROWS;
  return count;
}
INLINE const Part& part_of(const Call& call, int p) {
  return p == 0 || N_PARTS == 1 ? call.parts[0] : p == 1 || N_PARTS == 2 ? call.parts[1] : call.parts[2];
}
INLINE int row_bytes_of(int p) {
  return p == 0 || N_PARTS == 1   ? Format<TYPE_0>::row_bytes(COLS)
         : p == 1 || N_PARTS == 2 ? Format<TYPE_1>::row_bytes(COLS)
                                  : Format<TYPE_2>::row_bytes(COLS);
}

INLINE void fill(const Call& call, int index, int n_groups, u8* stage, u64* barrier) {
  if (index < n_groups) {
    Group group = group_at(call, index);
    int row_bytes = row_bytes_of(group.part);
    ring_expect(barrier, group.count * row_bytes);
    ring_copy(stage, part_of(call, group.part).weights + (u64)group.row * row_bytes, group.count * row_bytes, barrier);
  }
  ring_commit();
}

typedef float Sums[ROWS][TOKENS];

template <int TYPE>
INLINE void multiply(Sums& sums, const u8* stage, const u8* activations) {
  constexpr int UNITS = QuantisedToken<COLS>::UNITS, ROW_BYTES = Format<TYPE>::row_bytes(COLS);
#pragma unroll (unroll_of((UNITS + 31) / 32))
  for (int unit = lane_id(); unit < UNITS; unit += 32) {
    u32 codes[ROWS][16];
    Scales scales[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      RawUnit raw;
      load_unit<TYPE, FromShared>(raw, stage + r * ROW_BYTES, UNITS, unit);
      unit_scales<TYPE>(scales[r], raw, unit);
#pragma unroll
      for (int j = 0; j < 16; j++) codes[r][j] = dot_codes<TYPE>(raw, j);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      Activations<false> x;
      QuantisedToken<COLS>{(u8*)activations + t * TOKEN_BYTES}.read(x, unit);
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r][t] += unit_dot<TYPE, false>(codes[r], scales[r], x);
    }
  }
}

template <int TYPE>
INLINE void floats_of(float (&out)[8], const u8* row, int chunk) {
  if (TYPE == T_F32) {
    *(float4*)out = ((const float4*)row)[chunk * 2];
    *(float4*)(out + 4) = chunk * 8 + 4 < COLS ? ((const float4*)row)[chunk * 2 + 1] : make_float4(0, 0, 0, 0);
    return;
  }
  uint4 words = ((const uint4*)row)[chunk];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 pair = word_of(words, i);
    out[2 * i] = TYPE == T_F16 ? low_half(pair) : bf16_to_float((u16)(pair & 0xffff));
    out[2 * i + 1] = TYPE == T_F16 ? high_half(pair) : bf16_to_float((u16)(pair >> 16));
  }
}

template <int TYPE>
INLINE void multiply_floats(Sums& sums, const u8* stage, const u8* activations) {
  for (int chunk = lane_id(); chunk < FLOAT_COLS / 8; chunk += 32) {
    float w[ROWS][8];
#pragma unroll
    for (int r = 0; r < ROWS; r++) floats_of<TYPE>(w[r], stage + r * Format<TYPE>::row_bytes(COLS), chunk);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const float4* x = (const float4*)(activations + t * TOKEN_BYTES) + chunk * 2;
      float4 a = x[0], b = x[1];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        sums[r][t] += w[r][0] * a.x + w[r][1] * a.y + w[r][2] * a.z + w[r][3] * a.w + w[r][4] * b.x + w[r][5] * b.y +
                      w[r][6] * b.z + w[r][7] * b.w;
    }
  }
}

template <int TYPE>
INLINE void multiply_part(Sums& sums, const u8* stage, const u8* activations) {
  if constexpr (FLOATS) multiply_floats<TYPE>(sums, stage, activations);
  else multiply<TYPE>(sums, stage, activations);
}

// After warp_sums lane (r * TOKENS + t) * OUTPUT_LANES has row r of token t.
constexpr int next_power(int n) { return n <= 1 ? 1 : 2 * next_power((n + 1) / 2); }
constexpr int OUTPUTS = ROWS * TOKENS, SUMS = next_power(OUTPUTS), OUTPUT_LANES = 32 / SUMS;
static_assert(OUTPUTS <= 32, "a lane for every output of a group");

INLINE float* output_of(const Call& call, Group group) {
  const Part& part = part_of(call, group.part);
  int output = lane_id() / OUTPUT_LANES, r = output / TOKENS, t = output % TOKENS;
  if (lane_id() % OUTPUT_LANES || output >= OUTPUTS || r >= group.count) return nullptr;
  return part.output + (u64)t * part.output_stride + group.row + r;
}

INLINE void finish(const Call& call, Group group, Sums& sums, const float (&factors)[TOKENS], float* out, float old) {
  float values[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) values[i] = i < OUTPUTS ? sums[i / TOKENS % ROWS][i % TOKENS] * factors[i % TOKENS] : 0.f;
  float y = warp_sums(values);
  if (!out) return;
  const Part& part = part_of(call, group.part);
  if (HAS_SCALE && call.scale != 0) y *= call.scale;
  if (HAS_BIAS && part.bias) y += part.bias[group.row + lane_id() / OUTPUT_LANES / TOKENS];
  if (HAS_SCALE && call.softcap != 0) y = call.softcap * tanhf(y / call.softcap);
  *out = old + y;
}

INLINE void stage_floats(const Call& call, u8* activations) {
  for (int t = 0; t < TOKENS; t++)
    for (int i = threadIdx.x; i < FLOAT_COLS; i += THREADS)
      ((float*)(activations + t * TOKEN_BYTES))[i] = i < COLS ? __ldcg(call.values + (u64)t * COLS + i) : 0.f;
}

#if PROLOGUE == NORMED
INLINE void normalise_floats(const Call& call, u8* activations, float* scratch) {
  for (int t = 0; t < TOKENS; t++) {
    float* row = (float*)(activations + t * TOKEN_BYTES);
    float squares = 0;
    for (int i = threadIdx.x; i < COLS; i += THREADS) squares += row[i] * row[i];
    float factor = rsqrtf(block_sum<THREADS>(squares, scratch) * (1.f / COLS) + call.norm_epsilon);
    for (int i = threadIdx.x; i < COLS; i += THREADS) row[i] *= factor * call.norm[i];
    __syncthreads();
  }
}
#endif

// Weights of the norm that may be fetched before the inputs are there.
#if PROLOGUE == NORMED
typedef RowShare<COLS, THREADS> NormShare;
#else
struct NormShare {};
#endif

INLINE void stage_activations(const Call& call, const NormShare& norm, u8* activations, float* scratch) {
#if PROLOGUE == QUANTISED
  for (int t = 0; t < TOKENS; t++)
    stage_quantised<COLS, THREADS>(QuantisedToken<COLS>{activations + t * TOKEN_BYTES}, call.codes + (u64)t * COLS,
                                   call.scales + t * (COLS / 32), call.sums + t * (COLS / 32));
#else
  for (int t = 0; t < TOKENS; t++) {
    RowShare<COLS, THREADS> row;
    row.template load<true>(call.values + (u64)t * COLS);
#if PROLOGUE == NORMED
    const float squares = warp_sum(row.squares());
    if (lane_id() == 0) scratch[t * 32 + warp_id()] = squares;
    row.weigh(norm);
#endif
    row.quantise(QuantisedToken<COLS>{activations + t * TOKEN_BYTES}, 1.f);
  }
#endif
}

// A barrier of the warps that multiply.
INLINE void meet() {
  if (ROUTER_ROWS) meet_threads<1, THREADS>();
  else __syncthreads();
}

KERNEL __launch_bounds__(THREADS + ROUTER_WARPS * 32, blocks_together(TOKENS)) gemv(const __grid_constant__ Call call) {
  DYNAMIC_SHARED(memory);  // activations, then the rings of the warps
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ float scratch[TOKENS * 32];
#if ROUTER_ROWS
  if (warp_id() >= WARPS) {
    RouterWarps<COLS, ROUTER_COLS, ROUTER_ROWS, WARPS, ROUTER_WARPS>().run(call.router, call.codes, call.scales);
    return;
  }
#endif
  const int n_groups = group_count(call), n_warps = gridDim.x * WARPS;
  const int first = blockIdx.x + warp_id() * gridDim.x;  // neighbouring rows on different multiprocessors
  u8* ring = memory + TOKENS * TOKEN_BYTES + warp_id() * (STAGES * STAGE_BYTES);
  u64* barrier = barriers + warp_id() * STAGES;
  ring_init(barrier, STAGES);
  let_next_start();
#pragma unroll
  for (int s = 0; s < STAGES; s++) fill(call, first + s * n_warps, n_groups, ring + s * STAGE_BYTES, barrier + s);
  NormShare norm;
#if PROLOGUE == NORMED
  if (!FLOATS) norm.template load<false>(call.norm);
#endif
  wait_for_inputs();
  if constexpr (FLOATS) stage_floats(call, memory);
  else stage_activations(call, norm, memory, scratch);
  meet();
#if PROLOGUE == NORMED
  if (FLOATS) normalise_floats(call, memory, scratch);
#endif
  float factors[TOKENS];  // what the activations lack
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
    factors[t] = PROLOGUE == NORMED && !FLOATS ? inverse_rms<COLS, WARPS>(scratch + t * 32, call.norm_epsilon) : 1.f;
  int stage = 0, round = 0;
  for (int index = first; index < n_groups; index += n_warps) {
    Group group = group_at(call, index);
    float* out = output_of(call, group);
    const Part& part = part_of(call, group.part);
    // on its way while the weights are waited for
    float old = out && part.residual ? __ldcg(part.residual + (out - part.output)) : 0.f;
    Sums sums = {};
    ring_wait<STAGES - 1>(barrier + stage, round);
    const u8* weights = ring + stage * STAGE_BYTES;
    if (N_PARTS == 1 || group.part == 0) multiply_part<TYPE_0>(sums, weights, memory);
    else if (N_PARTS == 2 || group.part == 1) multiply_part<TYPE_1>(sums, weights, memory);
    else multiply_part<TYPE_2>(sums, weights, memory);
    __syncwarp();
    fill(call, index + STAGES * n_warps, n_groups, ring + stage * STAGE_BYTES, barrier + stage);
    finish(call, group, sums, factors, out, old);
    if (++stage == STAGES) stage = 0, round++;
  }
}
