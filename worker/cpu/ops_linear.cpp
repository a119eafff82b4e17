// LINEAR: up to three matrix products of one input, with what follows at once while the rows are in the cache.
#include "step.h"

namespace pw {
namespace {

constexpr int32_t kForms = 3;
constexpr double kPieceNs = 30000.0;  // long against taking it, short against waiting for it
constexpr double kBytesPerNs = 25.0;  // of weights from memory, by one thread
constexpr double kMultiplyAddsPerNs = 150.0;

// The input in each form that one of the weights asks for.
struct PreparedInputs {
  Activations forms[kForms];
};

PreparedInputs prepare_inputs(Run& run, const pw_op& op, int32_t n_rows) {
  PreparedInputs inputs;
  bool done[kForms] = {};
  Carver carver(run.step.shared_scratch);
  for (int32_t j = 0; j < LinearArgs(op).n_outputs; ++j) {
    const pw_weight& weight = run.weight(op.weight[j]);
    const ActForm form = activation_form(weight.type);
    const int32_t slot = static_cast<int32_t>(form);
    if (done[slot]) continue;
    done[slot] = true;
    uint8_t* memory = carver.take<uint8_t>(activations_bytes(run.step, op.weight[j], n_rows));
    inputs.forms[slot] = describe_activations(run, form, n_rows, weight.cols, memory);
    prepare_activations(run, inputs.forms[slot], run.row(op.in[0], 0));
  }
  return inputs;
}

// One output's product as the kernels want it.
Matmul product(const Run& run, const pw_op& op, int32_t j, const PreparedInputs& inputs) {
  const LinearArgs args(op);
  const pw_weight& weight = run.weight(op.weight[j]);
  Matmul m{};
  m.weight = &weight;
  m.input = &inputs.forms[static_cast<int32_t>(activation_form(weight.type))];
  m.output = run.row(op.out[j], 0);
  m.output_stride = run.width(op.out[j]);
  m.bias = run.vector(op.bias[j]);
  m.accumulate = j == 0 && args.accumulates;
  m.scale = args.scale;
  return m;
}

struct RowRange {
  int32_t begin, end;
};

RowRange rows_of_groups(const pw_weight& weight, int32_t group_begin, int32_t group_end) {
  const int32_t end = group_end * kRowGroup;
  return {group_begin * kRowGroup, end < weight.rows ? end : weight.rows};
}

// Gate, up and their gated product for the same rows, without a barrier between.
void run_gated(Run& run, const pw_op& op, const pw_op& glu, const PreparedInputs& inputs, int32_t n_rows) {
  const Matmul gate = product(run, op, 0, inputs), up = product(run, op, 1, inputs);
  const int64_t n_groups = row_groups(*gate.weight);
  run.member.parallel(n_groups, group_piece(run, *gate.weight, n_groups, n_rows), [&](int64_t begin, int64_t end) {
    const int32_t group_begin = static_cast<int32_t>(begin), group_end = static_cast<int32_t>(end);
    run.step.matmul->matmul(&gate, group_begin, group_end, run.scratch());
    run.step.matmul->matmul(&up, group_begin, group_end, run.scratch());
    const RowRange rows = rows_of_groups(*gate.weight, group_begin, group_end);
    for (int32_t r = 0; r < n_rows; ++r)
      run.step.element->glu(glu_activation(glu), run.row(op.out[0], r) + rows.begin, run.row(op.out[1], r) + rows.begin,
                            rows.end - rows.begin, run.row(glu.out[0], r) + rows.begin);
  });
}

void cap_rows(Run& run, const pw_op& op, int32_t j, RowRange range, int32_t n_rows) {
  for (int32_t r = 0; r < n_rows; ++r)
    run.step.element->soft_cap(run.row(op.out[j], r) + range.begin, range.end - range.begin, LinearArgs(op).softcap);
}

// The row groups of all outputs in one sequence, so that they share the threads evenly.
void run_outputs(Run& run, const pw_op& op, const PreparedInputs& inputs, int32_t n_rows) {
  const LinearArgs args(op);
  Matmul products[kMaxOutputs];
  int64_t first_group[kMaxOutputs + 1] = {};
  for (int32_t j = 0; j < args.n_outputs; ++j) {
    products[j] = product(run, op, j, inputs);
    first_group[j + 1] = first_group[j] + row_groups(*products[j].weight);
  }
  const int64_t n_groups = first_group[args.n_outputs];
  const int64_t piece = group_piece(run, *products[0].weight, n_groups, n_rows);
  run.member.parallel(n_groups, piece, [&](int64_t begin, int64_t end) {
    for (int32_t j = 0; j < args.n_outputs; ++j) {
      const int64_t from = begin > first_group[j] ? begin : first_group[j];
      const int64_t to = end < first_group[j + 1] ? end : first_group[j + 1];
      if (from >= to) continue;
      const int32_t group_begin = static_cast<int32_t>(from - first_group[j]);
      const int32_t group_end = static_cast<int32_t>(to - first_group[j]);
      run.step.matmul->matmul(&products[j], group_begin, group_end, run.scratch());
      if (args.softcap != 0.0f)
        cap_rows(run, op, j, rows_of_groups(*products[j].weight, group_begin, group_end), n_rows);
    }
  });
}

}  // namespace

size_t activations_bytes(const Step& step, int32_t weight, int32_t n_tokens) {
  const pw_weight& w = step.weights[weight];
  return step.matmul->activations_bytes(activation_form(w.type), n_tokens, w.cols);
}

Activations describe_activations(const Run& run, ActForm form, int32_t n_tokens, int32_t cols, uint8_t* memory) {
  Activations activations;
  run.step.matmul->activations_init(&activations, form, n_tokens, cols, memory);
  return activations;
}

void prepare_activations(Run& run, const Activations& activations, const float* x) {
  run.each_row(activations.n_tiles, [&](int32_t tile) {
    run.step.matmul->activations_prepare(&activations, x, activations.cols, nullptr, tile, tile + 1);
  });
}

int64_t group_piece(const Run& run, const pw_weight& weight, int64_t n_units, int32_t n_rows) {
  const double bytes_ns = static_cast<double>(pw_file_bytes(weight.type, kRowGroup, weight.cols)) / kBytesPerNs;
  const double compute_ns = double{kRowGroup} * weight.cols * n_rows / kMultiplyAddsPerNs;
  const double group_ns = bytes_ns > compute_ns ? bytes_ns : compute_ns;
  const int64_t at_least = n_rows > 1 ? 2 : 1;  // wide kernels take two row groups at a time
  return piece_of(n_units, run.member.n_threads(), at_least, static_cast<int64_t>(kPieceNs / group_ns));
}

size_t linear_shared_bytes(const Step& step, const pw_op& op) {
  const int32_t n_rows = step.buffers[op.in[0]].is_output ? step.max_outputs : step.max_tokens;
  Carver carver(nullptr);
  for (int32_t j = 0; j < LinearArgs(op).n_outputs; ++j)
    carver.take<uint8_t>(activations_bytes(step, op.weight[j], n_rows));
  return carver.used_bytes();
}

void run_linear(Run& run, const pw_op& op, const OpPlan& plan) {
  const int32_t n_rows = run.rows(op.in[0]);
  if (n_rows == 0) return;
  const PreparedInputs inputs = prepare_inputs(run, op, n_rows);
  if (plan.fused_glu < 0) return run_outputs(run, op, inputs, n_rows);
  run_gated(run, op, run.step.ops[plan.fused_glu], inputs, n_rows);
}

}  // namespace pw
