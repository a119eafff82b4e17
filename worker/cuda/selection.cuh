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
constexpr int kBins = 128;

struct Shared {
  u64 candidates[kRoom];  // packed keys
  double weights[kCandidates];
  double parts[32];
  u64 packed_parts[32];
  u32 maxima[kThreads];
  u32 bins[kBins];
  int count;
  int token;
};

struct Row {
  const float* logits;
  int n;
  float largest;      // NaN when the row holds one
  int first_largest;  // lowest id of it
  u32 own_key;        // of this thread's largest
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

// visit(logit, id) for this thread's share of a row, with many loads under way, since one block has to read all of it.
template <class Visit>
INLINE void for_each_logit(const float* logits, int n, const Visit& visit) {
  if (n % 4 == 0 && (u64)logits % 16 == 0) {
#pragma unroll 4
    for (int id = 4 * threadIdx.x; id < n; id += 4 * kThreads) {
      const float4 four = *(const float4*)(logits + id);
      visit(four.x, id);
      visit(four.y, id + 1);
      visit(four.z, id + 2);
      visit(four.w, id + 3);
    }
    return;
  }
#pragma unroll 1
  for (int id = threadIdx.x; id < n; id += kThreads) visit(logits[id], id);
}

INLINE Row look_at(Shared& shared, const float* logits, int n) {
  u64 best = 0;
  for_each_logit(logits, n, [&](float logit, int id) { best = max_of(best, packed_key(logit, id)); });
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

// Collects and sorts the tokens with first <= packed key <= last. Returns how many, or -1 when there is no room.
INLINE int take_between(Shared& shared, const Row& row, u64 first, u64 last) {
  __syncthreads();
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  for_each_logit(row.logits, row.n, [&](float logit, int id) {
    const u64 packed = packed_key(logit, id);
    if (packed < first || packed > last) return;
    const int at = atomicAdd(&shared.count, 1);
    if (at < kRoom) shared.candidates[at] = packed;
  });
  __syncthreads();
  const int count = shared.count;
  if (count > kRoom) return -1;
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) shared.candidates[i] = 0;
  sort_descending(shared.candidates, size);
  return count;
}

// The k best of the tokens from `lowest` up, sorted. Returns how many, or -1 when there is no room for all of them.
INLINE int take_at_least(Shared& shared, const Row& row, u64 lowest, int k) {
  return min(k, take_between(shared, row, lowest, ~0ull));
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

// ---- wide choices: a lowest packed key instead of a sorted list ----

// What the tokens from `lowest` up amount to: their number, or their mass.
INLINE double amount_from(Shared& shared, const Row& row, float temperature, bool by_mass, u64 lowest) {
  if (by_mass) return row_mass(shared, row, temperature, lowest);
  int count = 0;
#pragma unroll 4
  for (int id = threadIdx.x; id < row.n; id += kThreads) count += packed_key(row.logits[id], id) >= lowest;
  return sum_of_block(shared, count);
}

// Distances from the largest logit, cut into kBins bins of equal width; the last one also takes what is farther.
struct Scale {
  float near, far;

  INLINE int bin(float distance) const {
    const float at = (distance - near) * ((float)kBins / (far - near));
    return max(0, min((int)fminf(at, (float)kBins), kBins - 1));
  }
  INLINE float edge(int bin) const { return near + (far - near) * ((float)bin / (float)kBins); }
};

constexpr float kUnit = 8192.0f;  // weights in a bin are kept in such parts of the weight at its near edge

INLINE void fill_bins(Shared& shared, const Row& row, const Scale& scale, float inverse, bool by_mass, bool with_rest) {
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
  __syncthreads();
  for (int id = threadIdx.x; id < row.n; id += kThreads) {
    const float distance = row.largest - row.logits[id];
    if (distance < scale.near || (distance >= scale.far && !with_rest)) continue;
    const int bin = scale.bin(distance);
    const float part = by_mass ? expf(fminf((scale.edge(bin) - distance) * inverse, 0.0f)) * kUnit : 1.0f;
    atomicAdd(shared.bins + bin, (u32)(part + 0.5f));
  }
  __syncthreads();
}

// A range of packed keys, first <= key <= last, that should hold the one from which on the tokens amount to `wanted`.
struct Bracket {
  u64 first, last;
};

INLINE Bracket guess_bracket(Shared& shared, const Row& row, float temperature, bool by_mass, double wanted) {
  const float inverse = inverse_of(temperature);
  Scale scale = {0.0f, by_mass ? 24.0f * temperature : 64.0f};
  double above = 0.0;  // what lies nearer than the scale
  for (int round = 0; round < 2; ++round) {
    fill_bins(shared, row, scale, inverse, by_mass, round == 0);
    if (threadIdx.x == 0) {
      int bin = 0;
      for (; bin < kBins - 1; ++bin) {
        const double unit = by_mass ? exp(-(double)scale.edge(bin) * inverse) / kUnit : 1.0;
        const double next = above + shared.bins[bin] * unit;
        if (next >= wanted) break;
        above = next;
      }
      shared.count = bin;
      shared.parts[0] = above;
    }
    __syncthreads();
    above = shared.parts[0];
    const int bin = shared.count;
    if (round == 0) scale = {scale.edge(bin), scale.edge(bin + 1)};
    else scale = {scale.edge(bin - 1), scale.edge(bin + 2)};  // sums here are about right: one bin more on either side
  }
  const u64 top = packed_key(row.largest, row.first_largest);
  if (!(scale.near > 0.0f)) return {(u64)key_of_value(row.largest - scale.far) << 32, top};
  return {(u64)key_of_value(row.largest - scale.far) << 32, (u64)key_of_value(row.largest - scale.near) << 32 | 0xffffffffu};
}

// The answer among the tokens of a bracket, sorted; 0 when it is not there or they are too many.
INLINE u64 search_bracket(Shared& shared, const Row& row, float temperature, bool by_mass, double wanted,
                          const Bracket& bracket) {
  const double above = amount_from(shared, row, temperature, by_mass, bracket.last + 1);
  const int n = take_between(shared, row, bracket.first, bracket.last);
  if (n <= 0) return 0;
  if (threadIdx.x == 0) {
    double sum = above;
    int i = 0;
    for (; i < n && sum < wanted; ++i) {
      const float logit = value_of_key((u32)(shared.candidates[i] >> 32));
      sum += by_mass ? weight_of(row, logit, inverse_of(temperature)) : 1.0f;
    }
    shared.packed_parts[0] = above < wanted && sum >= wanted ? shared.candidates[i - 1] : 0;
  }
  __syncthreads();
  return shared.packed_parts[0];
}

// The largest packed key from which on the tokens that are at least `floor` amount to `wanted`: a number of tokens, or a
// mass. Two rounds of bins and a short sorted list as a rule; where thousands of logits are equal, bisection.
INLINE u64 lowest_of_amount(Shared& shared, const Row& row, float temperature, bool by_mass, u64 floor, double wanted) {
  const Bracket bracket = guess_bracket(shared, row, temperature, by_mass, wanted);
  const u64 found = search_bracket(shared, row, temperature, by_mass, wanted, bracket);
  if (found) return max_of(found, floor);
  u64 low = floor, high = packed_key(row.largest, row.first_largest) + 1;
  while (high - low > 1) {
    const u64 middle = low + (high - low) / 2;
    if (amount_from(shared, row, temperature, by_mass, middle) >= wanted) low = middle;
    else high = middle;
  }
  return low;
}

// Where in a row a drawn point lies: a range of ids, and how much of its mass is in front of the point.
struct Place {
  int first, end;
  double left;
};

// The part of `place`, of 32 parts of equal length, that the point lies in: one warp sums one part. `left` < 0 in the
// first call stands for -u: the point is then u times the mass of all.
template <class Weight>
INLINE Place narrow(Shared& shared, const Place& place, const Weight& weight) {
  const int warp = threadIdx.x / 32, length = (place.end - place.first + 31) / 32;
  const int first = min(place.end, place.first + warp * length), end = min(place.end, first + length);
  float own = 0.0f;
#pragma unroll 8
  for (int id = first + threadIdx.x % 32; id < end; id += 32) own += weight(id);
  double part = own;
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) part += __shfl_xor_sync(FULL_WARP, part, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.parts[warp] = part;
  __syncthreads();
  double left = place.left;
  if (left < 0.0) {
    double sum = 0.0;
    for (int i = 0; i < 32; ++i) sum += shared.parts[i];
    left = -left * sum;
  }
  int chosen = 0;
  while (chosen < 31 && left >= shared.parts[chosen]) left -= shared.parts[chosen++];
  while (chosen > 0 && !(shared.parts[chosen] > 0.0)) --chosen;  // a rounding put the point behind the last possible one
  const int begin = min(place.end, place.first + chosen * length);
  return {begin, min(place.end, begin + length), left};
}

// Draws among the tokens from `lowest` up, in the order of their ids.
INLINE int draw_from_row(Shared& shared, const Row& row, float temperature, u64 lowest, double u) {
  const float inverse = inverse_of(temperature);
  const auto weight = [&](int id) {
    const float logit = row.logits[id];
    return packed_key(logit, id) >= lowest ? weight_of(row, logit, inverse) : 0.0f;
  };
  Place place = narrow(shared, {0, row.n, u > 0.0 ? -u : 0.0}, weight);
  place = narrow(shared, place, weight);
  place = narrow(shared, place, weight);
  if (threadIdx.x == 0) {
    int token = -1;
    for (int id = place.first; id < place.end; ++id) {
      const float w = weight(id);
      if (w > 0.0f) token = id;
      if ((place.left -= w) < 0.0) break;
    }
    shared.token = token >= 0 ? token : row.first_largest;
  }
  __syncthreads();
  return shared.token;
}
