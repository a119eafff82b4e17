// The element kernels of one instruction set level: everything in a step that is not a matrix product.
//
// All kernels are serial and work on one row, one head or one tile; the executor spreads them over threads. A result
// depends on the row's own inputs only, never on how rows were grouped.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kv_layer.h"

namespace pw {

constexpr int32_t kSplitTokens = 256;  // keys are reduced in splits of this many positions, counted from position 0

// Softmax state of one query row over some keys: largest score, sum of exp(score - largest); the weighted values beside
// it.
struct AttentionState {
  float largest;
  float sum;
};

// Queries of consecutive tokens of one sequence that share a key/value head. Row r = token r / n_heads, head r %
// n_heads.
struct AttentionTile {
  const KvLayer* layer;
  const int32_t* pages;  // page ids of the sequence, from position 0
  int32_t kv_head;
  int32_t n_tokens;
  int32_t n_heads;         // query heads of this tile
  int32_t first_position;  // of the first token
  int32_t window_tokens;   // 0 = all
  float score_scale;
  float score_softcap;   // 0 = none
  const float* query;    // first token's first head; heads are head_dim apart, tokens token_stride
  float* output;         // as query
  int64_t token_stride;  // floats
  void* scratch;
};

struct RopeHead {
  int32_t head_dim;
  int32_t rope_dim;
  int32_t interleaved;  // 1: (0,1),(2,3)...; 0: (i, i + rope_dim / 2)
  float norm_eps;
  const float* norm_weight;  // [head_dim] or NULL
  const float* cosines;      // interleaved: [rope_dim], each twice; else [rope_dim / 2]
  const float* sines;        // interleaved: [rope_dim], even places negated; else [rope_dim / 2]
};

struct ElementKernels {
  // out (+)= x / rms(x) * weight
  void (*rms_norm)(const float* x, const float* weight, float eps, int32_t width, bool accumulate, float* out);
  // out = act(gate) * up; activation 0 silu, 1 gelu (tanh form)
  void (*glu)(int32_t activation, const float* gate, const float* up, int32_t n, float* out);
  void (*scale)(float* x, int32_t n, float factor);
  void (*soft_cap)(float* x, int32_t n, float cap);  // x = cap tanh(x / cap)
  void (*softmax)(float* x, int32_t n);
  void (*sigmoid)(float* x, int32_t n);
  // out (+)= sum over r of weights[r] * rows[r, width], r ascending
  void (*weighted_sum)(const float* rows, const float* weights, int32_t n_rows, int32_t width, bool accumulate,
                       float* out);

  void (*rope)(const RopeHead& shape, const float* head, float* out);
  void (*store_key)(const KvLayer& layer, uint8_t* block, int32_t slot, const float* key);
  void (*store_value)(const KvLayer& layer, uint8_t* block, int32_t slot, const float* value);

  size_t (*attention_scratch_bytes)(int32_t n_rows, int32_t head_dim);
  // whole attention of a tile into `output`
  void (*attend)(const AttentionTile& tile);
  // one split of it: states[row * stride], values[row * stride, head_dim]
  void (*attend_split)(const AttentionTile& tile, int32_t split, AttentionState* states, float* values, int64_t stride);
  // output = merge of n partial results of one row, in order
  void (*merge_splits)(const AttentionState* states, const float* values, int32_t n, int32_t head_dim, float* output);

  // largest of x; *has_nan tells of any NaN
  float (*row_max)(const float* x, int32_t n, bool* has_nan);
  int32_t (*first_equal)(const float* x, int32_t n, float value);  // lowest index, n where there is none
  // sums of exp((x - largest) * inverse_temperature) of each kSumChunk elements; where x < floor counts as 0
  void (*exp_sums)(const float* x, int32_t n, float largest, float inverse_temperature, float floor,
                   double* chunk_sums);
  // largest of each kMaxBlock elements
  void (*block_max)(const float* x, int32_t n, float* maxima);
  // how many of x are in [low, high)
  int32_t (*count_between)(const float* x, int32_t n, float low, float high);
  // their places, ascending; `ids` has room for all
  int32_t (*collect_between)(const float* x, int32_t n, float low, float high, int32_t* ids);
};

constexpr int32_t kSumChunk = 1024;
constexpr int32_t kMaxBlock = 64;

const ElementKernels& element_kernels();  // of the level pw_isa() names

}  // namespace pw
