// How keys and values lie in the cache: rows of HEAD_DIM, per page and kv head 32 of them. f16 rows are kept in an
// order in which they can be copied to shared memory as they are: units of 16 bytes change places by the token's
// number, so that the same unit of eight neighbouring tokens lies in eight different groups of banks. kv_cache.py has
// the same.
#pragma once
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_Q8
#define KV_Q8 0
#endif

constexpr int kPageTokens = 32;
constexpr int kUnits = HEAD_DIM / 8;  // 16-byte units of a row of halves
constexpr int kSwizzle = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : 2;
constexpr int kScales = HEAD_DIM / 32;  // of a q8_0 row
constexpr int kCacheRowBytes = KV_Q8 ? HEAD_DIM : 2 * HEAD_DIM;

// Where unit `unit` of the f16 row of token `token` lies; its own inverse.
INLINE int swizzled(int unit, int token) { return unit ^ (token * kSwizzle / 8 & (kSwizzle - 1)); }
