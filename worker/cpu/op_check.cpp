// Op lists whose parts do not fit together are refused when a step is created. Words say the op, what was given and
// what would do.
#include <cstdarg>
#include <cstdio>

#include "error.h"
#include "op_args.h"
#include "step.h"

namespace pw {
namespace {

constexpr const char* kKindNames[] = {"?",   "EMBED",  "RMS_NORM", "LINEAR", "ROPE_STORE", "ATTENTION",
                                      "GLU", "ROUTER", "MOE",      "SELECT", "SAMPLE"};

// Checks one op. The first thing that is wrong is kept, later checks are skipped.
class OpCheck {
 public:
  OpCheck(const Step& step, size_t index) : step_(step), op_(step.ops[index]), index_(index) {}

  int32_t run() {
    switch (op_.kind) {
      case PW_OP_EMBED: embed(); break;
      case PW_OP_RMS_NORM: rms_norm(); break;
      case PW_OP_LINEAR: linear(); break;
      case PW_OP_ROPE_STORE: rope_store(); break;
      case PW_OP_ATTENTION: attention(); break;
      case PW_OP_GLU: glu(); break;
      case PW_OP_ROUTER: router(); break;
      case PW_OP_MOE: moe(); break;
      case PW_OP_SELECT: select(); break;
      case PW_OP_SAMPLE: sample(); break;
      default: code_ = fail(PW_E_ARGUMENT, "op %zu: unknown kind %d", index_, op_.kind);
    }
    return code_;
  }

