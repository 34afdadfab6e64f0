// A recorded sequence of operations, replayed by all threads of the pool in one call.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernel_table.h"
#include "pool.h"

class Program {
 public:
  Program(const KernelTable& kernels, const Op* ops, int count);
  int run(const Step& step, int threads);  // a Status

 private:
  struct PlanKey {
    PlanShape shape;
    int32_t group, rows;
  };
  struct Counter {
    alignas(64) std::atomic<int32_t> next;
  };
  struct FreeDeleter {
    void operator()(void* memory) const { __builtin_free(memory); }
  };
  typedef std::unique_ptr<char, FreeDeleter> Memory;

  static void thread_main(void* self, int thread, int threads);
  void execute(int thread, int threads);
  void execute_attention(int op, int thread, int threads);
  template <class Run>
  void take(int counter, long tasks, int thread, int threads, Run&& run);
  void wait(int op, int thread, int threads);
  bool enabled(const Op& op) const;
  long rows(const Op& op) const { return op.rows == ROWS_SAMPLED ? step_->num_samples : step_->num_tokens; }
  int check(const Step& step) const;
  int choose_threads() const;
  void prepare(int threads);
  void finish_argmax(const LinearOp& op, int threads);
  ArgBest* best_of(int thread) { return best_.data() + (int64_t)thread * best_stride_; }

  const KernelTable& kernels_;
  std::vector<Op> ops_;
  std::vector<int> plan_of_op_, next_linear_;
  std::vector<PlanKey> plan_keys_;
  std::vector<AttentionPlan> plans_;
  std::unique_ptr<Counter[]> counters_;
  Memory scratch_, partials_;
  int64_t scratch_stride_ = 0, scratch_bytes_ = 0, partial_bytes_ = 0, best_stride_ = 0;
  std::vector<ArgBest> best_;
  const Step* step_ = nullptr;
};
