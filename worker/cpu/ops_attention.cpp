// ATTENTION: spreads query tiles over threads, and the splits of long contexts too when there are few tiles.
#include "step.h"

namespace pw {
namespace {

constexpr int32_t kTargetRows = 64;  // query rows of a tile: keys and values of a page are read once for all of them
constexpr int32_t kKernelRows = 8;   // the kernels take rows by so many
constexpr size_t kPartialBytes = 16 << 20;
constexpr int32_t kUnitsPerThread = 4;  // as many tiles as this keep the threads evenly busy without splitting
constexpr int64_t kSerialMergeFloats = 8192;

AttentionTile make_tile(const Run& run, const pw_op& op, const QueryTile& query, int32_t kv_head, int32_t head_begin,
                        int32_t n_heads) {
  const AttentionArgs args(op);
  const int64_t first_float = int64_t{kv_head * args.per_kv_head() + head_begin} * args.head_dim;
  AttentionTile tile{};
  tile.layer = &run.step.kv->layer(args.kv_layer);
  tile.pages = run.batch.page_tables + int64_t{query.sequence} * run.batch.page_table_stride;
  tile.kv_head = kv_head;
  tile.n_tokens = query.n_tokens;
  tile.n_heads = n_heads;
  tile.first_position = query.first_position;
  tile.window_tokens = args.window_tokens;
  tile.score_scale = args.score_scale;
  tile.score_softcap = args.score_softcap;
  tile.query = run.row(op.in[0], query.first_row) + first_float;
  tile.output = run.row(op.out[0], query.first_row) + first_float;
  tile.token_stride = run.width(op.in[0]);
  tile.scratch = run.scratch();
  return tile;
}

void run_whole_tiles(Run& run, const pw_op& op, const TilePlan& plan) {
  const AttentionArgs args(op);
  const int64_t n_units = static_cast<int64_t>(plan.tiles.size()) * args.n_kv_heads;
  run.member.parallel(n_units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const QueryTile& query = plan.tiles[unit / args.n_kv_heads];
      const int32_t kv_head = static_cast<int32_t>(unit % args.n_kv_heads);
      run.step.element->attend(make_tile(run, op, query, kv_head, 0, args.per_kv_head()));
    }
  });
}

// Query heads of a key/value head are dealt to `n_parts` units where tiles and splits alone are too few.
struct Parts {
  int32_t n_parts;
  int32_t per_kv_head;
  int32_t begin(int32_t part) const { return part * per_kv_head / n_parts; }
  int32_t size(int32_t part) const { return begin(part + 1) - begin(part); }
};

struct Splits {
  int32_t first, count;
};

Splits splits_of(const QueryTile& query, int32_t window_tokens) {
  const int32_t oldest = query.first_position - window_tokens + 1;
  const int32_t first = window_tokens > 0 && oldest > 0 ? oldest / kSplitTokens : 0;
  return {first, (query.first_position + query.n_tokens - 1) / kSplitTokens - first + 1};
}

// A tile's partial results in memory: per key/value head and part, rows in order, splits of a row side by side.
struct Partials {
  AttentionState* states;
  float* values;
};

class SplitAttention {
 public:
  SplitAttention(Run& run, const pw_op& op, const TilePlan& plan) : run_(run), op_(op), plan_(plan), args_(op) {
    int64_t n_units = 0;
    for (const QueryTile& query : plan.tiles) {
      const int32_t splits = splits_of(query, args_.window_tokens).count;
      n_units += int64_t{splits} * args_.n_kv_heads;
      n_results_ += int64_t{splits} * query.n_tokens * args_.n_heads;
    }
    const int64_t wanted = int64_t{run.member.n_threads()} * kUnitsPerThread / 2;
    const int64_t parts = n_units >= wanted ? 1 : (wanted + n_units - 1) / n_units;
    parts_ = {static_cast<int32_t>(parts < args_.per_kv_head() ? parts : args_.per_kv_head()), args_.per_kv_head()};
    n_units_ = n_units * parts_.n_parts;
    Carver carver(run.step.shared_scratch);
    partials_.states = carver.take<AttentionState>(n_results_);
    partials_.values = carver.take<float>(n_results_ * args_.head_dim);
    fits_ = carver.used_bytes() <= run.step.shared_scratch_bytes;
  }

  bool fits() const { return fits_; }

