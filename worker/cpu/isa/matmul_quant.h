// The kernels of the block-quantised types, written once over QuantLayout. Two ways to the same numbers:
//   direct: codes and scales straight from the packed bytes, for few tokens (decode) and where it is as fast
//   panel:  a row group is first expanded to bytes and f32 scales, then used for all tiles (prefill)
// Per 32-column group both do the same float operations in the same order, so a result does not depend on the choice.
#pragma once
#include "isa/dot.h"
#include "isa/matmul_job.h"
#include "isa/matmul_kernels.h"

namespace pw::PW_ISA {

// A group as it lies in the packed bytes; `lane` is the first row of the vector within the row group (0 or 8).
template <QuantLayout L>
struct PackedGroup {
  const uint8_t* unit;
  const uint8_t* group;
  int lane;

  Ints codes(int step) const {
    const uint8_t* low = group + L.low_plane_offset() + 4 * lane;
    if constexpr (L.low_bits == 8) return load_ints(low + step * kStepBytes);
    const int shift = step * L.low_bits % 8;
    const Ints low_bytes = shift_bytes(load_ints(low + step * L.low_bits / 8 * kStepBytes), -shift);
    const Ints code = and_ints(low_bytes, set_bytes((1 << L.low_bits) - 1));
    if constexpr (L.high_bits == 0) return code;
    const uint8_t* high = group + L.high_plane_offset() + 4 * lane;
    const Ints high_bytes = load_ints(high + step * L.high_bits / 8 * kStepBytes);
    const int high_shift = L.low_bits - step * L.high_bits % 8;
    return or_masked(code, shift_bytes(high_bytes, high_shift), set_bytes(((1 << L.high_bits) - 1) << L.low_bits));
  }

  Floats scale(int half) const {
    const Floats unit_scale = load_halves(unit + 2 * lane);
    if constexpr (L.sub_scales == SubScales::none) return unit_scale;
    return mul(unit_scale, to_floats(sub_scale(half)));
  }

  Floats min(int half) const {
    const Floats unit_min = load_halves(unit + 2 * kRowGroup + 2 * lane);
    if constexpr (L.sub_scales == SubScales::none) return unit_min;
    return mul(unit_min, to_floats(sub_min(half)));
  }

 private:
  Ints sub_scale(int half) const {
    const uint8_t* bytes = group + lane + half * kRowGroup;
    if constexpr (L.sub_scales == SubScales::two_signed) return load_signed_bytes(bytes);
    if constexpr (L.sub_scales == SubScales::scale_and_min) return load_unsigned_bytes(bytes);
    return and_ints(load_unsigned_bytes(bytes), set_ints(15));
  }

  Ints sub_min(int half) const {
    if constexpr (L.sub_scales == SubScales::scale_and_min) return load_unsigned_bytes(group + lane + kRowGroup);
    return shift_right_ints(load_unsigned_bytes(group + lane + half * kRowGroup), 4);
  }
};

// A group of a panel: [8 steps x 64 bytes][scales f32 x 16 per half][mins likewise].
template <QuantLayout L>
struct PanelGroup {
  static constexpr int kScalesOffset = kSteps * kStepBytes;
  static constexpr int kScaleBytes = 4 * kRowGroup;
  static constexpr int kMinsOffset = kScalesOffset + L.scales_per_group() * kScaleBytes;
  static constexpr int kBytes = kMinsOffset + (L.has_min() ? L.scales_per_group() * kScaleBytes : 0);
  const uint8_t* group;
  int lane;

