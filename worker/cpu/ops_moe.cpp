// ROUTER and MOE: which experts a token takes, and their feed-forward networks grouped by expert.
//
// A slot is one (token, choice) pair. Slots are sorted by expert, so that each expert's weights are read once for all
// its tokens; results go back to slot order before they are added up, so that a token's sum has one order.
#include <cmath>

#include "step.h"

namespace pw {
namespace {

// ---- router ----

struct RouterScratch {
  uint8_t* activations;
  float* probabilities;  // [rows, experts]
};

RouterScratch carve_router(Carver& carver, const Step& step, const pw_op& op, int32_t n_rows) {
  RouterScratch scratch;
  scratch.activations = carver.take<uint8_t>(activations_bytes(step, op.weight[0], n_rows));
  scratch.probabilities = carver.take<float>(size_t(n_rows) * RouterArgs(op).n_experts);
  return scratch;
}

// The expert with the largest probability (plus bias) that is not taken yet; the lower id where they are equal.
int32_t best_expert(const float* probabilities, const float* bias, int32_t n_experts, const int32_t* taken,
                    int32_t n_taken) {
  int32_t best = -1;
  float best_score = 0.0f;
  for (int32_t expert = 0; expert < n_experts; ++expert) {
    const float score = probabilities[expert] + (bias ? bias[expert] : 0.0f);
    if (best >= 0 && !(score > best_score)) continue;
    bool is_taken = false;
    for (int32_t i = 0; i < n_taken; ++i) is_taken |= taken[i] == expert;
    if (is_taken) continue;
    best = expert;
    best_score = score;
  }
  return best;
}

void choose_experts(const Run& run, const pw_op& op, float* probabilities, int32_t* ids, float* weights) {
  const RouterArgs args(op);
  if (args.is_sigmoid)
    run.step.element->sigmoid(probabilities, args.n_experts);
  else
    run.step.element->softmax(probabilities, args.n_experts);
  float sum = 0.0f;
  for (int32_t j = 0; j < args.n_used; ++j) {
    ids[j] = best_expert(probabilities, run.vector(op.bias[0]), args.n_experts, ids, j);
    weights[j] = probabilities[ids[j]];
    sum += weights[j];
  }
  float factor = args.scale;
  if (args.normalizes && sum > 0.0f) factor /= sum;
  for (int32_t j = 0; j < args.n_used; ++j) weights[j] *= factor;
}

// ---- experts ----

// Sorted slots: expert e's are [first[e], first[e + 1]).
struct Routing {
  int32_t* first;          // [experts + 1]
  int32_t* slots;          // [n_slots] slot ids by expert, ascending within one
  int32_t* tokens;         // [n_slots] their tokens
  int32_t* active;         // experts with slots
  int32_t* n_active;       // one number
  int64_t* input_offset;   // [experts] of an active expert's prepared input
  int64_t* hidden_offset;  // likewise of its prepared hidden rows
};

struct MoeScratch {
  Routing routing;
  float* hidden;   // [n_slots, n_ff] in sorted order
  float* up;       // likewise
  float* results;  // [n_slots, n_embd] in slot order
  uint8_t* inputs;
  uint8_t* hidden_inputs;
};

MoeScratch carve_moe(Carver& carver, const Step& step, const pw_op& op, int32_t n_tokens) {
  const pw_weight& gate = step.weights[op.weight[0]];
  const pw_weight& down = step.weights[op.weight[2]];
  const size_t n_slots = size_t(n_tokens) * MoeArgs(op).n_used, n_experts = gate.experts;
  MoeScratch s;
  s.routing.first = carver.take<int32_t>(n_experts + 1);
  s.routing.slots = carver.take<int32_t>(n_slots);
  s.routing.tokens = carver.take<int32_t>(n_slots);
  s.routing.active = carver.take<int32_t>(n_experts);
  s.routing.n_active = carver.take<int32_t>(1);
  s.routing.input_offset = carver.take<int64_t>(n_experts);
  s.routing.hidden_offset = carver.take<int64_t>(n_experts);
  s.hidden = carver.take<float>(n_slots * gate.rows);
  s.up = carver.take<float>(n_slots * gate.rows);
  s.results = carver.take<float>(n_slots * down.rows);
  const size_t padding = n_experts * kCacheLine;  // each expert's part starts on a line
  s.inputs = carver.take<uint8_t>(activations_bytes(step, op.weight[0], static_cast<int32_t>(n_slots)) + padding);
  s.hidden_inputs =
      carver.take<uint8_t>(activations_bytes(step, op.weight[2], static_cast<int32_t>(n_slots)) + padding);
  return s;
}

class Experts {
 public:
  Experts(Run& run, const pw_op& op)
      : run_(run),
        op_(op),
        args_(op),
        gate_(run.weight(op.weight[0])),
        up_(run.weight(op.weight[1])),
        down_(run.weight(op.weight[2])),
        n_tokens_(run.batch.n_tokens),
        n_slots_(n_tokens_ * args_.n_used) {
    Carver carver(run.step.shared_scratch);
    scratch_ = carve_moe(carver, run.step, op, n_tokens_);
  }

