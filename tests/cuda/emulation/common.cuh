// The twin of worker/cuda/common.cuh for the emulator: the same names, in plain C++.
#pragma once
#include <algorithm>
#include <cmath>

#include "simt.h"

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int uint;

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __constant__ static
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define INLINE inline
#define KERNEL extern "C" void
#define DYNAMIC_SHARED(name) u8* name = emulated_shared
#define FULL_WARP 0xffffffffu
#define HAS_HOPPER 0
#define HAS_AMPERE 0

#define VECTOR_TYPE(name, scalar)                                                                     \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                        \
  struct alignas(4 * sizeof(scalar)) name##4 { scalar x, y, z, w; };                                  \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                                \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
VECTOR_TYPE(int, int)
VECTOR_TYPE(uint, u32)
VECTOR_TYPE(float, float)
#undef VECTOR_TYPE

using std::max;
using std::min;

template <class To, class From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof(To));
  return out;
}
inline float __uint_as_float(u32 v) { return same_bits<float>(v); }
inline u32 __float_as_uint(float v) { return same_bits<u32>(v); }
inline float __int_as_float(int v) { return same_bits<float>(v); }
inline int __float_as_int(float v) { return same_bits<int>(v); }
inline int __float2int_rn(float v) { return (int)std::nearbyintf(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
void __stcg(T* p, T v) { *p = v; }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(i8)(a >> 8 * i) * (int)(i8)(b >> 8 * i);
  return c;
}
inline int dot4_unsigned(u32 a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int)(u8)(a >> 8 * i) * (int)(i8)(b >> 8 * i);
  return c;
}
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
template <class T, class U>
T atomicAdd(T* p, U v) {
  T old = *p;
  *p = old + (T)v;
  return old;
}
template <class T>
T atomicOr(T* p, T v) {
  T old = *p;
  *p |= v;
  return old;
}
template <class T>
T atomicMax(T* p, T v) {
  T old = *p;
  *p = std::max(old, v);
  return old;
}
inline void __threadfence() {}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz((u32)v) : 32; }
inline void __syncthreads() { simt::meet(simt::block_barrier); }
inline void __syncwarp(u32 = FULL_WARP) { simt::meet(simt::warp().barrier); }
template <class T>
T __shfl_xor_sync(u32, T v, int mask) {
  return simt::exchange(v, [&](auto from) { return from(simt::lane() ^ (unsigned)mask); });
}
template <class T>
T __shfl_sync(u32, T v, int source) {
  return simt::exchange(v, [&](auto from) { return from((unsigned)source); });
}
template <class T>
T __shfl_down_sync(u32, T v, int step) {
  unsigned source = simt::lane() + (unsigned)step;
  return simt::exchange(v, [&](auto from) { return from(source < 32 ? source : simt::lane()); });
}
template <class T>
T __shfl_up_sync(u32, T v, int step) {
  int source = (int)simt::lane() - step;
  return simt::exchange(v, [&](auto from) { return from(source >= 0 ? (unsigned)source : simt::lane()); });
}
template <class T>
u32 __match_any_sync(u32, T value) {
  return simt::exchange(value, [&](auto from) {
    u32 out = 0;
    for (unsigned i = 0; i < 32; i++) out |= (u32)(from(i) == value) << i;
    return out;
  });
}
inline u32 __ballot_sync(u32, int predicate) {
  return simt::exchange(predicate, [&](auto from) {
    u32 out = 0;
    for (unsigned i = 0; i < 32; i++) out |= (u32)(i / 32 == 0 && from(i) != 0) << i;
    return out;
  });
}

inline u32 lane_id() { return threadIdx.x & 31; }
inline u32 warp_id() { return threadIdx.x >> 5; }
template <int COUNT, int N_THREADS>
constexpr int SHARES = (COUNT + N_THREADS - 1) / N_THREADS;
template <int N_THREADS>
int shared_out(int i) {
  return (int)threadIdx.x + i * N_THREADS;
}

inline float half_to_float(u16 bits) { return (float)same_bits<_Float16>(bits); }
inline u16 float_to_half(float value) { return same_bits<u16>((_Float16)value); }
inline float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u32 pack_half2(float low, float high) { return (u32)float_to_half(low) | ((u32)float_to_half(high) << 16); }
inline float low_half(u32 pair) { return half_to_float((u16)(pair & 0xffff)); }
inline float high_half(u32 pair) { return half_to_float((u16)(pair >> 16)); }
inline u32 half2_sub(u32 a, u32 b) { return pack_half2(low_half(a) - low_half(b), high_half(a) - high_half(b)); }
inline u32 half2_mul(u32 a, u32 b) { return pack_half2(low_half(a) * low_half(b), high_half(a) * high_half(b)); }
inline u32 half2_fma(u32 a, u32 b, u32 c) {
  return pack_half2(std::fma(low_half(a), low_half(b), low_half(c)), std::fma(high_half(a), high_half(b), high_half(c)));
}

inline uint4 load_once(const void* address) { return *(const uint4*)address; }
inline float load_fresh(const float* address) { return *address; }
inline float4 load_fresh4(const float* address) { return *(const float4*)address; }

