#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <new>

static void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

static void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Barrier::reset(int parties) {
  parties_ = parties;
  missing_.store(parties, std::memory_order_release);
}

void Barrier::release() {
  missing_.store(parties_, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&generation_);
}

void Barrier::sleep(uint32_t generation) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (generation_.load(std::memory_order_seq_cst) == generation) futex_wait(&generation_, generation);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Pool& Pool::instance() {
  static Pool* pool = [] {  // never destroyed: workers may outlive static destructors
    pthread_atfork(nullptr, nullptr, [] { Pool::instance().forget_workers(); });
    return new Pool();
  }();
  return *pool;
}

void Pool::stop() {
  quit_ = true;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&epoch_);
  for (auto& worker : *workers_) worker.join();
  workers_->clear();
  quit_ = false;
}

static void pin_current_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused in some containers: then it runs anywhere
}

// A caller left to the scheduler is often put next to the worker it has just woken, and both then share one processor.
// It goes back to where it was allowed before when the pool is no longer pinned.
void Pool::place_caller() {
  thread_local int placed_on = -1;
  thread_local cpu_set_t before;
  const int cpu = cpus_.empty() ? -1 : cpus_[0];
  if (cpu == placed_on) return;
  if (placed_on < 0) pthread_getaffinity_np(pthread_self(), sizeof before, &before);
  if (cpu >= 0) pin_current_thread(cpu);
  else pthread_setaffinity_np(pthread_self(), sizeof before, &before);
  placed_on = cpu;
}

void Pool::set_threads(int threads, const int* cpus, int num_cpus) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop();
  threads_ = threads;
  cpus_.assign(cpus, cpus + num_cpus);
  start();
}

void Pool::start() {
  const uint32_t seen = epoch_.load();
  for (int i = 1; i < threads_; i++) {
    const int cpu = i < (int)cpus_.size() ? cpus_[i] : -1;
    workers_->emplace_back([this, i, seen, cpu] {
      if (cpu >= 0) pin_current_thread(cpu);
      worker(i, seen);
    });
  }
}

void Pool::forget_workers() {
  new (&mutex_) std::mutex();
  workers_ = new std::vector<std::thread>();  // the parent's handles can be neither joined nor destroyed here
  sleepers_.store(0);
  running_.store(0);
}

void Pool::worker(int index, uint32_t seen) {
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        cpu_relax();
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      while (epoch_.load(std::memory_order_seq_cst) == seen) futex_wait(&epoch_, seen);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (quit_) return;
    if (index < active_) job_(context_, index, active_);
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void Pool::run(Job job, void* context, int threads) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (threads > threads_ || threads < 1) threads = threads_;
  place_caller();
  barrier.reset(threads);
  if (threads == 1) {
    job(context, 0, 1);
    return;
  }
  if (workers_->empty()) start();
  job_ = job;
  context_ = context;
  active_ = threads;
  running_.store(static_cast<int>(workers_->size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&epoch_);
  job(context, 0, threads);
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0; spins++) {
    if (spins < kSpins) cpu_relax();
    else sched_yield();
  }
}
