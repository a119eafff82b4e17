/* The C ABI of the CPU kernels: everything Python may call, every argument with its shape.
 *
 * Python lowers a model to a flat list of `pw_op` and runs it with one call per forward pass (`pw_step_run`).
 * Struct sizes and PW_ABI_VERSION are checked when the library is loaded. All pointers stay owned by the caller
 * unless a function says otherwise. Functions that return int return 0 or a negative PW_E_*; `pw_last_error`
 * (thread local) has the words.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* the library hides every other symbol */

#define PW_ABI_VERSION 1
#define PW_PAGE_TOKENS 32 /* tokens in a KV page */
#define PW_MAX_TOP 20     /* most logprobs per token */

enum {
  PW_OK = 0,
  PW_E_ARGUMENT = -1,
  PW_E_MEMORY = -2,
  PW_E_CANCELLED = -3,
  PW_E_UNSUPPORTED = -4,
  PW_E_FILE = -5,  /* reading failed, or the file has changed */
  PW_E_DEVICE = -6 /* the CUDA driver refused */
};

/* ---- library ---- */
int32_t pw_abi_version(void);
int32_t pw_struct_size(const char* name); /* "pw_weight", "pw_op", ...; -1 for an unknown name */
const char* pw_last_error(void);
const char* pw_isa(void);             /* the level in use: "avx512_vnni", "avx2" */
int32_t pw_set_isa(const char* name); /* for tests and measuring; refused when the CPU lacks it or it is unknown */
uint64_t pw_step_calls(void);         /* how often pw_step_run was entered, for the one-call-a-token check */

/* ---- memory ---- */
void* pw_arena_alloc(size_t bytes, int32_t huge_pages); /* zeroed, 2 MiB aligned anonymous memory; NULL when refused */
void pw_arena_free(void* memory, size_t bytes);

/* ---- weights ---- */
/* A matrix [rows, cols] of ggml type `type`, or a stack of `experts` of them. `packed` is the 16-row interleaved
 * layout made by pw_pack; when NULL the rows are packed on the fly from `file` (row-major, as in the GGUF file).
 * Vectors (norms, biases, frequencies) are F32, rows = 1, in `file`. Embedding rows are read from `file`. */
typedef struct {
  int32_t type;
  int32_t rows;
  int32_t cols;
  int32_t experts;
  const uint8_t* packed;
  const uint8_t* file;
  int64_t packed_expert_bytes; /* stride between experts in `packed` */
  int64_t file_expert_bytes;   /* stride between experts in `file` */
} pw_weight;

int32_t pw_type_supported(int32_t type);                           /* 1 if there are kernels for it */
int64_t pw_packed_bytes(int32_t type, int32_t rows, int32_t cols); /* of one matrix; rows are padded to 16 */
int64_t pw_file_bytes(int32_t type, int32_t rows, int32_t cols);
/* pack rows [row_begin, row_end) (multiples of 16, or the end) of one matrix; `file` and `packed` are its starts */
int32_t pw_pack(int32_t type, int32_t rows, int32_t cols, const uint8_t* file, uint8_t* packed, int32_t row_begin,
                int32_t row_end);

/* ---- threads ---- */
typedef struct pw_team pw_team;
/* `cpus` (n_threads ids) pins each thread, NULL leaves them free. The caller is thread 0. Threads park when idle. */
pw_team* pw_team_create(int32_t n_threads, const int32_t* cpus, int32_t spin_us);
void pw_team_destroy(pw_team* team);

/* ---- key/value cache ---- */
typedef struct pw_kv pw_kv;
enum { PW_KV_F16 = 1, PW_KV_Q8_0 = 8 }; /* ggml type ids */
/* Pages of PW_PAGE_TOKENS tokens; a page id holds its tokens in all layers. Memory is committed when touched. */
pw_kv* pw_kv_create(int32_t type, int32_t n_layers, const int32_t* n_kv_heads, const int32_t* head_dims,
                    int32_t n_pages);