 private:
  // Records what is wrong unless `holds`, and says whether it does.
  bool need(bool holds, const char* format, ...) __attribute__((format(printf, 3, 4))) {
    if (code_ != PW_OK) return false;
    if (holds) return true;
    char words[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(words, sizeof(words), format, arguments);
    va_end(arguments);
    code_ = fail(PW_E_ARGUMENT, "op %zu (%s, layer %d): %s", index_, kKindNames[op_.kind], op_.layer, words);
    return false;
  }

  const Buffer& buffer_at(int32_t id) const { return step_.buffers[id]; }
  const pw_weight& weight_at(int32_t id) const { return step_.weights[id]; }

  bool buffer(const char* role, int32_t id) {
    return need(id >= 0 && id < static_cast<int32_t>(step_.buffers.size()), "%s is buffer %d, there are %zu", role, id,
                step_.buffers.size()) &&
           need(buffer_at(id).width > 0, "%s is a buffer of width %d", role, buffer_at(id).width);
  }

  bool buffer_of(const char* role, int32_t id, int64_t width) {
    return buffer(role, id) && need(buffer_at(id).width == width, "%s has width %d, needs %ld", role,
                                    buffer_at(id).width, static_cast<long>(width));
  }

  bool same_rows(int32_t a, int32_t b) {
    return need(buffer_at(a).is_output == buffer_at(b).is_output, "input and output differ in their rows");
  }

  bool tokens(const char* role, int32_t id) {
    return need(!buffer_at(id).is_output, "%s must have a row per token", role);
  }

  bool matrix(const char* role, int32_t id) {
    if (!need(id >= 0 && id < static_cast<int32_t>(step_.weights.size()), "%s is weight %d, there are %zu", role, id,
              step_.weights.size()))
      return false;
    const pw_weight& w = weight_at(id);
    return need(pw_type_supported(w.type), "%s has type %d, which has no kernels", role, w.type) &&
           need(w.rows > 0 && w.cols > 0 && w.experts > 0, "%s is empty: %d experts of %d x %d", role, w.experts,
                w.rows, w.cols) &&
           need(pw_file_bytes(w.type, w.rows, w.cols) > 0, "%s of type %d cannot have %d columns", role, w.type,
                w.cols) &&
           need(w.packed || w.file, "%s has no data", role);
  }

  bool vector(const char* role, int32_t id, int32_t length) {
    if (!need(id >= 0 && id < static_cast<int32_t>(step_.weights.size()), "%s is weight %d, there are %zu", role, id,
              step_.weights.size()))
      return false;
    const pw_weight& w = weight_at(id);
    return need(w.type == 0 && w.file, "%s must be F32 in file order, has type %d", role, w.type) &&
           need(int64_t{w.rows} * w.cols == length, "%s has %ld elements, needs %d", role,
                static_cast<long>(int64_t{w.rows} * w.cols), length);
  }

  void optional_vector(const char* role, int32_t id, int32_t length) {
    if (id >= 0) vector(role, id, length);
  }

  void embed() {
    if (!matrix("weight0", op_.weight[0]) || !buffer_of("out0", op_.out[0], weight_at(op_.weight[0]).cols)) return;
    need(weight_at(op_.weight[0]).file != nullptr, "the embedding must be given in file order");
    tokens("out0", op_.out[0]);
  }

  void rms_norm() {
    if (!buffer("in0", op_.in[0]) || !buffer_of("out0", op_.out[0], buffer_at(op_.in[0]).width)) return;
    vector("weight0", op_.weight[0], buffer_at(op_.in[0]).width);
    same_rows(op_.in[0], op_.out[0]);
  }

  void linear() {
    const int32_t n_outputs = LinearArgs(op_).n_outputs;
    if (!need(n_outputs >= 1 && n_outputs <= kMaxOutputs, "%d outputs, there can be 1 to %d", n_outputs, kMaxOutputs))
      return;
    if (!buffer("in0", op_.in[0])) return;
    for (int32_t j = 0; j < n_outputs; ++j) {
      if (!matrix("weight", op_.weight[j])) return;
      const pw_weight& w = weight_at(op_.weight[j]);
      if (!buffer_of("in0", op_.in[0], w.cols) || !buffer_of("out", op_.out[j], w.rows)) return;
      if (!same_rows(op_.in[0], op_.out[j]) || !need(op_.in[0] != op_.out[j], "out %d is the input", j)) return;
      optional_vector("bias", op_.bias[j], w.rows);
    }
  }

  bool heads(const HeadArgs& args) {
    const int32_t n_heads = args.n_heads, n_kv_heads = args.n_kv_heads, layer = args.kv_layer;
    if (!need(step_.kv != nullptr, "there is no key/value cache")) return false;
    if (!need(n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0, "%d heads on %d key/value heads", n_heads,
              n_kv_heads))
      return false;
    if (!need(layer >= 0 && layer < step_.kv->n_layers(), "KV layer %d, the cache has %d", layer, step_.kv->n_layers()))
      return false;
    const KvLayer& kv = step_.kv->layer(layer);
    return need(kv.n_heads == n_kv_heads && kv.head_dim == args.head_dim,
                "%d key/value heads of %d dims, the cache has %d of %d", n_kv_heads, args.head_dim, kv.n_heads,
                kv.head_dim);
  }

  void rope_store() {
    const RopeStoreArgs args(op_);
    if (!heads(args)) return;
    const int32_t head_dim = args.head_dim, rope_dim = args.rope_dim;
    if (!buffer_of("in0 (q)", op_.in[0], int64_t{args.n_heads} * head_dim) ||
        !buffer_of("in1 (k)", op_.in[1], int64_t{args.n_kv_heads} * head_dim) ||
        !buffer_of("in2 (v)", op_.in[2], int64_t{args.n_kv_heads} * head_dim))
      return;
    for (int32_t j = 0; j < 3; ++j) tokens("q, k and v", op_.in[j]);
    need(rope_dim > 0 && rope_dim % 2 == 0 && rope_dim <= head_dim, "rope_dim %d with head_dim %d", rope_dim, head_dim);
    need(op_.i[4] == 0 || op_.i[4] == 1, "rope style %d: 0 interleaved, 1 half", op_.i[4]);
    optional_vector("weight0 (q norm)", args.query_norm, head_dim);
    optional_vector("weight1 (k norm)", args.key_norm, head_dim);
    vector("weight2 (frequencies)", args.frequencies, rope_dim / 2);
  }

  void attention() {
    const AttentionArgs args(op_);
    if (!heads(args)) return;
    const int64_t width = int64_t{args.n_heads} * args.head_dim;
    if (!buffer_of("in0 (q)", op_.in[0], width) || !buffer_of("out0", op_.out[0], width)) return;
    tokens("in0", op_.in[0]);
    tokens("out0", op_.out[0]);
    need(op_.in[0] != op_.out[0], "q and the result must be two buffers");
    need(args.window_tokens >= 0, "window of %d tokens", args.window_tokens);
  }

  void glu() {
    if (!buffer("in0", op_.in[0]) || !buffer_of("in1", op_.in[1], buffer_at(op_.in[0]).width) ||
        !buffer_of("out0", op_.out[0], buffer_at(op_.in[0]).width))
      return;
    activation();
    same_rows(op_.in[0], op_.in[1]);
    same_rows(op_.in[0], op_.out[0]);
  }

  void activation() { need(op_.i[0] == 0 || op_.i[0] == 1, "activation %d: 0 silu, 1 gelu", op_.i[0]); }

  void router() {
    const RouterArgs args(op_);
    const int32_t n_experts = args.n_experts, k = args.n_used;
    if (!need(k >= 1 && k <= n_experts, "%d of %d experts", k, n_experts) || !matrix("weight0", op_.weight[0])) return;
    const pw_weight& w = weight_at(op_.weight[0]);
    need(w.rows == n_experts, "the router has %d rows for %d experts", w.rows, n_experts);
    if (!buffer_of("in0", op_.in[0], w.cols) || !buffer_of("out0 (ids)", op_.out[0], k) ||
        !buffer_of("out1 (weights)", op_.out[1], k))
      return;
    tokens("in0", op_.in[0]);
    tokens("out0", op_.out[0]);
    tokens("out1", op_.out[1]);
    need(op_.i[2] == 0 || op_.i[2] == 1, "gating %d: 0 softmax, 1 sigmoid", op_.i[2]);
    optional_vector("bias0", op_.bias[0], n_experts);
  }

  void moe() {
    for (int32_t j = 0; j < 3; ++j)
      if (!matrix("weight", op_.weight[j])) return;
    const pw_weight &gate = weight_at(op_.weight[0]), &up = weight_at(op_.weight[1]), &down = weight_at(op_.weight[2]);
    activation();
    const int32_t k = MoeArgs(op_).n_used;
    need(k >= 1 && k <= gate.experts, "%d of %d experts", k, gate.experts);
    need(gate.experts == up.experts && up.experts == down.experts && gate.rows == up.rows && gate.cols == up.cols &&
             down.cols == gate.rows,
         "gate, up and down do not fit: %d x %d, %d x %d, %d x %d with %d, %d, %d experts", gate.rows, gate.cols,
         up.rows, up.cols, down.rows, down.cols, gate.experts, up.experts, down.experts);
    need(activation_form(gate.type) == activation_form(up.type),
         "gate of type %d and up of type %d need their input "
         "in two forms: quantise them alike",
         gate.type, up.type);
    if (!buffer_of("in0", op_.in[0], gate.cols) || !buffer_of("in1 (ids)", op_.in[1], k) ||
        !buffer_of("in2 (weights)", op_.in[2], k) || !buffer_of("out0", op_.out[0], down.rows))
      return;
    for (int32_t j = 0; j < 3; ++j) tokens("input", op_.in[j]);
    tokens("out0", op_.out[0]);
  }

  void select() {
    if (!buffer("in0", op_.in[0]) || !buffer_of("out0", op_.out[0], buffer_at(op_.in[0]).width)) return;
    tokens("in0", op_.in[0]);
    need(buffer_at(op_.out[0]).is_output, "out0 must have a row per output");
  }

  void sample() {
    const int32_t n_vocab = sample_vocabulary(op_);
    if (!need(n_vocab >= 1, "a vocabulary of %d", n_vocab) || !buffer_of("in0", op_.in[0], n_vocab)) return;
    need(buffer_at(op_.in[0]).is_output, "in0 must have a row per output");
  }

  const Step& step_;
  const pw_op& op_;
  const size_t index_;
  int32_t code_ = PW_OK;
};

}  // namespace

int32_t check_ops(const Step& step) {
  for (size_t index = 0; index < step.ops.size(); ++index) {
    const int32_t checked = OpCheck(step, index).run();
    if (checked != PW_OK) return checked;
  }
  return PW_OK;
}

}  // namespace pw
