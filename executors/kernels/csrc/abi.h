// The structures Python fills and the native side reads. executors/kernels/abi.py mirrors them field by field;
// ea_struct_size() lets it verify at load time that both sides agree.
#pragma once
#include <cstdint>

typedef uint16_t bf16;  // bit pattern; arithmetic happens in float32

enum Epilogue : int32_t {
  EPI_STORE = 0,      // y = bf16(acc + bias)
  EPI_RESIDUAL = 1,   // y = bf16(bf16(acc + bias) + residual)
  EPI_SILU_UP = 2,    // gate and up interleaved by 16: y = bf16(bf16(silu(gate)) * up)
  EPI_GELU_UP = 3,    // same with tanh-approximated GELU
  EPI_LOGITS = 4,     // y float32 = cap(float(bf16(acc)) * scale)
  EPI_ARGMAX = 5,     // y int64 [m] = first index of the largest value EPI_LOGITS would have stored
};

enum NormStyle : int32_t {
  NORM_ROUND_THEN_SCALE = 0,  // Llama, Qwen: bf16(bf16(x / rms) * w)
  NORM_SCALE_IN_FLOAT = 1,    // Gemma: bf16(x / rms * w), w = 1 + checkpoint weight
};

// How panels hold their weights; see weight_layout.h.
enum WeightFormat : int32_t { WEIGHT_BF16 = 0, WEIGHT_INT8 = 1, WEIGHT_INT4 = 2 };

struct LinearOp {
  const bf16* x;
  const void* weight;
  const float* weight_scale;  // of each output, [panels * 32] in panel order; null for WEIGHT_BF16
  const float* bias;          // [panels * 32] in panel order, or null
  const bf16* residual;   // may equal y
  void* y;
  int64_t ldx, ldres, ldy;  // row strides in elements
  int64_t n, k;             // outputs and inputs; for *_UP epilogues n counts gate and up
  float scale, soft_cap;    // EPI_LOGITS and EPI_ARGMAX; soft_cap 0 is off
  int32_t epilogue, weight_format;
  int32_t fine_inputs;  // integer formats: inputs keep 15 bits instead of 8, for twice the arithmetic
  int32_t reserved;
};

// h = pre_weight ? norm(x; pre_weight) : x;  h += residual (stored back);  y = norm(h; weight).
struct NormOp {
  const bf16* x;
  bf16* residual;           // null: none
  const float* pre_weight;  // null: none
  const float* weight;      // null: only the residual is updated
  bf16* y;
  int64_t ldx, ldres, ldy;
  int64_t hidden;
  float eps;
  int32_t style;
};

// Per token: q and k heads normalised (optional) and rotated; q stays in `qkv`, k and v go to the cache.
struct QkvOp {
  bf16* qkv;  // [tokens][num_heads + 2 * num_kv_heads][head_size]
  const float* q_weight;
  const float* k_weight;  // null: no q/k norm
  const float* cos_sin;   // [max_position][rotary_dim]: cosines, then sines; null: no rotation
  bf16* kv_cache;
  int64_t ldqkv, max_position, block_stride;  // block_stride: elements from one cache block to the next
  int32_t num_heads, num_kv_heads, head_size, rotary_dim;
  float eps;
  int32_t style, group;
};

struct AttentionOp {
  const bf16* q;  // [tokens][num_heads][head_size] with row stride ldq
  const bf16* kv_cache;
  bf16* out;      // [tokens][num_heads * head_size] with row stride ldout
  int64_t ldq, ldout, block_stride;
  int32_t num_heads, num_kv_heads, head_size, sliding_window;  // sliding_window 0 is off
  float scale, soft_cap;
  int32_t group, non_causal;
};

// Rows of a packed weight: tied embeddings need no second copy. Formats: WEIGHT_BF16 and WEIGHT_INT8.
struct EmbedOp {
  const void* weight;
  const float* weight_scale;  // as in LinearOp
  bf16* y;
  int64_t ldy, n, k;
  float scale;  // applied in bf16; 1 is none
  int32_t weight_format;
};

struct GatherOp {  // dst[i] = src[sample_rows[i]]
  const bf16* src;
  bf16* dst;
  int64_t ldsrc, lddst, columns;
};

enum OpKind : int32_t { OP_LINEAR = 0, OP_NORM = 1, OP_QKV = 2, OP_ATTENTION = 3, OP_EMBED = 4, OP_GATHER = 5 };
enum RowSet : int32_t { ROWS_TOKENS = 0, ROWS_SAMPLED = 1 };
enum Condition : int32_t { WHEN_ALWAYS = 0, WHEN_GREEDY = 1, WHEN_LOGITS = 2 };

struct Op {
  int32_t kind, rows, condition, reserved;
  union {
    LinearOp linear;
    NormOp norm;
    QkvOp qkv;
    AttentionOp attention;
    EmbedOp embed;
    GatherOp gather;
  };
};

struct StepGroup {  // one KV group's view of the batch, as in executors/attention/base.py
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const int64_t* slot_mapping;
  const int32_t* prompt_lens;  // read by non-causal layers; null: every new token is of a prompt
  int64_t block_table_stride, num_blocks;
  int32_t block_size, reserved;
};

struct Step {
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* sample_rows;
  const StepGroup* groups;
  int64_t num_tokens, num_reqs, num_samples;
  int32_t num_groups;
  int32_t outputs;   // bit 0: greedy token ids, bit 1: logits
  int64_t* profile;  // nanoseconds by operation are added here, if not null
};

enum Status : int32_t {
  STATUS_OK = 0,
  STATUS_BAD_TOKEN = 1,      // input id outside the vocabulary
  STATUS_BAD_SLOT = 2,       // slot outside the cache
  STATUS_BAD_BLOCK = 3,      // block id outside the cache
  STATUS_BAD_POSITION = 4,   // position outside the rotary table
  STATUS_BAD_SHAPE = 5,      // block size the kernels cannot do
  STATUS_BAD_BATCH = 6,      // query_start_loc does not end at num_tokens, or a sequence is shorter than its queries
  STATUS_BAD_SAMPLE = 7,     // sample_rows not ascending within the batch
};
