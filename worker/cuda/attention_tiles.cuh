// Attention of 16 query rows by one warp on tensor cores: f16 products, f32 sums, running softmax in registers.
// Fragments are those of m16n8k16: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next one.
// Keys and values lie in shared memory as f16 rows of kRowHalves.
#pragma once
#include "attention.cuh"

constexpr int kRowHalves = HEAD_DIM + 8;  // an odd number of 16-byte units: eight rows of a tile hit all banks
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kUnits = HEAD_DIM / 8;  // 16-byte units of a row

struct QueryTile {
  u32 fragments[kSteps][4];

  // `upper`, `lower`: this lane's two rows, f32 [HEAD_DIM]
  INLINE void load(const float* upper, const float* lower, float factor) {
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float2 v = *(const float2*)((part % 2 ? lower : upper) + 16 * step + 8 * (part / 2) + column);
        fragments[step][part] = pack_half2(v.x * factor, v.y * factor);
      }
    }
  }
};

// The softmax state of this lane's two rows, and the weighted sums of values.
struct RowState {
  float largest[2], mass[2], sums[kUnits][4];

  INLINE void clear() {
    largest[0] = largest[1] = kNoScore;
    mass[0] = mass[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
  }
};

// scores [16 x Positions] of the query rows and `Positions` rows of keys
template <int Positions>
INLINE void score_tile(const QueryTile& query, const u16* keys, float (&scores)[Positions / 8][4]) {
  const int lane = threadIdx.x % 32, tile = lane / 8;
  const u16* own = keys + (tile / 2 * 8 + lane % 8) * kRowHalves + tile % 2 * 8;
#pragma unroll
  for (int i = 0; i < Positions / 8; ++i) scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const u32(&a)[4] = query.fragments[step];
#pragma unroll
    for (int pair = 0; pair < Positions / 16; ++pair) {
      u32 b[4];
      load_tiles(b, own + 16 * pair * kRowHalves + 16 * step);
      mma_f16(scores[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_f16(scores[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// Turns products into scores; those of positions that row r does not see (outside of [begin[r], end[r])) into kNoScore.
template <int Positions>
INLINE void finish_scores(float (&scores)[Positions / 8][4], const Scoring& scoring, bool masked,
                                              int first_position, const int (&begin)[2], const int (&end)[2]) {
  const int column = first_position + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < Positions / 8; ++i) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      scores[i][part] = scoring(scores[i][part]);
      const int position = column + 8 * i + part % 2, row = part / 2;
      if (masked && (position < begin[row] || position >= end[row])) scores[i][part] = kNoScore;
    }
  }
}

// Replaces scores by weights and fades what was summed before.
template <int Positions>
INLINE void weigh_scores(RowState& state, float (&scores)[Positions / 8][4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = state.largest[row];
#pragma unroll
    for (int i = 0; i < Positions / 8; ++i) largest = fmaxf(largest, fmaxf(scores[i][2 * row], scores[i][2 * row + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    const float fade = exp2_approximate(state.largest[row] - largest);
    state.largest[row] = largest;
    // a row that has seen nothing yet has kNoScore for its largest: its weights must be 0, not exp2(0)
    const float reference = largest > kNoScore ? largest : 0.0f;
    float mass = 0.0f;
#pragma unroll
    for (int i = 0; i < Positions / 8; ++i) {
#pragma unroll
      for (int part = 2 * row; part < 2 * row + 2; ++part) {
        scores[i][part] = exp2_approximate(scores[i][part] - reference);
        mass += scores[i][part];
      }
    }
    state.mass[row] = state.mass[row] * fade + mass;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      state.sums[i][2 * row] *= fade;
      state.sums[i][2 * row + 1] *= fade;
    }
  }
}

// state.sums += weights [16 x Positions] values [Positions x HEAD_DIM]
template <int Positions>
INLINE void add_values(RowState& state, const float (&weights)[Positions / 8][4],
                                           const u16* values) {
  const int lane = threadIdx.x % 32, tile = lane / 8;
  const u16* own = values + (tile % 2 * 8 + lane % 8) * kRowHalves + tile / 2 * 8;
#pragma unroll
  for (int step = 0; step < Positions / 16; ++step) {
    const u32 a[4] = {pack_half2(weights[2 * step][0], weights[2 * step][1]),
                      pack_half2(weights[2 * step][2], weights[2 * step][3]),
                      pack_half2(weights[2 * step + 1][0], weights[2 * step + 1][1]),
                      pack_half2(weights[2 * step + 1][2], weights[2 * step + 1][3])};
#pragma unroll
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      u32 b[4];
      load_tiles_transposed(b, own + 16 * step * kRowHalves + 16 * pair);
      mma_f16(state.sums[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_f16(state.sums[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// The mass of both rows over all columns: lanes of a row have a part each until the end.
INLINE void gather_mass(RowState& state) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    state.mass[row] += __shfl_xor_sync(FULL_WARP, state.mass[row], 1);
    state.mass[row] += __shfl_xor_sync(FULL_WARP, state.mass[row], 2);
  }
}

// 8 f16 of one unit from codes of a q8_0 cache
INLINE uint4 unpack_unit(uint2 codes, u16 scale_bits) {
  const float scale = half_to_float(scale_bits);
  const u32 words[2] = {codes.x, codes.y};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 pair = words[i / 2] >> 16 * (i % 2);
    out[i] = pack_half2((float)(signed char)pair * scale, (float)(signed char)(pair >> 8) * scale);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Unit `unit` (8 values) of cache row `row` into shared memory; in the background where it needs no conversion.
INLINE void fetch_unit(u16* target, const void* base, const u16* scales, u64 row, int unit) {
#if KV_Q8
  const uint2 codes = __ldcg((const uint2*)((const u8*)base + row * HEAD_DIM + 8 * unit));
  *(uint4*)target = unpack_unit(codes, __ldcg(scales + row * (HEAD_DIM / 32) + unit / 4));
#else
  copy_async16(target, (const u16*)base + row * HEAD_DIM + 8 * unit, true);
#endif
}
