// What a captured decode step takes from pinned memory of the host and leaves there. Kernels read and write it in place:
// a copy of a few words by the copy engine keeps the step waiting several times as long.
#include "common.cuh"

struct Row {  // ROW of step_inputs.py
  int token, position, page_index, page;
};

// Row i is sequence i. A token of -1 was drawn by the step before and is in `tokens` already; a page index of -1 means
// that its page table is as it was. `samplers` are plain words.
KERNEL __launch_bounds__(256)
    receive_inputs(const Row* rows, int n_rows, int* tokens, int* positions, int* page_tables, int max_pages,
            const u32* given_samplers, u32* samplers, int n_sampler_words) {
  for (int i = threadIdx.x; i < n_rows; i += blockDim.x) {
    const Row row = rows[i];
    if (row.token >= 0) tokens[i] = row.token;
    positions[i] = row.position;
    if (row.page_index >= 0) page_tables[(u64)i * max_pages + row.page_index] = row.page;
  }
  for (int i = threadIdx.x; i < n_sampler_words; i += blockDim.x) samplers[i] = given_samplers[i];
  __threadfence();  // for kernels that look at positions before they wait
}

KERNEL __launch_bounds__(256)
    send_answers(const u32* answers, u32* host, int n_words) {
  start_after_previous();
  for (int i = threadIdx.x; i < n_words; i += blockDim.x) host[i] = __ldcg(answers + i);
}
