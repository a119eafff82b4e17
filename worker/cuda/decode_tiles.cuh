// How a warp of decode attention gets its tiles: keys and values of kTile positions, STAGES of them in its shared
// memory or on the way there. q8_0 tiles arrive as they lie in the cache and become halves in a buffer of their own.
#pragma once
#include "decode.cuh"

#ifndef STAGES
#define STAGES 2
#endif

constexpr int kTilesInPage = kPageTokens / kTile;
constexpr int kHalvesBytes = 2 * kTile * HEAD_DIM * 2;  // keys, then values, as the products read them
constexpr int kRowsBytes = kTile * kCacheRowBytes;      // of keys, or of values
constexpr int kScalesBytes = KV_Q8 ? kTile * kScales * 2 : 0;
constexpr int kStageBytes = 2 * (kRowsBytes + kScalesBytes);
constexpr int kTilesBytes = STAGES * kStageBytes + (KV_Q8 ? kHalvesBytes : 0);
constexpr int kWarpBytes = kTilesBytes > kSumsBytes ? kTilesBytes : kSumsBytes;

// Neighbouring bytes, 16 at a time, from global to shared memory by a warp, in the background.
template <int Bytes>
INLINE void copy_bytes(u8* target, const void* source) {
#pragma unroll
  for (int first = 0; first < Bytes; first += 512) {
    const int at = first + threadIdx.x % 32 * 16;
    if (Bytes % 512 == 0 || at < Bytes) copy_async16(target + at, (const u8*)source + at, true);
  }
}

// Begins the copy of the tile whose first row in the cache is `row`: rows of keys, of values, their scales.
INLINE void fetch_tile(u8* stage, const Cache& cache, u64 row) {
  copy_bytes<kRowsBytes>(stage, (const u8*)cache.keys + row * kCacheRowBytes);
  copy_bytes<kRowsBytes>(stage + kRowsBytes, (const u8*)cache.values + row * kCacheRowBytes);
#if KV_Q8
  copy_bytes<kScalesBytes>(stage + 2 * kRowsBytes, cache.key_scales + row * kScales);
  copy_bytes<kScalesBytes>(stage + 2 * kRowsBytes + kScalesBytes, cache.value_scales + row * kScales);
#endif
}

// Overwrites the row of the token's own key and value, which the cache did not have yet.
INLINE void patch_own(u8* stage, int row, const Prepared& prepared) {
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < 2 * kCacheRowBytes / 16; i += 32) {
    const int which = i * 16 / kCacheRowBytes, unit = i % (kCacheRowBytes / 16);
    const int at = KV_Q8 ? unit : swizzled(unit, row);
    u8* target = stage + which * kRowsBytes + row * kCacheRowBytes;
    *(uint4*)(target + 16 * at) = *(const uint4*)(prepared.own[which] + 16 * unit);
  }
#if KV_Q8
  u16* scales = (u16*)(stage + 2 * kRowsBytes);
  const int which = lane / kScales, scale = lane % kScales;
  if (which < 2) scales[(which * kTile + row) * kScales + scale] = prepared.own_scales[which][scale];
#endif
  __syncwarp();
}

#if KV_Q8
// A q8_0 stage as halves.
INLINE void expand_tile(u16* halves, const u8* stage) {
  constexpr int kChunksInRow = HEAD_DIM / 16, kChunks = 2 * kTile * kChunksInRow;
  const u16* scales = (const u16*)(stage + 2 * kRowsBytes);
#pragma unroll 4
  for (int chunk = threadIdx.x % 32; chunk < kChunks; chunk += 32) {
    const int row = chunk / kChunksInRow, part = chunk % kChunksInRow * 16;
    store_codes(halves + row * HEAD_DIM, row, part, *(const uint4*)(stage + 16 * chunk), scales[chunk / 2]);
  }
}
#endif

// The tiles of one warp: number i is tile block.first_tile + warp + i * WARPS.
struct WarpTiles {
  const DecodeBlock& block;
  u8* memory;    // kWarpBytes
  int page_ids;  // lane l: of tile number l, later of the next 32

  INLINE WarpTiles(const DecodeBlock& of_block, u8* shared)
      : block(of_block), memory(shared + threadIdx.x / 32 * kWarpBytes) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) fetch(i, i);
  }
  INLINE int tile(int number) const { return block.first_tile + threadIdx.x / 32 + number * WARPS; }
  INLINE bool has(int number) const { return tile(number) < block.last_tile; }
  INLINE u8* stage(int index) const { return memory + index * kStageBytes; }
  INLINE void load_page_ids(int first_number) {
    const int last = max(block.last_tile - 1, 0);
    page_ids = block.cache.pages[min(tile(first_number + threadIdx.x % 32), last) / kTilesInPage];
  }
  // One group of copies, empty where there is no such tile.
  INLINE void fetch(int number, int to_stage) {
    if (number % 32 == 0) load_page_ids(number);
    if (has(number)) {
      const u64 page_row = block.cache.first_row(__shfl_sync(FULL_WARP, page_ids, number % 32));
      fetch_tile(stage(to_stage), block.cache, page_row + tile(number) % kTilesInPage * kTile);
    }
    copy_async_commit();
  }
  // The oldest tile that is under way is there.
  INLINE void wait() const {
    copy_async_wait<STAGES - 1>();
    __syncwarp();
  }
};
