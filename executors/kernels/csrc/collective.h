// Collectives among processes of one machine, over a segment that all of them have mapped. Each rank copies its part into
// a slot of its own, says so, and reads the others' when they have done the same; sums are taken in the order of ranks.
//
// Segment: a cache line for each rank, then two slots for each. Slots alternate: a rank that writes one again knows that all
// have read it, because they have said so for the collective in between.
#pragma once
#include <atomic>
#include <cstdint>

#include "abi.h"

class SharedGroup {
 public:
  static int64_t segment_bytes(int size, int64_t slot_bytes);
  SharedGroup(char* segment, int rank, int size, int64_t slot_bytes, int64_t timeout_ns);

  // Return 0, or 1 + the rank that did not come in time. All ranks must make the same calls.
  int all_reduce(float* data, int64_t count);
  int all_reduce(bf16* data, int64_t count);  // sums in float32, rounded once
  int all_gather(const char* data, int64_t bytes, char* out);  // out [ranks][bytes]

 private:
  struct Line {
    alignas(64) std::atomic<uint32_t> arrivals;
    std::atomic<uint32_t> sleepers;
  };
  template <class T>
  int all_reduce_chunks(T* data, int64_t count);
  char* slot(int rank) const { return slots_ + (2 * rank + (count_ & 1)) * slot_bytes_; }
  int meet();
  bool wait_for(int rank);
  Line* lines_;
  char* slots_;
  int rank_, size_;
  int64_t slot_bytes_, timeout_ns_;
  uint32_t count_ = 0;  // of collectives begun
};
