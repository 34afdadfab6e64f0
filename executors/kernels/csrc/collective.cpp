#include "collective.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "pool.h"

namespace {

constexpr int64_t kHeaderBytes = 64;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Between processes: without FUTEX_PRIVATE_FLAG.
void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns) {
  const timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

float to_float(float x) { return x; }
float to_float(bf16 bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

void store(float* out, float value) { *out = value; }
void store(bf16* out, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *out = (bf16)(value == value ? rounded : bits >> 16 | 0x40);  // a NaN stays one
}

constexpr int64_t kBlock = 1024;

// out[i] = sum over parts of part[i], in order, in float32.
template <class T>
void sum_parts(const char* const* parts, int num_parts, T* out, int64_t count) {
  float sums[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t n = std::min(kBlock, count - first);
    for (int p = 0; p < num_parts; p++) {
      const T* part = (const T*)parts[p] + first;
      if (p == 0)
        for (int64_t i = 0; i < n; i++) sums[i] = to_float(part[i]);
      else
        for (int64_t i = 0; i < n; i++) sums[i] += to_float(part[i]);
    }
    for (int64_t i = 0; i < n; i++) store(out + first + i, sums[i]);
  }
}

}  // namespace

int64_t SharedGroup::segment_bytes(int size, int64_t slot_bytes) {
  return (kHeaderBytes * size + 4095) / 4096 * 4096 + 2 * size * slot_bytes;
}

SharedGroup::SharedGroup(char* segment, int rank, int size, int64_t slot_bytes, int64_t timeout_ns)
    : lines_((Line*)segment),
      slots_(segment + (kHeaderBytes * size + 4095) / 4096 * 4096),
      rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      timeout_ns_(timeout_ns) {
  static_assert(sizeof(Line) == kHeaderBytes, "a line is a cache line");
}

bool SharedGroup::wait_for(int rank) {
  Line& line = lines_[rank];
  const auto arrived = [&](uint32_t arrivals) { return (int32_t)(arrivals - count_) > 0; };
  for (int spin = 0; spin < kSpins; spin++) {
    if (arrived(line.arrivals.load(std::memory_order_acquire))) return true;
    cpu_relax();
  }
  const int64_t deadline = now_ns() + timeout_ns_;
  line.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool done = false;
  while (true) {
    const uint32_t arrivals = line.arrivals.load(std::memory_order_seq_cst);
    if ((done = arrived(arrivals))) break;
    const int64_t left = deadline - now_ns();
    if (left <= 0) break;
    futex_wait(&line.arrivals, arrivals, left);
  }
  line.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return done;
}

// This rank's slot is filled; returns when all are.
int SharedGroup::meet() {
  Line& own = lines_[rank_];
  own.arrivals.fetch_add(1, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(&own.arrivals);
  for (int rank = 0; rank < size_; rank++)
    if (rank != rank_ && !wait_for(rank)) return 1 + rank;
  return 0;
}

template <class T>
int SharedGroup::all_reduce_chunks(T* data, int64_t count) {
  const int64_t limit = slot_bytes_ / (int64_t)sizeof(T);
  for (int64_t first = 0; first < count; first += limit) {
    const int64_t n = std::min(limit, count - first);
    std::memcpy(slot(rank_), data + first, n * sizeof(T));
    if (const int missing = meet()) return missing;
    const char* parts[64];
    for (int rank = 0; rank < size_; rank++) parts[rank] = slot(rank);
    sum_parts(parts, size_, data + first, n);
    count_++;
  }
  return 0;
}

int SharedGroup::all_reduce(float* data, int64_t count) { return all_reduce_chunks(data, count); }
int SharedGroup::all_reduce(bf16* data, int64_t count) { return all_reduce_chunks(data, count); }

int SharedGroup::all_gather(const char* data, int64_t bytes, char* out) {
  for (int64_t first = 0; first < bytes; first += slot_bytes_) {
    const int64_t n = std::min(slot_bytes_, bytes - first);
    std::memcpy(slot(rank_), data + first, n);
    if (const int missing = meet()) return missing;
    for (int rank = 0; rank < size_; rank++) std::memcpy(out + rank * bytes + first, slot(rank), n);
    count_++;
  }
  return 0;
}