inline float warp_sum(float value) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}
inline float warp_max(float value) {
  for (int step = 16; step; step >>= 1) value = std::max(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}
inline float warp_max_magnitude(float value) { return warp_max(std::fabs(value)); }
inline int warp_sum_int(int value) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}
inline int warp_max(int value) {
  for (int step = 16; step; step >>= 1) value = std::max(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}
template <int ID, int COUNT>
void meet_threads() {
  static simt::Rendezvous barrier;
  barrier.alive = COUNT;
  simt::meet(barrier);
}
template <int N>
float warp_sums(float (&values)[N]) {
  int step = 16;
  for (int half = N / 2; half; half >>= 1, step >>= 1) {
    bool upper = lane_id() & step;
    for (int i = 0; i < half; i++) {
      float given = upper ? values[i] : values[half + i], kept = upper ? values[half + i] : values[i];
      values[i] = kept + __shfl_xor_sync(FULL_WARP, given, step);
    }
  }
  float sum = values[0];
  for (; step; step >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
  return sum;
}
template <int THREADS>
float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  return warp_sum(lane_id() < THREADS / 32 ? scratch[lane_id()] : 0.f);
}

inline void wait_for_inputs() {}
inline void let_next_start() {}
inline void ring_init(u64*, int) {}
inline void ring_expect(u64*, u32) {}
inline void ring_copy(void* target, const void* source, u32 bytes, u64*) {
  for (u32 i = lane_id() * 16; i < bytes; i += 512) std::memcpy((u8*)target + i, (const u8*)source + i, 16);
}
inline void ring_copy_each(void* target, const void* source, u32 bytes, u64* barrier, int n) {
  for (int i = 0; i < n; i++)
    ring_copy((void*)__shfl_sync(FULL_WARP, (u64)target, i), (const void*)__shfl_sync(FULL_WARP, (u64)source, i), bytes,
              barrier);
}
inline void ring_commit() {}
template <int PENDING>
void ring_wait(u64*, u32) { __syncwarp(); }
inline void copy_async16(void* target, const void* source, bool valid) {
  if (valid) std::memcpy(target, source, 16);
  else std::memset(target, 0, 16);
}
template <int BYTES>
void copy_async_small(void* target, const void* source) { std::memcpy(target, source, BYTES); }
inline void copy_async_commit() {}
template <int PENDING>
void copy_async_wait() {}

// c (16 x 8) += a (16 x 16) b (16 x 8); fragments as PTX describes them for mma.m16n8k16
inline void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  struct Fragment { u32 a[4], b[2]; };
  simt::exchange(Fragment{{a0, a1, a2, a3}, {b0, b1}}, [&](auto from) {
    unsigned g = simt::lane() / 4, t = simt::lane() % 4;
    for (int i = 0; i < 4; i++) {
      unsigned upper = i / 2, column = 2 * t + i % 2;
      for (unsigned k = 0; k < 16; k++) {
        unsigned pair = k % 8 / 2, later = k / 8;
        u32 a = from(4 * g + pair).a[upper + 2 * later], b = from(4 * column + pair).b[later];
        c[i] += k % 2 ? high_half(a) * high_half(b) : low_half(a) * low_half(b);
      }
    }
    return 0;
  });
}

inline void load_tiles(u32 (&out)[4], const void* row) {
  struct Address { const u8* p; };
  simt::exchange(Address{(const u8*)row}, [&](auto from) {
    for (unsigned i = 0; i < 4; i++)
      std::memcpy(&out[i], from(8 * i + simt::lane() / 4).p + simt::lane() % 4 * 4, 4);
    return 0;
  });
}

// ---- what attention, the router and the sampler need ----
#define INFINITE HUGE_VALF
#define LOG2_E 1.4426950408889634f
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float exp2_approximate(float x) { return std::exp2(x); }
inline float tanh_by_exp2(float x) { return 1 - 2 / (1 + std::exp2(std::fmin(2 * LOG2_E * x, 126.f))); }
template <class T>
T atomicExch(T* p, T v) {
  T old = *p;
  *p = v;
  return old;
}
inline u32 atomicInc(u32* p, u32 limit) {
  u32 old = *p;
  *p = old >= limit ? 0 : old + 1;
  return old;
}
inline void start_after_previous() {}
inline bool is_last_block(u32* counter, u32 n_blocks) {
  static u32 arrived;
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicInc(counter, n_blocks - 1);
  __syncthreads();
  return arrived == n_blocks - 1;
}
inline void load_tiles_transposed(u32 (&tiles)[4], const void* row) {
  simt::exchange(row, [&](auto from) {
    const unsigned column = simt::lane() / 4, first = 2 * (simt::lane() % 4);
    for (unsigned i = 0; i < 4; i++) {
      const u32 low = ((const u16*)from(8 * i + first))[column], high = ((const u16*)from(8 * i + first + 1))[column];
      tiles[i] = low | high << 16;
    }
    return 0;
  });
}

// clusters of one block only: nobody to wait for
inline void arrive_in_cluster() {}
