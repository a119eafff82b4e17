// The expert router: logits = matrix x, softmax or sigmoid, the best `used` experts by score plus bias, their weights.
// `route` does all of it in one launch for a few tokens; prompts take router_logits and choose_experts.
// Variants: -DMATRIX_F16 (the matrix is f16, else f32).
#include "common.cuh"

#ifndef MATRIX_F16
#define MATRIX_F16 0
#endif

constexpr int kMaxExperts = 1024;
constexpr int kMaxUsed = 64;

INLINE float4 matrix_four(const void* matrix, u64 first) {
#if MATRIX_F16
  const uint2 packed = *(const uint2*)((const u16*)matrix + first);
  return make_float4(low_half(packed.x), high_half(packed.x), low_half(packed.y), high_half(packed.y));
#else
  return *(const float4*)((const float*)matrix + first);
#endif
}

struct Gate {
  const float* bias;
  int n_experts, n_used, gating, normalize;
  float scale;
  int* ids;
  float* weights;
};

// Shared memory of one choice.
struct Choice {
  float scores[kMaxExperts];
  float ranked[kMaxExperts];
  float chosen[kMaxUsed];
  float parts[32];
};

INLINE float block_reduce(float value, bool is_max, float* parts) {
  value = is_max ? warp_max(value) : warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const float part = lane < blockDim.x / 32 ? parts[lane] : is_max ? -INFINITE : 0.0f;
  return is_max ? warp_max(part) : warp_sum(part);
}

INLINE void make_scores(Choice& choice, const float* logits, const Gate& gate) {
  float largest = -INFINITE, mass = 0.0f;
  if (gate.gating == 0) {
    for (int e = threadIdx.x; e < gate.n_experts; e += blockDim.x) largest = fmaxf(largest, __ldcg(logits + e));
    largest = block_reduce(largest, true, choice.parts);
    for (int e = threadIdx.x; e < gate.n_experts; e += blockDim.x) mass += expf(__ldcg(logits + e) - largest);
    mass = block_reduce(mass, false, choice.parts);
  }
  for (int e = threadIdx.x; e < gate.n_experts; e += blockDim.x) {
    const float logit = __ldcg(logits + e);
    const float score = gate.gating == 0 ? expf(logit - largest) / mass : 1.0f / (1.0f + expf(-logit));
    choice.scores[e] = score;
    choice.ranked[e] = gate.bias ? score + gate.bias[e] : score;
  }
  __syncthreads();
}

// Chooses for one token with the whole block: an expert's rank is the number of experts before it.
INLINE void choose(Choice& choice, const float* logits, const Gate& gate, int token) {
  make_scores(choice, logits, gate);
  int* ids = gate.ids + (u64)token * gate.n_used;
  for (int e = threadIdx.x; e < gate.n_experts; e += blockDim.x) {
    const float own = choice.ranked[e];
    int rank = 0;
    for (int other = 0; other < gate.n_experts; ++other) {
      const float theirs = choice.ranked[other];
      rank += theirs > own || (theirs == own && other < e);
    }
    if (rank < gate.n_used) {
      ids[rank] = e;
      choice.chosen[rank] = choice.scores[e];
    }
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < gate.n_used; slot += blockDim.x) {
    float sum = 0.0f;
    for (int other = 0; other < gate.n_used; ++other) sum += choice.chosen[other];
    const float weight = gate.normalize ? choice.chosen[slot] / sum : choice.chosen[slot];
    gate.weights[(u64)token * gate.n_used + slot] = weight * gate.scale;
  }
  __syncthreads();
}

// grid: blocks of 8 experts, tokens; one warp per expert, the last block of a token chooses
KERNEL __launch_bounds__(256)
    route(const float* source, const void* matrix, int width, float* logits, u32* counters, const float* bias,
          int n_experts, int n_used, int gating, int normalize, float scale, int* ids, float* weights) {
  __shared__ Choice choice;
  start_after_previous();
  const int token = blockIdx.y, expert = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  float* own_logits = logits + (u64)token * n_experts;
  if (expert < n_experts) {
    const float* x = source + (u64)token * width;
    float sum = 0.0f;
#pragma unroll 4
    for (int column = 4 * lane; column < width; column += 128) {
      const float4 a = matrix_four(matrix, (u64)expert * width + column), b = *(const float4*)(x + column);
      sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    sum = warp_sum(sum);
    if (lane == 0) own_logits[expert] = sum;
  }
  if (!is_last_block(counters + token, gridDim.x)) return;
  const Gate gate = {bias, n_experts, n_used, gating, normalize, scale, ids, weights};
  choose(choice, own_logits, gate, token);
}

constexpr int kTile = 64, kDepth = 16;

// Rows first..first+64 and kDepth columns from `column` of a matrix into shared memory, transposed; 0 outside.
template <bool IsMatrix>
INLINE void load_tile(float (&tile)[kDepth][kTile + 4], const void* base, int first, int n_rows,
                                          int column, int width) {
  const int row = threadIdx.x / 4, in_row = threadIdx.x % 4 * 4;
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (first + row < n_rows && column + in_row < width) {
    const u64 at = (u64)(first + row) * width + column + in_row;
    v = IsMatrix ? matrix_four(base, at) : *(const float4*)((const float*)base + at);
  }
  tile[in_row][row] = v.x;
  tile[in_row + 1][row] = v.y;
  tile[in_row + 2][row] = v.z;
  tile[in_row + 3][row] = v.w;
}

// logits f32 [n_tokens, n_experts]; grid: blocks of 64 experts, blocks of 64 tokens; a thread makes 4 x 4 of them
KERNEL __launch_bounds__(256)
    router_logits(const float* source, const void* matrix, int width, int n_tokens, int n_experts, float* logits) {
  __shared__ float tokens[kDepth][kTile + 4], experts[kDepth][kTile + 4];
  start_after_previous();
  const int first_expert = blockIdx.x * kTile, first_token = blockIdx.y * kTile;
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  float sums[4][4] = {};
  for (int k = 0; k < width; k += kDepth) {
    load_tile<false>(tokens, source, first_token, n_tokens, k, width);
    load_tile<true>(experts, matrix, first_expert, n_experts, k, width);
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      const float4 a = *(const float4*)&tokens[depth][row], b = *(const float4*)&experts[depth][column];
      const float xs[4] = {a.x, a.y, a.z, a.w}, ws[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(xs[i], ws[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = first_token + row + i, expert = first_expert + column + j;
      if (token < n_tokens && expert < n_experts) logits[(u64)token * n_experts + expert] = sums[i][j];
    }
}

// grid: tokens
KERNEL __launch_bounds__(128)
    choose_experts(const float* logits, const float* bias, int n_experts, int n_used, int gating, int normalize,
                   float scale, int* ids, float* weights) {
  __shared__ Choice choice;
  start_after_previous();
  const Gate gate = {bias, n_experts, n_used, gating, normalize, scale, ids, weights};
  choose(choice, logits + (u64)blockIdx.x * n_experts, gate, blockIdx.x);
}
