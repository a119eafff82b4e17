// From one row of logits to a token.
//
// Order: penalties (repeat, then frequency and presence), bias, temperature, top-k, top-p, min-p, draw. Temperature 0
// takes the largest logit after penalties and bias, the lowest id where several are equal. Log probabilities are those
// of the model's own distribution, before everything in that list. The draw depends on (seed, draw) and the kept tokens
// alone.
#pragma once
#include "element_kernels.h"
#include "step.h"

namespace pw {

struct SamplerScratch {
  float* logits;        // [n_vocab] the row after penalties and bias
  int32_t* counts;      // [n_vocab] always left zeroed
  int32_t* candidates;  // [n_vocab]
  double* weights;      // [n_vocab] of sorted candidates
  float* block_maxima;  // [n_vocab / kMaxBlock]
  double* chunk_sums;   // [n_vocab / kSumChunk]
};

SamplerScratch carve_sampler(Carver& carver, int32_t n_vocab);

// nullptr when a token was chosen, else what is wrong with the logits.
const char* sample_row(const ElementKernels& element, const float* logits, int32_t n_vocab, const pw_sampler& sampler,
                       const SamplerScratch& scratch, pw_sampled* sampled);

// Words for a setting that can not be used, or nullptr.
const char* check_sampler(const pw_sampler& sampler, int32_t n_vocab);

}  // namespace pw
