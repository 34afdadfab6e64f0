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
constexpr int kFewRows = 8;  // below, a task takes as long as its reads, and the next task's are fetched ahead

static inline long align64(long bytes) { return (bytes + 63) / 64 * 64; }

// Buffers of one thread, carved from its scratch memory.
struct AttendScratch {
  bf16 *query, *weight;
  float *score, *chunk_out, *out, *chunk_max, *chunk_sum, *row_max, *row_sum, *keep, *add;
  int32_t *begin, *end;
  static int max_rows(int heads_per_kv) { return heads_per_kv > kTileRows ? heads_per_kv : kTileRows; }
  static long bytes(int heads_per_kv, int head_size) {
    const long rows = max_rows(heads_per_kv);
    return align64(rows * head_size * 2) + align64(rows * kWeightStride * 2) + align64(rows * kScoreStride * 4) +
           2 * align64(rows * head_size * 4) + 8 * align64(align64(rows * 4));
  }
  AttendScratch(char* memory, int heads_per_kv, int head_size) {
    const long rows = max_rows(heads_per_kv);
    const auto take = [&](long size) { char* at = memory; memory += align64(size); return at; };
    query = (bf16*)take(rows * head_size * 2);
    weight = (bf16*)take(rows * kWeightStride * 2);
    score = (float*)take(rows * kScoreStride * 4);
    chunk_out = (float*)take(rows * head_size * 4);
    out = (float*)take(rows * head_size * 4);
    float** const fields[] = {&chunk_max, &chunk_sum, &row_max, &row_sum, &keep, &add};
    for (float** field : fields) *field = (float*)take(align64(rows * 4));
    begin = (int32_t*)take(align64(rows * 4));
    end = (int32_t*)take(align64(rows * 4));
  }
};

// A partial result is [max, sum, 14 unused][head_size] float32.
constexpr int kPartialHeader = 16;
static inline float* partial_at(const AttendCall& call, int slot, int head) {
  return call.partials + ((int64_t)slot * call.op->num_heads + head) * (kPartialHeader + call.op->head_size);
}

// The tiles of one chunk that a task reads: [first, last).
struct Tiles {
  const bf16 *key[kChunkTiles], *value[kChunkTiles];
  int first = 0, last = 0;
};

static void find_tiles(Tiles& tiles, const AttendCall& call, const PlanItem& item, int kv_head, int chunk) {
  const AttentionOp& op = *call.op;
  const CacheLayout cache(op.block_stride, op.head_size, call.block_size);
  const QueryToken* tokens = call.tokens + item.first_token;
  const int32_t* blocks = call.block_table + tokens[0].request * call.block_table_stride;
  const int start = chunk * kChunk;
  int first = kChunk, last = 0;
  for (int t = 0; t < item.num_tokens; t++) {
    first = tokens[t].begin - start < first ? tokens[t].begin - start : first;
    last = tokens[t].end - start > last ? tokens[t].end - start : last;
  }
  tiles.first = (first < 0 ? 0 : first) / kTile;
  tiles.last = ((last > kChunk ? kChunk : last) + kTile - 1) / kTile;
  for (int j = tiles.first; j < tiles.last; j++) {
    const int token = start + j * kTile;
    const int64_t slot = (int64_t)blocks[token / call.block_size] * call.block_size + token % call.block_size;
    tiles.key[j] = cache.key_tile((bf16*)op.kv_cache, slot, kv_head);
    tiles.value[j] = cache.value_tile((bf16*)op.kv_cache, slot, kv_head);
  }
}

