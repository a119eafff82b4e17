// The sampler: candidate selection by thresholds instead of a full sort, so that the cost hardly depends on the
// vocabulary.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace pw {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kFewCandidates = 64;    // top-p sorts so many first,
constexpr int32_t kMoreCandidates = 512;  // then so many, then looks for the logit it cuts at without sorting all
constexpr int32_t kMostSorted = 4096;     // at the end of that search
constexpr float kNegligible = 60.0f;      // e^-60 of the largest weight is less than a rounding of the sum

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64: every input bit reaches every output bit
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Uniform in [0, 1), a pure function of (seed, draw).
double uniform(uint64_t seed, uint64_t draw) {
  const uint64_t stream = mix(seed + 0x9e3779b97f4a7c15u);
  const uint64_t bits = mix(stream ^ mix(draw + 0xd1b54a32d192ed03u));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

int32_t blocks(int32_t n, int32_t size) { return (n + size - 1) / size; }

// A row of logits under selection. Candidates come sorted: larger logit first, lower id first where equal.
class Row {
 public:
  Row(const ElementKernels& element, const float* logits, int32_t n, float largest, const SamplerScratch& scratch)
      : element_(element), logits_(logits), n_(n), largest_(largest), scratch_(scratch) {}

  const float* logits() const { return logits_; }
  float largest() const { return largest_; }
  float candidate_logit(int32_t i) const { return logits_[scratch_.candidates[i]]; }

  // The logit below which min-p keeps nothing.
  float min_p_floor(const pw_sampler& sampler) const {
    if (sampler.min_p <= 0.0f) return -kInfinity;
    return largest_ + sampler.temperature * std::log(sampler.min_p);
  }

  // Sum of exp((logit - largest) / temperature) over all logits of at least `floor`.
  double mass(float temperature, float floor = -kInfinity) const {
    element_.exp_sums(logits_, n_, largest_, 1.0f / temperature, floor, scratch_.chunk_sums);
    double sum = 0.0;
    for (int32_t chunk = 0; chunk < blocks(n_, kSumChunk); ++chunk) sum += scratch_.chunk_sums[chunk];
    return sum;
  }

  // The k largest, sorted; all where k is more. The k-th largest block maximum can not exceed the k-th largest logit.
  int32_t take_largest(int32_t k) const {
    float threshold = -kInfinity;
    const int32_t n_blocks = blocks(n_, kMaxBlock);
    if (k < n_blocks) {
      element_.block_max(logits_, n_, scratch_.block_maxima);
      float* kth = scratch_.block_maxima + k - 1;
      std::nth_element(scratch_.block_maxima, kth, scratch_.block_maxima + n_blocks, std::greater<float>());
      threshold = *kth;
    }
    const int32_t found = element_.collect_between(logits_, n_, threshold, kInfinity, scratch_.candidates);
    const int32_t kept = std::min(k, found);
    const auto before = [this](int32_t a, int32_t b) { return is_before(a, b); };
    if (kept < found)
      std::nth_element(scratch_.candidates, scratch_.candidates + kept - 1, scratch_.candidates + found, before);
    std::sort(scratch_.candidates, scratch_.candidates + kept, before);
    return kept;
  }

  // Those in [low, high), sorted.
  int32_t take_between(float low, float high) const {
    const int32_t found = element_.collect_between(logits_, n_, low, high, scratch_.candidates);
    std::sort(scratch_.candidates, scratch_.candidates + found,
              [this](int32_t a, int32_t b) { return is_before(a, b); });
    return found;
  }

  int32_t count_between(float low, float high) const { return element_.count_between(logits_, n_, low, high); }

  // Weights of the first n candidates into scratch; returns their sum.
  double weigh(int32_t n, float temperature) const {
    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
      const double distance = static_cast<double>(logits_[scratch_.candidates[i]]) - largest_;
      sum += scratch_.weights[i] = std::exp(distance / temperature);
    }
    return sum;
  }

  int32_t draw_candidate(int32_t n, double sum, double u) const {
    double left = u * sum;
    for (int32_t i = 0; i < n; ++i)
      if ((left -= scratch_.weights[i]) < 0.0) return scratch_.candidates[i];
    return scratch_.candidates[n - 1];
  }

  // Draws from all logits of at least `floor`.
  int32_t draw_at_least(float floor, float temperature, double u) const {
    double left = u * mass(temperature, floor);
    int32_t last_possible = element_.first_equal(logits_, n_, largest_);
    for (int32_t chunk = 0; chunk < blocks(n_, kSumChunk); ++chunk) {
      if (left >= scratch_.chunk_sums[chunk]) {
        left -= scratch_.chunk_sums[chunk];
        continue;
      }
      const int32_t end = std::min(n_, (chunk + 1) * kSumChunk);
      for (int32_t id = chunk * kSumChunk; id < end; ++id) {
        if (!(logits_[id] >= floor)) continue;
        const double weight = std::exp((static_cast<double>(logits_[id]) - largest_) / temperature);
        if (weight > 0.0) last_possible = id;
        if ((left -= weight) < 0.0) return id;
      }
      left = 0.0;  // the chunk's f32 sum was a rounding larger than its parts: the next possible token
    }
    return last_possible;
  }

 private:
  bool is_before(int32_t a, int32_t b) const { return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b; }

  const ElementKernels& element_;
  const float* logits_;
  const int32_t n_;
  const float largest_;
  const SamplerScratch& scratch_;
};

