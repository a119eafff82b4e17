// Copies pages of one layer between the CPU's cache and the device's; the host's memory is read and written in place. The
// CPU keeps a block per head and page, with the keys transposed (worker/cpu/kv_layer.h); kv_rows.cuh says how the rows
// of a page lie on the device.
// Variants: -DHEAD_DIM, -DKV_Q8, -DTO_HOST.
#include "kv_rows.cuh"

#ifndef TO_HOST
#define TO_HOST 0
#endif

#if KV_Q8
typedef u8 Code;
#else
typedef u16 Code;
#endif

constexpr int kThreads = 256;
constexpr int kPerWord = 4 / sizeof(Code);
constexpr int kRowWords = HEAD_DIM / kPerWord;
constexpr int kWords = kPageTokens * kRowWords;  // of a page's keys or values of one head
constexpr int kTokenWords = kPageTokens / kPerWord;  // of a dimension of the CPU's keys
constexpr int kHostScales = KV_Q8 ? kScales * kPageTokens : 0;
constexpr int kHalfBytes = kWords * 4 + kHostScales * 2;  // keys of a block, then as much for values

// Where a word of a token's row lies on the device.
INLINE int device_word(int token, int word) {
  if (KV_Q8) return token * kRowWords + word;
  return token * kRowWords + swizzled(word / 4, token) * 4 + word % 4;
}

template <typename T>
INLINE void move(T* host, T* device) {
  if (TO_HOST) *host = *device;
  else *device = *host;
}

union Word {
  u32 bits;
  Code codes[kPerWord];
};

// Keys through shared memory, so that both sides are read and written in whole lines.
INLINE void move_keys(u32* host, u32* device, Code (*tile)[HEAD_DIM + kPerWord]) {
  for (int step = 0; step < 2; step++) {
    const bool at_host = (step == 0) != (TO_HOST != 0);
    for (int i = threadIdx.x; i < kWords; i += kThreads) {
      Word word;
      u32* place = at_host ? host + i : device + device_word(i / kRowWords, i % kRowWords);
      if (step == 0) word.bits = *place;
      for (int k = 0; k < kPerWord; k++) {
        const int token = at_host ? i % kTokenWords * kPerWord + k : i / kRowWords;
        const int dim = at_host ? i / kTokenWords : i % kRowWords * kPerWord + k;
        if (step == 0) tile[token][dim] = word.codes[k];
        else word.codes[k] = tile[token][dim];
      }
      if (step == 1) *place = word.bits;
    }
    __syncthreads();
  }
}

// grid: pages, heads, keys and values
KERNEL __launch_bounds__(kThreads)
    move_pages(u8* host, i64 head_bytes, int n_heads, const int* pages, u32* keys, u32* values, u16* key_scales,
               u16* value_scales) {
  __shared__ Code tile[kPageTokens][HEAD_DIM + kPerWord];
  const int page = pages[blockIdx.x], head = blockIdx.y;
  const bool is_value = blockIdx.z == 1;
  u8* block = host + head * head_bytes + (i64)page * (2 * kHalfBytes) + (is_value ? kHalfBytes : 0);
  const u64 index = (u64)page * n_heads + head;
  u32* codes = (is_value ? values : keys) + index * kWords;
  if (is_value) {
    for (int i = threadIdx.x; i < kWords; i += kThreads)
      move((u32*)block + i, codes + device_word(i / kRowWords, i % kRowWords));
  } else {
    move_keys((u32*)block, codes, tile);
  }
  u16* scales = (is_value ? value_scales : key_scales) + index * kHostScales;
  for (int i = threadIdx.x; i < kHostScales; i += kThreads) {
    const int transposed = i % kPageTokens * kScales + i / kPageTokens;
    move((u16*)(block + kWords * 4) + i, scales + (is_value ? i : transposed));
  }
}
