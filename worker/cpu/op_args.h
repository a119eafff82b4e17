// What the numbered operands of an op mean, by name: one struct per kind that has numbers, read from a pw_op. pw_cpu.h
// describes them, op_check.cpp has checked them. Buffers and weights keep their numbers (in, out, weight, bias).
#pragma once
#include <cstdint>

#include "pw_cpu.h"

namespace pw {

struct RmsNormArgs {
  bool accumulates;
  float eps;
  explicit RmsNormArgs(const pw_op& op) : accumulates(op.i[0] == 1), eps(op.f[0]) {}
};

struct LinearArgs {
  int32_t n_outputs;
  bool accumulates;  // the first output only
  float scale;       // 1 = none
  float softcap;     // 0 = none
  explicit LinearArgs(const pw_op& op)
      : n_outputs(op.i[0]), accumulates(op.i[1] == 1), scale(op.f[0] != 0.0f ? op.f[0] : 1.0f), softcap(op.f[1]) {}
};

// Of ROPE_STORE and ATTENTION.
struct HeadArgs {
  int32_t n_heads;
  int32_t n_kv_heads;
  int32_t head_dim;
  int32_t kv_layer;
  explicit HeadArgs(const pw_op& op) : n_heads(op.i[0]), n_kv_heads(op.i[1]), head_dim(op.i[2]), kv_layer(op.i[5]) {}
  int32_t per_kv_head() const { return n_heads / n_kv_heads; }
};

struct RopeStoreArgs : HeadArgs {
  int32_t rope_dim;
  bool interleaved;
  float norm_eps;
  float magnitude;
  int32_t query_norm;  // weight ids
  int32_t key_norm;
  int32_t frequencies;
  explicit RopeStoreArgs(const pw_op& op)
      : HeadArgs(op),
        rope_dim(op.i[3]),
        interleaved(op.i[4] == 0),
        norm_eps(op.f[0]),
        magnitude(op.f[1]),
        query_norm(op.weight[0]),
        key_norm(op.weight[1]),
        frequencies(op.weight[2]) {}
};

struct AttentionArgs : HeadArgs {
  int32_t window_tokens;  // 0 = all
  float score_scale;
  float score_softcap;  // 0 = none
  explicit AttentionArgs(const pw_op& op)
      : HeadArgs(op), window_tokens(op.i[6]), score_scale(op.f[0]), score_softcap(op.f[1]) {}
};

struct RouterArgs {
  int32_t n_experts;
  int32_t n_used;
  bool is_sigmoid;  // else softmax
  bool normalizes;
  float scale;
  explicit RouterArgs(const pw_op& op)
      : n_experts(op.i[0]), n_used(op.i[1]), is_sigmoid(op.i[2] == 1), normalizes(op.i[3] == 1), scale(op.f[0]) {}
};

struct MoeArgs {
  int32_t activation;
  int32_t n_used;
  bool accumulates;
  explicit MoeArgs(const pw_op& op) : activation(op.i[0]), n_used(op.i[1]), accumulates(op.i[2] == 1) {}
};

inline float embed_scale(const pw_op& op) { return op.f[0]; }
inline int32_t glu_activation(const pw_op& op) { return op.i[0]; }
inline int32_t sample_vocabulary(const pw_op& op) { return op.i[0]; }

}  // namespace pw
