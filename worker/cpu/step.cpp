// Creating a step from an op list, and running it: every thread of the team walks the same list.
#include "step.h"

#include <cstdio>
#include <cstring>
#include <new>

#include "clock.h"
#include "error.h"
#include "isa.h"

namespace pw {
namespace {

std::atomic<uint64_t> step_calls{0};

// ---- creation ----

bool same_table(const RopeTable& table, const RopeStoreArgs& args) {
  return table.weight == args.frequencies && table.rope_dim == args.rope_dim && table.interleaved == args.interleaved &&
         table.magnitude == args.magnitude;
}

void plan_rope(Step& step, const RopeStoreArgs& args, OpPlan& plan) {
  for (size_t index = 0; index < step.rope_tables.size(); ++index)
    if (same_table(step.rope_tables[index], args)) {
      plan.rope_table = static_cast<int32_t>(index);
      return;
    }
  plan.rope_table = static_cast<int32_t>(step.rope_tables.size());
  plan.fills_table = true;
  const int32_t width = args.interleaved ? args.rope_dim : args.rope_dim / 2;
  step.rope_tables.push_back(
      {args.frequencies, args.rope_dim, args.interleaved, args.magnitude, width, nullptr, nullptr});
}

void plan_attention(Step& step, const AttentionArgs& args, OpPlan& plan) {
  const int32_t tile_tokens = tile_tokens_for(args.per_kv_head());
  for (size_t index = 0; index < step.tile_plans.size(); ++index)
    if (step.tile_plans[index].tile_tokens == tile_tokens) plan.tile_plan = static_cast<int32_t>(index);
  if (plan.tile_plan >= 0) return;
  plan.tile_plan = static_cast<int32_t>(step.tile_plans.size());
  step.tile_plans.push_back({tile_tokens, {}});
  step.tile_plans.back().tiles.reserve(step.max_tokens);
}

// Gate and up whose only purpose is the gated product that follows.
bool can_fuse(const pw_op& linear, const pw_op& next) {
  if (linear.kind != PW_OP_LINEAR || next.kind != PW_OP_GLU) return false;
  const LinearArgs args(linear);
  return args.n_outputs == 2 && !args.accumulates && args.softcap == 0.0f && next.in[0] == linear.out[0] &&
         next.in[1] == linear.out[1];
}

void plan_ops(Step& step) {
  step.plans.assign(step.ops.size(), OpPlan{});
  for (size_t index = 0; index < step.ops.size(); ++index) {
    const pw_op& op = step.ops[index];
    if (op.kind == PW_OP_ROPE_STORE) plan_rope(step, RopeStoreArgs(op), step.plans[index]);
    if (op.kind == PW_OP_ATTENTION) plan_attention(step, AttentionArgs(op), step.plans[index]);
    if (index + 1 < step.ops.size() && can_fuse(op, step.ops[index + 1])) {
      step.plans[index].fused_glu = static_cast<int32_t>(index + 1);
      step.plans[index + 1].skip = true;
    }
  }
}

size_t matmul_scratch_bytes(const Step& step) {
  size_t most = 0;
  for (const pw_weight& weight : step.weights) {
    if (!pw_type_supported(weight.type)) continue;
    const size_t bytes = step.matmul->scratch_bytes(weight.type, weight.cols);
    most = bytes > most ? bytes : most;
  }
  return most;
}

size_t shared_bytes(const Step& step, const pw_op& op) {
  switch (op.kind) {
    case PW_OP_LINEAR: return linear_shared_bytes(step, op);
    case PW_OP_ATTENTION: return attention_shared_bytes(step, op);
    case PW_OP_ROUTER: return router_shared_bytes(step, op);
    case PW_OP_MOE: return moe_shared_bytes(step, op);
    default: return 0;
  }
}

size_t thread_bytes(const Step& step, const pw_op& op, const OpPlan& plan) {
  if (op.kind == PW_OP_ATTENTION) return attention_thread_bytes(step, op, plan);
  return op.kind == PW_OP_SAMPLE ? sample_thread_bytes(step, op) : 0;
}

void measure_scratch(Step& step) {
  step.thread_scratch_bytes = matmul_scratch_bytes(step);
  for (size_t index = 0; index < step.ops.size(); ++index) {
    const size_t shared = shared_bytes(step, step.ops[index]);
    const size_t thread = thread_bytes(step, step.ops[index], step.plans[index]);
    if (shared > step.shared_scratch_bytes) step.shared_scratch_bytes = shared;
    if (thread > step.thread_scratch_bytes) step.thread_scratch_bytes = thread;
  }
  step.thread_scratch_bytes = align_up(step.thread_scratch_bytes, 4096);
}

void carve_workspace(Step& step, Carver& carver) {
  for (Buffer& buffer : step.buffers) {
    const size_t rows = buffer.is_output ? step.max_outputs : step.max_tokens;
    buffer.data = carver.take<float>(rows * buffer.width + kCacheLine / sizeof(float));
  }
  for (RopeTable& table : step.rope_tables) {
    table.cosines = carver.take<float>(size_t(step.max_tokens) * table.width);
    table.sines = carver.take<float>(size_t(step.max_tokens) * table.width);
  }
  step.shared_scratch = carver.take<uint8_t>(step.shared_scratch_bytes);
  step.thread_scratch = carver.take<uint8_t>(step.thread_scratch_bytes * step.team->size());
}

int32_t allocate(Step& step) {
  measure_scratch(step);
  Carver counter(nullptr);
  carve_workspace(step, counter);
  step.workspace_bytes = counter.used_bytes();
  step.workspace = pw_arena_alloc(step.workspace_bytes, 1);
  if (!step.workspace)
    return fail(PW_E_MEMORY, "no memory for the step's working buffers of %zu bytes: fewer tokens a step need less",
                step.workspace_bytes);
  Carver carver(static_cast<uint8_t*>(step.workspace));
  carve_workspace(step, carver);
  return PW_OK;
}

// ---- running ----

void run_op(Run& run, const pw_op& op, const OpPlan& plan) {
  switch (op.kind) {
    case PW_OP_EMBED: return run_embed(run, op);
    case PW_OP_RMS_NORM: return run_rms_norm(run, op);
    case PW_OP_LINEAR: return run_linear(run, op, plan);
    case PW_OP_ROPE_STORE: return run_rope_store(run, op, plan);
    case PW_OP_ATTENTION: return run_attention(run, op, plan);
    case PW_OP_GLU: return plan.skip ? void() : run_glu(run, op);
    case PW_OP_ROUTER: return run_router(run, op);
    case PW_OP_MOE: return run_moe(run, op);
    case PW_OP_SELECT: return run_select(run, op);
    case PW_OP_SAMPLE: return run_sample(run, op);
  }
}

void check_cancel(Run& run) {
  run.member.serial([&] {
    const int32_t* cancel = run.batch.cancel;
    if (cancel && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0) run.fail(PW_E_CANCELLED, "the step was cancelled");
  });
}

struct Job {
  Step& step;
  const pw_batch& batch;
};

void walk_ops(TeamMember& member, void* context) {
  Job& job = *static_cast<Job*>(context);
  Run run{job.step, job.batch, member};
  const bool keeps_time = member.index() == 0;
  double before_s = keeps_time ? now_s() : 0.0;
  int32_t layer = job.step.ops[0].layer - 1;
  for (size_t index = 0; index < job.step.ops.size() && !member.stopped(); ++index) {
    const pw_op& op = job.step.ops[index];
    if (op.layer != layer) check_cancel(run);
    layer = op.layer;
    run_op(run, op, job.step.plans[index]);
    if (!keeps_time) continue;
    const double after_s = now_s();
    job.step.seconds[op.kind] += after_s - before_s;
    before_s = after_s;
  }
}

int32_t run_step(Step& step, const pw_batch& batch, int32_t n_threads) {
  const int32_t checked = check_batch(step, batch, n_threads);
  if (checked != PW_OK) return checked;
  plan_tiles(step, batch);
  step.error.store(PW_OK, std::memory_order_relaxed);
  Job job{step, batch};
  step.team->run(n_threads, walk_ops, &job);
  const int32_t error = step.error.load(std::memory_order_acquire);
  return error == PW_OK ? PW_OK : fail(error, "%s", step.error_words);
}

pw_step* as_handle(Step* step) { return reinterpret_cast<pw_step*>(step); }
Step& as_step(pw_step* step) { return *reinterpret_cast<Step*>(step); }
const Step& as_step(const pw_step* step) { return *reinterpret_cast<const Step*>(step); }

}  // namespace

Step::~Step() { pw_arena_free(workspace, workspace_bytes); }

void Run::fail(int32_t code, const char* words) {
  int32_t none = PW_OK;
  if (step.error.compare_exchange_strong(none, code, std::memory_order_acq_rel))
    std::snprintf(step.error_words, sizeof(step.error_words), "%s", words);
  member.request_stop();
}

int32_t create_step(Step& step) {
  if (isa_level() == IsaLevel::none)
    return fail(PW_E_UNSUPPORTED, "this CPU has no AVX2 with FMA and F16C, which the kernels need");
  step.matmul = &matmul_kernels();
  step.element = &element_kernels();
  const int32_t checked = check_ops(step);
  if (checked != PW_OK) return checked;
  plan_ops(step);
  return allocate(step);
}

}  // namespace pw