  Ints codes(int step) const { return load_ints(group + step * kStepBytes + 4 * lane); }
  Floats scale(int half) const { return load_floats(group + kScalesOffset + half * kScaleBytes + 4 * lane); }
  Floats min(int half) const { return load_floats(group + kMinsOffset + half * kScaleBytes + 4 * lane); }
};

// Integer dot products of steps [half * Steps, ...), for V vectors of rows and T tokens.
template <QuantLayout L, int Steps, class Group, int V, int T>
inline void dot_steps(const Group (&groups)[V], Q8Group<T> x, int half, Ints (&sums)[V][T]) {
  Dot<L.code_bits(), Steps> dots[V][T];
  for (int t = 0; t < T; t++) {
    Ints start = zero_ints();
    if constexpr (L.zero_code != 0 && !kDotIsSigned<L.code_bits()>) {
      const Ints all = Steps == kSteps ? add_ints(x.negative_sum(0, t), x.negative_sum(1, t)) : x.negative_sum(half, t);
      start = shift_left(all, __builtin_ctz(L.zero_code));
    }
    for (int v = 0; v < V; v++) dots[v][t].start(start);
  }
#pragma GCC unroll 8
  for (int step = 0; step < Steps; step++) {
    Ints codes[V];
    for (int v = 0; v < V; v++) codes[v] = groups[v].codes(half * Steps + step);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const Ints activations = x.codes(half * Steps + step, t);
      for (int v = 0; v < V; v++) dots[v][t].multiply(codes[v], activations, step);
    }
  }
  for (int v = 0; v < V; v++) {
    for (int t = 0; t < T; t++) sums[v][t] = dots[v][t].sum;
  }
}

// Block types have a min that is added, K types one that is subtracted.
template <QuantLayout L>
inline Floats add_min(Floats min, Floats scaled_sum, Floats total) {
  if constexpr (L.sub_scales == SubScales::none) return fma(min, scaled_sum, total);
  return negative_fma(min, scaled_sum, total);
}

// total += scale of weights * scale of activations * dot (+ min * scaled sum), one scale for the 32 columns
template <QuantLayout L, class Group, int V, int T>
inline void add_group(const Group (&groups)[V], Q8Group<T> x, Floats (&total)[V][T])
  requires(L.scales_per_group() == 1)
{
  Ints sums[V][T];
  dot_steps<L, kSteps>(groups, x, 0, sums);
  for (int v = 0; v < V; v++) {
    const Floats scale = groups[v].scale(0);
    for (int t = 0; t < T; t++) total[v][t] = fma(to_floats(sums[v][t]), mul(scale, x.scale(t)), total[v][t]);
    if constexpr (L.has_min()) {
      const Floats min = groups[v].min(0);
      for (int t = 0; t < T; t++) total[v][t] = add_min<L>(min, x.scaled_sum(t), total[v][t]);
    }
  }
}

// The same with a scale (and min) for each 16 columns: both halves in units of the weights first, then one FMA with the
// scale of the activations.
template <QuantLayout L, class Group, int V, int T>
inline void add_group(const Group (&groups)[V], Q8Group<T> x, Floats (&total)[V][T])
  requires(L.scales_per_group() == 2)
{
  Floats part[V][T];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    Ints sums[V][T];
    dot_steps<L, kSteps / 2>(groups, x, half, sums);
    for (int v = 0; v < V; v++) {
      const Floats scale = groups[v].scale(half);
      for (int t = 0; t < T; t++) {
        const Floats dot = to_floats(sums[v][t]);
        part[v][t] = half == 0 ? mul(dot, scale) : fma(dot, scale, part[v][t]);
      }
      if constexpr (L.has_min()) {
        const Floats min = groups[v].min(half);
        for (int t = 0; t < T; t++) part[v][t] = fma(min, to_floats(x.negative_sum(half, t)), part[v][t]);
      }
    }
  }
  for (int v = 0; v < V; v++) {
    for (int t = 0; t < T; t++) total[v][t] = fma(part[v][t], x.scale(t), total[v][t]);
  }
}

template <QuantLayout L, int V, int T>
inline void dot_packed(const uint8_t* unit, int first_lane, int n_units, const uint8_t* x, Floats (&total)[V][T]) {
  for (int u = 0; u < n_units; u++, unit += L.unit_bytes()) {
    const uint8_t* group = unit + L.header_bytes();
#pragma GCC unroll 1
    for (int g = 0; g < L.groups(); g++, group += L.group_bytes(), x += T * kQ8GroupBytes) {
      if constexpr (kPrefetches<T>) prefetch_ahead(group, L.group_bytes());
      PackedGroup<L> groups[V];
      for (int v = 0; v < V; v++) groups[v] = {unit, group, first_lane + v * kLanes};
      add_group<L>(groups, Q8Group<T>{x}, total);
    }
  }
}

template <QuantLayout L, int V, int T>
inline void dot_panel(const uint8_t* group, int first_lane, int n_groups, const uint8_t* x, Floats (&total)[V][T]) {
  for (int g = 0; g < n_groups; g++, group += PanelGroup<L>::kBytes, x += T * kQ8GroupBytes) {
    PanelGroup<L> groups[V];
    for (int v = 0; v < V; v++) groups[v] = {group, first_lane + v * kLanes};
    add_group<L>(groups, Q8Group<T>{x}, total);
  }
}