void pw_kv_destroy(pw_kv* kv);
int64_t pw_kv_page_bytes(const pw_kv* kv); /* one page, all layers */
int32_t pw_kv_copy_page(pw_kv* kv, int32_t source, int32_t destination);
/* Where a layer's pages lie, as kv_layer.h has them, and the bytes from one head's pages to the next's; NULL for a layer
 * that does not exist. The region begins at a page of memory. */
void* pw_kv_layer_memory(const pw_kv* kv, int32_t layer, int64_t* head_bytes);
/* for tests and measuring: keys and values of one token of one head, as f32[head_dim] */
int32_t pw_kv_read(const pw_kv* kv, int32_t layer, int32_t head, int32_t page, int32_t slot, float* key, float* value);

/* ---- operations ----
 * Buffers are f32 [rows, width] with rows = tokens of the batch (or its outputs, after SELECT). */
typedef enum {
  PW_OP_EMBED = 1,    /* out0 = rows of weight0 for batch.token_ids, times f0 */
  PW_OP_RMS_NORM = 2, /* out0 = norm(in0) * weight0, eps f0; i0 = 1: out0 += norm(in0) * weight0 */
  PW_OP_LINEAR = 3,   /* for j < i0: out_j = weight_j in0 + bias_j; i1 = 1: out_0 += ...; f0 != 0: scaled by it;
                         f1 != 0: soft cap, f1 tanh(y / f1) */
  PW_OP_ROPE_STORE = 4, /* in0 = q, in1 = k, in2 = v; q rotated in place, k rotated and v written to the KV cache.
                           weight0, weight1 = q_norm, k_norm (or -1), weight2 = inverse frequencies [rope_dim / 2].
                           i0 = heads, i1 = kv heads, i2 = head_dim, i3 = rope_dim, i4 = style (0 interleaved,
                           1 half), i5 = KV layer; f0 = eps, f1 = magnitude of cos and sin */
  PW_OP_ATTENTION = 5,  /* out0 = attention of in0 = q; i0..i2 as above, i5 = KV layer, i6 = window (0 = all);
                           f0 = score scale, f1 = soft cap of scores (0 = none) */
  PW_OP_GLU = 6,        /* out0 = act(in0) * in1; i0 = 0 silu, 1 gelu (tanh) */
  PW_OP_ROUTER = 7,     /* out0 = expert ids (i32 in a f32 buffer [n, k]), out1 = their weights [n, k];
                           weight0 = router [experts, n_embd], bias0 = selection bias or -1; i0 = experts, i1 = k,
                           i2 = 0 softmax, 1 sigmoid, i3 = normalise; f0 = scale */
  PW_OP_MOE = 8,        /* out0 (+)= sum over chosen experts; in0 = h, in1 = ids, in2 = weights;
                           weight0..2 = gate, up, down stacks; i0 = act as in GLU, i1 = k, i2 = 1: accumulate */
  PW_OP_SELECT = 9,     /* out0[j] = in0[batch.output_rows[j]] */
  PW_OP_SAMPLE = 10     /* in0 = logits [outputs, i0 = n_vocab]; fills batch.sampled where batch.samplers is given and
                           copies to batch.logits where that is given */
} pw_op_kind;

typedef struct {
  int32_t kind;
  int32_t layer; /* -1 outside of layers; cancellation is checked where it changes */
  int32_t in[4]; /* buffer ids, -1 = none */
  int32_t out[4];
  int32_t weight[4]; /* weight ids, -1 = none */
  int32_t bias[4];
  int32_t i[8];
  float f[4];
} pw_op;

typedef struct {
  int32_t width;
  int32_t is_output; /* 1: rows are the batch's outputs, 0: its tokens */
} pw_buffer;