extern "C" {

pw_step* pw_step_create(const pw_op* ops, int32_t n_ops, const pw_weight* weights, int32_t n_weights,
                        const pw_buffer* buffers, int32_t n_buffers, int32_t max_tokens, int32_t max_outputs,
                        pw_team* team, pw_kv* kv) {
  if (!ops || n_ops < 1 || n_weights < 0 || n_buffers < 1 || !buffers || max_tokens < 1 || max_outputs < 1 || !team) {
    pw::fail(PW_E_ARGUMENT,
             "a step needs a team and at least one op, buffer, token and output; got %d ops, %d buffers, "
             "%d tokens, %d outputs",
             n_ops, n_buffers, max_tokens, max_outputs);
    return nullptr;
  }
  try {
    auto step = std::make_unique<pw::Step>();
    step->ops.assign(ops, ops + n_ops);
    if (n_weights > 0) step->weights.assign(weights, weights + n_weights);
    for (int32_t i = 0; i < n_buffers; ++i)
      step->buffers.push_back({buffers[i].width, buffers[i].is_output != 0, nullptr});
    step->max_tokens = max_tokens;
    step->max_outputs = max_outputs;
    step->team = reinterpret_cast<pw::Team*>(team);
    step->kv = reinterpret_cast<pw::KvCache*>(kv);
    return pw::create_step(*step) == PW_OK ? pw::as_handle(step.release()) : nullptr;
  } catch (const std::bad_alloc&) {
    pw::fail(PW_E_MEMORY, "no memory for a step of %d ops", n_ops);
    return nullptr;
  }
}

void pw_step_destroy(pw_step* step) { delete reinterpret_cast<pw::Step*>(step); }

int64_t pw_step_workspace_bytes(const pw_step* step) { return static_cast<int64_t>(pw::as_step(step).workspace_bytes); }

int32_t pw_step_run(pw_step* step, const pw_batch* batch, int32_t n_threads) {
  pw::step_calls.fetch_add(1, std::memory_order_relaxed);
  return pw::run_step(pw::as_step(step), *batch, n_threads);
}

uint64_t pw_step_calls(void) { return pw::step_calls.load(std::memory_order_relaxed); }

const float* pw_step_buffer(const pw_step* step, int32_t buffer) {
  const pw::Step& s = pw::as_step(step);
  return buffer >= 0 && buffer < static_cast<int32_t>(s.buffers.size()) ? s.buffers[buffer].data : nullptr;
}

void pw_step_profile(pw_step* step, double* seconds) {
  pw::Step& s = pw::as_step(step);
  std::memcpy(seconds, s.seconds, sizeof(s.seconds));
  std::memset(s.seconds, 0, sizeof(s.seconds));
}

}  // extern "C"
