#define EA_ISA ea_avx2
#include "vec_avx2.h"
#include "kernel_table.h"

#include "attend.h"
#include "linear_quant.h"
#include "probe.h"
#include "rows.h"

static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static long scratch_bytes(int heads_per_kv, int head_size) {
  return EA_ISA::AttendScratch::bytes(heads_per_kv, head_size);
}

const KernelTable kAvx2Kernels = {
    "avx2",
    supported,
    EA_ISA::linear_tasks,
    EA_ISA::linear_run,
    EA_ISA::linear_scratch_bytes,
    EA_ISA::norm_run,
    EA_ISA::qkv_run,
    EA_ISA::embed_run,
    EA_ISA::gather_run,
    EA_ISA::attend_run,
    scratch_bytes,
    EA_ISA::probe_read,
    EA_ISA::probe_arithmetic,
};
