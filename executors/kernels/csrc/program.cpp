#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>

#include "weight_layout.h"

// Threads first take equal shares of kFirstShare of an operation's tasks, at fixed places, and divide the rest as they
// finish, so that a thread that lost its core for a while holds nobody up.
static constexpr double kFirstShare = 0.75;
static constexpr long kPrefetchLimit = 192 * 1024;  // of the next weights, while waiting: well inside a core's L2

Program::Program(const KernelTable& kernels, const Op* ops, int count)
    : kernels_(kernels), ops_(ops, ops + count), plan_of_op_(count, -1), next_linear_(count, -1), counters_(new Counter[2 * count]) {
  const auto need_scratch = [&](int64_t bytes) { scratch_stride_ = std::max(scratch_stride_, (bytes + 4095) / 4096 * 4096); };
  for (int i = 0; i < count; i++) {
    if (ops[i].kind == OP_LINEAR) need_scratch(kernels.linear_scratch_bytes(ops[i].linear));
    if (ops[i].kind != OP_ATTENTION) continue;
    const AttentionOp& op = ops[i].attention;
    const PlanKey key = {{op.num_heads, op.num_kv_heads, op.sliding_window, op.non_causal != 0}, op.group, ops[i].rows};
    const auto same = [&](const PlanKey& k) {
      return k.group == key.group && k.rows == key.rows && k.shape.num_heads == key.shape.num_heads &&
             k.shape.num_kv_heads == key.shape.num_kv_heads && k.shape.sliding_window == key.shape.sliding_window &&
             k.shape.non_causal == key.shape.non_causal;
    };
    plan_of_op_[i] = (int)(std::find_if(plan_keys_.begin(), plan_keys_.end(), same) - plan_keys_.begin());
    if (plan_of_op_[i] == (int)plan_keys_.size()) plan_keys_.push_back(key);
    need_scratch(kernels.attend_scratch_bytes(op.num_heads / op.num_kv_heads, op.head_size));
  }
  plans_.resize(plan_keys_.size());
  for (int i = count - 2; i >= 0; i--) next_linear_[i] = ops[i + 1].kind == OP_LINEAR ? i + 1 : next_linear_[i + 1];
}

bool Program::enabled(const Op& op) const {
  if (op.condition == WHEN_GREEDY && !(step_->outputs & 1)) return false;
  if (op.condition == WHEN_LOGITS && !(step_->outputs & 2)) return false;
  return true;
}

static int check_group(const Step& step, const StepGroup& group) {
  if (group.block_size % 16 != 0 || group.block_size <= 0 || group.block_size > kChunk) return STATUS_BAD_SHAPE;
  for (int64_t t = 0; t < step.num_tokens; t++)
    if (group.slot_mapping[t] >= group.num_blocks * group.block_size) return STATUS_BAD_SLOT;
  if (step.num_reqs && group.query_start_loc[step.num_reqs] != step.num_tokens) return STATUS_BAD_BATCH;
  for (int64_t r = 0; r < step.num_reqs; r++) {
    const int32_t queries = group.query_start_loc[r + 1] - group.query_start_loc[r];
    if (queries < 0 || queries > group.seq_lens[r]) return STATUS_BAD_BATCH;
    const int64_t blocks = (group.seq_lens[r] + group.block_size - 1) / group.block_size;
    if (blocks > group.block_table_stride) return STATUS_BAD_BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
      const int32_t id = group.block_table[r * group.block_table_stride + b];
      if (id < 0 || id >= group.num_blocks) return STATUS_BAD_BLOCK;
    }
  }
  return STATUS_OK;
}

// Everything that is used as an address, so that a wrong input is an error and not a crash.
int Program::check(const Step& step) const {
  int64_t max_position = INT64_MAX;
  for (const Op& op : ops_) {
    if (op.kind == OP_EMBED)
      for (int64_t t = 0; t < step.num_tokens; t++)
        if (step.input_ids[t] < 0 || step.input_ids[t] >= op.embed.n) return STATUS_BAD_TOKEN;
    if (op.kind == OP_QKV && op.qkv.cos_sin) max_position = std::min(max_position, op.qkv.max_position);
  }
  for (int64_t t = 0; t < step.num_tokens && max_position != INT64_MAX; t++)
    if (step.positions[t] < 0 || step.positions[t] >= max_position) return STATUS_BAD_POSITION;
  for (int64_t i = 0; step.sample_rows && i < step.num_samples; i++)
    if (step.sample_rows[i] < (i ? step.sample_rows[i - 1] + 1 : 0) || step.sample_rows[i] >= step.num_tokens)
      return STATUS_BAD_SAMPLE;
  for (int g = 0; g < step.num_groups; g++)
    if (const int status = check_group(step, step.groups[g])) return status;
  return STATUS_OK;
}