  void compute() {
    run_.member.parallel(n_units_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) compute_unit(unit);
    });
  }

  void merge() {
    if (n_results_ * args_.head_dim <= kSerialMergeFloats) {
      run_.member.serial([&] { merge_heads(0, n_merges()); });
    } else {
      run_.member.parallel(n_merges(), 1, [&](int64_t begin, int64_t end) { merge_heads(begin, end); });
    }
  }

 private:
  int64_t n_merges() const { return static_cast<int64_t>(plan_.tiles.size()) * args_.n_kv_heads * parts_.n_parts; }

  void compute_unit(int64_t unit) {
    int64_t first_result = 0;
    for (const QueryTile& query : plan_.tiles) {
      const Splits splits = splits_of(query, args_.window_tokens);
      const int64_t units = int64_t{splits.count} * args_.n_kv_heads * parts_.n_parts;
      if (unit < units) return compute_split(query, splits, unit, first_result);
      unit -= units;
      first_result += int64_t{splits.count} * query.n_tokens * args_.n_heads;
    }
  }

  void compute_split(const QueryTile& query, Splits splits, int64_t unit, int64_t first_result) {
    const int32_t split = static_cast<int32_t>(unit % splits.count);
    const int32_t block = static_cast<int32_t>(unit / splits.count);  // kv head and part
    const int32_t kv_head = block / parts_.n_parts, part = block % parts_.n_parts;
    const int64_t result = first_result + results_before(query, splits, kv_head, part) + split;
    const AttentionTile tile = make_tile(run_, op_, query, kv_head, parts_.begin(part), parts_.size(part));
    run_.step.element->attend_split(tile, splits.first + split, partials_.states + result,
                                    partials_.values + result * args_.head_dim, splits.count);
  }

  int64_t results_before(const QueryTile& query, Splits splits, int32_t kv_head, int32_t part) const {
    return int64_t{kv_head * args_.per_kv_head() + parts_.begin(part)} * query.n_tokens * splits.count;
  }

  // unit = (tile, kv head, part)
  void merge_heads(int64_t begin, int64_t end) {
    int64_t unit = 0, first_result = 0;
    for (const QueryTile& query : plan_.tiles) {
      const Splits splits = splits_of(query, args_.window_tokens);
      for (int32_t kv_head = 0; kv_head < args_.n_kv_heads; ++kv_head)
        for (int32_t part = 0; part < parts_.n_parts; ++part, ++unit)
          if (unit >= begin && unit < end) merge_block(query, splits, kv_head, part, first_result);
      first_result += int64_t{splits.count} * query.n_tokens * args_.n_heads;
    }
  }

  void merge_block(const QueryTile& query, Splits splits, int32_t kv_head, int32_t part, int64_t first_result) {
    int64_t result = first_result + results_before(query, splits, kv_head, part);
    const int32_t first_head = kv_head * args_.per_kv_head() + parts_.begin(part);
    for (int32_t token = 0; token < query.n_tokens; ++token)
      for (int32_t h = 0; h < parts_.size(part); ++h, result += splits.count) {
        float* out = run_.row(op_.out[0], query.first_row + token) + int64_t{first_head + h} * args_.head_dim;
        run_.step.element->merge_splits(partials_.states + result, partials_.values + result * args_.head_dim,
                                        splits.count, args_.head_dim, out);
      }
  }

  Run& run_;
  const pw_op& op_;
  const TilePlan& plan_;
  const AttentionArgs args_;
  Parts parts_{1, 1};
  int64_t n_units_ = 0;
  int64_t n_results_ = 0;
  Partials partials_{};
  bool fits_ = false;
};

int32_t greatest_divisor(int32_t a, int32_t b) { return b == 0 ? a : greatest_divisor(b, a % b); }

}  // namespace

int32_t tile_tokens_for(int32_t heads_per_kv_head) {
  const int32_t multiple = kKernelRows / greatest_divisor(kKernelRows, heads_per_kv_head);
  const int32_t tokens = kTargetRows / heads_per_kv_head / multiple * multiple;
  return tokens > 0 ? tokens : 1;
}

void plan_tiles(Step& step, const pw_batch& batch) {
  for (TilePlan& plan : step.tile_plans) {
    plan.tiles.clear();
    for (int32_t sequence = 0; sequence < batch.n_sequences; ++sequence) {
      const int32_t end = batch.sequence_first[sequence + 1];
      for (int32_t row = batch.sequence_first[sequence]; row < end; row += plan.tile_tokens) {
        const int32_t n_tokens = end - row < plan.tile_tokens ? end - row : plan.tile_tokens;
        plan.tiles.push_back({sequence, row, n_tokens, batch.positions[row]});
      }
    }
  }
}

size_t attention_shared_bytes(const Step& step, const pw_op&) { return step.team->size() > 1 ? kPartialBytes : 0; }

size_t attention_thread_bytes(const Step& step, const pw_op& op, const OpPlan& plan) {
  const AttentionArgs args(op);
  const int32_t n_rows = step.tile_plans[plan.tile_plan].tile_tokens * args.per_kv_head();
  return step.element->attention_scratch_bytes(n_rows, args.head_dim);
}

void run_attention(Run& run, const pw_op& op, const OpPlan& plan) {
  const TilePlan& tiles = run.step.tile_plans[plan.tile_plan];
  const int64_t n_units = static_cast<int64_t>(tiles.tiles.size()) * AttentionArgs(op).n_kv_heads;
  const int32_t n_threads = run.member.n_threads();
  if (n_threads == 1 || n_units >= int64_t{n_threads} * kUnitsPerThread) return run_whole_tiles(run, op, tiles);
  SplitAttention split(run, op, tiles);
  if (!split.fits()) return run_whole_tiles(run, op, tiles);
  split.compute();
  split.merge();
}

}  // namespace pw
