// ROPE_STORE: rotates queries in place, rotates keys and writes them with the values into the cache.
#include <cmath>

#include "step.h"

namespace pw {
namespace {

// Angles in double: positions reach hundreds of thousands, where f32 angles are off by several hundredths.
void fill_table_row(const RopeTable& table, const float* frequencies, int32_t token, int32_t position) {
  float* cosines = table.cosines + int64_t{token} * table.width;
  float* sines = table.sines + int64_t{token} * table.width;
  for (int32_t i = 0; i < table.rope_dim / 2; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(frequencies[i]);
    const float c = static_cast<float>(std::cos(angle) * table.magnitude);
    const float s = static_cast<float>(std::sin(angle) * table.magnitude);
    if (table.interleaved) {
      cosines[2 * i] = cosines[2 * i + 1] = c;
      sines[2 * i] = -s;
      sines[2 * i + 1] = s;
    } else {
      cosines[i] = c;
      sines[i] = s;
    }
  }
}

RopeHead head_shape(const Run& run, const RopeStoreArgs& args, const RopeTable& table, int32_t token, int32_t norm) {
  RopeHead shape{};
  shape.head_dim = args.head_dim;
  shape.rope_dim = args.rope_dim;
  shape.interleaved = table.interleaved;
  shape.norm_eps = args.norm_eps;
  shape.norm_weight = run.vector(norm);
  shape.cosines = table.cosines + int64_t{token} * table.width;
  shape.sines = table.sines + int64_t{token} * table.width;
  return shape;
}

// One token's key/value head with the query heads that share it.
void store_head(Run& run, const pw_op& op, const RopeTable& table, int32_t sequence, int32_t token, int32_t kv_head) {
  const ElementKernels& element = *run.step.element;
  const RopeStoreArgs args(op);
  const RopeHead query_shape = head_shape(run, args, table, token, args.query_norm);
  float* query = run.row(op.in[0], token) + kv_head * args.per_kv_head() * args.head_dim;
  for (int32_t h = 0; h < args.per_kv_head(); ++h) {
    float* head = query + h * args.head_dim;
    element.rope(query_shape, head, head);
  }
  const KvLayer& layer = run.step.kv->layer(args.kv_layer);
  const int32_t position = run.batch.positions[token];
  const int32_t* pages = run.batch.page_tables + int64_t{sequence} * run.batch.page_table_stride;
  uint8_t* block = layer.block(pages[position / PW_PAGE_TOKENS], kv_head);
  float* key = run.row(op.in[1], token) + kv_head * args.head_dim;
  element.rope(head_shape(run, args, table, token, args.key_norm), key, key);
  element.store_key(layer, block, position % PW_PAGE_TOKENS, key);
  element.store_value(layer, block, position % PW_PAGE_TOKENS, run.row(op.in[2], token) + kv_head * args.head_dim);
}

int32_t sequence_of(const pw_batch& batch, int32_t token) {
  int32_t low = 0, high = batch.n_sequences;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (batch.sequence_first[middle] <= token ? low : high) = middle;
  }
  return low;
}

}  // namespace

void run_rope_store(Run& run, const pw_op& op, const OpPlan& plan) {
  const RopeTable& table = run.step.rope_tables[plan.rope_table];
  const float* frequencies = run.vector(table.weight);
  if (plan.fills_table)
    run.each_row(run.batch.n_tokens,
                 [&](int32_t token) { fill_table_row(table, frequencies, token, run.batch.positions[token]); });
  const int32_t n_kv_heads = RopeStoreArgs(op).n_kv_heads;
  const int64_t n_units = int64_t{run.batch.n_tokens} * n_kv_heads;
  run.member.parallel(n_units, piece_of(n_units, run.member.n_threads()), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int32_t token = static_cast<int32_t>(unit / n_kv_heads);
      store_head(run, op, table, sequence_of(run.batch, token), token, static_cast<int32_t>(unit % n_kv_heads));
    }
  });
}

}  // namespace pw
