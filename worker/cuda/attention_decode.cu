// Decode attention for short contexts, on CUDA cores: a block takes HEADS query heads of one kv head and a share of the
// positions; some lanes of a warp share a position, each with its part of the dimensions.
// Variants: -DHEAD_DIM, -DKV_Q8, -DHEADS, -DWARPS, -DFUSED.
#include "decode.cuh"

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
        const uint4 four = __ldcg((const uint4*)source);
        words[unit][0] = four.x, words[unit][1 % kWords] = four.y;
        words[unit][2 % kWords] = four.z, words[unit][3 % kWords] = four.w;
      } else if (kBytes == 8) {
        const uint2 two = __ldcg((const uint2*)source);
        words[unit][0] = two.x, words[unit][1 % kWords] = two.y;
      } else {
        words[unit][0] = kBytes == 4 ? __ldcg((const u32*)source) : __ldcg((const u16*)source);
      }
#if KV_Q8
      scales[unit] = __ldcg(scale_base + row * (HEAD_DIM / 32) + dim / 32);
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

  INLINE void clear() {
    largest = kNoScore;
    mass = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[i] = 0.0f;
  }
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

// Keys and values of the positions that a lane group looks at together.
struct Batch {
  Part keys[kAtOnce], values[kAtOnce];
  int positions[kAtOnce];
  bool seen[kAtOnce];

  INLINE void place(int first, const Visible& visible) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      positions[i] = first + (i * WARPS + threadIdx.x / 32) * (32 / kLanes) + threadIdx.x % 32 / kLanes;
      seen[i] = visible(positions[i]) && positions[i] < visible.last_page * kPageTokens;
      if (!seen[i]) positions[i] = visible.end - 1;
    }
  }
  // those of the pages first_page..last_page
  INLINE void load(const Cache& cache, int first_page, int last_page) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int page = positions[i] / kPageTokens;
      if (page < first_page || page > last_page) continue;
      const u64 row = cache.row(positions[i]);
      keys[i].load(cache.keys, cache.key_scales, row, threadIdx.x % kLanes);
      values[i].load(cache.values, cache.value_scales, row, threadIdx.x % kLanes);
    }
  }
};

INLINE void absorb_batch(Running (&running)[HEADS], const float (&queries)[HEADS][kPerLane], const Batch& batch,
                         const Scoring& scoring) {
  float scores[HEADS][kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    float key[kPerLane];
    batch.keys[i].unpack(key);
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      const float score = scoring(dot(queries[head], key));
      scores[head][i] = batch.seen[i] ? score : kNoScore;
    }
  }
#pragma unroll
  for (int head = 0; head < HEADS; ++head) absorb(running[head], scores[head], batch.values);
}

INLINE void publish(const WarpSums<HEAD_DIM>& warps, const Running& running, int head) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane >= kLanes) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) warps.of(warp, head)[unit_dim(i / kUnit, lane) + i % kUnit] = running.sums[i];
  if (lane == 0) warps.mass(warp, head) = make_float2(running.largest, running.mass);
}

// grid: splits, kv heads times blocks of HEADS query heads, rows
KERNEL __launch_bounds__(32 * WARPS, 2) attention_decode(const __grid_constant__ DecodeCall call) {
  __shared__ Queries shared_queries;
  __shared__ float sums[WARPS * HEADS * HEAD_DIM];
  __shared__ float2 masses[WARPS * HEADS];
  let_next_start();
  const DecodeBlock block(call);
  const int first = block.visible.first_page * kPageTokens, end = block.visible.last_page * kPageTokens;
  Batch batch;
  batch.place(first, block.visible);
  if (first < end) batch.load(block.cache, 0, block.own_page() - 1);
  prepare(call, block, shared_queries);
  if (first < end) batch.load(block.cache, block.own_page(), block.own_page());

  const Scoring scoring(call.scale, call.cap);
  float queries[HEADS][kPerLane];
  Running running[HEADS];
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    load_query(shared_queries.head(min(head, block.n_here - 1)), scoring.query_factor, threadIdx.x % kLanes,
               queries[head]);
    running[head].clear();
  }
  constexpr int kStride = kAtOnce * WARPS * (32 / kLanes);
  for (int at = first; at < end; at += kStride) {
    if (at > first) {
      batch.place(at, block.visible);
      batch.load(block.cache, 0, block.own_page());
    }
    absorb_batch(running, queries, batch, scoring);
  }
  const WarpSums<HEAD_DIM> warps = {sums, masses};
#pragma unroll
  for (int head = 0; head < HEADS; ++head) {
    merge_lanes(running[head]);
    publish(warps, running[head], head);
  }
  __syncthreads();
  finish(call, block, warps);
}
