// What the attention kernels share: where positions lie in the paged cache, and how scores are made.
// Scores are kept times log2(e), so that a weight is one exp2.
#pragma once
#include "kv_rows.cuh"
#include "outputs.cuh"

constexpr float kNoScore = -1e30f;  // finite: differences of two of them are 0, not NaN

struct Cache {
  const void* keys;
  const void* values;
  const u16* key_scales;
  const u16* value_scales;
  const int* pages;  // of this sequence
  int n_kv_heads;
  int kv_head;

  // index of the (page, head, token) row of the first token of page `page_id`
  INLINE u64 first_row(int page_id) const { return ((u64)page_id * n_kv_heads + kv_head) * kPageTokens; }
};

// How a product of query and key becomes a score.
struct Scoring {
  float query_factor;  // goes into the query
  float cap;           // 0: none

  INLINE Scoring(float scale, float soft_cap)
      : query_factor(soft_cap != 0.0f ? scale / soft_cap : scale * LOG2_E), cap(soft_cap * LOG2_E) {}
  // where there is a cap
  INLINE float operator()(float product) const { return cap * tanh_by_exp2(product); }
};
