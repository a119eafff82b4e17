// One matrix product behind the C ABI, on the calling thread. For tests and for measuring kernels by themselves; a
// model runs through pw_step_run.
#include <cstdlib>

#include "clock.h"
#include "formats.h"
#include "isa.h"
#include "matmul.h"
#include "pw_cpu.h"

namespace {

// Aligned memory that frees itself; `data` is null when there was none to have.
struct Buffer {
  void* data;
  explicit Buffer(size_t bytes) : data(aligned_alloc(64, (bytes + 127) / 64 * 64)) {}
  ~Buffer() { free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

bool is_matrix(const pw_weight& weight) {
  const pw::TypeInfo* info = pw::find_type(weight.type);
  return info != nullptr && weight.rows > 0 && weight.cols > 0 && weight.cols % info->unit_cols == 0 &&
         (weight.packed != nullptr || weight.file != nullptr);
}

bool is_range(int32_t begin, int32_t end, int32_t size) { return 0 <= begin && begin <= end && end <= size; }

bool is_valid(const pw_matmul_call& call) {
  const int32_t n_groups = (call.weight->rows + pw::kRowGroup - 1) / pw::kRowGroup;
  return is_matrix(*call.weight) && call.n_tokens > 0 && is_range(call.group_begin, call.group_end, n_groups) &&
         is_range(call.expert_begin, call.expert_end, call.weight->experts);
}

}  // namespace

extern "C" {

int32_t pw_matmul(const pw_matmul_call* call) {
  const pw_weight* weight = call->weight;
  if (pw::isa_level() == pw::IsaLevel::none) return PW_E_UNSUPPORTED;
  if (!is_valid(*call)) return PW_E_ARGUMENT;
  const pw::MatmulKernels& kernels = pw::matmul_kernels();
  const pw::ActForm form = pw::activation_form(weight->type);
  Buffer memory(kernels.activations_bytes(form, call->n_tokens, weight->cols));
  Buffer scratch(kernels.scratch_bytes(weight->type, weight->cols));
  if (memory.data == nullptr || scratch.data == nullptr) return PW_E_MEMORY;

  pw::Activations input;
  kernels.activations_init(&input, form, call->n_tokens, weight->cols, memory.data);
  const auto prepare = [&] {
    kernels.activations_prepare(&input, call->x, call->x_stride, call->gather, 0, input.n_tiles);
  };
  if (call->seconds != nullptr) prepare();  // first touch of the memory is not what is measured
  const double start_s = pw::now_s();
  prepare();
  const double prepared_s = pw::now_s();
  pw::Matmul m{weight,     0, &input, call->y, call->y_stride, call->output_rows, call->bias, call->accumulate != 0,
               call->scale};
  for (m.expert = call->expert_begin; m.expert < call->expert_end; m.expert++) {
    kernels.matmul(&m, call->group_begin, call->group_end, scratch.data);
  }
  if (call->seconds != nullptr) {
    call->seconds[0] = prepared_s - start_s;
    call->seconds[1] = pw::now_s() - prepared_s;
  }
  return PW_OK;
}

int32_t pw_dequantize_row(int32_t type, int32_t cols, const uint8_t* file_row, float* out) {
  const pw::TypeInfo* info = pw::find_type(type);
  if (info == nullptr || cols < 0 || cols % info->unit_cols != 0) return PW_E_ARGUMENT;
  pw::matmul_kernels().dequantize_row(type, file_row, cols, out);
  return PW_OK;
}

}  // extern "C"
