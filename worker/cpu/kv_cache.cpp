// Layout and bookkeeping of the key/value cache; the kernels that fill and read it are in isa/.
#include "kv_cache.h"

#include <cmath>
#include <cstring>
#include <new>

#include "error.h"

namespace pw {
namespace {

constexpr size_t kRegionAlignment = 4096;

KvLayer layer_shape(int32_t type, int32_t n_heads, int32_t head_dim, int32_t n_pages) {
  KvLayer layer{};
  layer.type = type;
  layer.n_heads = n_heads;
  layer.head_dim = head_dim;
  layer.n_scales = type == PW_KV_Q8_0 ? (head_dim + kQuantBlock - 1) / kQuantBlock : 0;
  const int64_t code_bytes = type == PW_KV_Q8_0 ? 1 : 2;
  layer.key_bytes = PW_PAGE_TOKENS * (head_dim * code_bytes + layer.n_scales * 2);
  layer.block_bytes = 2 * layer.key_bytes;
  layer.head_bytes = n_pages * layer.block_bytes;
  return layer;
}

float f16_to_f32(uint16_t bits) {
  const int32_t exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float size = exponent == 0    ? std::ldexp(mantissa, -24)
                     : exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                                      : std::ldexp(1024.0f + mantissa, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// one element of a block half; `code` and `scale` are element numbers
float read_element(const KvLayer& layer, const uint8_t* half, int64_t code, int64_t scale) {
  uint16_t bits;
  if (layer.type == PW_KV_F16) {
    std::memcpy(&bits, half + 2 * code, 2);
    return f16_to_f32(bits);
  }
  std::memcpy(&bits, half + PW_PAGE_TOKENS * layer.head_dim + 2 * scale, 2);
  return f16_to_f32(bits) * static_cast<float>(static_cast<int8_t>(half[code]));
}

}  // namespace

KvCache::KvCache(int32_t type, int32_t n_layers, const int32_t* n_heads, const int32_t* head_dims, int32_t n_pages)
    : n_pages_(n_pages) {
  std::vector<size_t> offsets;
  for (int32_t index = 0; index < n_layers; ++index) {
    layers_.push_back(layer_shape(type, n_heads[index], head_dims[index], n_pages));
    offsets.push_back(reserved_bytes_);
    const size_t bytes = static_cast<size_t>(layers_.back().head_bytes) * n_heads[index];
    reserved_bytes_ += (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
    page_bytes_ += layers_.back().block_bytes * n_heads[index];
  }
  memory_ = pw_arena_alloc(reserved_bytes_, 1);
  if (!memory_) throw std::bad_alloc();
  for (int32_t index = 0; index < n_layers; ++index)
    layers_[index].memory = static_cast<uint8_t*>(memory_) + offsets[index];
}

KvCache::~KvCache() { pw_arena_free(memory_, reserved_bytes_); }

void KvCache::copy_page(int32_t source, int32_t destination) {
  for (const KvLayer& layer : layers_)
    for (int32_t head = 0; head < layer.n_heads; ++head)
      std::memcpy(layer.block(destination, head), layer.block(source, head), layer.block_bytes);
}

}  // namespace pw

namespace {

int32_t check_shapes(int32_t type, int32_t n_layers, const int32_t* n_heads, const int32_t* head_dims,
                     int32_t n_pages) {
  if (type != PW_KV_F16 && type != PW_KV_Q8_0)
    return pw::fail(PW_E_UNSUPPORTED, "key/value type %d: there are f16 (%d) and q8_0 (%d)", type, PW_KV_F16,
                    PW_KV_Q8_0);
  if (n_layers < 1 || n_pages < 1 || !n_heads || !head_dims)
    return pw::fail(PW_E_ARGUMENT, "a key/value cache of %d layers and %d pages needs at least one of each", n_layers,
                    n_pages);
  for (int32_t index = 0; index < n_layers; ++index)
    if (n_heads[index] < 1 || head_dims[index] < 16 || head_dims[index] > 1024 || head_dims[index] % 16)
      return pw::fail(
          PW_E_UNSUPPORTED,
          "layer %d has %d key/value heads of %d dims: needs 1 head or more, dims a multiple of 16 up to 1024", index,
          n_heads[index], head_dims[index]);
  return PW_OK;
}

const pw::KvCache& as_cache(const pw_kv* kv) { return *reinterpret_cast<const pw::KvCache*>(kv); }

}  // namespace

extern "C" {

pw_kv* pw_kv_create(int32_t type, int32_t n_layers, const int32_t* n_kv_heads, const int32_t* head_dims,
                    int32_t n_pages) {
  if (check_shapes(type, n_layers, n_kv_heads, head_dims, n_pages) != PW_OK) return nullptr;
  try {
    return reinterpret_cast<pw_kv*>(new pw::KvCache(type, n_layers, n_kv_heads, head_dims, n_pages));
  } catch (const std::bad_alloc&) {
    pw::fail(PW_E_MEMORY, "no memory for a key/value cache of %d pages in %d layers", n_pages, n_layers);
    return nullptr;
  }
}

void pw_kv_destroy(pw_kv* kv) { delete reinterpret_cast<pw::KvCache*>(kv); }

int64_t pw_kv_page_bytes(const pw_kv* kv) { return as_cache(kv).page_bytes(); }

int32_t pw_kv_copy_page(pw_kv* kv, int32_t source, int32_t destination) {
  const int32_t n_pages = as_cache(kv).n_pages();
  if (source < 0 || source >= n_pages || destination < 0 || destination >= n_pages)
    return pw::fail(PW_E_ARGUMENT, "copy of page %d to %d: the cache has pages 0..%d", source, destination,
                    n_pages - 1);
  if (source != destination) reinterpret_cast<pw::KvCache*>(kv)->copy_page(source, destination);
  return PW_OK;
}

void* pw_kv_layer_memory(const pw_kv* kv, int32_t layer, int64_t* head_bytes) {
  const pw::KvCache& cache = as_cache(kv);
  if (layer < 0 || layer >= cache.n_layers()) {
    pw::fail(PW_E_ARGUMENT, "no such layer in the cache: %d", layer);
    return nullptr;
  }
  *head_bytes = cache.layer(layer).head_bytes;
  return cache.layer(layer).memory;
}

int32_t pw_kv_read(const pw_kv* kv, int32_t layer, int32_t head, int32_t page, int32_t slot, float* key, float* value) {
  const pw::KvCache& cache = as_cache(kv);
  if (layer < 0 || layer >= cache.n_layers() || head < 0 || head >= cache.layer(layer).n_heads || page < 0 ||
      page >= cache.n_pages() || slot < 0 || slot >= PW_PAGE_TOKENS)
    return pw::fail(PW_E_ARGUMENT, "no such place in the cache: layer %d, head %d, page %d, slot %d", layer, head, page,
                    slot);
  const pw::KvLayer& shape = cache.layer(layer);
  const uint8_t* keys = shape.block(page, head);
  const uint8_t* values = keys + shape.key_bytes;
  for (int32_t dim = 0; dim < shape.head_dim; ++dim) {
    const int32_t scale = dim / pw::kQuantBlock;
    key[dim] = pw::read_element(shape, keys, dim * PW_PAGE_TOKENS + slot, scale * PW_PAGE_TOKENS + slot);
    value[dim] = pw::read_element(shape, values, slot * shape.head_dim + dim, slot * shape.n_scales + scale);
  }
  return PW_OK;
}

}  // extern "C"
