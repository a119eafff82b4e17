// Where the keys and values of one layer lie: a region per key/value head, in it one block per page of PW_PAGE_TOKENS
// tokens. Pages with ascending ids are one stream in memory, which is how fast decoding wants to read them.
//
// Keys are stored transposed (all tokens of a dimension together), so that scores of many tokens need no horizontal
// sums:
//   f16   key [head_dim][32] f16, value [32][head_dim] f16
//   q8_0  key [head_dim][32] i8, key scale [dims / 32][32] f16, value [32][head_dim] i8, value scale [32][dims / 32]
//   f16
#pragma once
#include <cstdint>

#include "pw_cpu.h"

namespace pw {

constexpr int32_t kQuantBlock = 32;

struct KvLayer {
  int32_t type;
  int32_t n_heads;
  int32_t head_dim;
  int32_t n_scales;   // per token and head; 0 for f16
  int64_t key_bytes;  // codes and scales of one block's keys: values follow
  int64_t block_bytes;
  int64_t head_bytes;  // all pages of one head
  uint8_t* memory;

  uint8_t* block(int32_t page, int32_t head) const { return memory + head * head_bytes + page * block_bytes; }
};

}  // namespace pw
