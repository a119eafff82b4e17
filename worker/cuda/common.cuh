// What every kernel needs and CUDA's headers would otherwise bring: short types, half conversions, sums over warps
// and blocks, dependent launch, bulk copies into shared memory, tensor-core products. All assembly is in this file:
// tests/cuda/emulation has its twin in plain C++, with which the other sources run on a CPU.
#pragma once
typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#define FULL_WARP 0xffffffffu
#define HAS_HOPPER (__CUDA_ARCH__ >= 900)
#define HAS_AMPERE (__CUDA_ARCH__ >= 800)

INLINE u32 lane_id() { return threadIdx.x & 31; }
INLINE u32 warp_id() { return threadIdx.x >> 5; }
// The i-th of COUNT things that N_THREADS threads share, for i < SHARES<COUNT, N_THREADS>; may lie beyond COUNT. Loops
// written with it have a known length: the compiler makes a few instructions of them, not a loop for every length.
template <int COUNT, int N_THREADS>
constexpr int SHARES = (COUNT + N_THREADS - 1) / N_THREADS;
template <int N_THREADS>
INLINE int shared_out(int i) {
  return (int)threadIdx.x + i * N_THREADS;
}

// ---- 16-bit floats as bit patterns ----
INLINE float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
INLINE u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
INLINE float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
// two halves in one word, `low` in the lower 16 bits
INLINE u32 pack_half2(float low, float high) {
#if HAS_AMPERE
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return (u32)float_to_half(low) | ((u32)float_to_half(high) << 16);
#endif
}
INLINE float low_half(u32 pair) { return half_to_float((u16)(pair & 0xffff)); }
INLINE float high_half(u32 pair) { return half_to_float((u16)(pair >> 16)); }
INLINE u32 half2_sub(u32 a, u32 b) {
  u32 result;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
INLINE u32 half2_mul(u32 a, u32 b) {
  u32 result;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
INLINE u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// ---- loads ----
// 16 bytes that are read once: they do not displace what L1 holds
INLINE uint4 load_once(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
// past L1: data that another kernel may be writing until griddepcontrol.wait
INLINE float load_fresh(const float* address) { return __ldcg(address); }
INLINE float4 load_fresh4(const float* address) { return __ldcg((const float4*)address); }

// ---- arithmetic ----
#define INFINITE __int_as_float(0x7f800000)
#define LOG2_E 1.4426950408889634f

INLINE float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// tanh to about 1e-7 absolute, without branches
INLINE float tanh_by_exp2(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_approximate(fminf(2.0f * LOG2_E * x, 126.0f)));
}

// sum + the products of four unsigned with four signed bytes
INLINE int dot4_unsigned(u32 a, int b, int sum) {
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
}

// A barrier of COUNT threads of the block, whole warps; ID 1 to 15 tells barriers apart, 0 is that of __syncthreads.
template <int ID, int COUNT>
INLINE void meet_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// ---- sums and maxima ----
INLINE float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}
INLINE float warp_max(float value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}
// The largest |value|, and the sum of whole numbers, in one step where the card has it.
INLINE float warp_max_magnitude(float value) {
#if HAS_AMPERE
  u32 bits;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(bits) : "r"(__float_as_uint(fabsf(value))));
  return __uint_as_float(bits);
#else
  return warp_max(fabsf(value));
#endif
}
INLINE int warp_sum_int(int value) {
#if HAS_AMPERE
  int sum;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
  return sum;
#else
#pragma unroll
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
#endif
}
INLINE int warp_max(int value) {
#if HAS_AMPERE
  int largest;
  asm("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
  return largest;
#else
#pragma unroll
  for (int step = 16; step; step >>= 1) value = max(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
#endif
}
// Sums of N values over a warp, N a power of two: lane i gets the sum of values[i / (32 / N)]. `values` is used up. By
// recursion: of long loops over halves the compiler makes local memory.
template <int HALF, int STEP, int N>
INLINE float warp_sums_of(float (&values)[N]) {
  if constexpr (HALF > 0) {
    const bool upper = lane_id() & STEP;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
      const float given = upper ? values[i] : values[HALF + i], kept = upper ? values[HALF + i] : values[i];
      values[i] = kept + __shfl_xor_sync(FULL_WARP, given, STEP);
    }
    return warp_sums_of<HALF / 2, STEP / 2>(values);
  } else {
    float sum = values[0];
#pragma unroll
    for (int step = STEP; step; step >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    return sum;
  }
}
template <int N>
INLINE float warp_sums(float (&values)[N]) {
  return warp_sums_of<N / 2, 16>(values);
}
// Sum over the block, in every thread; `scratch` f32[32] may be reused after the next barrier.
template <int THREADS>
INLINE float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  return warp_sum(lane_id() < THREADS / 32 ? scratch[lane_id()] : 0.f);
}

// ---- dependent launch: no-ops where the card has none ----
// After this, everything that the kernels before have written is there.
INLINE void wait_for_inputs() {
#if HAS_HOPPER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start; it still waits for this one to end before it reads.
INLINE void let_next_start() {
#if HAS_HOPPER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both at once, for kernels that have nothing to do before.
INLINE void start_after_previous() {
  let_next_start();
  wait_for_inputs();
}

// True in every thread of the last of `n_blocks` blocks to come here, false in all others; `counter` is 0 again after
// it. What the other blocks wrote before is visible to the last one past L1 (__ldcg).
INLINE bool is_last_block(u32* counter, u32 n_blocks) {
  __shared__ u32 arrived;
  __syncthreads();
  if (threadIdx.x == 0) {  // its fences speak for the block: the barriers order the other threads' accesses around them
    __threadfence();
    arrived = atomicInc(counter, n_blocks - 1);
    __threadfence();
  }
  __syncthreads();
  return arrived == n_blocks - 1;
}

// ---- shared memory ----
INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---- clusters: blocks along x that can read each other's shared memory; Hopper and later ----
// All threads of all blocks of the cluster arrive, and wait for each other; what they wrote to shared memory before the
// one is visible after the other.
INLINE void arrive_in_cluster() {
#if HAS_HOPPER
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
INLINE void await_cluster() {
#if HAS_HOPPER
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
INLINE void meet_in_cluster() {
  arrive_in_cluster();
  await_cluster();
}
// Address of the same place in the shared memory of block `rank` of the cluster, for what follows.
INLINE u32 in_block_of_cluster(const void* own, u32 rank) {
  u32 address = shared_address(own);
#if HAS_HOPPER
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}
INLINE void write_cluster4(u32 address, float4 v) {
#if HAS_HOPPER
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
#endif
}
INLINE void write_cluster2(u32 address, float2 v) {
#if HAS_HOPPER
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
#endif
}

// ---- copies into shared memory ----
// 16 bytes per thread, asynchronous from Ampere on; `valid` false writes zeros
INLINE void copy_async16(void* target, const void* source, bool valid) {
#if HAS_AMPERE
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  *(uint4*)target = valid ? *(const uint4*)source : make_uint4(0, 0, 0, 0);
#endif
}
// 4 or 8 bytes per thread
template <int BYTES>
INLINE void copy_async_small(void* target, const void* source) {
#if HAS_AMPERE
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(target)), "l"(source), "n"(BYTES)
               : "memory");
#else
  for (int i = 0; i < BYTES / 4; i++) ((u32*)target)[i] = ((const u32*)source)[i];
#endif
}
INLINE void copy_async_commit() {
#if HAS_AMPERE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
INLINE void copy_async_wait() {
#if HAS_AMPERE
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// A ring of stages that one warp fills with copies and reads itself; one 64-bit barrier per stage. On Hopper one lane
// issues bulk copies; on Ampere the warp issues small asynchronous ones, in order, one group per fill; before that the
// copies are plain. All lanes call all of these.
INLINE void ring_init(u64* barriers, int n_stages) {
#if HAS_HOPPER
  if (lane_id() == 0)
    for (int i = 0; i < n_stages; i++)
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
#endif
}
// A fill of `bytes` in all begins: from one or more ring_copy, then ring_commit.
INLINE void ring_expect(u64* barrier, u32 bytes) {
#if HAS_HOPPER
  if (lane_id() == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}
// `bytes` is a multiple of 16 and both sides are 16-byte aligned
INLINE void ring_copy(void* target, const void* source, u32 bytes, u64* barrier) {
#if HAS_HOPPER
  if (lane_id() == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#else
  for (u32 i = lane_id() * 16; i < bytes; i += 512) copy_async16((u8*)target + i, (const u8*)source + i, true);
#endif
}
// The same for several copies at once: lane i < n has the addresses of the i-th.
INLINE void ring_copy_each(void* target, const void* source, u32 bytes, u64* barrier, int n) {
#if HAS_HOPPER
  if (lane_id() < n)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#else
  for (int i = 0; i < n; i++)
    ring_copy((void*)__shfl_sync(FULL_WARP, (u64)target, i), (const void*)__shfl_sync(FULL_WARP, (u64)source, i), bytes,
              barrier);
#endif
}
// Ends a fill; also called for a fill of nothing, to keep the count of groups.
INLINE void ring_commit() {
#if !HAS_HOPPER
  copy_async_commit();
#endif
}
// The fill of a stage is there; PENDING later fills may be under way. `round` counts the uses of this stage.
template <int PENDING>
INLINE void ring_wait(u64* barrier, u32 round) {
#if HAS_HOPPER
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(round & 1)
        : "memory");
  } while (!done);
#else
  copy_async_wait<PENDING>();
  __syncwarp();
#endif
}

// ---- tensor cores ----
// c (16 x 8, f32) += a (16 x 16) b (16 x 8), halves. Lane = 4 * g + t holds a: rows g, g + 8, columns 2t, 2t + 1 and
// 2t + 8, 2t + 9; b: rows 2t, 2t + 1 and + 8, column g; c: rows g and g + 8, columns 2t, 2t + 1.
INLINE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HAS_AMPERE
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a2), "r"(a3), "r"(b1));
#endif
}
// Four 8 x 8 tiles of halves from shared memory: lane 8 i + r gives the address of row r (16 bytes) of tile i; word i of
// lane 4 g + t gets columns 2t, 2t + 1 of row g of tile i.
INLINE void load_tiles(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of the tiles' transposes: word i of lane 4 g + t gets rows 2t, 2t + 1 of column g of tile i.
INLINE void load_tiles_transposed(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