// Fetches the next task's tiles into L2, a few lines whenever this task has issued some arithmetic.
struct Fetcher {
  const Tiles* tiles;
  int tile, lines_per_tile, line = 0;
  Fetcher(const Tiles* next, int head_size) : tiles(next), tile(next ? next->first : 0), lines_per_tile(head_size / 2) {}
  int lines() const { return tiles ? (tiles->last - tiles->first) * lines_per_tile * 2 : 0; }
  void run(int count) {
    if (!tiles) return;
    for (; count > 0 && tile < tiles->last; count -= 2) {
      __builtin_prefetch((const char*)tiles->key[tile] + 64 * line, 0, 2);
      __builtin_prefetch((const char*)tiles->value[tile] + 64 * line, 0, 2);
      if (++line == lines_per_tile) line = 0, tile++;
    }
  }
};

// Scores -> unnormalised weights of one row over tiles [0, tiles) of the chunk; also its maximum and sum.
static void softmax_row(float* score, bf16* weight, int tiles, int first, int last, float scale, float soft_cap, float* max_out,
                        float* sum_out) {
  const VF minus_inf = vset(-INFINITY);
  const int first_tile = first / kTile, last_tile = (last + kTile - 1) / kTile;
  if (soft_cap > 0.0f)
    for (int j = first_tile; j < last_tile; j++)
      vstore(score + kTile * j, vmul(vtanh(vmul(vload(score + kTile * j), vset(scale / soft_cap))), vset(soft_cap / scale)));
  const auto mask = [&](int j) {
    vstore(score + kTile * j, vkeep_lanes(vload(score + kTile * j), first - kTile * j, last - kTile * j, minus_inf));
  };
  mask(first_tile);
  mask(last_tile - 1);
  VF top = vload(score + kTile * first_tile);
  for (int j = first_tile + 1; j < last_tile; j++) top = vmax(top, vload(score + kTile * j));
  const float max = vhmax(top);
  *max_out = max * scale;
  const float exponent = scale * 1.44269504f;
  const VF multiplier = vset(exponent), offset = vset(-max * exponent);
  VF sum = vzero();
  for (int j = 0; j < first_tile; j++) vstore_bf16(weight + kTile * j, vzero());
  for (int j = first_tile; j < last_tile; j++) {
    const VF p = vexp2_fast(vfma(vload(score + kTile * j), multiplier, offset));
    sum = vadd(sum, p);
    vstore_bf16(weight + kTile * j, p);
  }
  for (int j = last_tile; j < tiles; j++) vstore_bf16(weight + kTile * j, vzero());
  *sum_out = vhsum(sum);
}

static void dot_scores(const AttendScratch& s, int head_size, int rows, const Tiles& tiles, Fetcher& fetcher) {
  const RowBlocks blocks(rows, kMaxRows);
  const int pairs = (tiles.last - tiles.first + 1) / 2, share = fetcher.lines() / 2 / (pairs ? pairs : 1);
  for (int j = tiles.first; j < tiles.last; j += 2) {
    const bool two = j + 1 < tiles.last;
    const Panel panel = {tiles.key + j, head_size / 2, head_size / 2, two ? tiles.key[j + 1] - tiles.key[j] : 0, 2 * kTile};
    const DotFn* table = two ? kDot2 : kDot1;
    for (int b = 0, row = 0; b < blocks.count; row += blocks.size(b++))
      table[blocks.size(b) - 1](s.query + row * head_size, head_size, panel, s.score + row * kScoreStride + kTile * j, kScoreStride);
    fetcher.run(share);
  }
}

