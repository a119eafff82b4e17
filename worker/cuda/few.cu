// y = W x for 2 to 32 tokens on tensor cores, at the speed at which weights arrive: a block brings all of its few rows
// into shared memory at once (before the inputs are there, if it knows which), its warps split the columns, unpack
// their part straight into operands and add up at the end.
//
// Definitions: COLS (a multiple of 8), TOKEN_TILE (16 or 32), N_TILES (groups of 8 rows of a block), WARPS, MIXTURE
// (tiles of sorted tokens are read: weights are known only after the wait). GLU: the first half of a block's rows is of
// gate (TYPE_0), the second of up (TYPE_1), the output act(gate) * up in halves; ACTIVATION 0 silu, 1 gelu. Without GLU
// a launch takes up to three matrices of one input, of types TYPE_0 .. TYPE_2.
#include "quant_mma.cuh"
#include "matrix_call.cuh"

constexpr int THREADS = WARPS * 32, ROWS = 8 * N_TILES, M_TILES = TOKEN_TILE / 16;
constexpr int OWN_ROWS = GLU ? ROWS / 2 : ROWS;  // rows of the output that a block makes
constexpr int N_UNITS = (COLS + 63) / 64;
#ifndef TYPE_2
#define TYPE_2 TYPE_0
#endif
constexpr int larger(int a, int b) { return a > b ? a : b; }
// 16 bytes more than a row, so that the eight rows of a group lie in different banks
constexpr int STRIDE = larger(Format<TYPE_0>::row_bytes(COLS),
                              larger(Format<TYPE_1>::row_bytes(COLS), Format<TYPE_2>::row_bytes(COLS))) + 16;

struct FewCall {
  MatrixCall parts[3];
  int first_block[3];  // of each part; beyond the grid for parts that are not there
};

INLINE u32 row_bytes_of(int type_index) {
  return type_index == 0   ? Format<TYPE_0>::row_bytes(COLS)
         : type_index == 1 ? Format<TYPE_1>::row_bytes(COLS)
                           : Format<TYPE_2>::row_bytes(COLS);
}

// Each warp brings its rows of the block; with GLU of two matrices.
INLINE void bring_rows(const MatrixCall& call, int part, int row_block, int expert, u8* rows, u64* barrier) {
  u32 bytes = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    if (pass == 1) ring_expect(barrier, bytes);
    for (int r = warp_id(); r < ROWS; r += WARPS) {
      int matrix = GLU ? r / OWN_ROWS : 0, row = row_block * OWN_ROWS + (GLU ? r % OWN_ROWS : r);
      if (row >= call.rows) continue;
      u32 row_bytes = row_bytes_of(GLU ? matrix : part);
      bytes += row_bytes;
      if (pass == 0) continue;
      const u8* weights = (matrix == 0 ? call.weights[0] : call.weights[1]) +
                          expert * (matrix == 0 ? call.expert_bytes[0] : call.expert_bytes[1]);
      ring_copy(rows + r * STRIDE, weights + (u64)row * row_bytes, row_bytes, barrier);
    }
  }
  ring_commit();
}

// The activations of a unit for one lane: of tokens g and g + 8 of each group of 16, the columns of its fragments.
struct Inputs {
  uint4 words[M_TILES][2][2];  // [group][token g or g + 8][first or last eight columns]
};
INLINE void read_inputs(Inputs& x, const MatrixCall& call, const int* sources, int unit) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int upper = 0; upper < 2; upper++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int source = sources[m * 16 + upper * 8 + g], column = unit * 64 + half * 32 + t * 8;
        bool inside = source >= 0 && unit < N_UNITS && column < COLS;
        x.words[m][upper][half] =
            inside ? __ldcg((const uint4*)(call.input + (u64)source * COLS + column)) : make_uint4(0, 0, 0, 0);
      }
}

typedef float Sums[M_TILES][N_TILES][4];

INLINE const u8* lane_row(const u8* rows, int n) { return rows + (n * 8 + (lane_id() >> 2)) * STRIDE; }

template <int TYPE>
INLINE void multiply_tile(Sums& sums, int n, const PairedScales& scales, const u8* rows, int unit, const Inputs& x) {
  u32 b[4][2];
  lane_fragments<TYPE, COLS>(b, scales, lane_row(rows, n), N_UNITS, unit, lane_id() & 3);
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const uint4 low = x.words[m][0][s >> 1], high = x.words[m][1][s >> 1];
      if (s & 1) mma_f16(sums[m][n], low.z, high.z, low.w, high.w, b[s][0], b[s][1]);
      else mma_f16(sums[m][n], low.x, high.x, low.y, high.y, b[s][0], b[s][1]);
    }
}

