// Norms, gated activations, softmax and sums over rows of f32.
#include "kernel_list.h"
#include "lanes.h"

namespace pw::PW_ISA {
namespace {

PW_INLINE int32_t whole_lanes(int32_t n) { return n & ~(kLanes - 1); }

// Applies `f` to the lanes of x[0, n) in place, the last ones partly.
template <class F>
PW_INLINE void update(float* x, int32_t n, F f) {
  const int32_t whole = whole_lanes(n);
  for (int32_t i = 0; i < whole; i += kLanes) store(x + i, f(load(x + i)));
  if (whole < n) store_first(x + whole, f(load_first(x + whole, n - whole)), n - whole);
}

// Four partial sums, so that the additions do not wait for each other.
PW_INLINE float sum_of_squares(const float* x, int32_t n) {
  Lanes sums[4] = {zero(), zero(), zero(), zero()};
  int32_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int32_t j = 0; j < 4; ++j) {
      const Lanes v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  for (; i < n; i += kLanes) {
    const Lanes v = load_first(x + i, n - i);
    sums[0] = fma(v, v, sums[0]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

PW_INLINE Lanes silu(Lanes x) { return x / (splat(1.0f) + exp(zero() - x)); }

// x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^(-2u))
PW_INLINE Lanes gelu(Lanes x) {
  const Lanes inner = fma(x * x, splat(0.044715f), splat(1.0f)) * x;
  return x / (splat(1.0f) + exp(inner * splat(-1.5957691216f)));
}

template <class F>
PW_INLINE void gated(const float* gate, const float* up, int32_t n, float* out, F activation) {
  const int32_t whole = whole_lanes(n);
  for (int32_t i = 0; i < whole; i += kLanes) store(out + i, activation(load(gate + i)) * load(up + i));
  if (whole == n) return;
  const int32_t rest = n - whole;
  store_first(out + whole, activation(load_first(gate + whole, rest)) * load_first(up + whole, rest), rest);
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int32_t width, bool accumulate, float* out) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const Lanes factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  for (int32_t i = 0; i < width; i += kLanes) {
    const int32_t n = width - i;
    Lanes y = load_first(x + i, n) * factor * load_first(weight + i, n);
    if (accumulate) y = y + load_first(out + i, n);
    store_first(out + i, y, n);
  }
}

void glu(int32_t activation, const float* gate, const float* up, int32_t n, float* out) {
  if (activation == 0)
    gated(gate, up, n, out, [](Lanes x) PW_LAMBDA { return silu(x); });
  else
    gated(gate, up, n, out, [](Lanes x) PW_LAMBDA { return gelu(x); });
}

void scale(float* x, int32_t n, float factor) {
  update(x, n, [&](Lanes v) PW_LAMBDA { return v * splat(factor); });
}

void soft_cap(float* x, int32_t n, float cap) {
  update(x, n, [&](Lanes v) PW_LAMBDA { return splat(cap) * tanh(v * splat(1.0f / cap)); });
}

void softmax(float* x, int32_t n) {
  Lanes largest = splat(x[0]);
  for (int32_t i = 0; i < n; i += kLanes) largest = max(largest, keep(load_first(x + i, n - i), 0, n - i, largest));
  const Lanes top = splat(reduce_max(largest));
  Lanes sums = zero();
  for (int32_t i = 0; i < n; i += kLanes) {
    const Lanes e = keep(exp(load_first(x + i, n - i) - top), 0, n - i, zero());
    store_first(x + i, e, n - i);
    sums = sums + e;
  }
  scale(x, n, 1.0f / reduce_add(sums));
}

void sigmoid(float* x, int32_t n) {
  update(x, n, [](Lanes v) PW_LAMBDA { return splat(1.0f) / (splat(1.0f) + exp(zero() - v)); });
}

void weighted_sum(const float* rows, const float* weights, int32_t n_rows, int32_t width, bool accumulate, float* out) {
  for (int32_t i = 0; i < width; i += kLanes) {
    const int32_t n = width - i;
    Lanes sum = accumulate ? load_first(out + i, n) : zero();
    for (int32_t row = 0; row < n_rows; ++row)
      sum = fma(splat(weights[row]), load_first(rows + int64_t{row} * width + i, n), sum);
    store_first(out + i, sum, n);
  }
}

}  // namespace pw::PW_ISA