template <QuantLayout L, bool FromPanel, int T>
void quant_tile(const TileJob& job) {
  constexpr int V = kPassVectors<T>;
  const int32_t cols = job.m->weight->cols;
  for (int lane = 0; lane < kRowGroup; lane += V * kLanes) {
    Floats total[V][T];
    for (int v = 0; v < V; v++) {
      for (int t = 0; t < T; t++) total[v][t] = zero_floats();
    }
    if constexpr (FromPanel) {
      dot_panel<L>(job.group, lane, cols / kGroupCols, job.activations, total);
    } else {
      dot_packed<L>(job.group, lane, cols / L.unit_cols, job.activations, total);
    }
    store_tile(job, lane, total);
  }
}

template <QuantLayout L>
void expand_panel(const uint8_t* unit, int n_units, uint8_t* panel) {
  using Panel = PanelGroup<L>;
  for (int u = 0; u < n_units; u++, unit += L.unit_bytes()) {
    for (int g = 0; g < L.groups(); g++, panel += Panel::kBytes) {
      for (int lane = 0; lane < kRowGroup; lane += kLanes) {
        const PackedGroup<L> group{unit, unit + L.header_bytes() + g * L.group_bytes(), lane};
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; step++) store_ints(panel + step * kStepBytes + 4 * lane, group.codes(step));
        for (int half = 0; half < L.scales_per_group(); half++) {
          const int offset = half * Panel::kScaleBytes + 4 * lane;
          store_floats(panel + Panel::kScalesOffset + offset, group.scale(half));
          if constexpr (L.has_min()) store_floats(panel + Panel::kMinsOffset + offset, group.min(half));
        }
      }
    }
  }
}

template <QuantLayout L, bool FromPanel>
struct QuantTiles {
  static constexpr TileKernel kernels[] = {
      quant_tile<L, FromPanel, 1>, quant_tile<L, FromPanel, 2>,
      quant_tile<L, FromPanel, 3>, quant_tile<L, FromPanel, 4>,
#if PW_ISA_avx512
      quant_tile<L, FromPanel, 5>, quant_tile<L, FromPanel, 6>,
      quant_tile<L, FromPanel, 7>, quant_tile<L, FromPanel, 8>,
#endif
  };
};

template <QuantLayout L>
int64_t quant_packed_bytes(int32_t cols) {
  return align_64(static_cast<int64_t>(cols) / L.unit_cols * L.unit_bytes());
}

template <QuantLayout L>
size_t quant_scratch_bytes(int32_t cols) {
  const int64_t panel_bytes = static_cast<int64_t>(cols) / kGroupCols * PanelGroup<L>::kBytes;
  return static_cast<size_t>(quant_packed_bytes<L>(cols) + panel_bytes);
}

// From PanelFromTokens tokens on, expanding a panel pays (measured per type and level).
constexpr int32_t kNoPanel = INT32_MAX;

template <QuantLayout L, int32_t PanelFromTokens>
void matmul_quant(const Matmul& m, int32_t group_begin, int32_t group_end, uint8_t* scratch) {
  const int32_t n_units = m.weight->cols / L.unit_cols;
  const int64_t group_bytes = static_cast<int64_t>(n_units) * L.unit_bytes();
  const int64_t row_bytes = static_cast<int64_t>(n_units) * L.file_bytes;
  uint8_t* panel = scratch + quant_packed_bytes<L>(m.weight->cols);
  for (int32_t group = group_begin; group < group_end; group++) {
    const uint8_t* packed = find_packed_group(m, group, group_bytes, row_bytes, scratch);
    if (m.input->n_tokens < PanelFromTokens) {
      run_tiles(m, group, packed, QuantTiles<L, false>::kernels);
      continue;
    }
    expand_panel<L>(packed, n_units, panel);
    run_tiles(m, group, panel, QuantTiles<L, true>::kernels);
  }
}

template <QuantLayout L, int32_t PanelFromTokens>
TypeKernel quant_kernel() {
  return {matmul_quant<L, PanelFromTokens>, quant_scratch_bytes<L>};
}

}  // namespace pw::PW_ISA
