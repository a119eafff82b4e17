// Selection in a row of logits by one block: the largest, the k largest in order, the tokens above a cut, and drawing.
// A logit's key is an unsigned integer of the same order; with its id below (inverted) keys are distinct, larger is
// better, and of equal logits the lower id is the better one.
#pragma once
#include "common.cuh"

constexpr int kThreads = 1024;
constexpr int kGreedyChunk = 8192;
constexpr int kMaxTop = 20;
constexpr int kCandidates = 512;  // most that are sorted
constexpr int kRoom = 2048;       // that can be collected before sorting

struct Shared {
  u64 candidates[kRoom];  // packed keys
  double weights[kCandidates];
  double parts[32];
  u64 packed_parts[32];
  u32 maxima[kThreads];
  int count;
  int token;
};

struct Row {
  const float* logits;
  int n;
  float largest;      // NaN when the row holds one
  int first_largest;  // lowest id of it
  u32 own_key;        // of this thread's largest among ids t, t + kThreads, ...
};

INLINE bool is_finite(float x) { return fabsf(x) < INFINITE; }

INLINE u32 key_of_value(float value) {
  if (value != value) return 0xffffffffu;
  const u32 bits = (u32)__float_as_int(value == 0.0f ? 0.0f : value);  // -0 equals 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

INLINE float value_of_key(u32 key) {
  return __int_as_float((int)(key & 0x80000000u ? key & 0x7fffffffu : ~key));
}

INLINE u64 packed_key(float value, int id) { return (u64)key_of_value(value) << 32 | ~(u32)id; }
INLINE u64 max_of(u64 a, u64 b) { return a > b ? a : b; }
INLINE int candidate_id(const Shared& shared, int i) { return (int)~(u32)shared.candidates[i]; }

INLINE u64 warp_max_packed(u64 value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) value = max_of(value, __shfl_xor_sync(FULL_WARP, value, offset));
  return value;
}

// Sum over the block, the same in every thread: always added in the same order.
INLINE double sum_of_block(Shared& shared, double value) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.parts[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int i = 0; i < kThreads / 32; ++i) sum += shared.parts[i];
  return sum;
}

INLINE Row look_at(Shared& shared, const float* logits, int n) {
  u64 best = 0;
#pragma unroll 8
  for (int id = threadIdx.x; id < n; id += kThreads) best = max_of(best, packed_key(logits[id], id));
  Row row = {logits, n, 0.0f, 0, (u32)(best >> 32)};
  best = warp_max_packed(best);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.packed_parts[threadIdx.x / 32] = best;
  __syncthreads();
  best = warp_max_packed(shared.packed_parts[threadIdx.x % 32]);
  row.largest = value_of_key((u32)(best >> 32));
  row.first_largest = (int)~(u32)best;
  return row;
}

// Finite also for a temperature so small that its inverse is not: the largest logit's weight stays 1.
INLINE float inverse_of(float temperature) { return fminf(1.0f / temperature, 3e38f); }

INLINE float weight_of(const Row& row, float logit, float inverse_temperature) {
  return expf((logit - row.largest) * inverse_temperature);
}

// Sum of exp((logit - largest) / temperature) over the tokens from `lowest` up.
INLINE double row_mass(Shared& shared, const Row& row, float temperature, u64 lowest) {
  const float inverse = inverse_of(temperature);
  float sum = 0.0f;
#pragma unroll 8
  for (int id = threadIdx.x; id < row.n; id += kThreads) {
    const float logit = row.logits[id];
    if (packed_key(logit, id) >= lowest) sum += weight_of(row, logit, inverse);
  }
  return sum_of_block(shared, sum);
}

template <class T>
INLINE void sort_descending(T* values, int n) {  // n: a power of two; bitonic
  for (int size = 2; size <= n; size <<= 1) {
    for (int stride = size / 2; stride; stride >>= 1) {
      __syncthreads();
      for (int i = threadIdx.x; i < n / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const T a = values[low], b = values[high];
        if ((a < b) == ((low & size) == 0)) values[low] = b, values[high] = a;
      }
    }
  }
  __syncthreads();
}

// Collects the tokens from `lowest` up, sorts them and keeps the k best. Returns how many, or -1 when there is no room.
INLINE int take_at_least(Shared& shared, const Row& row, u64 lowest, int k) {
  __syncthreads();
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  for (int id = threadIdx.x; id < row.n; id += kThreads) {
    const u64 packed = packed_key(row.logits[id], id);
    if (packed < lowest) continue;
    const int at = atomicAdd(&shared.count, 1);
    if (at < kRoom) shared.candidates[at] = packed;
  }
  __syncthreads();
  const int count = shared.count;
  if (count > kRoom) return -1;
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) shared.candidates[i] = 0;
  sort_descending(shared.candidates, size);
  return min(k, count);
}

