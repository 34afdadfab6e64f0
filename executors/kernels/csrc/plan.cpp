#include "plan.h"

#include <algorithm>
#include <cstring>

namespace {

typedef AttentionPlan::Request Request;

int tokens_per_item(const PlanShape& shape) {
  return std::max(1, kTileRows / std::max(1, shape.num_heads / shape.num_kv_heads));
}

// Chunks whose blocks are equal in both tables, of the chunks that both requests read in full.
int common_chunks(const int32_t* a, const int32_t* b, int limit, int blocks_per_chunk) {
  int chunks = 0;
  while (chunks < limit &&
         std::memcmp(a + (int64_t)chunks * blocks_per_chunk, b + (int64_t)chunks * blocks_per_chunk,
                     blocks_per_chunk * sizeof(int32_t)) == 0)
    chunks++;
  return chunks;
}

void collect_tokens(AttentionPlan& plan, const Step& step, const StepGroup& group, const PlanShape& shape, const int64_t* rows,
                    int64_t num_rows) {
  int64_t next = 0;
  for (int32_t r = 0; r < step.num_reqs; r++) {
    const int32_t start = group.query_start_loc[r], stop = group.query_start_loc[r + 1];
    const int32_t computed = group.seq_lens[r] - (stop - start);
    const int32_t prompt_end = group.prompt_lens ? std::min(group.prompt_lens[r], group.seq_lens[r]) : group.seq_lens[r];
    Request request = {(int32_t)plan.tokens.size(), 0, 0};
    for (int32_t t = start; t < stop; t++) {
      if (rows) {
        while (next < num_rows && rows[next] < t) next++;
        if (next >= num_rows || rows[next] != t) continue;
      }
      const int32_t position = computed + t - start;
      QueryToken token = {t, rows ? (int32_t)next : t, r, 0, position + 1, -1};
      if (shape.non_causal && position < prompt_end) token.end = prompt_end;
      if (shape.sliding_window > 0) {
        token.begin = std::max(0, position + 1 - shape.sliding_window);
        token.end = std::min(token.end, position + shape.sliding_window);
      }
      plan.tokens.push_back(token);
    }
    request.num_tokens = (int32_t)plan.tokens.size() - request.first_token;
    plan.requests.push_back(request);
  }
}

// Requests with the same blocks in their first chunk form a family; it shares the chunks its members have in common.
// Requests whose own queries fill a task gain nothing, and would leave many partial sums behind.
void find_families(AttentionPlan& plan, const StepGroup& group, const PlanShape& shape) {
  std::vector<Request>& requests = plan.requests;
  if (shape.sliding_window > 0 || requests.size() < 2 || group.block_size > kChunk) return;
  const int blocks_per_chunk = kChunk / group.block_size;
  for (int32_t r = 0; r < (int32_t)requests.size(); r++) {
    const int32_t queries = requests[r].num_tokens;
    const bool fills_task = queries > 1 && 2 * queries > tokens_per_item(shape);
    if (queries == 0 || fills_task || plan.tokens[requests[r].first_token].end < kChunk) continue;
    plan.members.push_back({group.block_table[r * group.block_table_stride], r});
  }
  std::sort(plan.members.begin(), plan.members.end(), [](const AttentionPlan::Member& a, const AttentionPlan::Member& b) {
    return a.first_block != b.first_block ? a.first_block < b.first_block : a.request < b.request;
  });
  const auto table = [&](int32_t member) { return group.block_table + plan.members[member].request * group.block_table_stride; };
  const auto full_chunks = [&](int32_t member) {
    return plan.tokens[requests[plan.members[member].request].first_token].end / kChunk;
  };
  const int32_t count = (int32_t)plan.members.size();
  for (int32_t first = 0, last; first < count; first = last) {
    int shared = full_chunks(first);
    for (last = first + 1; last < count && plan.members[last].first_block == plan.members[first].first_block; last++)
      shared = common_chunks(table(first), table(last), std::min(shared, full_chunks(last)), blocks_per_chunk);
    if (last - first < 2 || shared == 0) continue;
    for (int32_t m = first; m < last; m++) requests[plan.members[m].request].shared_chunks = shared;
    plan.families.push_back({first, last, shared});
  }
}

}  // namespace

