// y = W x on tensor cores for many tokens, weights unpacked to halves in the kernel: for dense matrices with few tokens
// and for experts, whose tokens have been sorted (group.cu). A block computes TOKEN_TILE tokens times 128 rows in steps
// of 128 columns. While the tensor cores work on one step, the weights of the next are on their way to registers and
// its activations to shared memory.
//
// Definitions: COLS, TYPE_0, TYPE_1, TOKEN_TILE (16, 32, 64, 128), BUFFERS (1 or 2), GLU. With GLU half of the 128 rows
// are of gate and half of up, and the output is act(gate) * up in halves; ACTIVATION 0 silu, 1 gelu.
#include "quant.cuh"
#include "matrix_call.cuh"

constexpr int THREADS = 256, ROW_TILE = 128, STEP = 128;
constexpr int WARPS_M = TOKEN_TILE >= 64 ? 2 : 1, WARPS_N = 8 / WARPS_M;
constexpr int M_TILES = TOKEN_TILE / 16 / WARPS_M, N_TILES = ROW_TILE / 8 / WARPS_N;
constexpr int N_UNITS = (COLS + 63) / 64, N_STEPS = (COLS + STEP - 1) / STEP;
constexpr int LINE_BYTES = STEP * 2;  // of a row of a tile in shared memory
constexpr int A_BYTES = TOKEN_TILE * LINE_BYTES, B_BYTES = ROW_TILE * LINE_BYTES;
// Scales are kept 64 times too large while they are halves: small ones would lose digits.
constexpr float SCALE_UP = 64.f, SCALE_DOWN = 1.f / 64.f;

// 16-byte piece `chunk` of line `row`: pieces are permuted so that neither the unpacking threads nor the tile loads
// meet in a bank.
INLINE u8* piece(u8* tile, int row, int chunk) {
  int half = chunk >> 3;
  return tile + row * LINE_BYTES + half * 128 + (((chunk & 7) ^ ((row + 4 * half) & 7)) * 16);
}

// Row of the tile -> matrix (0 or 1) and row in it. With GLU every warp's rows are half gate, half up.
struct TileRow {
  int matrix, row;
};
INLINE TileRow tile_row(int r) {
#if GLU
  constexpr int WARP_ROWS = 8 * N_TILES;
  int in_warp = r % WARP_ROWS;
  return {in_warp / (WARP_ROWS / 2),
          (int)blockIdx.x * (ROW_TILE / 2) + r / WARP_ROWS * (WARP_ROWS / 2) + in_warp % (WARP_ROWS / 2)};
#else
  return {0, (int)blockIdx.x * ROW_TILE + r};
#endif
}

INLINE u32 both(float value) { return pack_half2(value, value); }

template <int TYPE>
INLINE void unpack_unit(const RawUnit& raw, int unit, u8* tile, int row, int first_chunk) {
  using F = Format<TYPE>;
  Scales scales;
  unit_scales<TYPE>(scales, raw, unit);
#pragma unroll
  for (int chunk = 0; chunk < 8; chunk++) {  // 8 weights
    int group = F::N_GROUPS == 4 ? chunk >> 1 : chunk >> 2;
    u32 scale = both(scales.scale[group] * SCALE_UP);
    u32 minimum = F::HAS_MINIMUM ? both(-scales.minimum[group] * SCALE_UP) : 0;
    u32 low[2], high[2];
    codes_to_halves<TYPE>(low, unit_codes<TYPE>(raw, 2 * chunk), scale, minimum);
    codes_to_halves<TYPE>(high, unit_codes<TYPE>(raw, 2 * chunk + 1), scale, minimum);
    *(uint4*)piece(tile, row, first_chunk + chunk) = make_uint4(low[0], low[1], high[0], high[1]);
  }
}

