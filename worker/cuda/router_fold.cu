// The rows of a folded router (router_fold.cuh), once per layer at load: R = router * norm, and R W.
//
// Definitions: WEIGHT_TYPE and COLS of W (quantised), ROUTER_TYPE (a float type). Exact to the rounding of f32 sums and
// of the halves in the end.
#include "quant.cuh"

constexpr int DEPTH = 32, EXPERTS = 64, UNITS = (COLS + 63) / 64;  // rows of W at a time; experts of a block

INLINE float router_weight(const u8* matrix, u64 index) {
  if (ROUTER_TYPE == T_F32) return ((const float*)matrix)[index];
  const u16 bits = ((const u16*)matrix)[index];
  return ROUTER_TYPE == T_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

INLINE u16 stored_half(float value) { return float_to_half(fminf(fmaxf(value, -65504.f), 65504.f)); }

// Eight threads a row of W, eight of the unit's columns each.
INLINE void unpack_unit(float (&tile)[DEPTH][64], const u8* matrix, int first, int n_rows, int unit) {
  using F = Format<WEIGHT_TYPE>;
  const int row = threadIdx.x / 8, part = threadIdx.x % 8, column = part * 8;
  if (first + row >= n_rows || unit * 64 + column >= COLS) {
    for (int i = 0; i < 8; i++) tile[row][column + i] = 0;
    return;
  }
  RawUnit raw;
  Scales scales;
  load_unit<WEIGHT_TYPE, FromGlobal>(raw, matrix + (u64)(first + row) * F::row_bytes(COLS), UNITS, unit);
  unit_scales<WEIGHT_TYPE>(scales, raw, unit);
  float scale = 0, minimum = 0;
#pragma unroll
  for (int g = 0; g < F::N_GROUPS; g++)
    if (g == part * F::N_GROUPS / 8) scale = scales.scale[g], minimum = F::HAS_MINIMUM ? scales.minimum[g] : 0;
#pragma unroll
  for (int word = 0; word < 16; word++) {
    if (word / 2 != part) continue;
    const u32 codes = unit_codes<WEIGHT_TYPE>(raw, word);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 byte = codes >> (8 * i) & 0xff;
      tile[row][word * 4 + i] = scale * (F::HAS_MINIMUM ? (float)byte : (float)(i8)byte) - minimum;
    }
  }
}

// R for a block of experts and DEPTH columns; the blocks of the first unit also store it.
INLINE void load_router(float (&tile)[DEPTH][EXPERTS], const u8* router, const float* norm, u16* rows, int first,
                        int n_rows, int first_expert, int n_experts) {
  for (int i = threadIdx.x; i < DEPTH * EXPERTS; i += 256) {
    const int column = first + i % DEPTH, expert = first_expert + i / DEPTH;
    float value = 0;
    if (column < n_rows && expert < n_experts) {
      value = router_weight(router, (u64)expert * n_rows + column) * norm[column];
      if (blockIdx.x == 0) rows[(u64)expert * (COLS + n_rows) + COLS + column] = stored_half(value);
    }
    tile[i % DEPTH][i / DEPTH] = value;
  }
}

// grid: units of W, blocks of experts; 256 threads make 4 experts x 4 columns each
KERNEL __launch_bounds__(256)
    fold_router(const u8* matrix, const u8* router, const float* norm, u16* rows, int n_rows, int n_experts) {
  __shared__ float weights[DEPTH][64], routers[DEPTH][EXPERTS];
  const int unit = blockIdx.x, first_expert = blockIdx.y * EXPERTS;
  const int column = threadIdx.x % 16 * 4, expert = threadIdx.x / 16 * 4;
  float sums[4][4] = {};
  for (int first = 0; first < n_rows; first += DEPTH) {
    unpack_unit(weights, matrix, first, n_rows, unit);
    load_router(routers, router, norm, rows, first, n_rows, first_expert, n_experts);
    __syncthreads();
#pragma unroll 8
    for (int depth = 0; depth < DEPTH; depth++) {
      const float4 w = *(const float4*)&weights[depth][column], r = *(const float4*)&routers[depth][expert];
      const float ws[4] = {w.x, w.y, w.z, w.w}, rs[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[e][c] = fmaf(rs[e], ws[c], sums[e][c]);
    }
    __syncthreads();
  }
  for (int e = 0; e < 4; e++)
    for (int c = 0; c < 4; c++)
      if (first_expert + expert + e < n_experts && unit * 64 + column + c < COLS)
        rows[(u64)(first_expert + expert + e) * (COLS + n_rows) + unit * 64 + column + c] = stored_half(sums[e][c]);
}
