// The slots (token, k) of a mixture by expert, found by every block for itself: cheaper than a launch that does it
// once.
// Definitions of the including source: N_EXPERTS, N_USED, TOKEN_TILE, THREADS.
#pragma once
#include "common.cuh"

constexpr int TOKEN_LIMIT = 32;  // tokens of a launch
constexpr int MAX_SLOTS = N_EXPERTS > 1 ? TOKEN_LIMIT * N_USED : 1;

struct SlotTile {
  int expert, first, count;  // first: place of its first slot in the order
};
struct SlotTiles {
  int n_tiles;
  u16 counts[N_EXPERTS], ends[N_EXPERTS];
  SlotTile tiles[MAX_SLOTS];
  u16 experts[MAX_SLOTS], order[MAX_SLOTS];
};

// One warp, 32 slots at a time: `visit(slot, expert, before, all)` in every lane, with the number of slots of the same
// expert in lanes before this one and in all 32; beyond the last slot expert is -1.
template <class Visit>
INLINE void visit_slots(const SlotTiles& slots, int n_slots, Visit visit) {
  for (int base = 0; base < n_slots; base += 32) {
    const int slot = base + lane_id(), expert = slot < n_slots ? slots.experts[slot] : -1;
    const u32 same = __match_any_sync(FULL_WARP, expert);
    visit(slot, expert, __popc(same & ((1u << lane_id()) - 1)), __popc(same));
    __syncwarp();
  }
}

// One warp: tiles of at most TOKEN_TILE slots of one expert, in the order of experts; `ends` is then where the slots of
// an expert begin.
INLINE void list_tiles(SlotTiles& slots) {
  int slots_before = 0, tiles_before = 0;
  for (int base = 0; base < N_EXPERTS; base += 32) {
    const int expert = base + lane_id(), count = expert < N_EXPERTS ? slots.counts[expert] : 0;
    const int own = (count + TOKEN_TILE - 1) / TOKEN_TILE;
    int both = count << 16 | own;  // sums of both in one word
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      int before = __shfl_up_sync(FULL_WARP, both, step);
      if (lane_id() >= step) both += before;
    }
    const int first = slots_before + (both >> 16) - count, tile = tiles_before + (both & 0xffff) - own;
    if (expert < N_EXPERTS) slots.ends[expert] = first;
    for (int i = 0; i < own; i++)
      slots.tiles[tile + i] = {expert, first + i * TOKEN_TILE, min(TOKEN_TILE, count - i * TOKEN_TILE)};
    both = __shfl_sync(FULL_WARP, both, 31);
    slots_before += both >> 16, tiles_before += both & 0xffff;
  }
  if (lane_id() == 0) slots.n_tiles = tiles_before;
  __syncwarp();
}

// ids [n_slots]: the expert of each slot. Every block finds the same order, or tiles of one expert would not fit
// together.
INLINE void find_tiles(SlotTiles& slots, const int* ids, int n_slots) {
  for (int i = threadIdx.x; i < N_EXPERTS; i += THREADS) slots.counts[i] = 0;
  for (int i = threadIdx.x; i < n_slots; i += THREADS) slots.experts[i] = (u16)__ldcg(ids + i);
  __syncthreads();
  if (warp_id() == 0) {
    visit_slots(slots, n_slots, [&](int, int expert, int before, int all) {
      if (expert >= 0 && before == 0) slots.counts[expert] += all;
    });
    list_tiles(slots);
    visit_slots(slots, n_slots, [&](int slot, int expert, int before, int all) {
      const int end = expert < 0 ? 0 : slots.ends[expert];
      __syncwarp();  // all have read it
      if (expert >= 0) slots.order[end + before] = slot;
      if (expert >= 0 && before == 0) slots.ends[expert] = end + all;
    });
  }
  __syncthreads();
}
