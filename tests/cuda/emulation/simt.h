// Runs a CUDA kernel on the CPU: every thread of a block is a fiber, blocks run one after the other. Barriers and
// shuffles are rendezvous of the fibers that still live. Slow and plain: for the logic of kernels, not their speed.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

struct Extent {
  unsigned x, y, z;
};
inline Extent threadIdx, blockIdx, blockDim, gridDim;
inline unsigned char* emulated_shared;

namespace simt {
constexpr size_t STACK_BYTES = 128 * 1024;

struct Rendezvous {
  int alive = 0, arrived = 0;
  uint64_t generation = 0;
  void release_if_complete() {
    if (arrived == alive) arrived = 0, generation++;
  }
};
struct Warp {
  Rendezvous barrier;
  uint64_t slots[32][8];
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK_BYTES]};
  Extent index;
  bool done = false;
  const uint64_t* waits_for = nullptr;  // a rendezvous' generation that has to move on from `generation`
  uint64_t generation = 0;

  bool is_blocked() const { return done || (waits_for && *waits_for == generation); }
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Rendezvous block_barrier;
inline ucontext_t scheduler;
inline unsigned current;
inline std::function<void()> body;

inline void yield() {
  swapcontext(&fibers[current].context, &scheduler);
  threadIdx = fibers[current].index;
}
inline void meet(Rendezvous& barrier) {
  uint64_t generation = barrier.generation;
  barrier.arrived++;
  barrier.release_if_complete();
  if (barrier.generation != generation) return;
  fibers[current].waits_for = &barrier.generation;
  fibers[current].generation = generation;
  yield();
}
inline Warp& warp() { return warps[current / 32]; }
inline unsigned lane() { return current % 32; }

inline void entry() {
  body();
  fibers[current].done = true;
  for (Rendezvous* barrier : {&warp().barrier, &block_barrier}) {
    barrier->alive--;
    if (barrier->alive) barrier->release_if_complete();
  }
  swapcontext(&fibers[current].context, &scheduler);
}

inline void run_block() {
  unsigned n = blockDim.x * blockDim.y * blockDim.z;
  if (fibers.size() < n) fibers.resize(n);
  warps.assign((n + 31) / 32, Warp());
  block_barrier = Rendezvous();
  block_barrier.alive = (int)n;
  for (unsigned i = 0; i < n; i++) {
    Fiber& fiber = fibers[i];
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    warps[i / 32].barrier.alive++;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  // every other round goes backwards, so that a missing barrier shows
  for (unsigned any = 1, round = 0; any; round++) {
    any = 0;
    for (unsigned i = 0; i < n; i++) {
      current = round % 2 ? n - 1 - i : i;
      if (fibers[current].is_blocked()) continue;
      any = 1;
      fibers[current].waits_for = nullptr;
      threadIdx = fibers[current].index;
      swapcontext(&scheduler, &fibers[current].context);
    }
  }
  for (unsigned i = 0; i < n; i++)
    if (!fibers[i].done) std::fprintf(stderr, "emulated kernel: threads wait for each other for ever\n"), std::abort();
}

// Ends with its last byte, so that AddressSanitizer sees what goes over it.
constexpr std::align_val_t SHARED_ALIGNMENT{128};
struct DeleteShared {
  void operator()(unsigned char* memory) const { ::operator delete(memory, SHARED_ALIGNMENT); }
};

inline void run_grid(Extent grid, Extent block, size_t shared_bytes, std::function<void()> kernel) {
  std::unique_ptr<unsigned char, DeleteShared> memory((unsigned char*)::operator new(shared_bytes, SHARED_ALIGNMENT));
  emulated_shared = memory.get();
  gridDim = grid, blockDim = block, body = std::move(kernel);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        std::memset(emulated_shared, 0xAB, shared_bytes);
        run_block();
      }
}

template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*(std::remove_const_t<Args>*)args[I]...);
}
template <class... Args>
void launch(void (*kernel)(Args...), const unsigned* grid, const unsigned* block, size_t shared_bytes, void** args) {
  run_grid({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes,
           [&] { call(kernel, args, std::index_sequence_for<Args...>()); });
}

// Every lane gives a value and sees those of all lanes.
template <class T, class Read>
auto exchange(T value, Read read) {
  static_assert(sizeof(T) <= sizeof(Warp::slots[0]));
  Warp& w = warp();
  std::memcpy(w.slots[lane()], &value, sizeof(T));
  meet(w.barrier);
  auto result = read([&](unsigned source) {
    T out;
    std::memcpy(&out, w.slots[source % 32], sizeof(T));
    return out;
  });
  meet(w.barrier);
  return result;
}
}  // namespace simt