// All units of this warp, in blocks of four; FIRST is the type of the rows, with GLU of the first half and SECOND of the
// others. `x` comes with the inputs of the first unit.
template <int FIRST, int SECOND>
INLINE void multiply_units(Sums& sums, const MatrixCall& call, const int* sources, const u8* rows, Inputs x) {
#pragma unroll 1
  for (int block = warp_id(); block * 4 < N_UNITS; block += WARPS) {
    PairedScales scales[N_TILES];
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
      scales[n] = GLU && n >= N_TILES / 2 ? block_scales<SECOND>(lane_row(rows, n), N_UNITS, block, lane_id() & 3)
                                          : block_scales<FIRST>(lane_row(rows, n), N_UNITS, block, lane_id() & 3);
#pragma unroll 1
    for (int unit = block * 4; unit < min(N_UNITS, block * 4 + 4); unit++) {
      Inputs next;
      read_inputs(next, call, sources, (unit & 3) == 3 ? unit + 4 * WARPS - 3 : unit + 1);
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        if (GLU && n >= N_TILES / 2) multiply_tile<SECOND>(sums, n, scales[n], rows, unit, x);
        else multiply_tile<FIRST>(sums, n, scales[n], rows, unit, x);
      }
      x = next;
    }
  }
}

// Sum over the warps of what lane `lane` has in register `i` of tile (m, n).
INLINE float total(const float* parts, int m, int n, int i, int lane) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += parts[((w * M_TILES + m) * N_TILES + n) * 128 + i * 32 + lane];
  return sum;
}

// One thread an output; neighbouring threads have neighbouring rows.
INLINE void finish(const MatrixCall& call, const Tile& tile, int part, int row_block, const float* parts) {
  const float down[3] = {1.f / scale_up<TYPE_0>(), 1.f / scale_up<TYPE_1>(), 1.f / scale_up<TYPE_2>()};
  for (int o = threadIdx.x; o < TOKEN_TILE * OWN_ROWS; o += THREADS) {
    int token = o / OWN_ROWS, own = o % OWN_ROWS, row = row_block * OWN_ROWS + own;
    if (token >= tile.count || row >= call.rows) continue;
    int m = token / 16, n = own / 8, i = (token % 16 / 8) * 2 + (own & 1), lane = token % 8 * 4 + own % 8 / 2;
    float y = total(parts, m, n, i, lane) * (part == 0 ? down[0] : part == 1 ? down[1] : down[2]);
#if GLU
    store_gated(call, tile.first + token, row, y, total(parts, m, n + N_TILES / 2, i, lane) * down[1]);
#else
    store_value(call, tile.first + token, row, y);
#endif
  }
}

KERNEL __launch_bounds__(THREADS, (M_TILES == 1 ? 24 : 16) / WARPS) few_tokens(const __grid_constant__ FewCall few) {
  DYNAMIC_SHARED(rows);  // the weights; at the end the sums of the warps
  __shared__ u64 barriers[WARPS];
  __shared__ int sources[TOKEN_TILE];
  const int part = ((int)blockIdx.x >= few.first_block[1]) + ((int)blockIdx.x >= few.first_block[2]);
  const MatrixCall& call = part == 0 ? few.parts[0] : part == 1 ? few.parts[1] : few.parts[2];
  const int row_block = blockIdx.x - (part == 0 ? 0 : part == 1 ? few.first_block[1] : few.first_block[2]);
  ring_init(barriers + warp_id(), 1);
  __syncthreads();
  let_next_start();
  if (MIXTURE) wait_for_inputs();
  Tile tile = tile_of(call, TOKEN_TILE);
  if (tile.count <= 0) return;
  bring_rows(call, part, row_block, tile.expert, rows, barriers + warp_id());
  if (!MIXTURE) wait_for_inputs();
  find_sources(sources, call, tile, TOKEN_TILE, THREADS);
  __syncthreads();
  Inputs x;
  read_inputs(x, call, sources, warp_id() * 4);
  ring_wait_all(barriers, WARPS);
  Sums sums = {};
  if (part == 0) multiply_units<TYPE_0, TYPE_1>(sums, call, sources, rows, x);
  else if (!GLU && part == 1) multiply_units<TYPE_1, TYPE_1>(sums, call, sources, rows, x);
  else if (!GLU) multiply_units<TYPE_2, TYPE_2>(sums, call, sources, rows, x);
  __syncthreads();
  float* parts = (float*)rows;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        parts[((warp_id() * M_TILES + m) * N_TILES + n) * 128 + i * 32 + lane_id()] = sums[m][n][i];
  __syncthreads();
  finish(call, tile, part, row_block, parts);
}