// How many of the first n candidates (weights in place) top-p keeps; 0 when even all of them do not reach it.
int32_t cut_top_p(const double* weights, int32_t n, double wanted) {
  double sum = 0.0;
  for (int32_t i = 0; i < n; ++i)
    if ((sum += weights[i]) >= wanted) return i + 1;
  return 0;
}

int32_t cut_min_p(const double* weights, int32_t n, double min_p) {
  int32_t kept = 1;
  while (kept < n && weights[kept] >= min_p) ++kept;
  return kept;
}

double sum_of(const double* weights, int32_t n) {
  double sum = 0.0;
  for (int32_t i = 0; i < n; ++i) sum += weights[i];
  return sum;
}

// The logit of the last token that top-p keeps, where the tokens above `high` are known not to be enough. Halves the
// range of logits until few are left to sort. False where several tokens share that logit and some are cut.
bool find_top_p_floor(const Row& row, double wanted, float high, float temperature, const double* weights,
                      float* floor) {
  float low = row.largest() - kNegligible * temperature;
  if (row.mass(temperature, low) < wanted) return false;
  while (row.count_between(low, high) > kMostSorted) {
    const float middle = low + 0.5f * (high - low);
    if (middle <= low || middle >= high) return false;
    (row.mass(temperature, middle) >= wanted ? low : high) = middle;
  }
  const double above = row.mass(temperature, high);
  const int32_t n = row.take_between(low, high);
  row.weigh(n, temperature);
  const int32_t kept = cut_top_p(weights, n, wanted - above);
  if (kept == 0) return false;
  *floor = row.candidate_logit(kept - 1);
  return kept == n || row.candidate_logit(kept) < *floor;
}

// Draws from the first `kept` candidates after min-p.
int32_t draw_first(const Row& row, int32_t kept, const pw_sampler& sampler, const double* weights, double u) {
  if (sampler.min_p > 0.0f) kept = cut_min_p(weights, kept, sampler.min_p);
  return row.draw_candidate(kept, sum_of(weights, kept), u);
}

int32_t draw_top_p(const Row& row, int32_t n_vocab, const pw_sampler& sampler, const double* weights, double u) {
  const float temperature = sampler.temperature;
  const double wanted = row.mass(temperature) * sampler.top_p;
  for (const int32_t k : {kFewCandidates, kMoreCandidates, n_vocab}) {
    const int32_t n = row.take_largest(std::min(k, n_vocab));
    row.weigh(n, temperature);
    const int32_t reached = cut_top_p(weights, n, wanted);
    if (reached > 0 || n == n_vocab) {
      const int32_t kept = reached > 0 ? reached : n;
      return draw_first(row, kept, sampler, weights, u);
    }
    float floor = 0.0f;
    if (k == kMoreCandidates && find_top_p_floor(row, wanted, row.candidate_logit(n - 1), temperature, weights, &floor))
      return row.draw_at_least(std::max(floor, row.min_p_floor(sampler)), temperature, u);
  }
  return 0;  // not reached: the last round takes all
}

int32_t draw_token(const Row& row, int32_t n_vocab, const pw_sampler& sampler, const double* weights) {
  const double u = uniform(sampler.seed, sampler.draw);
  if (sampler.top_k == 0 || sampler.top_k >= n_vocab) {
    if (sampler.top_p < 1.0f) return draw_top_p(row, n_vocab, sampler, weights, u);
    return row.draw_at_least(row.min_p_floor(sampler), sampler.temperature, u);
  }
  int32_t kept = row.take_largest(sampler.top_k);
  const double sum = row.weigh(kept, sampler.temperature);
  if (sampler.top_p < 1.0f) kept = std::max(1, cut_top_p(weights, kept, sum * sampler.top_p));
  return draw_first(row, kept, sampler, weights, u);
}

void apply_penalties(const pw_sampler& sampler, float* logits, int32_t* counts) {
  for (int32_t i = 0; i < sampler.n_history; ++i) ++counts[sampler.history[i]];
  for (int32_t i = 0; i < sampler.n_history; ++i) {
    const int32_t id = sampler.history[i];
    if (counts[id] == 0) continue;
    float logit = logits[id];
    logit = logit > 0.0f ? logit / sampler.repeat_penalty : logit * sampler.repeat_penalty;
    logits[id] = logit - static_cast<float>(counts[id]) * sampler.frequency_penalty - sampler.presence_penalty;
    counts[id] = 0;
  }
}

