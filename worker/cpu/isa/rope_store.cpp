// Per-head norm, rotary positions, and writing keys and values into their page.
#include "kernel_list.h"
#include "lanes.h"

namespace pw::PW_ISA {
namespace {

constexpr float kLargestF16 = 65504.0f;

PW_INLINE void rotate_interleaved(const RopeHead& shape, const float* x, float* out) {
  for (int32_t i = 0; i < shape.rope_dim; i += kLanes) {
    const int32_t n = shape.rope_dim - i;
    const Lanes v = load_first(x + i, n);
    const Lanes turned = swap_pairs(v) * load_first(shape.sines + i, n);
    store_first(out + i, fma(v, load_first(shape.cosines + i, n), turned), n);
  }
}

PW_INLINE void rotate_halves(const RopeHead& shape, const float* x, float* out) {
  const int32_t half = shape.rope_dim / 2;
  for (int32_t i = 0; i < half; i += kLanes) {
    const int32_t n = half - i;
    const Lanes a = load_first(x + i, n), b = load_first(x + half + i, n);
    const Lanes c = load_first(shape.cosines + i, n), s = load_first(shape.sines + i, n);
    store_first(out + i, fma(a, c, zero() - b * s), n);
    store_first(out + half + i, fma(b, c, a * s), n);
  }
}

PW_INLINE Lanes finite_f16(Lanes x) { return max(splat(-kLargestF16), min(splat(kLargestF16), x)); }

// An infinite or NaN key becomes a large or NaN code's scale, never undefined bits.
PW_INLINE float block_scale(const float* x, int32_t n) {
  Lanes largest = zero();
  for (int32_t i = 0; i < n; i += kLanes) largest = max(largest, absolute(load(x + i)));
  return reduce_max(largest) * (1.0f / 127.0f);
}

PW_INLINE uint16_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
PW_INLINE float from_f16(uint16_t bits) { return _cvtsh_ss(bits); }

// Codes and scale of up to 32 elements; the codes fit the scale as it is stored.
PW_INLINE uint16_t quantize_block(const float* x, int32_t n, int8_t* codes) {
  const float bounded = block_scale(x, n) < kLargestF16 ? block_scale(x, n) : kLargestF16;
  const uint16_t stored = to_f16(bounded);
  const float step = from_f16(stored);
  const Lanes inverse = splat(step > 0 ? 1.0f / step : 0.0f);
  const Lanes limit = splat(127.0f);
  for (int32_t i = 0; i < n; i += kLanes) store_i8(codes + i, max(zero() - limit, min(limit, load(x + i) * inverse)));
  return stored;
}

PW_INLINE int32_t block_length(int32_t head_dim, int32_t begin) {
  return head_dim - begin < kQuantBlock ? head_dim - begin : kQuantBlock;
}

void store_key_f16(const KvLayer& layer, uint8_t* block, int32_t slot, const float* key) {
  uint16_t* keys = reinterpret_cast<uint16_t*>(block) + slot;
  alignas(32) uint16_t bits[kLanes];
  for (int32_t dim = 0; dim < layer.head_dim; dim += kLanes) {
    store_f16(bits, finite_f16(load(key + dim)));
    for (int32_t i = 0; i < kLanes; ++i) keys[(dim + i) * PW_PAGE_TOKENS] = bits[i];
  }
}

void store_key_q8(const KvLayer& layer, uint8_t* block, int32_t slot, const float* key) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(block + PW_PAGE_TOKENS * layer.head_dim);
  int8_t codes[kQuantBlock];
  for (int32_t begin = 0; begin < layer.head_dim; begin += kQuantBlock) {
    const int32_t n = block_length(layer.head_dim, begin);
    scales[begin / kQuantBlock * PW_PAGE_TOKENS + slot] = quantize_block(key + begin, n, codes);
    for (int32_t i = 0; i < n; ++i) block[(begin + i) * PW_PAGE_TOKENS + slot] = static_cast<uint8_t>(codes[i]);
  }
}

}  // namespace

void rope(const RopeHead& shape, const float* head, float* out) {
  if (shape.norm_weight)
    rms_norm(head, shape.norm_weight, shape.norm_eps, shape.head_dim, false, out);
  else if (head != out)
    for (int32_t i = 0; i < shape.head_dim; i += kLanes) store(out + i, load(head + i));
  if (shape.interleaved)
    rotate_interleaved(shape, out, out);
  else
    rotate_halves(shape, out, out);
}

void store_key(const KvLayer& layer, uint8_t* block, int32_t slot, const float* key) {
  if (layer.type == PW_KV_F16)
    store_key_f16(layer, block, slot, key);
  else
    store_key_q8(layer, block, slot, key);
}

void store_value(const KvLayer& layer, uint8_t* block, int32_t slot, const float* value) {
  uint8_t* half = block + layer.key_bytes;
  if (layer.type == PW_KV_F16) {
    uint16_t* row = reinterpret_cast<uint16_t*>(half) + slot * layer.head_dim;
    for (int32_t dim = 0; dim < layer.head_dim; dim += kLanes) store_f16(row + dim, finite_f16(load(value + dim)));
    return;
  }
  int8_t* codes = reinterpret_cast<int8_t*>(half) + slot * layer.head_dim;
  uint16_t* scales = reinterpret_cast<uint16_t*>(half + PW_PAGE_TOKENS * layer.head_dim) + slot * layer.n_scales;
  for (int32_t begin = 0; begin < layer.head_dim; begin += kQuantBlock)
    scales[begin / kQuantBlock] = quantize_block(value + begin, block_length(layer.head_dim, begin), codes + begin);
}

}  // namespace pw::PW_ISA
