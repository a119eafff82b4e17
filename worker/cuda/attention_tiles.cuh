// Attention of 16 query rows by one warp on tensor cores: f16 products, f32 sums, running softmax in registers.
// Fragments are those of m16n8k16: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next one.
// Keys and values lie in shared memory as rows of the f16 cache do (kv_rows.cuh).
#pragma once
#include "attention.cuh"

constexpr int kSteps = HEAD_DIM / 16;

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

// The running softmax of this lane's rows: l / 4 and, with two, l / 4 + 8. Lanes of a row have a part of its mass each.
template <int Rows>
struct Softmax {
  float largest[Rows], mass[Rows];

  INLINE void clear() {
#pragma unroll
    for (int row = 0; row < Rows; ++row) largest[row] = kNoScore, mass[row] = 0.0f;
  }
  // the whole mass of the rows
  INLINE void gather_mass() {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      mass[row] += __shfl_xor_sync(FULL_WARP, mass[row], 1);
      mass[row] += __shfl_xor_sync(FULL_WARP, mass[row], 2);
    }
  }
};

// For load_tiles: unit `unit` (even) or, with `odd`, the next one of row `row` of `rows`; row % 8 is this lane's number
// % 8. Few different registers for all units: what a unit adds beyond a group of kSwizzle is a constant.
INLINE const u16* tile_row(const u16* rows, int row, int unit, int odd) {
  const int group = unit / kSwizzle * kSwizzle, lane_unit = odd ^ swizzled(0, threadIdx.x % 8);
  return rows + row * HEAD_DIM + group * 8 + ((unit - group) ^ lane_unit) * 8;
}

// scores [16 x Positions] of the query rows and `Positions` rows of keys; `Ahead` steps are loaded together.
template <int Positions, int Ahead>
INLINE void score_tile(const QueryTile& query, const u16* keys, float (&scores)[Positions / 8][4]) {
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < Positions / 8; ++i) scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
#pragma unroll
  for (int first = 0; first < kSteps; first += Ahead) {
    u32 b[Ahead][Positions / 16][4];
#pragma unroll
    for (int step = first; step < first + Ahead && step < kSteps; ++step)
#pragma unroll
      for (int pair = 0; pair < Positions / 16; ++pair)
        load_tiles(b[step - first][pair], tile_row(keys, row + 16 * pair, 2 * step, odd));
#pragma unroll
    for (int step = first; step < first + Ahead && step < kSteps; ++step) {
      const u32(&a)[4] = query.fragments[step];
#pragma unroll
      for (int pair = 0; pair < Positions / 16; ++pair) {
        const u32(&keys_here)[4] = b[step - first][pair];
        mma_f16(scores[2 * pair], a[0], a[1], a[2], a[3], keys_here[0], keys_here[1]);
        mma_f16(scores[2 * pair + 1], a[0], a[1], a[2], a[3], keys_here[2], keys_here[3]);
      }
    }
  }
}

// Turns products into scores; those of positions that row r does not see (outside of [begin[r], end[r])) into kNoScore.
template <int Positions, int Rows>
INLINE void finish_scores(float (&scores)[Positions / 8][4], const Scoring& scoring, bool masked, int first_position,
                          const int (&begin)[Rows], const int (&end)[Rows]) {
  if (scoring.cap != 0.0f) {
#pragma unroll
    for (int i = 0; i < Positions / 8; ++i)
#pragma unroll
      for (int part = 0; part < 2 * Rows; ++part) scores[i][part] = scoring(scores[i][part]);
  }
  if (!masked) return;
  const int column = first_position + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < Positions / 8; ++i) {
#pragma unroll
    for (int part = 0; part < 2 * Rows; ++part) {
      const int position = column + 8 * i + part % 2, row = part / 2;
      if (position < begin[row] || position >= end[row]) scores[i][part] = kNoScore;
    }
  }
}

