// Norms and rotary positions of queries and keys, and the write of keys and values into the paged cache: one launch,
// one warp per head of a token. Variants: -DHEAD_DIM, -DKV_Q8, and those of rope.cuh.
#include "rope.cuh"

constexpr int kWarps = 4;

// grid: blocks of kWarps heads (queries, keys, values), tokens
KERNEL __launch_bounds__(32 * kWarps)
    rope_store(float* query, const Rope rope, int n_heads, int n_kv_heads, void* keys, void* values, u16* key_scales,
               u16* value_scales, const int* positions, const int* sequence_of_token, const int* page_tables,
               int max_pages) {
  __shared__ float heads[kWarps][HEAD_DIM];
  start_after_previous();
  const int warp = threadIdx.x / 32, token = blockIdx.y;
  const int index = blockIdx.x * kWarps + warp;
  if (index >= n_heads + 2 * n_kv_heads) return;
  const int position = positions[token];
  float* head = heads[warp];
  LanePairs pairs, norm;
  Turns turns(rope);
  if (index < n_heads + n_kv_heads) turns.make(position, rope);
  if (index < n_heads) {
    float* own = query + ((u64)token * n_heads + index) * HEAD_DIM;
    pairs.load(own);
    if (Q_NORM) norm.load(rope.q_norm);
    finish_head(pairs, Q_NORM, pairs.inverse_norm(rope.eps), norm, true, turns,
                [&](int dim, float v) { own[dim] = v; });
    return;
  }
  const bool is_key = index < n_heads + n_kv_heads;
  const int kv_head = index - n_heads - (is_key ? 0 : n_kv_heads);
  pairs.load((is_key ? rope.key : rope.value) + ((u64)token * n_kv_heads + kv_head) * HEAD_DIM);
  if (K_NORM) norm.load(rope.k_norm);
  finish_head(pairs, K_NORM && is_key, pairs.inverse_norm(rope.eps), norm, is_key, turns,
              [&](int dim, float v) { head[dim] = v; });
  __syncwarp();
  const int page = page_tables[(u64)sequence_of_token[token] * max_pages + position / kPageTokens];
  const u64 row = ((u64)page * n_kv_heads + kv_head) * kPageTokens + position % kPageTokens;
  store_head(head, is_key ? keys : values, is_key ? key_scales : value_scales, row);
}