bool has_penalties(const pw_sampler& s) {
  return s.n_history > 0 && (s.repeat_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f);
}

// The row to choose from: the model's own, or a changed copy.
const float* changed_row(const float* logits, int32_t n_vocab, const pw_sampler& sampler,
                         const SamplerScratch& scratch) {
  if (!has_penalties(sampler) && sampler.n_bias == 0) return logits;
  std::copy(logits, logits + n_vocab, scratch.logits);
  if (has_penalties(sampler)) apply_penalties(sampler, scratch.logits, scratch.counts);
  for (int32_t i = 0; i < sampler.n_bias; ++i) scratch.logits[sampler.bias_ids[i]] += sampler.bias_values[i];
  return scratch.logits;
}

void report_logprobs(const Row& raw, int32_t n_top, const SamplerScratch& scratch, pw_sampled* sampled) {
  const double log_sum = raw.largest() + std::log(raw.mass(1.0f));
  sampled->logprob = static_cast<float>(raw.logits()[sampled->token] - log_sum);
  if (n_top == 0) return;
  sampled->n_top = raw.take_largest(n_top);
  for (int32_t i = 0; i < sampled->n_top; ++i) {
    sampled->top_ids[i] = scratch.candidates[i];
    sampled->top_logprobs[i] = static_cast<float>(raw.logits()[scratch.candidates[i]] - log_sum);
  }
}

bool finite(float x) { return std::isfinite(x); }

}  // namespace

SamplerScratch carve_sampler(Carver& carver, int32_t n_vocab) {
  SamplerScratch scratch;
  scratch.counts = carver.take<int32_t>(n_vocab);
  scratch.logits = carver.take<float>(n_vocab);
  scratch.candidates = carver.take<int32_t>(n_vocab);
  scratch.weights = carver.take<double>(n_vocab);
  scratch.block_maxima = carver.take<float>(blocks(n_vocab, kMaxBlock));
  scratch.chunk_sums = carver.take<double>(blocks(n_vocab, kSumChunk));
  return scratch;
}

const char* sample_row(const ElementKernels& element, const float* logits, int32_t n_vocab, const pw_sampler& sampler,
                       const SamplerScratch& scratch, pw_sampled* sampled) {
  bool has_nan = false;
  const float largest = element.row_max(logits, n_vocab, &has_nan);
  if (has_nan) return "the model's logits hold NaN";
  if (!finite(largest)) return "the model's logits hold no finite largest value";
  const float* row_logits = changed_row(logits, n_vocab, sampler, scratch);
  const float row_largest = row_logits == logits ? largest : element.row_max(row_logits, n_vocab, &has_nan);
  if (has_nan || !finite(row_largest)) return "penalties and bias leave no token that can be chosen";
  const Row row(element, row_logits, n_vocab, row_largest, scratch);
  sampled->token = sampler.temperature > 0.0f ? draw_token(row, n_vocab, sampler, scratch.weights)
                                              : element.first_equal(row_logits, n_vocab, row_largest);
  sampled->n_top = 0;
  sampled->logprob = std::numeric_limits<float>::quiet_NaN();  // not asked for
  if (sampler.n_top >= 0)
    report_logprobs(Row(element, logits, n_vocab, largest, scratch), std::min(sampler.n_top, n_vocab), scratch,
                    sampled);
  return nullptr;
}

const char* check_sampler(const pw_sampler& s, int32_t n_vocab) {
  if (!finite(s.temperature) || !finite(s.top_p) || !finite(s.min_p))
    return "temperature, top_p or min_p is not finite";
  if (!finite(s.repeat_penalty) || !finite(s.presence_penalty) || !finite(s.frequency_penalty))
    return "a penalty is not finite";
  if (s.repeat_penalty <= 0.0f) return "repeat_penalty must be above 0 (1 = off)";
  if (s.top_k < 0 || s.top_p <= 0.0f || s.min_p < 0.0f || s.min_p > 1.0f)
    return "top_k must be 0 or more, top_p above 0, min_p 0 to 1";
  if (s.n_top < -1 || s.n_top > PW_MAX_TOP) return "n_top must be -1 (none) to 20";
  if (s.n_history < 0 || (s.n_history > 0 && !s.history)) return "n_history without history";
  if (s.n_bias < 0 || (s.n_bias > 0 && !(s.bias_ids && s.bias_values)))
    return "n_bias without bias_ids and bias_values";
  for (int32_t i = 0; i < s.n_history; ++i)
    if (s.history[i] < 0 || s.history[i] >= n_vocab) return "a history token is outside of the vocabulary";
  for (int32_t i = 0; i < s.n_bias; ++i)
    if (s.bias_ids[i] < 0 || s.bias_ids[i] >= n_vocab || std::isnan(s.bias_values[i]) || s.bias_values[i] == INFINITY)
      return "a bias is outside of the vocabulary or not a number below infinity";
  return nullptr;
}

}  // namespace pw
