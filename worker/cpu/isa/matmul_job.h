// What the kernels of all weight types share: finding a packed row group (packing it first when the weight is not
// packed) and walking over the tiles of the activations.
#pragma once
#include "formats.h"
#include "isa/activations.h"
#include "isa/matmul_output.h"
#include "isa/rows.h"
#include "matmul.h"

namespace pw::PW_ISA {

constexpr int kVectorsPerGroup = kRowGroup / kLanes;

inline int64_t align_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The packed bytes of a row group; `scratch` takes them when the weight has to be packed on the fly.
inline const uint8_t* find_packed_group(const Matmul& m, int32_t group, int64_t group_bytes, int64_t row_bytes,
                                        uint8_t* scratch) {
  const pw_weight& weight = *m.weight;
  if (weight.packed != nullptr) return weight.packed + m.expert * weight.packed_expert_bytes + group * group_bytes;
  const int32_t first_row = group * kRowGroup;
  const int32_t rest = weight.rows - first_row;
  const uint8_t* rows = weight.file + m.expert * weight.file_expert_bytes + first_row * row_bytes;
  pack_row_group(weight.type, rows, rest < kRowGroup ? rest : kRowGroup, weight.cols, scratch);
  return scratch;
}

// One tile of T tokens times one row group.
struct TileJob {
  const Matmul* m;
  const uint8_t* group;        // packed rows, or a panel made of them
  const uint8_t* activations;  // of the tile
  int32_t first_token;
  int32_t first_row;
};

using TileKernel = void (*)(const TileJob&);

// kernels[T - 1] is the one for T tokens
inline void run_tiles(const Matmul& m, int32_t group, const uint8_t* packed, const TileKernel* kernels) {
  const Activations& input = *m.input;
  for (int32_t tile = 0; tile < input.n_tiles; tile++) {
    const TileJob job{&m, packed, tile_memory(input, tile), tile * kTileTokens, group * kRowGroup};
    kernels[tile_tokens(input, tile) - 1](job);
  }
}

// With few tokens the core runs ahead of the loads by itself and prefetching only costs; with more the multiplications
// of one group fill its window, and the stream of weights has to be asked for.
template <int T>
constexpr bool kPrefetches = T >= (kLanes == 16 ? 4 : 3);
constexpr int kPrefetchBytes = 4096;

inline void prefetch_ahead(const uint8_t* from, int n_bytes) {
  for (int line = 0; line < n_bytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kPrefetchBytes + line), _MM_HINT_T0);
  }
}

template <int V, int T>
inline void store_tile(const TileJob& job, int first_lane, const Floats (&values)[V][T]) {
  for (int t = 0; t < T; t++) {
    for (int v = 0; v < V; v++) {
      store_product(*job.m, job.first_token + t, job.first_row + first_lane + v * kLanes, values[v][t]);
    }
  }
}

// How many vectors of rows one pass takes. On AVX2 a row group is two vectors: both at once where the registers allow,
// so that decode reads each line of the weights once.
template <int T>
constexpr int kPassVectors = kVectorsPerGroup == 2 && T > 2 ? 1 : kVectorsPerGroup;

}  // namespace pw::PW_ISA