// Replaces scores by weights; what was summed before has to be multiplied by `fades`.
template <int Positions, int Rows>
INLINE void weigh_scores(Softmax<Rows>& softmax, float (&scores)[Positions / 8][4], float (&fades)[Rows]) {
#pragma unroll
  for (int row = 0; row < Rows; ++row) {
    float largest = softmax.largest[row];
#pragma unroll
    for (int i = 0; i < Positions / 8; ++i) largest = fmaxf(largest, fmaxf(scores[i][2 * row], scores[i][2 * row + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    fades[row] = exp2_approximate(softmax.largest[row] - largest);
    softmax.largest[row] = largest;
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
    softmax.mass[row] = softmax.mass[row] * fades[row] + mass;
  }
}

constexpr int kTileHalves = kPageTokens * HEAD_DIM;  // a page of keys, or of values

#if KV_Q8
// Halves `part` to `part` + 15 of a row from codes of a q8_0 cache. A code plus 1152 is written as the low byte of a
// half: exact, and cheaper than conversions.
INLINE void store_codes(u16* row_start, int token, int part, uint4 codes, u16 scale_bits) {
  const u32 scale = (u32)scale_bits << 16 | scale_bits, words[4] = {codes.x, codes.y, codes.z, codes.w};
  u32 out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 shifted = __byte_perm(words[i / 2] ^ 0x80808080u, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
    out[i] = half2_mul(half2_sub(shifted, 0x64806480u), scale);
  }
  *(uint4*)(row_start + swizzled(part / 8, token) * 8) = make_uint4(out[0], out[1], out[2], out[3]);
  *(uint4*)(row_start + swizzled(part / 8 + 1, token) * 8) = make_uint4(out[4], out[5], out[6], out[7]);
}
#endif

// Keys and values of a page into shared memory, keys first, by `Threads` threads of which this is `thread`. Runs in the
// background where nothing is to convert; else all loads of a thread are under way together.
template <int Threads>
INLINE void fetch_page(u16* keys, u16* values, const Cache& cache, int page, int thread) {
  const u64 first_row = cache.first_row(cache.pages[page]);
#if KV_Q8
  constexpr int kChunksInRow = HEAD_DIM / 16, kChunks = kPageTokens * kChunksInRow;
  constexpr int kEach = (kChunks + Threads - 1) / Threads, kBatch = kEach < 8 ? kEach : 8;
  const uint4* key_codes = (const uint4*)((const i8*)cache.keys + first_row * HEAD_DIM);
  const uint4* value_codes = (const uint4*)((const i8*)cache.values + first_row * HEAD_DIM);
  const u16* key_scales = cache.key_scales + first_row * kScales;
  const u16* value_scales = cache.value_scales + first_row * kScales;
#pragma unroll
  for (int base = 0; base < kEach; base += kBatch) {
    uint4 codes[2][kBatch];
    u16 scales[2][kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int chunk = min((base + i) * Threads + thread, kChunks - 1);
      codes[0][i] = __ldcg(key_codes + chunk);
      codes[1][i] = __ldcg(value_codes + chunk);
      scales[0][i] = __ldcg(key_scales + chunk / 2);
      scales[1][i] = __ldcg(value_scales + chunk / 2);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int chunk = min((base + i) * Threads + thread, kChunks - 1);
      const int token = chunk / kChunksInRow, part = chunk % kChunksInRow * 16;
      store_codes(keys + token * HEAD_DIM, token, part, codes[0][i], scales[0][i]);
      store_codes(values + token * HEAD_DIM, token, part, codes[1][i], scales[1][i]);
    }
  }
#else
  const u16* key_units = (const u16*)cache.keys + first_row * HEAD_DIM;
  const u16* value_units = (const u16*)cache.values + first_row * HEAD_DIM;
#pragma unroll
  for (int unit = thread; unit < kPageTokens * kUnits; unit += Threads) {
    copy_async16(keys + 8 * unit, key_units + 8 * unit, true);
    copy_async16(values + 8 * unit, value_units + 8 * unit, true);
  }
#endif
}
