// The worker threads of a process. A job is one function run by every thread; inside it they meet at barriers.
// Waiting spins briefly and then sleeps on a futex, so idle workers cost nothing and a descheduled peer gets the core.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Barrier {
 public:
  void reset(int parties);
  // Returns after all parties arrived. `idle()` is called while waiting; it returns false when it has nothing to do.
  template <class Idle>
  void wait(Idle&& idle);
  void wait() {
    wait([] { return false; });
  }

 private:
  void sleep(uint32_t generation);
  void release();
  alignas(64) std::atomic<int> missing_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  int parties_ = 1;
};

class Pool {
 public:
  typedef void (*Job)(void* context, int thread, int threads);
  static Pool& instance();
  void set_threads(int threads, const int* cpus, int num_cpus);  // cpus: thread i runs on cpus[i]; none: not pinned
  int threads() const { return threads_; }
  void run(Job job, void* context, int threads);  // the caller is thread 0; concurrent callers take turns
  void forget_workers();  // in a forked child, where they do not exist: they are started again when needed
  Barrier barrier;

 private:
  Pool() = default;
  void stop();
  void start();
  void place_caller();
  void worker(int index, uint32_t seen);
  std::mutex mutex_;
  std::vector<std::thread>* workers_ = new std::vector<std::thread>();
  std::vector<int> cpus_;
  int threads_ = 1;
  Job job_ = nullptr;
  void* context_ = nullptr;
  int active_ = 1;
  bool quit_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> running_{0};
};

static inline void cpu_relax() { __builtin_ia32_pause(); }

// About 30 us on current cores: longer than the skew between threads, shorter than a scheduler tick.
constexpr int kSpins = 1500;

template <class Idle>
void Barrier::wait(Idle&& idle) {
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    release();
    return;
  }
  for (int spin = 0; spin < kSpins;) {
    if (generation_.load(std::memory_order_acquire) != generation) return;
    if (!idle()) {
      cpu_relax();
      spin++;
    }
  }
  sleep(generation);
}
