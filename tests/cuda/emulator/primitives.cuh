// Stands in for worker/cuda/primitives.cuh when kernels are compiled as plain C++ for the tests: a block's threads are
// fibers of one CPU thread, switched where they wait for each other. Arithmetic is the CPU's.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static
#define DYNAMIC_SHARED(name) u8* name = emulator::dynamic_shared()
#define INFINITE HUGE_VALF
#define FULL_WARP 0xffffffffu
#define LOG2_E 1.4426950408889634f

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emulator {

struct Dim { u32 x, y, z; };

// A place where `live` fibers meet: the last to come opens it for all.
struct Gate {
  int live = 0, arrived = 0;
  u32 generation = 0;
  void open_if_full() {
    if (live > 0 && arrived == live) arrived = 0, ++generation;
  }
};

struct Warp {
  Gate gate;
  alignas(16) u8 slots[2][32][64];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<u8[]> stack;
  Dim thread;
  Gate* waits_at = nullptr;
  u32 generation = 0;
  bool done = false;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Gate gate;
  std::vector<u8> shared;
  Fiber* current = nullptr;
  Dim block, block_dim, grid_dim;
};

inline Block& block() {
  static Block value;
  return value;
}

inline u8* dynamic_shared() { return (u8*)(((uintptr_t)block().shared.data() + 127) / 128 * 128); }
inline Warp& warp() { return block().warps[block().current->thread.x / 32]; }

inline void meet(Gate& gate) {
  Fiber* self = block().current;
  const u32 generation = gate.generation;
  ++gate.arrived;
  gate.open_if_full();
  if (gate.generation != generation) return;
  self->waits_at = &gate;
  self->generation = generation;
  swapcontext(&self->context, &block().scheduler);
}

// Every lane of the warp gives a value and may then read all of them, until the next exchange but one.
template <class T>
inline const T& lane_value(const u8 (*slots)[64], int lane) { return *(const T*)slots[lane]; }

template <class T>
inline const u8 (*exchange(const T& value))[64] {
  static_assert(sizeof(T) <= 64, "larger than a slot");
  Warp& w = warp();
  auto slots = w.slots[w.gate.generation % 2];
  memcpy(slots[block().current->thread.x % 32], &value, sizeof(T));
  meet(w.gate);
  return slots;
}

inline void leave(Fiber& fiber) {
  fiber.done = true;
  for (Gate* gate : {&block().warps[fiber.thread.x / 32].gate, &block().gate}) {
    --gate->live;
    gate->open_if_full();
  }
}

template <class Body>
void fiber_main(u32 high, u32 low) {
  const Body* body = (const Body*)((u64)high << 32 | low);
  (*body)();
  leave(*block().current);
  swapcontext(&block().current->context, &block().scheduler);
}

// Runs all fibers of a block to their ends; every other round goes backwards, so that a missing barrier shows.
inline void schedule() {
  Block& b = block();
  for (size_t left = b.fibers.size(), round = 0; left; ++round) {
    bool moved = false;
    for (size_t i = 0; i < b.fibers.size(); ++i) {
      Fiber& fiber = b.fibers[round % 2 ? b.fibers.size() - 1 - i : i];
      if (fiber.done || (fiber.waits_at && fiber.waits_at->generation == fiber.generation)) continue;
      fiber.waits_at = nullptr;
      b.current = &fiber;
      swapcontext(&b.scheduler, &fiber.context);
      moved = true;
      left -= fiber.done;
    }
    if (!moved) fprintf(stderr, "emulated kernel: threads wait for each other for ever\n"), abort();
  }
}

template <class Body>
void run_block(const Body& body, size_t shared_bytes) {
  Block& b = block();
  const size_t n = b.block_dim.x;
  b.fibers.resize(n);
  b.warps.assign((n + 31) / 32, Warp());
  b.gate = Gate();
  b.gate.live = (int)n;
  b.shared.assign(shared_bytes + 128, 0xff);  // NaN: nothing may rely on what was there
  for (size_t i = 0; i < n; ++i) {
    Fiber& fiber = b.fibers[i];
    constexpr size_t kStackBytes = 256 << 10;
    if (!fiber.stack) fiber.stack.reset(new u8[kStackBytes]);
    fiber.thread = {(u32)i, 0, 0};
    fiber.waits_at = nullptr;
    fiber.done = false;
    ++b.warps[i / 32].gate.live;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    const u64 address = (u64)&body;
    makecontext(&fiber.context, (void (*)())fiber_main<Body>, 2, (u32)(address >> 32), (u32)address);
  }
  schedule();
}

template <class... A, size_t... I>
void run(void (*kernel)(A...), const u32* dims, u32 shared_bytes, void** args, std::index_sequence<I...>) {
  Block& b = block();
  b.grid_dim = {dims[0], dims[1], dims[2]};
  b.block_dim = {dims[3], 1, 1};
  const auto body = [&] { kernel(*(A*)args[I]...); };
  for (u32 z = 0; z < dims[2]; ++z)
    for (u32 y = 0; y < dims[1]; ++y)
      for (u32 x = 0; x < dims[0]; ++x) {
        b.block = {x, y, z};
        run_block(body, shared_bytes);
      }
}

template <class... A>
void run(void (*kernel)(A...), const u32* dims, u32 shared_bytes, void** args) {
  run(kernel, dims, shared_bytes, args, std::index_sequence_for<A...>());
}

}  // namespace emulator

