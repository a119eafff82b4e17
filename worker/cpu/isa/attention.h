// Inner loops of attention over one page: scores of R query rows, and their weighted sum of values.
//
// A row's arithmetic is the same for every R: rows only share the conversion of keys and values to f32.
#pragma once
#include "element_kernels.h"
#include "lanes.h"

namespace pw::PW_ISA {

// Accumulators of R rows by L lane groups have to fit the register file beside the operands.
#ifdef PW_ISA_avx512
constexpr int32_t kTileRows = 8;
constexpr int32_t kTileLanes = 2;
#else
constexpr int32_t kTileRows = 6;
constexpr int32_t kTileLanes = 1;
#endif

constexpr int32_t kPageTokens = PW_PAGE_TOKENS;

// Readers of a block: `key(dim, token)` gives 16 tokens of one dimension, `value(token, dim)` 16 dimensions of one token.
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

// Fetches what is needed soon, a line per dimension of the page in work: the values of this page and the next page's
// keys. Blocks are too short for the processor to see a stream in them.
struct Ahead {
  const uint8_t* values;
  const uint8_t* next_keys;
  int64_t bytes_per_dim;

  PW_INLINE_MEMBER void fetch(int32_t dim) const {
    _mm_prefetch(values + dim * bytes_per_dim, _MM_HINT_T0);
    _mm_prefetch(next_keys + dim * bytes_per_dim, _MM_HINT_T0);
  }
};

// scores[row * kSplitTokens + token] of the page's 32 tokens; `query` is packed [head_dim][R]; `ahead` may be NULL
template <class Reader, int32_t R>
void score_page(const KvLayer& layer, const uint8_t* block, const float* query, float* scores, const Ahead* ahead) {
  const Reader reader(layer, block);
  for (int32_t token = 0; token < kPageTokens; token += kTileLanes * kLanes) {
    Lanes sums[R][kTileLanes];
    for (int32_t r = 0; r < R; ++r)
      for (int32_t l = 0; l < kTileLanes; ++l) sums[r][l] = zero();
    for (int32_t begin = 0; begin < layer.head_dim; begin += kQuantBlock) {
      Lanes scales[kTileLanes];
      for (int32_t l = 0; l < kTileLanes; ++l) scales[l] = reader.key_scale(begin, token + l * kLanes);
      const int32_t end = layer.head_dim - begin < kQuantBlock ? layer.head_dim : begin + kQuantBlock;
      for (int32_t dim = begin; dim < end; ++dim) {
        if (ahead) ahead->fetch(dim);
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
      for (int32_t l = 0; l < kTileLanes; ++l) store(scores + r * kSplitTokens + token + l * kLanes, sums[r][l]);
  }
}

// The keys and values of one head in one split: positions [begin, end) of it, `pages` from its start.
struct SplitPages {
  const KvLayer* layer;
  const int32_t* pages;
  int32_t kv_head;
  int32_t begin;
  int32_t end;

  PW_INLINE_MEMBER const uint8_t* block(int32_t page) const { return layer->block(pages[page], kv_head); }
};

// sums[row, dim .. dim + 16 L) = weight of token * value of token over the split; weights[row * kSplitTokens + token]
template <class Reader, int32_t R, int32_t L>
void weigh_values(const SplitPages& split, const float* weights, int32_t dim, float* sums) {
  Lanes total[R][L];
  for (int32_t r = 0; r < R; ++r)
    for (int32_t l = 0; l < L; ++l) total[r][l] = zero();
  for (int32_t begin = split.begin; begin < split.end;) {
    const int32_t page = begin / kPageTokens, start = page * kPageTokens;
    const int32_t end = start + kPageTokens < split.end ? start + kPageTokens : split.end;
    const Reader reader(*split.layer, split.block(page));
    for (int32_t token = begin; token < end; ++token) {
      const Lanes scale = reader.value_scale(token - start, dim);
      Lanes values[L];
      for (int32_t l = 0; l < L; ++l) values[l] = reader.value(token - start, dim + l * kLanes, scale);
#pragma GCC unroll 8
      for (int32_t r = 0; r < R; ++r) {
        const Lanes weight = splat(weights[r * kSplitTokens + token]);
        for (int32_t l = 0; l < L; ++l) total[r][l] = fma(weight, values[l], total[r][l]);
      }
    }
    begin = end;
  }
  const int32_t head_dim = split.layer->head_dim;
  for (int32_t r = 0; r < R; ++r)
    for (int32_t l = 0; l < L; ++l) store(sums + r * head_dim + dim + l * kLanes, total[r][l]);
}

}  // namespace pw::PW_ISA
