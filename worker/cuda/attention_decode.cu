// Decode attention for short contexts, on CUDA cores: a block takes HEADS query heads of one kv head and a share of the
// positions; some lanes of a warp share a position, each with its part of the dimensions.
// Variants: -DHEAD_DIM, -DKV_Q8, -DHEADS, -DWARPS.
#include "attention.cuh"

#ifndef HEADS
#define HEADS 2
#endif
#ifndef WARPS
#define WARPS 8
#endif

constexpr int kLanes = HEAD_DIM == 256 ? 16 : 8;  // that share a position
constexpr int kPerLane = HEAD_DIM / kLanes;
constexpr int kUnit = kPerLane % 8 == 0 ? 8 : kPerLane % 4 == 0 ? 4 : 2;  // neighbouring dimensions, one load
constexpr int kUnits = kPerLane / kUnit;
constexpr int kAtOnce = 2;  // positions whose loads are under way together

// first dimension of unit `unit` of a lane: neighbouring lanes read neighbouring units
INLINE int unit_dim(int unit, int lane) { return (unit * kLanes + lane) * kUnit; }

// One lane's part of a key or value as it lies in memory.
struct Part {
#if KV_Q8
  static constexpr int kBytes = kUnit;
  u16 scales[kUnits];
#else
  static constexpr int kBytes = 2 * kUnit;
#endif
  static constexpr int kWords = (kBytes + 3) / 4;
  u32 words[kUnits][kWords];

  INLINE void load(const void* base, const u16* scale_base, u64 row, int lane) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int dim = unit_dim(unit, lane);
      const u8* source = (const u8*)base + (row * HEAD_DIM + dim) * (kBytes / kUnit);
      if (kBytes == 16) {
        const uint4 four = *(const uint4*)source;
        words[unit][0] = four.x, words[unit][1 % kWords] = four.y;
        words[unit][2 % kWords] = four.z, words[unit][3 % kWords] = four.w;
      } else if (kBytes == 8) {
        const uint2 two = *(const uint2*)source;
        words[unit][0] = two.x, words[unit][1 % kWords] = two.y;
      } else {
        words[unit][0] = kBytes == 4 ? *(const u32*)source : *(const u16*)source;
      }
#if KV_Q8
      scales[unit] = scale_base[row * (HEAD_DIM / 32) + dim / 32];
#endif
    }
  }

  INLINE void unpack(float (&values)[kPerLane]) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int unit = i / kUnit, element = i % kUnit;
#if KV_Q8
      const int code = (signed char)(words[unit][element / 4] >> 8 * (element % 4));
      values[i] = (float)code * half_to_float(scales[unit]);
#else
      values[i] = half_to_float((u16)(words[unit][element / 2] >> 16 * (element % 2)));
#endif
    }
  }
};

// The running softmax of one lane group: largest score, mass, weighted sum of values.
struct Running {
  float largest, mass, sums[kPerLane];
};

INLINE void load_query(const float* query, float factor, int lane, float (&out)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) out[i] = query[unit_dim(i / kUnit, lane) + i % kUnit] * factor;
}

INLINE float dot(const float (&a)[kPerLane], const float (&b)[kPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum = fmaf(a[i], b[i], sum);
#pragma unroll
  for (int offset = kLanes / 2; offset; offset >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
  return sum;
}

// Adds `Count` positions, given their scores and values.
template <int Count>
INLINE void absorb(Running& running, const float (&scores)[Count], const Part (&parts)[Count]) {
  float largest = running.largest;
#pragma unroll
  for (int i = 0; i < Count; ++i) largest = fmaxf(largest, scores[i]);
  const float fade = exp2f(running.largest - largest);
  running.largest = largest;
  running.mass *= fade;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) running.sums[i] *= fade;
#pragma unroll
  for (int j = 0; j < Count; ++j) {
    const float weight = scores[j] > kNoScore ? exp2f(scores[j] - largest) : 0.0f;
    float values[kPerLane];
    parts[j].unpack(values);
    running.mass += weight;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) running.sums[i] = fmaf(weight, values[i], running.sums[i]);
  }
}

// Makes the lane groups of a warp one.
INLINE void merge_lanes(Running& running) {
#pragma unroll
  for (int offset = kLanes; offset < 32; offset <<= 1) {
    const float other = __shfl_xor_sync(FULL_WARP, running.largest, offset);
    const float largest = fmaxf(running.largest, other);
    const float fade = exp2f(running.largest - largest);
    running.largest = largest;
    running.mass *= fade;
    running.mass += __shfl_xor_sync(FULL_WARP, running.mass, offset);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float own = running.sums[i] * fade;
      running.sums[i] = own + __shfl_xor_sync(FULL_WARP, own, offset);
    }
  }
}