template <int TYPE>
INLINE float float_weight(const u8* row, int column) {
  if (column >= COLS) return 0;
  if (TYPE == T_F32) return ((const float*)row)[column];
  u16 bits = ((const u16*)row)[column];
  return TYPE == T_F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// What one thread brings: one unit (64 columns) of one row of the tile, fetched in one step and unpacked in the next.
struct Share {
  const u8* row;  // null: outside of the matrix
  int matrix;
  RawUnit raw;
};

template <int TYPE>
INLINE void fetch_as(Share& share, int unit) {
  if constexpr (!Format<TYPE>::IS_FLOAT) load_unit<TYPE, FromGlobal>(share.raw, share.row, N_UNITS, unit);
}
INLINE void fetch(Share& share, int step) {
  int unit = step * 2 + (threadIdx.x & 1);
  if (!share.row || unit >= N_UNITS) return;
  if (TYPE_0 == TYPE_1 || share.matrix == 0) fetch_as<TYPE_0>(share, unit);
  else fetch_as<TYPE_1>(share, unit);
}
template <int TYPE>
INLINE void unpack_as(const Share& share, int unit, u8* tile) {
  int row = threadIdx.x >> 1, first_chunk = (threadIdx.x & 1) * 8;
  if constexpr (!Format<TYPE>::IS_FLOAT) {
    unpack_unit<TYPE>(share.raw, unit, tile, row, first_chunk);
  } else {
    for (int chunk = 0; chunk < 8; chunk++) {
      u32 words[4];
      for (int i = 0; i < 4; i++) {
        int column = unit * 64 + chunk * 8 + i * 2;
        words[i] = pack_half2(float_weight<TYPE>(share.row, column) * SCALE_UP,
                              float_weight<TYPE>(share.row, column + 1) * SCALE_UP);
      }
      *(uint4*)piece(tile, row, first_chunk + chunk) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
INLINE void unpack(const Share& share, int step, u8* tile) {
  int unit = step * 2 + (threadIdx.x & 1);
  if (!share.row || unit >= N_UNITS) {
    for (int chunk = 0; chunk < 8; chunk++)
      *(uint4*)piece(tile, threadIdx.x >> 1, (threadIdx.x & 1) * 8 + chunk) = make_uint4(0, 0, 0, 0);
    return;
  }
  if (TYPE_0 == TYPE_1 || share.matrix == 0) unpack_as<TYPE_0>(share, unit, tile);
  else unpack_as<TYPE_1>(share, unit, tile);
}

// Activations of a step: 16 pieces a token; rows of the input are padded to whole pieces (COLS is a multiple of 8).
INLINE void copy_activations(const MatrixCall& call, const int* sources, int step, u8* tile) {
  constexpr int PIECES = TOKEN_TILE * 16;
#pragma unroll
  for (int i = threadIdx.x; i < PIECES; i += THREADS) {
    int token = i >> 4, chunk = i & 15, column = step * STEP + chunk * 8;
    bool valid = sources[token] >= 0 && column < COLS;
    const u16* source = call.input + (valid ? (u64)sources[token] * COLS + column : 0);
    copy_async16(piece(tile, token, chunk), source, valid);
  }
  copy_async_commit();
}

typedef float Sums[M_TILES][N_TILES][4];

INLINE void multiply_step(Sums& sums, const u8* a_tile, const u8* b_tile) {
  const int lane = lane_id(), m0 = warp_id() / WARPS_N * (M_TILES * 16), n0 = warp_id() % WARPS_N * (N_TILES * 8);
#pragma unroll
  for (int k = 0; k < STEP / 16; k++) {
    u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
      load_tiles(a[m], piece((u8*)a_tile, m0 + m * 16 + (lane & 15), k * 2 + (lane >> 4)));
#pragma unroll
    for (int n = 0; n < N_TILES / 2; n++)
      load_tiles(b[n], piece((u8*)b_tile, n0 + n * 16 + (lane & 7) + (lane >> 4) * 8, k * 2 + ((lane >> 3) & 1)));
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
        mma_f16(sums[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
}

INLINE void store(const MatrixCall& call, const Tile& tile, const Sums& sums) {
  const int lane = lane_id(), m0 = warp_id() / WARPS_N * (M_TILES * 16), n0 = warp_id() % WARPS_N * (N_TILES * 8);
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = m0 + m * 16 + (lane >> 2) + (i >> 1) * 8;
      if (token >= tile.count) continue;
#pragma unroll
      for (int n = 0; n < N_TILES / (GLU ? 2 : 1); n++) {
        int row = tile_row(n0 + n * 8 + (lane & 3) * 2 + (i & 1)).row;
        if (row >= call.rows) continue;
        float y = sums[m][n][i] * SCALE_DOWN;
#if GLU
        store_gated(call, tile.first + token, row, y, sums[m][n + N_TILES / 2][i] * SCALE_DOWN);
#else
        store_value(call, tile.first + token, row, y);
#endif
      }
    }
}

KERNEL __launch_bounds__(THREADS) matrix_matrix(const __grid_constant__ MatrixCall call) {
  DYNAMIC_SHARED(memory);  // BUFFERS of activations, then of weights
  __shared__ int sources[TOKEN_TILE];
  let_next_start();
  wait_for_inputs();
  Tile tile = tile_of(call, TOKEN_TILE);
  if (tile.count <= 0) return;
  find_sources(sources, call, tile, TOKEN_TILE, THREADS);
  TileRow own = tile_row(threadIdx.x >> 1);
  Share share;
  share.matrix = own.matrix;
  u32 row_bytes = own.matrix == 0 ? Format<TYPE_0>::row_bytes(COLS) : Format<TYPE_1>::row_bytes(COLS);
  const u8* weights = (own.matrix == 0 ? call.weights[0] : call.weights[1]) +
                      tile.expert * (own.matrix == 0 ? call.expert_bytes[0] : call.expert_bytes[1]);
  share.row = own.row < call.rows ? weights + (u64)own.row * row_bytes : nullptr;
  fetch(share, 0);
  __syncthreads();
  u8* a_tiles = memory;
  u8* b_tiles = memory + BUFFERS * A_BYTES;
  copy_activations(call, sources, 0, a_tiles);
  unpack(share, 0, b_tiles);
  Sums sums = {};
#pragma unroll 1
  for (int step = 0; step < N_STEPS; step++) {
    copy_async_wait<0>();
    __syncthreads();
    int current = BUFFERS == 2 ? step & 1 : 0, next = BUFFERS == 2 ? current ^ 1 : 0;
    bool more = step + 1 < N_STEPS;
    if (more) fetch(share, step + 1);
    if (more && BUFFERS == 2) copy_activations(call, sources, step + 1, a_tiles + next * A_BYTES);
    multiply_step(sums, a_tiles + current * A_BYTES, b_tiles + current * B_BYTES);
    if (BUFFERS == 1) __syncthreads();
    if (more && BUFFERS == 1) copy_activations(call, sources, step + 1, a_tiles);
    if (more) unpack(share, step + 1, b_tiles + next * B_BYTES);
  }
  store(call, tile, sums);
}
