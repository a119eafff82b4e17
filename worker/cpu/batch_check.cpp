// Batches that would read or write outside of their memory, or ask for what can not be, are refused before a step runs.
// Words say what was given and what would do.
#include "error.h"
#include "op_args.h"
#include "sampler.h"
#include "step.h"

namespace pw {
namespace {

int32_t vocabulary(const Step& step) {  // 0 where nothing is sampled
  for (const pw_op& op : step.ops)
    if (op.kind == PW_OP_SAMPLE) return sample_vocabulary(op);
  return 0;
}

int32_t embedding_rows(const Step& step) {  // 0 where nothing is embedded
  for (const pw_op& op : step.ops)
    if (op.kind == PW_OP_EMBED) return step.weights[op.weight[0]].rows;
  return 0;
}

int32_t check_shape(const Step& step, const pw_batch& batch, int32_t n_threads) {
  if (n_threads < 1 || n_threads > step.team->size())
    return fail(PW_E_ARGUMENT, "%d threads of a team of %d", n_threads, step.team->size());
  if (batch.n_tokens < 1 || batch.n_tokens > step.max_tokens)
    return fail(PW_E_ARGUMENT, "%d tokens in a step made for 1 to %d", batch.n_tokens, step.max_tokens);
  if (batch.n_outputs < 0 || batch.n_outputs > step.max_outputs)
    return fail(PW_E_ARGUMENT, "%d outputs in a step made for up to %d", batch.n_outputs, step.max_outputs);
  if (batch.n_sequences < 1 || batch.n_sequences > batch.n_tokens)
    return fail(PW_E_ARGUMENT, "%d sequences with %d tokens", batch.n_sequences, batch.n_tokens);
  if (!batch.token_ids || !batch.positions || !batch.sequence_first || (step.kv && !batch.page_tables) ||
      (batch.n_outputs > 0 && !batch.output_rows) || (batch.samplers && !batch.sampled))
    return fail(PW_E_ARGUMENT, "a pointer of the batch is missing");
  return PW_OK;
}

int32_t check_sequence(const Step& step, const pw_batch& batch, int32_t sequence) {
  const int32_t begin = batch.sequence_first[sequence], end = batch.sequence_first[sequence + 1];
  if (begin >= end || begin < 0 || end > batch.n_tokens)
    return fail(PW_E_ARGUMENT, "sequence %d has tokens [%d, %d) of %d", sequence, begin, end, batch.n_tokens);
  const int32_t first_position = batch.positions[begin];
  for (int32_t token = begin; token < end; ++token)
    if (batch.positions[token] != first_position + (token - begin) || first_position < 0)
      return fail(PW_E_ARGUMENT, "token %d of sequence %d has position %d: they start at 0 or above and ascend by 1",
                  token - begin, sequence, batch.positions[token]);
  if (!step.kv) return PW_OK;
  const int64_t n_pages = (int64_t{first_position} + (end - begin) + PW_PAGE_TOKENS - 1) / PW_PAGE_TOKENS;
  if (n_pages > batch.page_table_stride)
    return fail(PW_E_ARGUMENT, "sequence %d needs %ld pages, its table holds %d", sequence, static_cast<long>(n_pages),
                batch.page_table_stride);
  const int32_t* pages = batch.page_tables + int64_t{sequence} * batch.page_table_stride;
  for (int64_t i = 0; i < n_pages; ++i)
    if (pages[i] < 0 || pages[i] >= step.kv->n_pages())
      return fail(PW_E_ARGUMENT, "sequence %d has page %d, the cache has 0..%d", sequence, pages[i],
                  step.kv->n_pages() - 1);
  return PW_OK;
}

int32_t check_sequences(const Step& step, const pw_batch& batch) {
  if (batch.sequence_first[0] != 0 || batch.sequence_first[batch.n_sequences] != batch.n_tokens)
    return fail(PW_E_ARGUMENT, "the sequences must cover tokens 0 to %d", batch.n_tokens);
  for (int32_t sequence = 0; sequence < batch.n_sequences; ++sequence) {
    const int32_t checked = check_sequence(step, batch, sequence);
    if (checked != PW_OK) return checked;
  }
  return PW_OK;
}

int32_t check_tokens(const Step& step, const pw_batch& batch) {
  const int32_t n_rows = embedding_rows(step);
  for (int32_t token = 0; token < batch.n_tokens && n_rows > 0; ++token)
    if (batch.token_ids[token] < 0 || batch.token_ids[token] >= n_rows)
      return fail(PW_E_ARGUMENT, "token id %d, the vocabulary has 0..%d", batch.token_ids[token], n_rows - 1);
  return PW_OK;
}

int32_t check_outputs(const Step& step, const pw_batch& batch) {
  const int32_t n_vocab = vocabulary(step);
  for (int32_t output = 0; output < batch.n_outputs; ++output) {
    const int32_t row = batch.output_rows[output];
    if (row < 0 || row >= batch.n_tokens)
      return fail(PW_E_ARGUMENT, "output %d is row %d of %d", output, row, batch.n_tokens);
    if (!batch.samplers || n_vocab == 0) continue;
    const char* words = check_sampler(batch.samplers[output], n_vocab);
    if (words) return fail(PW_E_ARGUMENT, "sampler of output %d: %s", output, words);
  }
  return PW_OK;
}

}  // namespace

int32_t check_batch(const Step& step, const pw_batch& batch, int32_t n_threads) {
  int32_t checked = check_shape(step, batch, n_threads);
  if (checked == PW_OK) checked = check_sequences(step, batch);
  if (checked == PW_OK) checked = check_tokens(step, batch);
  if (checked == PW_OK) checked = check_outputs(step, batch);
  return checked;
}

}  // namespace pw
