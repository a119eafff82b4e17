// Element-wise operations: embedding rows, row selection, RMS norm, conversion, gated activations, adding, soft caps.
// Variants: -DFILE_TYPE (GGML type of the embedding), -DVECTORS (groups of four values per thread in a norm).
#include "activation.cuh"
#include "file_rows.cuh"
#include "outputs.cuh"

#ifndef FILE_TYPE
#define FILE_TYPE 0
#endif
#ifndef VECTORS
#define VECTORS 1
#endif

KERNEL __launch_bounds__(256)
    embed(const u8* rows, int row_bytes, int width, const int* token_ids, float scale, float* output) {
  start_after_previous();
  const int column = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (column >= width) return;
  const int id = max(token_ids[token], 0);  // -1: the step before had no result, so nobody wants this one's
  const u8* row = rows + (u64)id * row_bytes;
  output[(u64)token * width + column] = file_value<FILE_TYPE>(row, column) * scale;
}

KERNEL __launch_bounds__(256)
    select_rows(const float* source, const int* rows, int width, float* output) {
  start_after_previous();
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column < width) output[(u64)blockIdx.y * width + column] = source[(u64)rows[blockIdx.y] * width + column];
}

// values first .. first + valid of `row`; those beyond are 0
INLINE float4 load_four(const float* row, u64 first, int valid, bool aligned) {
  if (valid == 4 && aligned) return *(const float4*)(row + first);
  float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int i = 0; i < valid; ++i) parts[i] = row[first + i];
  return make_float4(parts[0], parts[1], parts[2], parts[3]);
}

INLINE int valid_four(long long left) { return left >= 4 ? 4 : left > 0 ? (int)left : 0; }

INLINE float sum_of_block(float value) {
  __shared__ float sums[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// One block per row; every thread holds VECTORS groups of four values in registers between the two passes.
KERNEL __launch_bounds__(1024)
    rms_norm(const float* source, const int* rows, const float* weight, int width, float eps, int accumulate,
             float* values, u16* halves, signed char* codes, float* scales, float* code_sums) {
  start_after_previous();
  const int token = blockIdx.x;
  const float* row = source + (u64)(rows ? rows[token] : token) * width;
  const bool aligned = width % 4 == 0;
  float4 held[VECTORS];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int first = 4 * (i * blockDim.x + threadIdx.x);
    held[i] = load_four(row, first, valid_four(width - first), aligned);
    squares += held[i].x * held[i].x + held[i].y * held[i].y + held[i].z * held[i].z + held[i].w * held[i].w;
  }
  const float factor = 1.0f / sqrtf(sum_of_block(squares) / (float)width + eps);
  const Outputs out = {values, halves, codes, scales, code_sums};
  const u64 base = (u64)token * width;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int first = 4 * (i * blockDim.x + threadIdx.x), valid = valid_four(width - first);
    const float4 w = load_four(weight, first, valid, true);
    float4 v = make_float4(held[i].x * factor * w.x, held[i].y * factor * w.y, held[i].z * factor * w.z,
                           held[i].w * factor * w.w);
    if (accumulate) {
      const float4 old = load_four(values, base + first, valid, aligned);
      v = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
    store_four(out, base + first, v, valid);
  }
}

KERNEL __launch_bounds__(256)
    convert(const float* source, long long count, float* values, u16* halves, signed char* codes, float* scales,
            float* code_sums) {
  start_after_previous();
  const long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  const int valid = valid_four(count - first);
  const Outputs out = {values, halves, codes, scales, code_sums};
  store_four(out, first, load_four(source, first, valid, true), valid);
}

KERNEL __launch_bounds__(256)
    glu(const float* gate, const float* up, long long count, int activation, float* values, u16* halves,
        signed char* codes, float* scales, float* code_sums) {
  start_after_previous();
  const long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  const int valid = valid_four(count - first);
  const float4 g = load_four(gate, first, valid, true), u = load_four(up, first, valid, true);
  const Outputs out = {values, halves, codes, scales, code_sums};
  store_four(out, first,
             make_float4(activate(g.x, activation) * u.x, activate(g.y, activation) * u.y,
                         activate(g.z, activation) * u.z, activate(g.w, activation) * u.w),
             valid);
}

KERNEL __launch_bounds__(256)
    add(const float* source, float* target, long long count) {
  start_after_previous();
  const long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  const int valid = valid_four(count - first);
  const float4 a = load_four(source, first, valid, true), b = load_four(target, first, valid, true);
  const Outputs out = {target, 0, 0, 0, 0};
  store_four(out, first, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w), valid);
}

KERNEL __launch_bounds__(256)
    scale_and_cap(float* values, long long count, float scale, float cap) {
  start_after_previous();
  const long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
  const long long end = first + 4 < count ? first + 4 : count;
  for (long long i = first; i < end; ++i) {
    const float scaled = values[i] * scale;
    values[i] = cap != 0.0f ? cap * tanhf(scaled / cap) : scaled;
  }
}
