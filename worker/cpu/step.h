// A lowered forward pass: the op list, its buffers and working memory, and what one thread sees while it runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "element_kernels.h"
#include "formats.h"
#include "kv_cache.h"
#include "matmul.h"
#include "op_args.h"
#include "pw_cpu.h"
#include "team.h"

namespace pw {

constexpr int32_t kMaxOutputs = 3;  // of a LINEAR
constexpr int32_t kProfileSlots = 16;
constexpr size_t kCacheLine = 64;

inline size_t align_up(size_t bytes, size_t alignment = kCacheLine) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Hands out pieces of a memory range. From a null start it only counts, so one function can size a layout and use it.
class Carver {
 public:
  explicit Carver(uint8_t* start) : start_(start) {}

  template <class T>
  T* take(size_t count) {
    uint8_t* piece = start_ ? start_ + used_ : nullptr;
    used_ += align_up(count * sizeof(T));
    return reinterpret_cast<T*>(piece);
  }
  size_t used_bytes() const { return used_; }

 private:
  uint8_t* start_;
  size_t used_ = 0;
};

struct Buffer {
  int32_t width;
  bool is_output;
  float* data;
};

// Cosines and sines of the batch's positions, shared by all layers with the same frequencies.
struct RopeTable {
  int32_t weight;
  int32_t rope_dim;
  bool interleaved;
  float magnitude;
  int32_t width;  // floats per token of each of the two tables
  float* cosines;
  float* sines;
};

// Consecutive tokens of a sequence that run through attention together.
struct QueryTile {
  int32_t sequence;
  int32_t first_row;
  int32_t n_tokens;
  int32_t first_position;
};

// The batch cut into tiles of at most tile_tokens; made before the team starts, used by every layer.
struct TilePlan {
  int32_t tile_tokens;
  std::vector<QueryTile> tiles;
};

// What is known of an op when the step is created.
struct OpPlan {
  int32_t fused_glu = -1;    // LINEAR: the GLU op that is applied to its outputs at once
  bool skip = false;         // GLU that a LINEAR does
  int32_t rope_table = -1;   // ROPE_STORE
  bool fills_table = false;  // first user of it
  int32_t tile_plan = -1;    // ATTENTION
};

struct Step {
  std::vector<pw_op> ops;
  std::vector<OpPlan> plans;
  std::vector<pw_weight> weights;
  std::vector<Buffer> buffers;
  std::vector<RopeTable> rope_tables;
  std::vector<TilePlan> tile_plans;
  int32_t max_tokens = 0;
  int32_t max_outputs = 0;
  Team* team = nullptr;
  KvCache* kv = nullptr;
  // the instruction set level is fixed when the step is created: layouts of working memory depend on it
  const MatmulKernels* matmul = nullptr;
  const ElementKernels* element = nullptr;

  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  uint8_t* shared_scratch = nullptr;  // of the op that runs
  uint8_t* thread_scratch = nullptr;
  size_t shared_scratch_bytes = 0;
  size_t thread_scratch_bytes = 0;

  double seconds[kProfileSlots] = {};
  std::atomic<int32_t> error{PW_OK};
  char error_words[256] = "";

  Step() = default;
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
};

// One thread's view of one forward pass.
struct Run {
  Step& step;
  const pw_batch& batch;
  TeamMember& member;

  int32_t rows(int32_t buffer) const { return step.buffers[buffer].is_output ? batch.n_outputs : batch.n_tokens; }
  int32_t width(int32_t buffer) const { return step.buffers[buffer].width; }
  float* row(int32_t buffer, int64_t row) const { return step.buffers[buffer].data + row * step.buffers[buffer].width; }
  const pw_weight& weight(int32_t id) const { return step.weights[id]; }
  const float* vector(int32_t id) const {
    return id < 0 ? nullptr : reinterpret_cast<const float*>(step.weights[id].file);
  }
  uint8_t* scratch() const { return step.thread_scratch + member.index() * step.thread_scratch_bytes; }

  // A row per unit: on one thread without a barrier where there is but one row.
  template <class Work>
  void each_row(int32_t n_rows, Work&& work) {
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) work(static_cast<int32_t>(r));
    };
    if (n_rows == 1)
      member.serial([&] { rows(0, 1); });
    else
      member.parallel(n_rows, piece_of(n_rows, member.n_threads()), rows);
  }

  // Ends the step with an error; the first one's words are kept.
  void fail(int32_t code, const char* words);
};

// ---- matrix products (ops_linear.cpp; also used by the router and the experts) ----

size_t activations_bytes(const Step& step, int32_t weight, int32_t n_tokens);
// Describes rows prepared in `memory`; every thread makes its own copy.
Activations describe_activations(const Run& run, ActForm form, int32_t n_tokens, int32_t cols, uint8_t* memory);
// Fills them from x [n_tokens, cols].
void prepare_activations(Run& run, const Activations& activations, const float* x);

inline int32_t row_groups(const pw_weight& weight) { return (weight.rows + kRowGroup - 1) / kRowGroup; }
// How many of n_units row groups of `weight` one thread should take at a time, for n_rows rows of input.
int64_t group_piece(const Run& run, const pw_weight& weight, int64_t n_units, int32_t n_rows);

// ---- ops: one function each, called by every thread of the team ----

void run_embed(Run& run, const pw_op& op);
void run_rms_norm(Run& run, const pw_op& op);
void run_glu(Run& run, const pw_op& op);
void run_select(Run& run, const pw_op& op);
void run_linear(Run& run, const pw_op& op, const OpPlan& plan);
void run_rope_store(Run& run, const pw_op& op, const OpPlan& plan);
void run_attention(Run& run, const pw_op& op, const OpPlan& plan);
void run_router(Run& run, const pw_op& op);
void run_moe(Run& run, const pw_op& op);
void run_sample(Run& run, const pw_op& op);

// ---- working memory an op needs: shared by the team, and per thread ----

size_t linear_shared_bytes(const Step& step, const pw_op& op);
size_t attention_shared_bytes(const Step& step, const pw_op& op);
size_t attention_thread_bytes(const Step& step, const pw_op& op, const OpPlan& plan);
size_t router_shared_bytes(const Step& step, const pw_op& op);
size_t moe_shared_bytes(const Step& step, const pw_op& op);
size_t sample_thread_bytes(const Step& step, const pw_op& op);

// ---- checks; return PW_OK or a code with words ----

int32_t check_ops(const Step& step);
int32_t check_batch(const Step& step, const pw_batch& batch, int32_t n_threads);

// Cuts the batch into the query tiles of every plan.
void plan_tiles(Step& step, const pw_batch& batch);
int32_t tile_tokens_for(int32_t heads_per_kv_head);

}  // namespace pw