  void compute() {
    run_.member.serial([&] { sort_slots(); });
    run_.member.meet();
    if (run_.member.stopped()) return;
    prepare_inputs();
    run_.member.parallel(units(gate_), piece(gate_), [&](int64_t begin, int64_t end) {
      each_expert(gate_, begin, end, [&](int32_t expert, int32_t from, int32_t to) { gate_and_up(expert, from, to); });
    });
    prepare_hidden();
    run_.member.parallel(units(down_), piece(down_), [&](int64_t begin, int64_t end) {
      each_expert(down_, begin, end, [&](int32_t expert, int32_t from, int32_t to) { project_down(expert, from, to); });
    });
    add_up();
  }

 private:
  int32_t count(int32_t expert) const { return routing().first[expert + 1] - routing().first[expert]; }
  const Routing& routing() const { return scratch_.routing; }
  int64_t units(const pw_weight& weight) const { return int64_t{*routing().n_active} * row_groups(weight); }
  int64_t piece(const pw_weight& weight) const {
    return group_piece(run_, weight, units(weight), n_slots_ / *routing().n_active);
  }

  void sort_slots() {
    const Routing& r = routing();
    const int32_t* ids = reinterpret_cast<const int32_t*>(run_.row(op_.in[1], 0));
    for (int32_t e = 0; e <= gate_.experts; ++e) r.first[e] = 0;
    for (int32_t slot = 0; slot < n_slots_; ++slot) ++r.first[ids[slot]];
    int32_t end = 0;
    for (int32_t e = 0; e <= gate_.experts; ++e) r.first[e] = end += r.first[e];
    for (int32_t slot = n_slots_ - 1; slot >= 0; --slot) {
      const int32_t place = --r.first[ids[slot]];
      r.slots[place] = slot;
      r.tokens[place] = slot / args_.n_used;
    }
    list_active();
  }

  void list_active() {
    const Routing& r = routing();
    int64_t input = 0, hidden = 0;
    *r.n_active = 0;
    for (int32_t e = 0; e < gate_.experts; ++e) {
      if (count(e) == 0) continue;
      r.active[(*r.n_active)++] = e;
      r.input_offset[e] = input;
      r.hidden_offset[e] = hidden;
      input += align_up(activations_bytes(run_.step, op_.weight[0], count(e)));
      hidden += align_up(activations_bytes(run_.step, op_.weight[2], count(e)));
    }
  }

  bool one_token() const { return n_tokens_ == 1; }  // then all experts share one prepared input

  Activations input_of(int32_t expert) const {
    const ActForm form = activation_form(gate_.type);
    if (one_token()) return describe_activations(run_, form, 1, gate_.cols, scratch_.inputs);
    return describe_activations(run_, form, count(expert), gate_.cols,
                                scratch_.inputs + routing().input_offset[expert]);
  }

  Activations hidden_of(int32_t expert) const {
    return describe_activations(run_, activation_form(down_.type), count(expert), down_.cols,
                                scratch_.hidden_inputs + routing().hidden_offset[expert]);
  }

  void prepare_inputs() {
    if (one_token()) return prepare_activations(run_, input_of(0), run_.row(op_.in[0], 0));
    each_active([&](int32_t expert) {
      const Activations a = input_of(expert);
      run_.step.matmul->activations_prepare(&a, run_.row(op_.in[0], 0), gate_.cols,
                                            routing().tokens + routing().first[expert], 0, a.n_tiles);
    });
  }

  void prepare_hidden() {
    each_active([&](int32_t expert) {
      const Activations a = hidden_of(expert);
      run_.step.matmul->activations_prepare(&a, scratch_.hidden + int64_t{routing().first[expert]} * down_.cols,
                                            down_.cols, nullptr, 0, a.n_tiles);
    });
  }

  template <class Work>
  void each_active(Work&& work) {
    run_.member.parallel(*routing().n_active, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work(routing().active[i]);
    });
  }