struct BlockSums {
  float sums[WARPS][HEADS][HEAD_DIM];
  float2 masses[WARPS][HEADS];
};

INLINE void publish(BlockSums& block, const Running& running, int warp, int head, int lane) {
  if (lane >= kLanes) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) block.sums[warp][head][unit_dim(i / kUnit, lane) + i % kUnit] = running.sums[i];
  if (lane == 0) block.masses[warp][head] = make_float2(running.largest, running.mass);
}

INLINE void write_partials(const BlockSums& block, const Partials& partials, int row,
                                               int first_head, int n_here, int split) {
  for (int index = threadIdx.x; index < n_here * HEAD_DIM; index += blockDim.x) {
    const int head = index / HEAD_DIM, dim = index % HEAD_DIM;
    float largest = kNoScore, mass = 0.0f, sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, block.masses[warp][head].x);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float fade = exp2f(block.masses[warp][head].x - largest);
      mass += fade * block.masses[warp][head].y;
      sum += fade * block.sums[warp][head][dim];
    }
    const u64 at = partials.index(row, first_head + head, split);
    partials.sums[at * HEAD_DIM + dim] = sum;
    if (dim == 0) partials.masses[at] = make_float2(largest, mass);
  }
}

// grid: splits, kv heads times blocks of HEADS query heads, rows
KERNEL __launch_bounds__(32 * WARPS)
    attention_decode(const float* query, int n_heads, int n_kv_heads, const void* keys, const void* values,
                     const u16* key_scales, const u16* value_scales, const int* positions,
                     const int* sequence_of_token, const int* page_tables, int max_pages, float scale, float cap,
                     int window, float* workspace, u32* counters, float* out_values, u16* out_halves,
                     signed char* out_codes, float* out_scales, float* out_sums) {
  __shared__ BlockSums block;
  start_after_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.z;
  const int group = n_heads / n_kv_heads, head_blocks = (group + HEADS - 1) / HEADS;
  const int kv_head = blockIdx.y / head_blocks, first_in_group = blockIdx.y % head_blocks * HEADS;
  const int first_head = kv_head * group + first_in_group, n_here = min(HEADS, group - first_in_group);
  const Visible visible(positions[row], window, blockIdx.x, gridDim.x);
  const Cache cache = {keys, values, key_scales, value_scales,
                       page_tables + (u64)sequence_of_token[row] * max_pages, n_kv_heads, kv_head};
  const Scoring scoring(scale, cap);

  float queries[HEADS][kPerLane];
  Running running[HEADS];
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    const int own = first_head + min(head, n_here - 1);
    load_query(query + ((u64)row * n_heads + own) * HEAD_DIM, scoring.query_factor, lane % kLanes, queries[head]);
    running[head].largest = kNoScore;
    running[head].mass = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) running[head].sums[i] = 0.0f;
  }
  constexpr int kStride = WARPS * (32 / kLanes);
  const int end = visible.last_page * kPageTokens;
  for (int first = visible.first_page * kPageTokens; first < end; first += kAtOnce * kStride) {
    Part key_parts[kAtOnce], value_parts[kAtOnce];
    bool seen[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int position = first + i * kStride + warp * (32 / kLanes) + lane / kLanes;
      seen[i] = visible(position) && position < end;
      const u64 at = cache.row(seen[i] ? position : visible.end - 1);
      key_parts[i].load(keys, key_scales, at, lane % kLanes);
      value_parts[i].load(values, value_scales, at, lane % kLanes);
    }
    float scores[HEADS][kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float key[kPerLane];
      key_parts[i].unpack(key);
#pragma unroll
      for (int head = 0; head < HEADS; ++head) {
        const float score = scoring(dot(queries[head], key));
        scores[head][i] = seen[i] ? score : kNoScore;
      }
    }
#pragma unroll
    for (int head = 0; head < HEADS; ++head) absorb(running[head], scores[head], value_parts);
  }
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    merge_lanes(running[head]);
    publish(block, running[head], warp, head, lane);
  }
  __syncthreads();
  const Partials partials(workspace, gridDim.z, n_heads, gridDim.x);
  write_partials(block, partials, row, first_head, n_here, blockIdx.x);
  if (!is_last_block(counters + row * gridDim.y + blockIdx.y, gridDim.x)) return;
  const Outputs out = {out_values, out_halves, out_codes, out_scales, out_sums};
  merge_splits<HEADS>(partials, row, first_head, n_here, out);
}
