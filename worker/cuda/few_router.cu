// An RMS norm and the router behind it for 2 to 32 tokens: logits[t][e] = sum of matrix[e] * norm * x / rms(x), and the
// normalised rows as the codes that the experts read. Each warp computes one expert's logits: it fetches the expert's row
// before the inputs are there, and finds the rms by itself.
//
// Definitions: COLS (a multiple of 32), WEIGHT_TYPE (a float type), TOKENS (of a block), WARPS.
// Grid: x counts blocks of WARPS experts each, and one more that writes the rows; y counts groups of TOKENS tokens.
#include "activations.cuh"
#include "outputs.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PIECES = (COLS + 127) / 128, HELD = PIECES < 16 ? PIECES : 16;  // of four columns a lane; at a time

INLINE float4 weights_at(const u8* row, int column) {
  if (WEIGHT_TYPE == T_F32) return __ldg((const float4*)((const float*)row + column));
  uint2 pairs = __ldg((const uint2*)((const u16*)row + column));
  if (WEIGHT_TYPE == T_F16)
    return make_float4(low_half(pairs.x), high_half(pairs.x), low_half(pairs.y), high_half(pairs.y));
  return make_float4(bf16_to_float((u16)pairs.x), bf16_to_float((u16)(pairs.x >> 16)), bf16_to_float((u16)pairs.y),
                     bf16_to_float((u16)(pairs.y >> 16)));
}

// A lane's share of HELD pieces of a router row, times the norm.
struct RouterShare {
  float4 w[HELD];
  INLINE static int column(int first, int i) { return ((first + i) * 32 + lane_id()) * 4; }
  INLINE void load(const u8* row, const float* norm, int first) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      w[i] = make_float4(0, 0, 0, 0);
      if (column(first, i) >= COLS) continue;
      const float4 a = weights_at(row, column(first, i)), n = __ldg((const float4*)(norm + column(first, i)));
      w[i] = make_float4(a.x * n.x, a.y * n.y, a.z * n.z, a.w * n.w);
    }
  }
  INLINE void multiply(float& dot, float& squares, const float* values, int first) const {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if (column(first, i) >= COLS) continue;
      const float4 x = load_fresh4(values + column(first, i));
      dot += w[i].x * x.x + w[i].y * x.y + w[i].z * x.z + w[i].w * x.w;
      squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
  }
};

INLINE void write_rows(const float* values, const float* norm, float epsilon, int first_token, int n_own,
                       const Outputs& out) {
  __shared__ float scratch[2][32];
  RowShare<COLS, THREADS> weights;
  weights.template load<false>(norm);
  wait_for_inputs();
  for (int t = 0; t < n_own; t++) {
    RowShare<COLS, THREADS> row;
    row.template load<true>(values + (u64)(first_token + t) * COLS);
    const float factor = rsqrtf(block_sum<THREADS>(row.squares(), scratch[t & 1]) * (1.f / COLS) + epsilon);
    row.weigh(weights);
#pragma unroll
    for (int i = 0; i < row.COUNT; i++) {
      const float4 v = row.v[i];
      const int column = row.column(i);
      store_four(out, (u64)(first_token + t) * COLS + column,
                 make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor), column < COLS ? 4 : 0);
    }
  }
}

KERNEL __launch_bounds__(THREADS)
    few_router(const u8* matrix, const float* norm, const float* values, float* logits, float epsilon, int n_experts,
               int n_tokens, i8* codes, float* scales, float* sums) {
  const int first_token = blockIdx.y * TOKENS, n_own = min(TOKENS, n_tokens - first_token);
  let_next_start();
  if (blockIdx.x == gridDim.x - 1) {
    write_rows(values, norm, epsilon, first_token, n_own, {nullptr, nullptr, codes, scales, sums});
    return;
  }
  const int expert = blockIdx.x * WARPS + warp_id();
  const u8* row = matrix + (u64)min(expert, n_experts - 1) * Format<WEIGHT_TYPE>::row_bytes(COLS);
  RouterShare share;
  share.load(row, norm, 0);
  wait_for_inputs();
  float dots[TOKENS] = {}, squares[TOKENS] = {};
#pragma unroll 1
  for (int first = 0; first < PIECES; first += HELD) {
    if (first) share.load(row, norm, first);
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
      if (t < n_own) share.multiply(dots[t], squares[t], values + (u64)(first_token + t) * COLS, first);
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    const float dot = warp_sum(dots[t]), mass = warp_sum(squares[t]);
    if (lane_id() == 0 && t < n_own && expert < n_experts)
      logits[(u64)(first_token + t) * n_experts + expert] = dot * rsqrtf(mass * (1.f / COLS) + epsilon);
  }
}