// Waking sleeping workers takes tens of microseconds: a step of that order runs on the caller's thread alone.
int Program::choose_threads() const {
  double ns = 0;
  for (const Op& op : ops_) {
    if (!enabled(op)) continue;
    if (op.kind == OP_LINEAR)
      ns += std::max((double)op.linear.n * op.linear.k / 12, (double)rows(op) * op.linear.n * op.linear.k / 100);
    else ns += 20.0 * rows(op);
    if (ns > 60000) return Pool::instance().threads();
  }
  return 1;
}

void Program::prepare(int threads) {
  int64_t needed = 0;
  for (size_t p = 0; p < plans_.size(); p++) {
    const PlanKey& key = plan_keys_[p];
    const bool sampled = key.rows == ROWS_SAMPLED;
    build_plan(plans_[p], *step_, step_->groups[key.group], key.shape, sampled ? step_->sample_rows : nullptr,
               step_->num_samples, threads);
  }
  bool argmax = false;
  for (size_t i = 0; i < ops_.size(); i++) {
    if (ops_[i].kind == OP_ATTENTION) {
      const AttentionOp& op = ops_[i].attention;
      const int64_t slot = (int64_t)op.num_heads * (16 + op.head_size) * sizeof(float);
      needed = std::max(needed, plans_[plan_of_op_[i]].partial_slots * slot);
    }
    argmax |= ops_[i].kind == OP_LINEAR && ops_[i].linear.epilogue == EPI_ARGMAX;
  }
  if (needed > partial_bytes_) {
    partial_bytes_ = needed * 3 / 2 / 64 * 64 + 64;
    partials_.reset((char*)aligned_alloc(64, partial_bytes_));
  }
  if (scratch_stride_ * threads > scratch_bytes_) {
    scratch_bytes_ = scratch_stride_ * threads;
    scratch_.reset((char*)aligned_alloc(4096, scratch_bytes_));
  }
  if (argmax) {
    best_stride_ = std::max(step_->num_samples, step_->num_tokens) + 8;
    best_.assign(best_stride_ * threads, ArgBest{-INFINITY, -1});
  }
  for (size_t i = 0; i < 2 * ops_.size(); i++) counters_[i].next.store(threads, std::memory_order_relaxed);
}

template <class Run>
void Program::take(int counter, long tasks, int thread, int threads, Run&& run) {
  if (threads == 1) {
    if (tasks > 0) run(0, tasks);
    return;
  }
  // Piece i of the cut: `threads` first shares, then pieces of a fraction of what is left.
  const long share = std::max<long>(1, (long)(tasks * kFirstShare) / threads);
  long piece = 0, start = 0, wanted = thread;
  while (true) {
    long size = 0;
    for (;; piece++) {
      size = piece < threads ? share : std::max<long>(1, (tasks - start) / (2 * threads));
      size = std::min(size, tasks - start);
      if (piece == wanted || size <= 0) break;
      start += size;
    }
    if (size <= 0) return;
    run(start, start + size);
    wanted = counters_[counter].next.fetch_add(1, std::memory_order_relaxed);
  }
}

// Meets the other threads; meanwhile fetches the first weights this thread will need next.
void Program::wait(int op, int thread, int threads) {
  if (threads == 1) return;
  const int next = next_linear_[op];
  const char *at = nullptr, *end = nullptr;
  if (next >= 0) {
    const LinearOp& linear = ops_[next].linear;
    const long panels = (linear.n + 31) / 32, share = std::max<long>(1, (long)(panels * kFirstShare) / threads);
    const int64_t bytes = panel_bytes(linear.weight_format, linear.k);
    at = (const char*)linear.weight + std::min(panels, thread * share) * bytes;
    end = at + std::min<long>(kPrefetchLimit, std::min(panels - std::min(panels, thread * share), share) * bytes);
  }
  Pool::instance().barrier.wait([&] {
    if (at >= end) return false;
    for (int i = 0; i < 4; i++) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 256;
    return true;
  });
}