// The k (at most kCandidates) largest, sorted. The k-th largest of the threads' maxima can not exceed the k-th largest
// logit, and few more logits reach it. -1 when too many do.
INLINE int take_largest(Shared& shared, const Row& row, int k) {
  u64 lowest = 0;
  if (row.n > kRoom) {
    __syncthreads();
    shared.maxima[threadIdx.x] = row.own_key;
    sort_descending(shared.maxima, kThreads);
    lowest = (u64)shared.maxima[k - 1] << 32;
  }
  return take_at_least(shared, row, lowest, k);
}

INLINE void weigh(Shared& shared, int n, float largest, float temperature) {
  if (threadIdx.x < n) {
    const double distance = (double)value_of_key((u32)(shared.candidates[threadIdx.x] >> 32)) - largest;
    shared.weights[threadIdx.x] = exp(distance / temperature);
  }
  __syncthreads();
}

// The k-th largest packed key, by bisection.
INLINE u64 lowest_of_count(Shared& shared, const Row& row, int k) {
  u64 low = 0, high = ~0ull;  // at least k reach low; fewer than k reach high
  while (high - low > 1) {
    const u64 middle = low + (high - low) / 2;
    int count = 0;
    for (int id = threadIdx.x; id < row.n; id += kThreads) count += packed_key(row.logits[id], id) >= middle;
    if (sum_of_block(shared, count) >= k) low = middle;
    else high = middle;
  }
  return low;
}

// The largest packed key, not below `floor`, from which on the tokens have the mass `wanted`.
INLINE u64 lowest_of_mass(Shared& shared, const Row& row, float temperature, u64 floor,
                                              double wanted) {
  u64 low = floor, high = packed_key(row.largest, row.first_largest) + 1;
  while (high - low > 1) {
    const u64 middle = low + (high - low) / 2;
    if (row_mass(shared, row, temperature, middle) >= wanted) low = middle;
    else high = middle;
  }
  return low;
}

// Draws among the tokens from `lowest` up, in the order of their ids. Each warp sums a segment; the warp's segment
// that holds the drawn point is then walked over in steps of 32.
INLINE int draw_from_row(Shared& shared, const Row& row, float temperature, u64 lowest, double u) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = (row.n + 31) / 32;
  const float inverse = inverse_of(temperature);
  const auto weight = [&](int id, int end) {
    if (id >= end) return 0.0f;
    const float logit = row.logits[id];
    return packed_key(logit, id) >= lowest ? weight_of(row, logit, inverse) : 0.0f;
  };
  const int first = min(row.n, warp * length), end = min(row.n, first + length);
  float own = 0.0f;
  for (int id = first + lane; id < end; id += 32) own += weight(id, end);
  double segment = own;
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) segment += __shfl_xor_sync(FULL_WARP, segment, offset);
  __syncthreads();
  if (lane == 0) shared.parts[warp] = segment;
  if (threadIdx.x == 0) shared.token = row.first_largest;
  __syncthreads();
  double left = 0.0;
  for (int i = 0; i < 32; ++i) left += shared.parts[i];
  left *= u;
  int chosen = 0;
  while (chosen < 31 && left >= shared.parts[chosen]) left -= shared.parts[chosen++];
  if (warp == chosen) {
    int last_possible = -1;
    for (int base = first; base < end; base += 32) {
      const float w = weight(base + lane, end);
      double before = w;  // inclusive sum over the lanes
#pragma unroll
      for (int offset = 1; offset < 32; offset <<= 1) {
        const double other = __shfl_up_sync(FULL_WARP, before, offset);
        if (lane >= offset) before += other;
      }
      const u32 possible = __ballot_sync(FULL_WARP, w > 0.0f), beyond = __ballot_sync(FULL_WARP, w > 0.0f && before > left);
      if (beyond) {
        last_possible = base + __ffs((int)beyond) - 1;
        break;
      }
      if (possible) last_possible = base + 31 - __clz((int)possible);
      left -= __shfl_sync(FULL_WARP, before, 31);
    }
    if (lane == 0 && last_possible >= 0) shared.token = last_possible;
  }
  __syncthreads();
  return shared.token;
}
