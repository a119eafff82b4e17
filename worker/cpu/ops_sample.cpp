// SAMPLE: hands logits out and picks a token per output row.
#include <cstring>

#include "sampler.h"
#include "step.h"

namespace pw {

size_t sample_thread_bytes(const Step&, const pw_op& op) {
  Carver carver(nullptr);
  carve_sampler(carver, sample_vocabulary(op));
  return carver.used_bytes();
}

void run_sample(Run& run, const pw_op& op) {
  const int32_t n_vocab = sample_vocabulary(op);
  const pw_batch& batch = run.batch;
  run.each_row(batch.n_outputs, [&](int32_t output) {
    const float* logits = run.row(op.in[0], output);
    if (batch.logits) std::memcpy(batch.logits + int64_t{output} * n_vocab, logits, n_vocab * sizeof(float));
    if (!batch.samplers) return;
    Carver carver(run.scratch());
    const SamplerScratch scratch = carve_sampler(carver, n_vocab);
    // counts share their memory with other ops' scratch: they are only zero after this
    if (batch.samplers[output].n_history > 0) std::memset(scratch.counts, 0, n_vocab * sizeof(int32_t));
    const char* words =
        sample_row(*run.step.element, logits, n_vocab, batch.samplers[output], scratch, &batch.sampled[output]);
    if (words) run.fail(PW_E_ARGUMENT, words);
  });
}

}  // namespace pw
