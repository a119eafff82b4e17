// The table of element kernels of this instruction set level.
#include "kernel_list.h"

namespace pw::PW_ISA {

extern const ElementKernels element_table;
const ElementKernels element_table = {
    rms_norm,
    glu,
    scale,
    soft_cap,
    softmax,
    sigmoid,
    weighted_sum,
    rope,
    store_key,
    store_value,
    attention_scratch_bytes,
    attend,
    attend_split,
    merge_splits,
    row_max,
    first_equal,
    exp_sums,
    block_max,
    count_between,
    collect_between,
};

}  // namespace pw::PW_ISA
