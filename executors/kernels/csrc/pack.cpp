#include "pack.h"

#include <cstring>

#include "pool.h"

int64_t packed_panels(int64_t n, bool interleave_halves) {
  return interleave_halves ? (n / 2 + 15) / 16 : (n + 31) / 32;
}

int64_t panel_source_row(int64_t panel, int lane, int64_t n, bool interleave_halves) {
  if (!interleave_halves) {
    const int64_t row = panel * 32 + lane;
    return row < n ? row : -1;
  }
  const int64_t row = panel * 16 + lane % 16;
  if (row >= n / 2) return -1;
  return lane < 16 ? row : n / 2 + row;
}

namespace {
struct PackJob {
  bf16 *weight, *packed;
  int64_t ldw, n, k;
  bool interleave, unpack;
};

void pack_panel(const PackJob& job, int64_t panel) {
  const int64_t pairs = (job.k + 1) / 2;
  uint32_t* out = (uint32_t*)job.packed + panel * pairs * 32;
  for (int lane = 0; lane < 32; lane++) {
    const int64_t row = panel_source_row(panel, lane, job.n, job.interleave);
    if (row < 0) {
      for (int64_t p = 0; p < pairs && !job.unpack; p++) out[p * 32 + lane] = 0;
      continue;
    }
    bf16* source = job.weight + row * job.ldw;
    for (int64_t p = 0; p < pairs; p++) {
      uint32_t& word = out[p * 32 + lane];
      const bool both = 2 * p + 1 < job.k;
      if (job.unpack) {
        source[2 * p] = (bf16)word;
        if (both) source[2 * p + 1] = (bf16)(word >> 16);
      } else {
        word = source[2 * p] | (both ? (uint32_t)source[2 * p + 1] << 16 : 0);
      }
    }
  }
}

void pack_thread(void* context, int thread, int threads) {
  const PackJob& job = *(const PackJob*)context;
  const int64_t panels = packed_panels(job.n, job.interleave);
  for (int64_t panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++) pack_panel(job, panel);
}
}  // namespace

void pack_bf16(const bf16* weight, int64_t ldw, int64_t n, int64_t k, bool interleave_halves, bf16* packed) {
  PackJob job = {const_cast<bf16*>(weight), packed, ldw, n, k, interleave_halves, false};
  Pool::instance().run(pack_thread, &job, 0);
}

void unpack_bf16(const bf16* packed, int64_t n, int64_t k, bool interleave_halves, bf16* weight, int64_t ldw) {
  PackJob job = {weight, const_cast<bf16*>(packed), ldw, n, k, interleave_halves, true};
  Pool::instance().run(pack_thread, &job, 0);
}