static void dot_values(const AttendScratch& s, int head_size, int rows, const Tiles& tiles, int last) {
  const int skipped = tiles.first * kTile;
  const auto run = [&](const DotFn* table, int limit, int column) {
    const RowBlocks blocks(rows, limit);
    const bf16* shifted[kChunkTiles];
    for (int j = tiles.first; j < tiles.last; j++) shifted[j] = tiles.value[j] + 2 * column;
    const Panel panel = {shifted + tiles.first, (last - skipped + 1) / 2, kTile / 2, 2 * kTile, 2 * head_size};
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
static void attend_chunk(const AttendCall& call, const AttendScratch& s, int rows, int chunk, const Tiles& tiles, Fetcher& fetcher) {
  const AttentionOp& op = *call.op;
  const int start = chunk * kChunk;
  dot_scores(s, op.head_size, rows, tiles, fetcher);
  const int share = (fetcher.lines() / 2 + rows - 1) / rows;
  int longest = 0;
  for (int r = 0; r < rows; r++) {
    fetcher.run(share);
    int first = s.begin[r] - start, last = s.end[r] - start;
    first = first < 0 ? 0 : first;
    last = last > kChunk ? kChunk : last;
    longest = last > longest ? last : longest;
    if (first < last) {
      softmax_row(s.score + r * kScoreStride, s.weight + r * kWeightStride, tiles.last, first, last, op.scale, op.soft_cap,
                  s.chunk_max + r, s.chunk_sum + r);
      continue;
    }
    s.chunk_max[r] = -INFINITY;
    s.chunk_sum[r] = 0.0f;
    for (int j = 0; j < tiles.last; j++) vstore_bf16(s.weight + r * kWeightStride + kTile * j, vzero());
  }
  if (tiles.last > tiles.first) dot_values(s, op.head_size, rows, tiles, longest);
}

// Adds one chunk's sums (s.chunk_max, s.chunk_sum; `values_of(row)`) to the running sums of all rows. A row's first
// chunk is taken as it is, and a chunk it reads nothing of changes nothing.
template <class Values>
static void merge_rows(const AttendScratch& s, int rows, int head_size, Values&& values_of) {
  for (int r = 0; r < rows; r += 16) {
    const VF old_max = vload(s.row_max + r), new_max = vload(s.chunk_max + r);
    const VF top = vmax(old_max, new_max), log2e = vset(1.44269504f);
    vstore(s.keep + r, vexp2(vmul(vsub(old_max, top), log2e)));
    vstore(s.add + r, vexp2(vmul(vsub(new_max, top), log2e)));
  }
  for (int r = 0; r < rows; r++) {
    if (s.chunk_max[r] == -INFINITY) continue;
    float* out = s.out + r * head_size;
    const float* values = values_of(r);
    if (s.row_max[r] == -INFINITY) {
      s.row_max[r] = s.chunk_max[r];
      s.row_sum[r] = s.chunk_sum[r];
      std::memcpy(out, values, head_size * sizeof(float));
      continue;
    }
    s.row_max[r] = s.row_max[r] > s.chunk_max[r] ? s.row_max[r] : s.chunk_max[r];
    s.row_sum[r] = s.row_sum[r] * s.keep[r] + s.chunk_sum[r] * s.add[r];
    const VF keep = vset(s.keep[r]), add = vset(s.add[r]);
    for (int c = 0; c < head_size; c += 16) vstore(out + c, vfma(vload(values + c), add, vmul(vload(out + c), keep)));
  }
}

static void load_rows(const AttendCall& call, const PlanItem& item, int kv_head, const AttendScratch& s) {
  const AttentionOp& op = *call.op;
  const int heads = op.num_heads / op.num_kv_heads, d = op.head_size;
  const QueryToken* tokens = call.tokens + item.first_token;
  for (int t = 0, r = 0; t < item.num_tokens; t++) {
    const bf16* query = op.q + (long)tokens[t].token * op.ldq + kv_head * heads * d;
    std::memcpy(s.query + r * d, query, heads * d * sizeof(bf16));
    for (int h = 0; h < heads; h++, r++) {
      s.begin[r] = tokens[t].begin;
      s.end[r] = tokens[t].end;
      s.row_max[r] = -INFINITY;
      s.row_sum[r] = 0.0f;
    }
  }
}

static void merge_partials(const AttendCall& call, const PlanItem& item, int kv_head, const AttendScratch& s, int chunk) {
  const int heads = call.op->num_heads / call.op->num_kv_heads, rows = item.num_tokens * heads;
  const auto partial = [&](int r) {
    return partial_at(call, call.tokens[item.first_token + r / heads].first_slot + chunk, kv_head * heads + r % heads);
  };
  for (int r = 0; r < rows; r++) {
    s.chunk_max[r] = partial(r)[0];
    s.chunk_sum[r] = partial(r)[1];
  }
  merge_rows(s, rows, call.op->head_size, [&](int r) { return partial(r) + kPartialHeader; });
}

static void store_partials(const AttendCall& call, const PlanItem& item, int kv_head, const AttendScratch& s, int chunk) {
  const int heads = call.op->num_heads / call.op->num_kv_heads, rows = item.num_tokens * heads, d = call.op->head_size;
  for (int r = 0; r < rows; r++) {
    float* partial = partial_at(call, call.tokens[item.first_token + r / heads].first_slot + chunk, kv_head * heads + r % heads);
    partial[0] = s.chunk_max[r];
    partial[1] = s.chunk_sum[r];
    std::memcpy(partial + kPartialHeader, s.chunk_out + r * d, d * sizeof(float));
  }
}

static void store_rows(const AttendCall& call, const PlanItem& item, int kv_head, const AttendScratch& s) {
  const AttentionOp& op = *call.op;
  const int heads = op.num_heads / op.num_kv_heads, d = op.head_size;
  for (int r = 0; r < item.num_tokens * heads; r++) {
    bf16* y = op.out + (long)call.tokens[item.first_token + r / heads].out_row * op.ldout + (kv_head * heads + r % heads) * d;
    const VF inverse = vset(1.0f / s.row_sum[r]);
    for (int c = 0; c < d; c += 16) vstore_bf16(y + c, vmul(vload(s.out + r * d + c), inverse));
  }
}

// Tasks are (KV head, item), items fastest, so that a head's keys and values stay in cache.
static void attend_run(const AttendCall& call, long begin, long end, char* memory) {
  const AttentionOp& op = *call.op;
  const int heads = op.num_heads / op.num_kv_heads, d = op.head_size;
  const AttendScratch s(memory, heads, d);
  const auto item_of = [&](long task) -> const PlanItem& { return call.items[task % call.num_items]; };
  const auto head_of = [&](long task) { return (int)(task / call.num_items); };
  Tiles buffers[2];
  Tiles *tiles = &buffers[0], *next = &buffers[1];
  bool fetched = false;  // `tiles` already describes the next chunk
  for (long task = begin; task < end; task++) {
    const PlanItem& item = item_of(task);
    const int head = head_of(task), rows = item.num_tokens * heads;
    load_rows(call, item, head, s);
    for (int chunk = item.merge_first; chunk < item.merge_last; chunk++) merge_partials(call, item, head, s, chunk);
    for (int chunk = item.first_chunk; chunk < item.last_chunk; chunk++) {
      if (!fetched) find_tiles(*tiles, call, item, head, chunk);
      fetched = false;
      if (rows <= kFewRows) {
        if (chunk + 1 < item.last_chunk) {
          find_tiles(*next, call, item, head, chunk + 1);
          fetched = true;
        } else if (task + 1 < end && item_of(task + 1).first_chunk < item_of(task + 1).last_chunk) {
          find_tiles(*next, call, item_of(task + 1), head_of(task + 1), item_of(task + 1).first_chunk);
          fetched = true;
        }
      }
      Fetcher fetcher(fetched ? next : nullptr, d);
      attend_chunk(call, s, rows, chunk, *tiles, fetcher);
      if (fetched) {
        Tiles* swap = tiles;
        tiles = next;
        next = swap;
      }
      if (call.finals)
        merge_rows(s, rows, d, [&](int r) { return s.chunk_out + r * d; });
      else
        store_partials(call, item, head, s, chunk);
    }
    if (call.finals) store_rows(call, item, head, s);
  }
}

}  // namespace EA_ISA
