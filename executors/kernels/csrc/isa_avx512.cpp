#define EA_ISA ea_avx512
#include "vec_avx512.h"
#include "kernel_table.h"

#include "attend.h"
#include "linear_quant.h"
#include "probe.h"
#include "rows.h"

static bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

static long scratch_bytes(int heads_per_kv, int head_size) {
  return EA_ISA::AttendScratch::bytes(heads_per_kv, head_size);
}

const KernelTable kAvx512Kernels = {
    "avx512",
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
