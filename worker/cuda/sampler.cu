// Choosing tokens: `greedy` for rows that only want the largest logit, `sample` for everything, one block per row.
// The definitions are those of worker/cpu/sampler.cpp: penalties, bias, then top-k, top-p and min-p on weights
// exp((logit - largest) / temperature), and a random number that depends on (seed, draw) alone.
#include "selection.cuh"

// A row's part of the workspace; all but `changed` is 0 between launches.
struct RowScratch {
  u64* best;
  u32* counter;
  float* changed;  // [n_vocab]
  int* counts;     // [n_vocab]

  INLINE RowScratch(u8* workspace, int row, int n_vocab) {
    u8* own = workspace + (u64)row * (16 + 8 * (u64)n_vocab);
    best = (u64*)own;
    counter = (u32*)(own + 8);
    changed = (float*)(own + 16);
    counts = (int*)changed + n_vocab;
  }
};

// ---- greedy ----

// A row's best so far: the packed (key, not id) makes ties go to the lower id; NaN keys are above all others.
KERNEL __launch_bounds__(1024)
    greedy(const float* logits, int n_vocab, int* tokens, u8* workspace) {
  __shared__ u64 best[32];
  start_after_previous();
  const RowScratch scratch(workspace, blockIdx.y, n_vocab);
  const float* row = logits + (u64)blockIdx.y * n_vocab;
  u64 own = 0;
  const int first = blockIdx.x * kGreedyChunk, end = min(first + kGreedyChunk, n_vocab);
#pragma unroll 8
  for (int id = first + threadIdx.x; id < end; id += 1024) own = max_of(own, packed_key(row[id], id));
  own = warp_max_packed(own);
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x < 32) {
    own = warp_max_packed(best[threadIdx.x]);
    if (threadIdx.x == 0) atomicMax(scratch.best, own);
  }
  if (!is_last_block(scratch.counter, gridDim.x) || threadIdx.x) return;
  const u64 winner = atomicExch(scratch.best, 0ull);
  const float value = value_of_key((u32)(winner >> 32));
  tokens[blockIdx.y] = is_finite(value) ? (int)~(u32)winner : -1;
}

// ---- the full sampler ----

struct Sampler {  // SAMPLER in sampler.py
  u64 seed, draw;
  float temperature;
  int top_k;
  float top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
  int first_history, n_history, first_bias, n_bias, n_top, target, reserved;
};

struct Sampled {  // SAMPLED in sampler.py
  int token, status;
  float logprob;
  int n_top;
  int top_ids[kMaxTop];
  float top_logprobs[kMaxTop];
};

enum { kOk = 0, kHasNan = 1, kNoLargest = 2, kNothingLeft = 3 };

INLINE u64 mix(u64 x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

INLINE double uniform(u64 seed, u64 draw) {
  const u64 stream = mix(seed + 0x9e3779b97f4a7c15ull);
  return (double)(mix(stream ^ mix(draw + 0xd1b54a32d192ed03ull)) >> 11) * 0x1p-53;
}

INLINE bool has_penalties(const Sampler& s) {
  return s.n_history > 0 && (s.repeat_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f);
}

// A changed copy of the row in `changed`; `counts` is all 0 before and after. A history of -1 is `drawn`.
INLINE void change_row(const float* logits, int n_vocab, const Sampler& s, const int* history, int drawn,
                                           const int* bias_ids, const float* bias_values, float* changed, int* counts) {
  for (int id = threadIdx.x; id < n_vocab; id += kThreads) changed[id] = logits[id];
  history += s.first_history;
  if (has_penalties(s)) {
    const auto id_at = [&](int i) { return history[i] < 0 ? drawn : history[i]; };
    for (int i = threadIdx.x; i < s.n_history; i += kThreads) atomicAdd(counts + id_at(i), 1);
    __syncthreads();
    for (int i = threadIdx.x; i < s.n_history; i += kThreads) {
      const int id = id_at(i), count = atomicExch(counts + id, 0);
      if (count == 0) continue;
      const float logit = logits[id];
      const float pushed = logit > 0.0f ? logit / s.repeat_penalty : logit * s.repeat_penalty;
      changed[id] = pushed - (float)count * s.frequency_penalty - s.presence_penalty;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < s.n_bias; i += kThreads)
    atomicAdd(changed + bias_ids[s.first_bias + i], bias_values[s.first_bias + i]);
  __syncthreads();
}

// How many of the sorted candidates top-p keeps of `wanted`; 0 when all do not reach it. One thread's work.
INLINE int cut_top_p(const Shared& shared, int n, double wanted) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i)
    if ((sum += shared.weights[i]) >= wanted) return i + 1;
  return 0;
}

INLINE int draw_sorted(const Shared& shared, int kept, double min_p, double u) {
  if (min_p > 0.0) {
    int n = 1;
    while (n < kept && shared.weights[n] >= min_p) ++n;
    kept = n;
  }
  double sum = 0.0;
  for (int i = 0; i < kept; ++i) sum += shared.weights[i];
  double left = u * sum;
  for (int i = 0; i < kept; ++i)
    if ((left -= shared.weights[i]) < 0.0) return candidate_id(shared, i);
  return candidate_id(shared, kept - 1);
}

