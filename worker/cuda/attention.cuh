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

constexpr int kMergeBatch = 12;  // loads under way in a thread

// Sum of the splits `first`, `first + step`, ... of four neighbouring values, by their weights.
INLINE float4 weighted_splits(const float* sums, const float* weights, int first, int step, int n_splits) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int base = first; base < n_splits; base += kMergeBatch * step) {
    float4 parts[kMergeBatch];
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const int split = min(base + i * step, n_splits - 1);
      parts[i] = __ldcg((const float4*)(sums + (u64)split * HEAD_DIM));
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const int split = base + i * step;
      const float weight = split < n_splits ? weights[split] : 0.0f;
      total.x += weight * parts[i].x;
      total.y += weight * parts[i].y;
      total.z += weight * parts[i].z;
      total.w += weight * parts[i].w;
    }
  }
  return total;
}

// Merges all splits of `n_here` heads of a row, in the same order whichever block came last. Threads that are more than
// there are groups of four values share the splits of one.
template <int Heads, int Threads>
INLINE void merge_splits(const Partials& partials, int row, int first_head, int n_here, const Outputs& out) {
  constexpr int kVectors = Heads * HEAD_DIM / 4;
  constexpr int kShares = kVectors >= Threads ? 1 : Threads / kVectors;
  __shared__ float weights[Heads][kMaxSplits];
  __shared__ float4 shares[kShares > 1 ? Threads : 1];
  const int lane = threadIdx.x % 32, n_splits = partials.n_splits;
  for (int head = threadIdx.x / 32; head < n_here; head += Threads / 32) {
    const float2* masses = partials.masses + partials.index(row, first_head + head, 0);
    const float2 none = make_float2(kNoScore, 0.0f);
    const float2 a = lane < n_splits ? __ldcg(masses + lane) : none;
    const float2 b = lane + 32 < n_splits ? __ldcg(masses + lane + 32) : none;
    const float largest = warp_max(fmaxf(a.x, b.x));
    const float wa = exp2f(a.x - largest), wb = exp2f(b.x - largest);
    const float inverse = 1.0f / warp_sum(wa * a.y + wb * b.y);
    weights[head][lane] = wa * inverse;
    weights[head][lane + 32] = wb * inverse;
  }
  __syncthreads();
  const int vectors = n_here * HEAD_DIM / 4;
  for (int base = 0; base < kVectors; base += Threads) {  // once, where threads share
    const int vector = kShares > 1 ? threadIdx.x % kVectors : base + threadIdx.x;
    const int share = kShares > 1 ? threadIdx.x / kVectors : 0;
    const bool exists = vector < vectors && share < kShares;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (exists) {
      const int head = 4 * vector / HEAD_DIM;
      const float* sums = partials.sums + partials.index(row, first_head + head, 0) * HEAD_DIM + 4 * vector % HEAD_DIM;
      total = weighted_splits(sums, weights[head], share, kShares, n_splits);
    }
    if (kShares > 1) {
      shares[threadIdx.x] = total;
      __syncthreads();
      for (int other = 1; other < kShares && share == 0; ++other) {
        const float4 part = shares[other * kVectors + vector];
        total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
      }
    }
    const u64 at = ((u64)row * partials.n_heads + first_head) * HEAD_DIM + 4 * (u64)vector;
    store_four(out, at, total, exists && share == 0 ? 4 : 0);
  }
}