/* ---- batch ---- */
typedef struct {
  float temperature; /* <= 0: greedy */
  int32_t top_k;     /* 0 = off */
  float top_p;       /* 1 = off */
  float min_p;       /* 0 = off */
  float repeat_penalty; /* 1 = off */
  float presence_penalty;
  float frequency_penalty;
  int32_t n_history; /* tokens the penalties look at */
  const int32_t* history;
  int32_t n_bias;
  int32_t n_top; /* -1: no logprobs, else 0..PW_MAX_TOP */
  const int32_t* bias_ids;
  const float* bias_values;
  uint64_t seed;
  uint64_t draw; /* number of this token in its sequence: the random number depends on (seed, draw) alone */
} pw_sampler;

typedef struct {
  int32_t token;
  float logprob;
  int32_t n_top;
  int32_t top_ids[PW_MAX_TOP];
  float top_logprobs[PW_MAX_TOP];
} pw_sampled;

typedef struct {
  int32_t n_tokens;
  int32_t n_sequences;
  int32_t n_outputs;
  int32_t page_table_stride;
  const int32_t* token_ids;      /* [n_tokens] */
  const int32_t* positions;      /* [n_tokens] */
  const int32_t* sequence_first; /* [n_sequences + 1]; the tokens of a sequence are contiguous, positions ascend by 1 */
  const int32_t* page_tables;    /* [n_sequences, page_table_stride] page ids */
  const int32_t* output_rows;    /* [n_outputs] */
  const pw_sampler* samplers;    /* [n_outputs] or NULL */
  pw_sampled* sampled;           /* [n_outputs] or NULL */
  float* logits;                 /* [n_outputs, n_vocab] or NULL */
  const int32_t* cancel;         /* when it becomes non-zero the step ends with PW_E_CANCELLED; may be NULL */
} pw_batch;

/* ---- step ---- */
typedef struct pw_step pw_step;
/* copies ops, weights (not their bytes) and buffers; allocates every buffer for max_tokens and max_outputs rows */
pw_step* pw_step_create(const pw_op* ops, int32_t n_ops, const pw_weight* weights, int32_t n_weights,
                        const pw_buffer* buffers, int32_t n_buffers, int32_t max_tokens, int32_t max_outputs,
                        pw_team* team, pw_kv* kv);
void pw_step_destroy(pw_step* step);
int64_t pw_step_workspace_bytes(const pw_step* step);
/* one forward pass on the first n_threads of the team */
int32_t pw_step_run(pw_step* step, const pw_batch* batch, int32_t n_threads);
const float* pw_step_buffer(const pw_step* step, int32_t buffer); /* [rows, width], valid until the next run */
/* seconds spent per op kind since the last call (thread 0's clock); seconds[16] */
void pw_step_profile(pw_step* step, double* seconds);

/* ---- measuring (no model needed) ---- */
double pw_read_bandwidth(pw_team* team, int32_t n_threads, const void* memory, size_t bytes); /* bytes per second */
double pw_int8_peak(pw_team* team, int32_t n_threads); /* multiply-adds per second, registers only */

/* ---- one matrix product on the calling thread, for tests and measuring ----
 * For each expert e in [expert_begin, expert_end) and row group g in [group_begin, group_end):
 * y[output_rows[t], row] (+)= scale * sum_k weight[e][row, k] * x[gather[t], k] + bias[row]; every expert writes the
 * same y. gather, output_rows, bias and seconds may be NULL; strides are in floats. */
typedef struct {
  const pw_weight* weight;
  const float* x;
  int64_t x_stride;
  const int32_t* gather;
  float* y;
  int64_t y_stride;
  const int32_t* output_rows;
  const float* bias;
  double* seconds; /* [2]: preparing the activations, multiplying */
  int32_t n_tokens;
  int32_t expert_begin;
  int32_t expert_end;
  int32_t group_begin; /* row groups of 16 rows */
  int32_t group_end;
  int32_t accumulate;
  float scale;
} pw_matmul_call;
int32_t pw_matmul(const pw_matmul_call* call);
int32_t pw_dequantize_row(int32_t type, int32_t cols, const uint8_t* file_row, float* out); /* f32[cols] */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
