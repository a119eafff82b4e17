// What the attention kernels share: where positions lie in the paged cache, how scores are made, how splits are merged.
// Scores are kept times log2(e), so that a weight is one exp2.
#pragma once
#include "outputs.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_Q8
#define KV_Q8 0
#endif

constexpr int kPageTokens = 32;
constexpr int kMaxSplits = 64;
constexpr float kNoScore = -1e30f;  // finite: differences of two of them are 0, not NaN

struct Cache {
  const void* keys;
  const void* values;
  const u16* key_scales;
  const u16* value_scales;
  const int* pages;  // of this sequence
  int n_kv_heads;
  int kv_head;

  // index of the (page, head, token) row of `position`
  INLINE u64 row(int position) const {
    const u64 page = pages[position / kPageTokens];
    return (page * n_kv_heads + kv_head) * kPageTokens + position % kPageTokens;
  }
};

// How a product of query and key becomes a score.
struct Scoring {
  float query_factor;  // goes into the query
  float cap;           // 0: none

  INLINE Scoring(float scale, float soft_cap)
      : query_factor(soft_cap != 0.0f ? scale / soft_cap : scale * LOG2_E), cap(soft_cap * LOG2_E) {}
  INLINE float operator()(float product) const {
    return cap != 0.0f ? cap * tanh_by_exp2(product) : product;
  }
};

// The positions that one token sees, and a split's share of them in whole pages.
struct Visible {
  int begin, end;
  int first_page, last_page;  // of this split; last_page is one past the end

  INLINE Visible(int position, int window, int split, int n_splits) {
    end = position + 1;
    begin = window > 0 && end > window ? end - window : 0;
    const int first = begin / kPageTokens, n_pages = (end + kPageTokens - 1) / kPageTokens - first;
    const int per_split = (n_pages + n_splits - 1) / n_splits;
    first_page = first + split * per_split;
    last_page = min(first_page + per_split, first + n_pages);
  }
  INLINE bool operator()(int position) const { return position >= begin && position < end; }
};

// Unfinished results of the splits: sums f32 [row][head][split][HEAD_DIM], then {largest score, mass} of each.
struct Partials {
  float* sums;
  float2* masses;
  int n_heads, n_splits;

  INLINE Partials(float* memory, int rows, int heads, int splits)
      : sums(memory), masses((float2*)(memory + (u64)rows * heads * splits * HEAD_DIM)), n_heads(heads),
        n_splits(splits) {}
  INLINE u64 index(int row, int head, int split) const {
    return ((u64)row * n_heads + head) * n_splits + split;
  }
};

// Merges all splits of `n_here` heads of a row, in the order of the splits whichever block came last.
template <int Heads>
INLINE void merge_splits(const Partials& partials, int row, int first_head, int n_here,
                                             const Outputs& out) {
  __shared__ float weights[Heads][kMaxSplits];
  const int lane = threadIdx.x % 32, n_splits = partials.n_splits;
  for (int head = threadIdx.x / 32; head < n_here; head += blockDim.x / 32) {
    const float2* masses = partials.masses + partials.index(row, first_head + head, 0);
    const float2 none = make_float2(kNoScore, 0.0f);
    const float2 a = lane < n_splits ? __ldcg(masses + lane) : none;
    const float2 b = lane + 32 < n_splits ? __ldcg(masses + lane + 32) : none;
    const float largest = warp_max(fmaxf(a.x, b.x));
    const float wa = exp2f(a.x - largest), wb = exp2f(b.x - largest);
    const float inverse = 1.0f / warp_sum(wa * a.y + wb * b.y);
    weights[head][lane] = a.y > 0.0f ? wa * inverse : 0.0f;
    weights[head][lane + 32] = b.y > 0.0f ? wb * inverse : 0.0f;
  }
  __syncthreads();
  for (int index = threadIdx.x; index < n_here * HEAD_DIM; index += blockDim.x) {
    const int head = index / HEAD_DIM;
    const float* sums = partials.sums + partials.index(row, first_head + head, 0) * HEAD_DIM + index % HEAD_DIM;
    float total = 0.0f;
#pragma unroll 8
    for (int split = 0; split < n_splits; ++split) {
      const float sum = __ldcg(sums + (u64)split * HEAD_DIM), weight = weights[head][split];
      total += weight > 0.0f ? weight * sum : 0.0f;
    }
    store_one(out, ((u64)row * partials.n_heads + first_head) * HEAD_DIM + index, total);
  }
}
