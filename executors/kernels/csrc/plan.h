// How one step's attention of one KV group is cut into tasks. Built once per step and shared by all its layers.
//
// Keys are read in chunks of kChunk tokens at fixed positions. The softmax sums of a (query, chunk) depend on nothing
// else, and chunks are merged in ascending order, so every cut below gives bit-identical results:
//   - partial items compute single chunks: for queries of several requests that share the blocks of a prefix (whose
//     keys and values are then read once), and for long contexts with too few requests to occupy all threads;
//   - final items merge a query's partial chunks, compute its other chunks, and write its output.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"

constexpr int kChunk = 256;
constexpr int kTileRows = 24;  // query rows (tokens * heads of a group) per task: two blocks of the dot kernel

struct QueryToken {
  int32_t token;       // row of the flattened batch
  int32_t out_row;     // row of the output
  int32_t request;
  int32_t begin, end;  // keys [begin, end) are read
  int32_t first_slot;  // of its partial chunks, in units of (token, chunk)
};

struct PlanItem {
  int32_t first_token, num_tokens;  // in AttentionPlan::tokens
  int32_t first_chunk, last_chunk;  // [first, last) computed here
  int32_t merge_first, merge_last;  // final items: these chunks come from partial items
};

// Vectors keep their memory from step to step.
struct AttentionPlan {
  std::vector<QueryToken> tokens;
  std::vector<PlanItem> partials, finals;
  int64_t partial_slots = 0;

  // Only while it is built.
  struct Request {
    int32_t first_token, num_tokens;  // in tokens
    int32_t shared_chunks;            // computed together with other requests
  };
  struct Member {  // a request that may share its first blocks with others
    int32_t first_block, request;
  };
  struct Family {  // members [first, last)
    int32_t first, last, shared_chunks;
  };
  std::vector<Request> requests;
  std::vector<Member> members;
  std::vector<Family> families;
};

// Plain pointers only: code compiled for one instruction set must not instantiate shared library templates.
struct AttendCall {
  const AttentionOp* op;
  const QueryToken* tokens;
  const PlanItem* items;
  int64_t num_items;
  bool finals;
  float* partials;
  const int32_t* block_table;
  int64_t block_table_stride;
  int32_t block_size;
};

struct PlanShape {
  int num_heads, num_kv_heads, sliding_window;
  bool non_causal;
};

// `rows`: the query tokens wanted, ascending, and output rows are their indices; null is all.
void build_plan(AttentionPlan& plan, const Step& step, const StepGroup& group, const PlanShape& shape,
               const int64_t* rows, int64_t num_rows, int threads);
