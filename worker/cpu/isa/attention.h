// The inner loop of attention: one page of keys and values against R query rows, in one go through its memory.
//
// A page's keys and then its values are read in address order, once: that runs at two and a half times the speed of
// keys of many pages first and values after (26 against 10 GB/s). A row's arithmetic is the same for every R: rows only
// share the conversion of keys and values to f32.
#pragma once
#include "element_kernels.h"
#include "lanes.h"

namespace pw::PW_ISA {

// Accumulators of R rows by L lane groups have to fit the register file beside the operands.
#ifdef PW_ISA_avx512
constexpr int32_t kTileRows = 8;
constexpr int32_t kTileLanes = 2;
constexpr bool kConversionCosts = true;  // f16 to f32 beside the multiply-adds; then groups of rows share one
#else
constexpr int32_t kTileRows = 6;
constexpr int32_t kTileLanes = 1;
constexpr bool kConversionCosts = false;
#endif

constexpr int32_t kPageTokens = PW_PAGE_TOKENS;

// Readers of a block: `key(dim, token)` gives 16 tokens of one dimension, `value(token, dim)` 16 dimensions of one
// token.
struct F16Reader {
  const uint16_t* keys;
  const uint16_t* values;
  int32_t head_dim;

  PW_INLINE_MEMBER F16Reader(const KvLayer& layer, const uint8_t* block)
      : keys(reinterpret_cast<const uint16_t*>(block)),
        values(reinterpret_cast<const uint16_t*>(block + layer.key_bytes)),
        head_dim(layer.head_dim) {}
  PW_INLINE_MEMBER Lanes key_scale(int32_t, int32_t) const { return zero(); }
  PW_INLINE_MEMBER Lanes key(int32_t dim, int32_t token, Lanes) const {
    return load_f16(keys + dim * kPageTokens + token);
  }
  PW_INLINE_MEMBER Lanes value_scale(int32_t, int32_t) const { return zero(); }
  PW_INLINE_MEMBER Lanes value(int32_t token, int32_t dim, Lanes) const {
    return load_f16(values + token * head_dim + dim);
  }
};

struct Q8Reader {
  const int8_t* keys;
  const int8_t* values;
  const uint16_t* key_scales;
  const uint16_t* value_scales;
  int32_t head_dim;
  int32_t n_scales;

  PW_INLINE_MEMBER Q8Reader(const KvLayer& layer, const uint8_t* block)
      : keys(reinterpret_cast<const int8_t*>(block)),
        values(reinterpret_cast<const int8_t*>(block + layer.key_bytes)),
        key_scales(reinterpret_cast<const uint16_t*>(block + kPageTokens * layer.head_dim)),
        value_scales(reinterpret_cast<const uint16_t*>(block + layer.key_bytes + kPageTokens * layer.head_dim)),
        head_dim(layer.head_dim),
        n_scales(layer.n_scales) {}
  PW_INLINE_MEMBER Lanes key_scale(int32_t dim, int32_t token) const {
    return load_f16(key_scales + dim / kQuantBlock * kPageTokens + token);
  }
  PW_INLINE_MEMBER Lanes key(int32_t dim, int32_t token, Lanes scale) const {
    return load_i8(keys + dim * kPageTokens + token) * scale;
  }
  PW_INLINE_MEMBER Lanes value_scale(int32_t token, int32_t dim) const {
    return splat(_cvtsh_ss(value_scales[token * n_scales + dim / kQuantBlock]));
  }
  PW_INLINE_MEMBER Lanes value(int32_t token, int32_t dim, Lanes scale) const {
    return load_i8(values + token * head_dim + dim) * scale;
  }
};

// A page that was expanded to f32 for a tile of many rows: keys [head_dim][32], then values [32][head_dim].
struct F32Reader {
  const float* keys;
  const float* values;
  int32_t head_dim;

