// The internal face of the matrix kernels: what the executor calls, whatever the weight type and instruction set.
//
// y[token, row] (+)= scale * sum_k weight[row, k] * x[token, k] + bias[row]
//
// The result of a token is bit-identical whatever the number of tokens beside it, the tile it falls into and the split
// of rows over threads: every kernel of a weight type adds in the same order with the same operations.
#pragma once
#include <cstddef>
#include <cstdint>

#include "pw_cpu.h"

namespace pw {

// How activations are stored for a weight type: int8 with one f32 scale per 32, bf16, or plain f32.
enum class ActForm : int32_t { q8 = 0, bf16 = 1, f32 = 2 };

// Activations of n_tokens rows prepared for the kernels, in memory of the caller. Tokens are cut into tiles.
struct Activations {
  ActForm form;
  int32_t n_tokens;
  int32_t cols;
  int32_t n_tiles;
  uint8_t* memory;  // laid out by the kernels
};

// 16-row groups [group_begin, group_end) of one matmul are one unit of work.
struct Matmul {
  const pw_weight* weight;
  int32_t expert;             // 0 for a plain matrix
  const Activations* input;
  float* output;              // [n_tokens, rows] with row stride `output_stride` (floats)
  int64_t output_stride;
  const int32_t* output_rows; // token t goes to output row output_rows[t]; NULL = t
  const float* bias;          // [rows] or NULL
  bool accumulate;            // add to what is in output
  float scale;                // 1 = none; applied to the product before bias and accumulation
};

// One table per instruction set; `matmul_kernels()` gives the one in use.
struct MatmulKernels {
  // activations
  size_t (*activations_bytes)(ActForm form, int32_t n_tokens, int32_t cols);
  void (*activations_init)(Activations* a, ActForm form, int32_t n_tokens, int32_t cols, void* memory);
  // prepare tiles [tile_begin, tile_end) from x[row, cols] (row stride in floats); token t reads row gather[t], or row t
  void (*activations_prepare)(const Activations* a, const float* x, int64_t stride, const int32_t* gather,
                              int32_t tile_begin, int32_t tile_end);
  // matmul
  size_t (*scratch_bytes)(int32_t type, int32_t cols);  // per thread
  void (*matmul)(const Matmul* m, int32_t group_begin, int32_t group_end, void* scratch);
  // one row of a matrix in file order to f32 (for the embedding)
  void (*dequantize_row)(int32_t type, const uint8_t* file_row, int32_t cols, float* out);
  // one row group: n_rows (1 to 16) rows from `file` on into the packed layout; missing rows become zeros
  void (*pack_row_group)(int32_t type, const uint8_t* file, int32_t n_rows, int32_t cols, uint8_t* packed);
};

ActForm activation_form(int32_t type);
const MatmulKernels& matmul_kernels();

}  // namespace pw