// Draws from the sorted candidates if they are enough for top-k and top-p; -1 where they are not.
INLINE int draw_from_candidates(Shared& shared, const Row& row, const Sampler& s, double u) {
  const bool by_rank = s.top_k > 0 && s.top_k < row.n;
  if (by_rank && s.top_k > kCandidates) return -1;
  const double mass = by_rank ? 0.0 : row_mass(shared, row, s.temperature, 0);
  const int n = take_largest(shared, row, by_rank ? s.top_k : min(kCandidates, row.n));
  if (n < 0) return -1;
  weigh(shared, n, row.largest, s.temperature);
  if (threadIdx.x == 0) {
    int kept = n;
    if (by_rank && s.top_p < 1.0f) {
      double sum = 0.0;
      for (int i = 0; i < n; ++i) sum += shared.weights[i];
      kept = max(1, cut_top_p(shared, n, sum * s.top_p));
    } else if (!by_rank) {
      kept = cut_top_p(shared, n, mass * s.top_p);
      if (kept == 0 && n == row.n) kept = n;
    }
    shared.token = kept == 0 ? -1 : draw_sorted(shared, kept, s.min_p, u);
  }
  __syncthreads();
  return shared.token;
}

// The filters as a lowest (key, id), however many tokens are kept: found by bisection. The slow way, for wide choices.
INLINE u64 lowest_kept(Shared& shared, const Row& row, const Sampler& s) {
  u64 lowest = 0;
  if (s.top_k > 0 && s.top_k < row.n) lowest = lowest_of_amount(shared, row, 1.0f, false, 0, s.top_k);
  if (s.top_p < 1.0f) {
    const double mass = row_mass(shared, row, s.temperature, lowest);
    lowest = lowest_of_amount(shared, row, s.temperature, true, lowest, mass * s.top_p);
  }
  return lowest;
}

INLINE int draw_token(Shared& shared, const Row& row, const Sampler& s) {
  const double u = uniform(s.seed, s.draw);
  u64 lowest = 0;
  if ((s.top_k > 0 && s.top_k < row.n) || s.top_p < 1.0f) {
    const int token = draw_from_candidates(shared, row, s, u);
    if (token >= 0) return token;
    lowest = lowest_kept(shared, row, s);
  }
  if (s.min_p > 0.0f) {
    const float threshold = row.largest + s.temperature * logf(s.min_p);
    lowest = max_of(lowest, (u64)key_of_value(threshold) << 32);
  }
  return draw_from_row(shared, row, s.temperature, lowest, u);
}

INLINE void report(Shared& shared, const Row& raw, const Sampler& s, Sampled& out) {
  const double log_sum = raw.largest + log(row_mass(shared, raw, 1.0f, 0));
  if (threadIdx.x == 0) out.logprob = (float)(raw.logits[out.token] - log_sum);
  if (s.n_top <= 0) return;
  const int wanted = min(min(s.n_top, kMaxTop), raw.n);
  int n = take_largest(shared, raw, wanted);
  if (n < 0) {  // thousands of equal logits
    const u64 lowest = lowest_of_amount(shared, raw, 1.0f, false, 0, wanted);
    n = take_at_least(shared, raw, lowest, wanted);
  }
  if (threadIdx.x == 0) out.n_top = n;
  if (threadIdx.x < n) {
    const int id = candidate_id(shared, threadIdx.x);
    out.top_ids[threadIdx.x] = id;
    out.top_logprobs[threadIdx.x] = (float)(raw.logits[id] - log_sum);
  }
}

INLINE void finish(Sampled& out, int* tokens, int token, int status) {
  if (threadIdx.x == 0) {
    out.token = token;
    out.status = status;
    out.logprob = __int_as_float(0x7fc00000);
    out.n_top = 0;
    if (tokens) tokens[blockIdx.x] = token;
  }
  __syncthreads();
}

// grid: rows
KERNEL __launch_bounds__(kThreads, 1)
    sample(const float* logits, int n_vocab, const Sampler* samplers, const int* history, const int* bias_ids,
           const float* bias_values, Sampled* sampled, int* tokens, u8* workspace) {
  __shared__ Shared shared;
  start_after_previous();
  const Sampler s = samplers[blockIdx.x];
  Sampled& out = sampled[blockIdx.x];
  const Row raw = look_at(shared, logits + (u64)blockIdx.x * n_vocab, n_vocab);
  if (!is_finite(raw.largest)) return finish(out, tokens, 0, raw.largest != raw.largest ? kHasNan : kNoLargest);
  Row row = raw;
  if (s.target < 0 && (has_penalties(s) || s.n_bias > 0)) {
    const RowScratch scratch(workspace, blockIdx.x, n_vocab);
    const int drawn = tokens ? max(tokens[blockIdx.x], 0) : 0;  // by the step before
    change_row(raw.logits, n_vocab, s, history, drawn, bias_ids, bias_values, scratch.changed, scratch.counts);
    row = look_at(shared, scratch.changed, n_vocab);
    if (!is_finite(row.largest)) return finish(out, tokens, 0, kNothingLeft);
  }
  const int token = s.target >= 0 ? s.target : s.temperature > 0.0f ? draw_token(shared, row, s) : row.first_largest;
  __syncthreads();
  finish(out, tokens, token, kOk);
  if (s.n_top >= 0) report(shared, raw, s, out);
}
