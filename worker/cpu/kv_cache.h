// The paged key/value cache of a model: one region per layer, all from one reservation that is committed when touched.
#pragma once
#include <cstddef>
#include <vector>

#include "kv_layer.h"

namespace pw {

class KvCache {
 public:
  // Throws std::bad_alloc when the memory is refused.
  KvCache(int32_t type, int32_t n_layers, const int32_t* n_heads, const int32_t* head_dims, int32_t n_pages);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  int32_t n_layers() const { return static_cast<int32_t>(layers_.size()); }
  int32_t n_pages() const { return n_pages_; }
  int64_t page_bytes() const { return page_bytes_; }
  const KvLayer& layer(int32_t index) const { return layers_[index]; }
  void copy_page(int32_t source, int32_t destination);

 private:
  std::vector<KvLayer> layers_;
  int32_t n_pages_;
  int64_t page_bytes_ = 0;
  void* memory_ = nullptr;
  size_t reserved_bytes_ = 0;
};

}  // namespace pw
