// Attention of one task: query rows (tokens x heads of one KV head) over chunks of cached keys and values.
#pragma once
#include <cmath>
#include <cstring>

#include "cache_layout.h"
#include "linear.h"
#include "plan.h"

namespace EA_ISA {

constexpr int kScoreStride = kChunk + 16;
constexpr int kWeightStride = kChunk + 32;  // of bf16 weights; not a multiple of 4 KiB, so rows spread over cache sets
constexpr int kChunkTiles = kChunk / kTile;

static inline long align64(long bytes) { return (bytes + 63) / 64 * 64; }

// Buffers of one thread, carved from its scratch memory.
struct AttendScratch {
  bf16 *query, *weight;
  float *score, *chunk_out, *out, *chunk_max, *chunk_sum, *row_max, *row_sum;
  int32_t *begin, *end;
  static int max_rows(int heads_per_kv) { return heads_per_kv > kTileRows ? heads_per_kv : kTileRows; }
  static long bytes(int heads_per_kv, int head_size) {
    const long rows = max_rows(heads_per_kv);
    return align64(rows * head_size * 2) + align64(rows * kWeightStride * 2) + align64(rows * kScoreStride * 4) +
           2 * align64(rows * head_size * 4) + 6 * align64(rows * 4);
  }
  AttendScratch(char* memory, int heads_per_kv, int head_size) {
    const long rows = max_rows(heads_per_kv);
    const auto take = [&](long size) { char* at = memory; memory += align64(size); return at; };
    query = (bf16*)take(rows * head_size * 2);
    weight = (bf16*)take(rows * kWeightStride * 2);
    score = (float*)take(rows * kScoreStride * 4);
    chunk_out = (float*)take(rows * head_size * 4);
    out = (float*)take(rows * head_size * 4);
    for (float** field : {&chunk_max, &chunk_sum, &row_max, &row_sum}) *field = (float*)take(rows * 4);
    begin = (int32_t*)take(rows * 4);
    end = (int32_t*)take(rows * 4);
  }
};

// A partial result is [max, sum, 14 unused][head_size] float32.
constexpr int kPartialHeader = 16;
static inline float* partial_at(const AttendCall& call, int slot, int head) {
  return call.partials + ((int64_t)slot * call.op->num_heads + head) * (kPartialHeader + call.op->head_size);
}

// Scores -> unnormalised weights of one row over tiles [0, tiles) of the chunk; also its maximum and sum.
static void softmax_row(float* score, bf16* weight, int tiles, int first, int last, float scale, float soft_cap, float* max_out,
                        float* sum_out) {
  const VF minus_inf = vset(-INFINITY);
  VF top = minus_inf;
  const int first_tile = first / kTile, last_tile = (last + kTile - 1) / kTile;
  for (int j = first_tile; j < last_tile; j++) {
    VF s = vload(score + kTile * j);
    const bool edge = kTile * j < first || kTile * (j + 1) > last;
    if (soft_cap > 0.0f) s = vmul(vtanh(vmul(s, vset(scale / soft_cap))), vset(soft_cap / scale));
    if (edge) s = vkeep_lanes(s, first - kTile * j, last - kTile * j, minus_inf);
    if (edge || soft_cap > 0.0f) vstore(score + kTile * j, s);
    top = vmax(top, s);
  }
  const float max = vhmax(top);
  *max_out = max * scale;
  const float exponent = scale * 1.44269504f;
  const VF multiplier = vset(exponent), offset = vset(-max * exponent);
  VF sum = vzero();
  for (int j = 0; j < first_tile; j++) vstore_bf16(weight + kTile * j, vzero());
  for (int j = first_tile; j < last_tile; j++) {
    const VF p = vexp2(vfma(vload(score + kTile * j), multiplier, offset));
    sum = vadd(sum, p);
    vstore_bf16(weight + kTile * j, p);
  }
  for (int j = last_tile; j < tiles; j++) vstore_bf16(weight + kTile * j, vzero());
  *sum_out = vhsum(sum);
}

static void dot_scores(const bf16* query, int head_size, int rows, const bf16* const* key_tiles, int first_tile, int tiles,
                       float* score) {
  const RowBlocks blocks(rows, kMaxRows);
  for (int j = first_tile; j < tiles; j += 2) {
    const bool two = j + 1 < tiles;
    const Panel panel = {key_tiles + j, head_size / 2, head_size / 2, two ? key_tiles[j + 1] - key_tiles[j] : 0, 2 * kTile};
    for (int b = 0, row = 0; b < blocks.count; row += blocks.size(b++))
      (two ? kDot2 : kDot1)[blocks.size(b) - 1](query + row * head_size, head_size, panel, score + row * kScoreStride + kTile * j,
                                                kScoreStride);
  }
}

static void dot_values(const AttendScratch& s, int head_size, int rows, const bf16* const* value_tiles, int first_tile, int last) {
  const int skipped = first_tile * kTile;
  const auto run = [&](const DotFn* table, int limit, int column) {
    const RowBlocks blocks(rows, limit);
    const bf16* shifted[kChunkTiles];
    for (int j = first_tile; j * kTile < last; j++) shifted[j] = value_tiles[j] + 2 * column;
    const Panel panel = {shifted + first_tile, (last - skipped + 1) / 2, kTile / 2, 2 * kTile, 2 * head_size};
    for (int b = 0, row = 0; b < blocks.count; row += blocks.size(b++))
      table[blocks.size(b) - 1](s.weight + row * kWeightStride + skipped, kWeightStride, panel,
                                s.chunk_out + row * head_size + column, head_size);
  };
  int column = 0;
  for (; column + 64 <= head_size; column += 64) run(kDot4, kMaxRowsWide, column);
  for (; column + 32 <= head_size; column += 32) run(kDot2, kMaxRows, column);
  for (; column < head_size; column += 16) run(kDot1, kMaxRows, column);
}

// Leaves max, sum and weighted values of chunk `chunk` in s.chunk_*; rows that read nothing of it get max -inf.
static void attend_chunk(const AttendCall& call, const AttendScratch& s, const int32_t* blocks, int kv_head, int rows, int chunk) {
  const AttentionOp& op = *call.op;
  const CacheLayout cache(op.num_kv_heads, op.head_size, call.block_size);
  const int start = chunk * kChunk;
  int first = kChunk, last = 0;
  for (int r = 0; r < rows; r++) {
    first = s.begin[r] - start < first ? s.begin[r] - start : first;
    last = s.end[r] - start > last ? s.end[r] - start : last;
  }
  first = first < 0 ? 0 : first;
  last = last > kChunk ? kChunk : last;
  const int first_tile = first / kTile, tiles = (last + kTile - 1) / kTile;
  const bf16 *key_tiles[kChunkTiles], *value_tiles[kChunkTiles];
  for (int j = first_tile; j < tiles; j++) {
    const int token = start + j * kTile;
    const int64_t slot = (int64_t)blocks[token / call.block_size] * call.block_size + token % call.block_size;
    key_tiles[j] = cache.key_tile((bf16*)op.kv_cache, slot, kv_head);
    value_tiles[j] = cache.value_tile((bf16*)op.kv_cache, slot, kv_head);
  }
  dot_scores(s.query, op.head_size, rows, key_tiles, first_tile, tiles, s.score);
  for (int r = 0; r < rows; r++) {
    int row_first = s.begin[r] - start, row_last = s.end[r] - start;
    row_first = row_first < 0 ? 0 : row_first;
    row_last = row_last > kChunk ? kChunk : row_last;
    if (row_first >= row_last) {
      s.chunk_max[r] = -INFINITY;
      s.chunk_sum[r] = 0.0f;
      for (int j = 0; j < tiles; j++) vstore_bf16(s.weight + r * kWeightStride + kTile * j, vzero());
      continue;
    }
    softmax_row(s.score + r * kScoreStride, s.weight + r * kWeightStride, tiles, row_first, row_last, op.scale, op.soft_cap,
                s.chunk_max + r, s.chunk_sum + r);
  }
  if (tiles > first_tile) dot_values(s, op.head_size, rows, value_tiles, first_tile, last);
}

// Adds one chunk's sums to a row's running sums. The first chunk is taken as it is.
static void merge_row(const AttendScratch& s, int row, int head_size, float max, float sum, const float* values) {
  if (max == -INFINITY) return;
  float* out = s.out + row * head_size;
  if (s.row_max[row] == -INFINITY) {
    s.row_max[row] = max;
    s.row_sum[row] = sum;
    std::memcpy(out, values, head_size * sizeof(float));
    return;
  }
  const float top = max > s.row_max[row] ? max : s.row_max[row];
  const float keep = std::exp(s.row_max[row] - top), add = std::exp(max - top);
  s.row_max[row] = top;
  s.row_sum[row] = s.row_sum[row] * keep + sum * add;
  for (int c = 0; c < head_size; c += 16)
    vstore(out + c, vfma(vload(values + c), vset(add), vmul(vload(out + c), vset(keep))));
}

static void attend_item(const AttendCall& call, const PlanItem& item, int kv_head, char* memory) {
  const bool is_final = call.finals;
  const AttentionOp& op = *call.op;
  const int heads = op.num_heads / op.num_kv_heads, rows = item.num_tokens * heads, d = op.head_size;
  const AttendScratch s(memory, heads, d);
  const QueryToken* tokens = call.tokens + item.first_token;
  const int32_t* blocks = call.block_table + tokens[0].request * call.block_table_stride;
  for (int r = 0; r < rows; r++) {
    const QueryToken& token = tokens[r / heads];
    std::memcpy(s.query + r * d, op.q + (long)token.token * op.ldq + (kv_head * heads + r % heads) * d, d * sizeof(bf16));
    s.begin[r] = token.begin;
    s.end[r] = token.end;
    s.row_max[r] = -INFINITY;
    s.row_sum[r] = 0.0f;
  }
  for (int chunk = item.merge_first; is_final && chunk < item.merge_last; chunk++)
    for (int r = 0; r < rows; r++) {
      const float* partial = partial_at(call, tokens[r / heads].first_slot + chunk, kv_head * heads + r % heads);
      merge_row(s, r, d, partial[0], partial[1], partial + kPartialHeader);
    }
  for (int chunk = item.first_chunk; chunk < item.last_chunk; chunk++) {
    attend_chunk(call, s, blocks, kv_head, rows, chunk);
    for (int r = 0; r < rows; r++) {
      if (is_final) {
        merge_row(s, r, d, s.chunk_max[r], s.chunk_sum[r], s.chunk_out + r * d);
        continue;
      }
      float* partial = partial_at(call, tokens[r / heads].first_slot + chunk, kv_head * heads + r % heads);
      partial[0] = s.chunk_max[r];
      partial[1] = s.chunk_sum[r];
      std::memcpy(partial + kPartialHeader, s.chunk_out + r * d, d * sizeof(float));
    }
  }
  for (int r = 0; is_final && r < rows; r++) {
    bf16* y = op.out + (long)tokens[r / heads].out_row * op.ldout + (kv_head * heads + r % heads) * d;
    const VF inverse = vset(1.0f / s.row_sum[r]);
    for (int c = 0; c < d; c += 16) vstore_bf16(y + c, vmul(vload(s.out + r * d + c), inverse));
  }
}

// Tasks are (KV head, item), items fastest, so that a head's keys and values stay in cache.
static void attend_run(const AttendCall& call, long begin, long end, char* memory) {
  for (long task = begin; task < end; task++)
    attend_item(call, call.items[task % call.num_items], (int)(task / call.num_items), memory);
}

}  // namespace EA_ISA
