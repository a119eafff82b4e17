// The few machine operations that the kernels of this folder are written in: f16 conversion, dependent launch,
// warp sums, tensor-core products, asynchronous copies. No CUDA header is needed. What a card lacks has a plain form.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITE __int_as_float(0x7f800000)
#define FULL_WARP 0xffffffffu
#define LOG2_E 1.4426950408889634f
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

// Programmatic dependent launch: the next kernel may be placed now; this one goes on only when the one in front is done.
__device__ __forceinline__ void start_after_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// two f16 in a word, `low` in its low half
__device__ __forceinline__ u32 pack_halves(float low, float high) {
  return (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
}

__device__ __forceinline__ float2 unpack_halves(u32 word) {
  return make_float2(half_to_float((u16)(word & 0xffff)), half_to_float((u16)(word >> 16)));
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh to about 1e-7 absolute, without branches
__device__ __forceinline__ float tanh_by_exp2(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_approximate(fminf(2.0f * LOG2_E * x, 126.0f)));
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}

// True in every thread of the last of `n_blocks` blocks to come here, false in all others; `counter` is 0 again after
// it. Everything that the blocks wrote before is visible to the last one.
__device__ __forceinline__ bool is_last_block(u32* counter, u32 n_blocks) {
  __shared__ u32 arrived;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicInc(counter, n_blocks - 1);
  __syncthreads();
  if (arrived != n_blocks - 1) return false;
  __threadfence();
  return true;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// 16 bytes from global to shared memory, in the background where the card can
__device__ __forceinline__ void copy_16_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  *(uint4*)shared = *(const uint4*)global;
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// waits until at most `Pending` of this thread's committed groups are under way
template <int Pending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// Four 8x8 tiles of f16; lane l gives the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void load_tiles(u32 (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_tiles_transposed(u32 (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

// sums [16 x 8] += a [16 x 16] b [16 x 8], f16 with f32 sums, in the fragment layout of PTX's m16n8k16
__device__ __forceinline__ void multiply_tiles(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const u32 b[2] = {b0, b1};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}