void build_plan(AttentionPlan& plan, const Step& step, const StepGroup& group, const PlanShape& shape,
               const int64_t* rows, int64_t num_rows, int threads) {
  plan.tokens.clear();
  plan.partials.clear();
  plan.finals.clear();
  plan.requests.clear();
  plan.members.clear();
  plan.families.clear();
  plan.partial_slots = 0;
  std::vector<Request>& requests = plan.requests;
  collect_tokens(plan, step, group, shape, rows, num_rows);
  const int per_item = tokens_per_item(shape);
  find_families(plan, group, shape);

  for (const AttentionPlan::Family& family : plan.families) {
    // Members' query tokens are copied next to each other, so that an item is one range of plan.tokens.
    const int32_t first = (int32_t)plan.tokens.size();
    for (int32_t m = family.first; m < family.last; m++) {
      const Request& request = requests[plan.members[m].request];
      for (int32_t t = 0; t < request.num_tokens; t++) {
        QueryToken& token = plan.tokens[request.first_token + t];
        token.first_slot = (int32_t)plan.partial_slots;
        plan.partial_slots += family.shared_chunks;
        plan.tokens.push_back(QueryToken(token));
      }
    }
    const int32_t total = (int32_t)plan.tokens.size() - first;
    for (int32_t c = 0; c < family.shared_chunks; c++)
      for (int32_t t = 0; t < total; t += per_item)
        plan.partials.push_back({first + t, std::min<int32_t>(per_item, total - t), c, c + 1, 0, 0});
  }

  int64_t total_keys = 0;
  for (const auto& request : requests)
    for (int32_t t = 0; t < request.num_tokens; t++) {
      const QueryToken& token = plan.tokens[request.first_token + t];
      total_keys += token.end - token.begin;
    }
  total_keys *= shape.num_kv_heads;

  for (const auto& request : requests)
    for (int32_t t = 0; t < request.num_tokens; t += per_item) {
      const int32_t first = request.first_token + t, count = std::min<int32_t>(per_item, request.num_tokens - t);
      int32_t end = 0;
      for (int32_t i = 0; i < count; i++) end = std::max(end, plan.tokens[first + i].end);
      const int32_t last_chunk = (end + kChunk - 1) / kChunk;
      int32_t first_chunk = std::max(request.shared_chunks, plan.tokens[first].begin / kChunk);
      int32_t merge_first = 0, merge_last = request.shared_chunks;
      const int64_t keys = (int64_t)count * (last_chunk - first_chunk) * kChunk;
      if (merge_last == 0 && threads > 1 && last_chunk - first_chunk > 1 && keys * threads * 4 > total_keys) {
        for (int32_t i = 0; i < count; i++) {
          plan.tokens[first + i].first_slot = (int32_t)plan.partial_slots;
          plan.partial_slots += last_chunk;
        }
        for (int32_t c = first_chunk; c < last_chunk; c++) plan.partials.push_back({first, count, c, c + 1, 0, 0});
        merge_first = first_chunk;
        first_chunk = merge_last = last_chunk;
      }
      plan.finals.push_back({first, count, first_chunk, last_chunk, merge_first, merge_last});
    }
  // Longest first, so that the last tasks to be taken are short.
  const auto length = [](const PlanItem& item) { return (int64_t)item.num_tokens * (item.last_chunk - item.first_chunk); };
  std::sort(plan.finals.begin(), plan.finals.end(), [&](const PlanItem& a, const PlanItem& b) {
    return length(a) != length(b) ? length(a) > length(b) : a.first_token < b.first_token;
  });
}