  template <class Work>
  void each_expert(const pw_weight& weight, int64_t begin, int64_t end, Work&& work) {
    const int64_t groups = row_groups(weight);
    while (begin < end) {
      const int64_t first = begin / groups * groups;
      const int64_t stop = first + groups < end ? first + groups : end;
      work(routing().active[begin / groups], static_cast<int32_t>(begin - first), static_cast<int32_t>(stop - first));
      begin = stop;
    }
  }

  void gate_and_up(int32_t expert, int32_t group_begin, int32_t group_end) {
    const Activations input = input_of(expert);
    const int64_t first_row = routing().first[expert];
    Matmul m{};
    m.expert = expert;
    m.input = &input;
    m.output_stride = gate_.rows;
    m.scale = 1.0f;
    m.weight = &gate_;
    m.output = scratch_.hidden + first_row * gate_.rows;
    run_.step.matmul->matmul(&m, group_begin, group_end, run_.scratch());
    m.weight = &up_;
    m.output = scratch_.up + first_row * gate_.rows;
    run_.step.matmul->matmul(&m, group_begin, group_end, run_.scratch());
    const int32_t begin = group_begin * kRowGroup;
    const int32_t end = group_end * kRowGroup < gate_.rows ? group_end * kRowGroup : gate_.rows;
    for (int32_t i = 0; i < count(expert); ++i) {
      const int64_t at = (first_row + i) * gate_.rows + begin;
      run_.step.element->glu(args_.activation, scratch_.hidden + at, scratch_.up + at, end - begin,
                             scratch_.hidden + at);
    }
  }

  void project_down(int32_t expert, int32_t group_begin, int32_t group_end) {
    const Activations input = hidden_of(expert);
    Matmul m{};
    m.weight = &down_;
    m.expert = expert;
    m.input = &input;
    m.output = scratch_.results;
    m.output_stride = down_.rows;
    m.output_rows = routing().slots + routing().first[expert];
    m.scale = 1.0f;
    run_.step.matmul->matmul(&m, group_begin, group_end, run_.scratch());
  }

  void add_up() {
    run_.each_row(n_tokens_, [&](int32_t token) {
      const float* results = scratch_.results + int64_t{token} * args_.n_used * down_.rows;
      run_.step.element->weighted_sum(results, run_.row(op_.in[2], token), args_.n_used, down_.rows, args_.accumulates,
                                      run_.row(op_.out[0], token));
    });
  }

  Run& run_;
  const pw_op& op_;
  const MoeArgs args_;
  const pw_weight& gate_;
  const pw_weight& up_;
  const pw_weight& down_;
  const int32_t n_tokens_;
  const int32_t n_slots_;
  MoeScratch scratch_;
};

}  // namespace

size_t router_shared_bytes(const Step& step, const pw_op& op) {
  Carver carver(nullptr);
  carve_router(carver, step, op, step.max_tokens);
  return carver.used_bytes();
}

size_t moe_shared_bytes(const Step& step, const pw_op& op) {
  Carver carver(nullptr);
  carve_moe(carver, step, op, step.max_tokens);
  return carver.used_bytes();
}

void run_router(Run& run, const pw_op& op) {
  const pw_weight& weight = run.weight(op.weight[0]);
  const int32_t n_rows = run.batch.n_tokens;
  Carver carver(run.step.shared_scratch);
  const RouterScratch scratch = carve_router(carver, run.step, op, n_rows);
  const Activations input =
      describe_activations(run, activation_form(weight.type), n_rows, weight.cols, scratch.activations);
  prepare_activations(run, input, run.row(op.in[0], 0));
  Matmul m{};
  m.weight = &weight;
  m.input = &input;
  m.output = scratch.probabilities;
  m.output_stride = weight.rows;
  m.scale = 1.0f;
  const int64_t n_groups = row_groups(weight);
  run.member.parallel(n_groups, group_piece(run, weight, n_groups, n_rows), [&](int64_t begin, int64_t end) {
    run.step.matmul->matmul(&m, static_cast<int32_t>(begin), static_cast<int32_t>(end), run.scratch());
  });
  run.each_row(n_rows, [&](int32_t row) {
    choose_experts(run, op, scratch.probabilities + int64_t{row} * RouterArgs(op).n_experts,
                   reinterpret_cast<int32_t*>(run.row(op.out[0], row)), run.row(op.out[1], row));
  });
}

void run_moe(Run& run, const pw_op& op) {
  if (run.batch.n_tokens > 0) Experts(run, op).compute();
}

}  // namespace pw