  PW_INLINE_MEMBER F32Reader(const KvLayer& layer, const uint8_t* page)
      : keys(reinterpret_cast<const float*>(page)),
        values(keys + kPageTokens * layer.head_dim),
        head_dim(layer.head_dim) {}
  PW_INLINE_MEMBER Lanes key_scale(int32_t, int32_t) const { return zero(); }
  PW_INLINE_MEMBER Lanes key(int32_t dim, int32_t token, Lanes) const { return load(keys + dim * kPageTokens + token); }
  PW_INLINE_MEMBER Lanes value_scale(int32_t, int32_t) const { return zero(); }
  PW_INLINE_MEMBER Lanes value(int32_t token, int32_t dim, Lanes) const {
    return load(values + token * head_dim + dim);
  }
};

// `page` as F32Reader takes it; every value is what the block's own reader gives.
template <class Reader>
void expand_page(const KvLayer& layer, const uint8_t* block, float* page) {
  const Reader reader(layer, block);
  float* values = page + kPageTokens * layer.head_dim;
  for (int32_t dim = 0; dim < layer.head_dim; ++dim)
    for (int32_t token = 0; token < kPageTokens; token += kLanes)
      store(page + dim * kPageTokens + token, reader.key(dim, token, reader.key_scale(dim, token)));
  for (int32_t token = 0; token < kPageTokens; ++token)
    for (int32_t dim = 0; dim < layer.head_dim; dim += kLanes)
      store(values + token * layer.head_dim + dim, reader.value(token, dim, reader.value_scale(token, dim)));
}

constexpr float kNoScore = -1e30f;     // finite, so that the difference of two of them is 0 and not NaN
constexpr float kLog2E = 1.44269504f;  // scores are kept times this: weights are powers of two

struct Range {
  int32_t begin, end;
};

PW_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
PW_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// R rows on their way through the pages of a split: a softmax that is rescaled when a larger score turns up.
struct Rows {
  const float* query;        // packed [head_dim][R], scaled
  const int32_t* positions;  // [R] ascending
  float* sums;               // [R][head_dim] weighted values
  float* largest;            // [R] largest score so far
  float* lane_sums;          // [R][16] sums of weights, by lane
  int32_t window_tokens;     // 0 = all
  float softcap;             // 0 = none
};

// What the query at `position` sees of the page that starts at position `start`, counted from there.
PW_INLINE Range seen_of_page(int32_t position, int32_t start, int32_t window_tokens) {
  const int32_t oldest = window_tokens > 0 ? larger(0, position - window_tokens + 1) : 0;
  return {larger(0, oldest - start), smaller(kPageTokens, position + 1 - start)};
}

// scores[row * 32 + token]
template <class Reader, int32_t R>
PW_INLINE void score_page(const Reader& reader, const float* query, float* scores) {
  for (int32_t token = 0; token < kPageTokens; token += kTileLanes * kLanes) {
    Lanes sums[R][kTileLanes];
    for (int32_t r = 0; r < R; ++r)
      for (int32_t l = 0; l < kTileLanes; ++l) sums[r][l] = zero();
    for (int32_t begin = 0; begin < reader.head_dim; begin += kQuantBlock) {
      Lanes scales[kTileLanes];
      for (int32_t l = 0; l < kTileLanes; ++l) scales[l] = reader.key_scale(begin, token + l * kLanes);
      const int32_t end = smaller(reader.head_dim, begin + kQuantBlock);
      for (int32_t dim = begin; dim < end; ++dim) {
        Lanes keys[kTileLanes];
        for (int32_t l = 0; l < kTileLanes; ++l) keys[l] = reader.key(dim, token + l * kLanes, scales[l]);
#pragma GCC unroll 8
        for (int32_t r = 0; r < R; ++r) {
          const Lanes q = splat(query[dim * R + r]);
          for (int32_t l = 0; l < kTileLanes; ++l) sums[r][l] = fma(q, keys[l], sums[r][l]);
        }
      }
    }
    for (int32_t r = 0; r < R; ++r)
      for (int32_t l = 0; l < kTileLanes; ++l) store(scores + r * kPageTokens + token + l * kLanes, sums[r][l]);
  }
}

// A larger score than all before: what was summed up so far counts for less.
inline __attribute__((noinline)) void raise_largest(const Rows& rows, int32_t r, float score, int32_t head_dim) {
  const Lanes factor = exp2_negative(splat(rows.largest[r] - score));
  rows.largest[r] = score;
  store(rows.lane_sums + r * kLanes, load(rows.lane_sums + r * kLanes) * factor);
  float* sums = rows.sums + r * head_dim;
  for (int32_t dim = 0; dim < head_dim; dim += kLanes) store(sums + dim, load(sums + dim) * factor);
}

// A row's scores of a page become weights 2^(score - largest), 0 where it does not see the key.
PW_INLINE void weigh_row(const Rows& rows, int32_t r, Range seen, float* scores, int32_t head_dim) {
  if (seen.begin >= seen.end) {
    store(scores, zero());
    store(scores + kLanes, zero());
    return;
  }
  Lanes low = load(scores), high = load(scores + kLanes);
  if (rows.softcap != 0.0f) {
    const Lanes cap = splat(rows.softcap * kLog2E), inverse = splat(1.0f / (rows.softcap * kLog2E));
    low = cap * tanh(low * inverse);
    high = cap * tanh(high * inverse);
  }
  if (seen.begin > 0 || seen.end < kPageTokens) {
    low = keep(low, seen.begin, seen.end, splat(kNoScore));
    high = keep(high, seen.begin - kLanes, seen.end - kLanes, splat(kNoScore));
  }
  const Lanes both = max(low, high);
  if (mask_greater(both, splat(rows.largest[r]))) raise_largest(rows, r, reduce_max(both), head_dim);
  const Lanes largest = splat(rows.largest[r]);
  low = exp2_negative(low - largest);
  high = exp2_negative(high - largest);
  store(scores, low);
  store(scores + kLanes, high);
  store(rows.lane_sums + r * kLanes, load(rows.lane_sums + r * kLanes) + low + high);
}

// sums[row, dim .. dim + 16 L) += weight of token * value of token, for tokens of the page
template <class Reader, int32_t R, int32_t L>
PW_INLINE void add_values(const Reader& reader, const float* weights, Range tokens, int32_t dim, float* sums) {
  Lanes total[R][L];
  for (int32_t r = 0; r < R; ++r)
    for (int32_t l = 0; l < L; ++l) total[r][l] = load(sums + r * reader.head_dim + dim + l * kLanes);
  for (int32_t token = tokens.begin; token < tokens.end; ++token) {
    const Lanes scale = reader.value_scale(token, dim);
    Lanes values[L];
    for (int32_t l = 0; l < L; ++l) values[l] = reader.value(token, dim + l * kLanes, scale);
#pragma GCC unroll 8
    for (int32_t r = 0; r < R; ++r) {
      const Lanes weight = splat(weights[r * kPageTokens + token]);
      for (int32_t l = 0; l < L; ++l) total[r][l] = fma(weight, values[l], total[r][l]);
    }
  }
  for (int32_t r = 0; r < R; ++r)
    for (int32_t l = 0; l < L; ++l) store(sums + r * reader.head_dim + dim + l * kLanes, total[r][l]);
}

// Whether any of the rows sees anything of the page that starts at position `start`.
PW_INLINE bool sees_page(const Rows& rows, int32_t n_rows, int32_t start) {
  return rows.positions[n_rows - 1] >= start &&
         (rows.window_tokens == 0 || rows.positions[0] - rows.window_tokens + 1 < start + kPageTokens);
}

// One page, whose first position is `start`, into the state of R rows.
template <class Reader, int32_t R>
void attend_page(const KvLayer& layer, const uint8_t* block, int32_t start, const Rows& rows) {
  const Reader reader(layer, block);
  alignas(64) float scores[R * kPageTokens];
  score_page<Reader, R>(reader, rows.query, scores);
  for (int32_t r = 0; r < R; ++r) {
    const Range seen = seen_of_page(rows.positions[r], start, rows.window_tokens);
    weigh_row(rows, r, seen, scores + r * kPageTokens, layer.head_dim);
  }
  const Range tokens{seen_of_page(rows.positions[0], start, rows.window_tokens).begin,
                     seen_of_page(rows.positions[R - 1], start, rows.window_tokens).end};
  int32_t dim = 0;
  for (; dim + kTileLanes * kLanes <= layer.head_dim; dim += kTileLanes * kLanes)
    add_values<Reader, R, kTileLanes>(reader, scores, tokens, dim, rows.sums);
  if (dim < layer.head_dim) add_values<Reader, R, 1>(reader, scores, tokens, dim, rows.sums);
}

}  // namespace pw::PW_ISA
