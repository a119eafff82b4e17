// Ops on single rows: embedding, norm, gated activation, choosing the output rows.
#include <cstring>

#include "step.h"

namespace pw {

void run_embed(Run& run, const pw_op& op) {
  const pw_weight& table = run.weight(op.weight[0]);
  const int64_t row_bytes = pw_file_bytes(table.type, 1, table.cols);
  run.each_row(run.batch.n_tokens, [&](int32_t token) {
    float* out = run.row(op.out[0], token);
    run.step.matmul->dequantize_row(table.type, table.file + run.batch.token_ids[token] * row_bytes, table.cols, out);
    if (embed_scale(op) != 1.0f) run.step.element->scale(out, table.cols, embed_scale(op));
  });
}

void run_rms_norm(Run& run, const pw_op& op) {
  const RmsNormArgs args(op);
  const float* weight = run.vector(op.weight[0]);
  const int32_t width = run.width(op.in[0]);
  run.each_row(run.rows(op.in[0]), [&](int32_t row) {
    run.step.element->rms_norm(run.row(op.in[0], row), weight, args.eps, width, args.accumulates,
                               run.row(op.out[0], row));
  });
}

void run_glu(Run& run, const pw_op& op) {
  const int32_t width = run.width(op.out[0]);
  run.each_row(run.rows(op.in[0]), [&](int32_t row) {
    run.step.element->glu(glu_activation(op), run.row(op.in[0], row), run.row(op.in[1], row), width,
                          run.row(op.out[0], row));
  });
}

void run_select(Run& run, const pw_op& op) {
  const size_t row_bytes = run.width(op.out[0]) * sizeof(float);
  run.each_row(run.batch.n_outputs, [&](int32_t output) {
    std::memcpy(run.row(op.out[0], output), run.row(op.in[0], run.batch.output_rows[output]), row_bytes);
  });
}

}  // namespace pw