#define threadIdx (emulator::block().current->thread)
#define blockIdx (emulator::block().block)
#define blockDim (emulator::block().block_dim)
#define gridDim (emulator::block().grid_dim)

inline void __syncthreads() { emulator::meet(emulator::block().gate); }
inline void __syncwarp() { emulator::meet(emulator::warp().gate); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(u32, T value, int lane) { return emulator::lane_value<T>(emulator::exchange(value), lane); }
template <class T>
T __shfl_xor_sync(u32, T value, int mask) {
  return emulator::lane_value<T>(emulator::exchange(value), (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(u32, T value, int offset) {
  const int lane = threadIdx.x % 32;
  return emulator::lane_value<T>(emulator::exchange(value), lane >= offset ? lane - offset : lane);
}
inline u32 __ballot_sync(u32, bool value) {
  const auto slots = emulator::exchange(value);
  u32 bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (u32)emulator::lane_value<bool>(slots, lane) << lane;
  return bits;
}

template <class T>
T __ldcg(const T* pointer) { return *pointer; }
template <class T, class U>
T atomicAdd(T* pointer, U value) { const T old = *pointer; *pointer = old + value; return old; }
template <class T>
T atomicExch(T* pointer, T value) { const T old = *pointer; *pointer = value; return old; }
template <class T>
T atomicMax(T* pointer, T value) { const T old = *pointer; if (value > old) *pointer = value; return old; }
inline u32 atomicInc(u32* pointer, u32 limit) { const u32 old = *pointer; *pointer = old >= limit ? 0 : old + 1; return old; }

template <class To, class From>
To same_bits(From value) { To to; static_assert(sizeof(To) == sizeof(From), ""); memcpy(&to, &value, sizeof(to)); return to; }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline int __float2int_rn(float x) { return (int)lrintf(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline void start_after_previous() {}
inline float half_to_float(u16 bits) { return (float)same_bits<_Float16>(bits); }
inline u16 float_to_half(float value) { return same_bits<u16>((_Float16)value); }
inline u32 pack_halves(float low, float high) { return (u32)float_to_half(low) | (u32)float_to_half(high) << 16; }
inline float2 unpack_halves(u32 word) { return {half_to_float((u16)word), half_to_float((u16)(word >> 16))}; }
inline float exp2_approximate(float x) { return exp2f(x); }
inline float tanh_by_exp2(float x) { return 1.0f - 2.0f / (1.0f + exp2f(fminf(2.0f * LOG2_E * x, 126.0f))); }

inline float warp_sum(float value) {
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}
inline float warp_max(float value) {
  for (int offset = 16; offset; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}
inline bool is_last_block(u32* counter, u32 n_blocks) {
  static u32 arrived;
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicInc(counter, n_blocks - 1);
  __syncthreads();
  return arrived == n_blocks - 1;
}

inline void copy_16_async(void* shared, const void* global) { memcpy(shared, global, 16); }
inline void commit_copies() {}
template <int Pending>
void wait_copies() {}

inline void load_tiles(u32 (&tiles)[4], const void* row) {
  const auto rows = emulator::exchange(row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    tiles[i] = ((const u32*)emulator::lane_value<const void*>(rows, 8 * i + lane / 4))[lane % 4];
}
inline void load_tiles_transposed(u32 (&tiles)[4], const void* row) {
  const auto rows = emulator::exchange(row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int first = 8 * i + 2 * (lane % 4);
    const u16 low = ((const u16*)emulator::lane_value<const void*>(rows, first))[lane / 4];
    const u16 high = ((const u16*)emulator::lane_value<const void*>(rows, first + 1))[lane / 4];
    tiles[i] = low | (u32)high << 16;
  }
}
struct Fragments { u32 a[4], b[2]; };
inline void multiply_tiles(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto slots = emulator::exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = threadIdx.x % 32;
  for (int part = 0; part < 4; ++part) {
    const int column = 2 * (lane % 4) + part % 2;
    for (int k = 0; k < 16; ++k) {
      const auto& row = emulator::lane_value<Fragments>(slots, lane / 4 * 4 + k % 8 / 2);
      const auto& col = emulator::lane_value<Fragments>(slots, column * 4 + k % 8 / 2);
      const float2 x = unpack_halves(row.a[k / 8 * 2 + part / 2]), w = unpack_halves(col.b[k / 8]);
      sums[part] += (k % 2 ? x.y : x.x) * (k % 2 ? w.y : w.x);
    }
  }
}
