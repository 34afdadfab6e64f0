// What each instruction set provides. Ranges [begin, end) are of tasks; their results do not depend on the cut.
#pragma once
#include "plan.h"

struct ArgBest {
  float value;
  int64_t index;
};

// What one thread keeps while it runs a linear layer.
struct LinearWork {
  ArgBest* best;            // of EPI_ARGMAX, by row
  char* scratch;            // linear_scratch_bytes
  long scratch_chunk = -1;  // whose inputs it holds
};

struct KernelTable {
  const char* name;
  bool (*supported)();
  long (*linear_tasks)(const LinearOp&, long rows);
  void (*linear_run)(const LinearOp&, long rows, long begin, long end, LinearWork&);
  long (*linear_scratch_bytes)(const LinearOp&);
  void (*norm_run)(const NormOp&, long begin, long end);
  void (*qkv_run)(const QkvOp&, const Step&, long begin, long end);
  void (*embed_run)(const EmbedOp&, const Step&, long begin, long end);
  void (*gather_run)(const GatherOp&, const Step&, long begin, long end);
  void (*attend_run)(const AttendCall&, long begin, long end, char* scratch);
  long (*attend_scratch_bytes)(int heads_per_kv, int head_size);
  long (*probe_read)(const char* begin, const char* end);
  double (*probe_arithmetic)(long rounds);
};

extern const KernelTable kAvx512Kernels, kAvx2Kernels;