void Program::finish_argmax(const LinearOp& op, int threads) {
  for (int64_t row = 0; row < step_->num_samples; row++) {
    ArgBest best = {-INFINITY, -1};
    for (int t = 0; t < threads; t++) {
      const ArgBest& other = best_of(t)[row];
      if (other.index < 0) continue;
      if (best.index < 0 || other.value > best.value || (other.value == best.value && other.index < best.index)) best = other;
    }
    ((int64_t*)op.y)[row] = best.value < INFINITY ? best.index : -1;  // an infinite logit is an overflow
  }
}

void Program::execute_attention(int index, int thread, int threads) {
  const AttentionOp& op = ops_[index].attention;
  const StepGroup& group = step_->groups[op.group];
  const AttentionPlan& plan = plans_[plan_of_op_[index]];
  char* scratch = scratch_.get() + thread * scratch_stride_;
  const auto run = [&](const std::vector<PlanItem>& items, bool finals, int counter) {
    const AttendCall call = {&op, plan.tokens.data(), items.data(), (int64_t)items.size(), finals, (float*)partials_.get(),
                             group.block_table, group.block_table_stride, group.block_size};
    take(counter, (long)items.size() * op.num_kv_heads, thread, threads,
         [&](long begin, long end) { kernels_.attend_run(call, begin, end, scratch); });
  };
  if (!plan.partials.empty()) {
    run(plan.partials, false, 2 * index + 1);
    wait(index, thread, threads);
  }
  run(plan.finals, true, 2 * index);
}

// With one thread its CPU time, which other processes on the machine do not disturb.
static int64_t now_ns(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void Program::execute(int thread, int threads) {
  int64_t* const profile = thread == 0 ? step_->profile : nullptr;
  int64_t last = profile ? now_ns(threads) : 0;
  for (int i = 0; i < (int)ops_.size(); i++) {
    const Op& op = ops_[i];
    if (!enabled(op)) continue;
    const long m = rows(op);
    if (m == 0) continue;
    switch (op.kind) {
      case OP_LINEAR: {
        LinearWork work = {best_of(thread), scratch_.get() + thread * scratch_stride_};
        take(2 * i, kernels_.linear_tasks(op.linear, m), thread, threads,
             [&](long b, long e) { kernels_.linear_run(op.linear, m, b, e, work); });
        break;
      }
      case OP_NORM:
        take(2 * i, m, thread, threads, [&](long b, long e) { kernels_.norm_run(op.norm, b, e); });
        break;
      case OP_QKV:
        take(2 * i, m, thread, threads, [&](long b, long e) { kernels_.qkv_run(op.qkv, *step_, b, e); });
        break;
      case OP_EMBED:
        take(2 * i, m, thread, threads, [&](long b, long e) { kernels_.embed_run(op.embed, *step_, b, e); });
        break;
      case OP_GATHER:
        take(2 * i, m, thread, threads, [&](long b, long e) { kernels_.gather_run(op.gather, *step_, b, e); });
        break;
      case OP_ATTENTION:
        execute_attention(i, thread, threads);
        break;
    }
    wait(i, thread, threads);
    if (op.kind == OP_LINEAR && op.linear.epilogue == EPI_ARGMAX && thread == 0) finish_argmax(op.linear, threads);
    if (profile) {
      const int64_t now = now_ns(threads);
      profile[i] += now - last;
      last = now;
    }
  }
}

void Program::thread_main(void* self, int thread, int threads) { ((Program*)self)->execute(thread, threads); }

int Program::run(const Step& step, int threads) {
  const int status = check(step);
  if (status != STATUS_OK) return status;
  step_ = &step;
  if (threads <= 0 || threads > Pool::instance().threads()) threads = Pool::instance().threads();
  threads = std::min(threads, choose_threads());
  prepare(threads);
  Pool::instance().run(&Program::thread_main, this, threads);
  return STATUS_OK;
}
