// The element kernels of one instruction set level, as element_table.cpp gathers them.
#pragma once
#include "element_kernels.h"

namespace pw::PW_ISA {

void rms_norm(const float* x, const float* weight, float eps, int32_t width, bool accumulate, float* out);
void glu(int32_t activation, const float* gate, const float* up, int32_t n, float* out);
void scale(float* x, int32_t n, float factor);
void soft_cap(float* x, int32_t n, float cap);
void softmax(float* x, int32_t n);
void sigmoid(float* x, int32_t n);
void weighted_sum(const float* rows, const float* weights, int32_t n_rows, int32_t width, bool accumulate, float* out);

void rope(const RopeHead& shape, const float* head, float* out);
void store_key(const KvLayer& layer, uint8_t* block, int32_t slot, const float* key);
void store_value(const KvLayer& layer, uint8_t* block, int32_t slot, const float* value);

size_t attention_scratch_bytes(int32_t n_rows, int32_t head_dim);
void attend(const AttentionTile& tile);
void attend_split(const AttentionTile& tile, int32_t split, AttentionState* states, float* values, int64_t stride);
void merge_splits(const AttentionState* states, const float* values, int32_t n, int32_t head_dim, float* output);

float row_max(const float* x, int32_t n, bool* has_nan);
int32_t first_equal(const float* x, int32_t n, float value);
void exp_sums(const float* x, int32_t n, float largest, float inverse_temperature, float floor, double* chunk_sums);
void block_max(const float* x, int32_t n, float* maxima);
int32_t count_between(const float* x, int32_t n, float low, float high);
int32_t collect_between(const float* x, int32_t n, float low, float high, int32_t* ids);

}  // namespace pw::PW_ISA
