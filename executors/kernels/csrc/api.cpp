// The functions Python calls. Handles are opaque pointers; a program is run by one caller at a time.
#include <atomic>

#include "collective.h"
#include "pack.h"
#include "program.h"
#include "quantize.h"
#include "weight_layout.h"

static const KernelTable* const kTables[] = {&kAvx512Kernels, &kAvx2Kernels};

#define EA_EXPORT extern "C" __attribute__((visibility("default")))

EA_EXPORT const char* ea_isa_name(int index) { return index >= 0 && index < 2 ? kTables[index]->name : nullptr; }
EA_EXPORT int ea_isa_supported(int index) { return kTables[index]->supported(); }

EA_EXPORT int64_t ea_struct_size(int which) {
  const int64_t sizes[] = {sizeof(LinearOp), sizeof(NormOp), sizeof(QkvOp),     sizeof(AttentionOp), sizeof(EmbedOp),
                           sizeof(GatherOp), sizeof(Op),     sizeof(StepGroup), sizeof(Step)};
  return which >= 0 && which < (int)(sizeof sizes / sizeof *sizes) ? sizes[which] : -1;
}

EA_EXPORT void ea_set_threads(int threads, const int* cpus, int num_cpus) { Pool::instance().set_threads(threads, cpus, num_cpus); }
EA_EXPORT int ea_threads() { return Pool::instance().threads(); }

EA_EXPORT void* ea_program_create(int isa, const Op* ops, int count) { return new Program(*kTables[isa], ops, count); }
EA_EXPORT void ea_program_destroy(void* program) { delete (Program*)program; }
EA_EXPORT int ea_program_run(void* program, const Step* step, int threads) { return ((Program*)program)->run(*step, threads); }

EA_EXPORT int ea_run_op(int isa, const Op* op, const Step* step, int threads) {
  return Program(*kTables[isa], op, 1).run(*step, threads);
}

EA_EXPORT void ea_pack_bf16(const bf16* weight, int64_t ldw, int64_t n, int64_t k, int interleave_halves, bf16* packed) {
  pack_bf16(weight, ldw, n, k, interleave_halves != 0, packed);
}
EA_EXPORT void ea_unpack_bf16(const bf16* packed, int64_t n, int64_t k, int interleave_halves, bf16* weight, int64_t ldw) {
  unpack_bf16(packed, n, k, interleave_halves != 0, weight, ldw);
}

EA_EXPORT int64_t ea_panel_bytes(int format, int64_t k) { return panel_bytes(format, k); }
EA_EXPORT void ea_quantize(const bf16* weight, int64_t ldw, int64_t n, int64_t k, int interleave_halves, int format,
                           const float* importance, char* packed, float* scale) {
  quantize_weight(weight, ldw, n, k, interleave_halves != 0, format, importance, packed, scale);
}
EA_EXPORT void ea_dequantize(const char* packed, const float* scale, int64_t n, int64_t k, int interleave_halves, int format,
                             float* weight, int64_t ldw) {
  dequantize_weight(packed, scale, n, k, interleave_halves != 0, format, weight, ldw);
}

EA_EXPORT int64_t ea_group_segment_bytes(int size, int64_t slot_bytes) { return SharedGroup::segment_bytes(size, slot_bytes); }
EA_EXPORT void* ea_group_create(void* segment, int rank, int size, int64_t slot_bytes, int64_t timeout_ns) {
  return new SharedGroup((char*)segment, rank, size, slot_bytes, timeout_ns);
}
EA_EXPORT void ea_group_destroy(void* group) { delete (SharedGroup*)group; }
EA_EXPORT int ea_group_all_reduce(void* group, void* data, int64_t count, int is_bf16) {
  return is_bf16 ? ((SharedGroup*)group)->all_reduce((bf16*)data, count) : ((SharedGroup*)group)->all_reduce((float*)data, count);
}
EA_EXPORT int ea_group_all_gather(void* group, const void* data, int64_t bytes, void* out) {
  return ((SharedGroup*)group)->all_gather((const char*)data, bytes, (char*)out);
}

// Probes run on every thread of the pool at once; the result is what all of them did: bytes, or operations.
namespace {
struct Probe {
  const KernelTable* kernels;
  const char* memory;
  int64_t bytes, rounds;
  std::atomic<int64_t> sink;
};
}  // namespace

EA_EXPORT void ea_probe_read(int isa, const void* memory, int64_t bytes, int threads) {
  Probe probe = {kTables[isa], (const char*)memory, bytes, 0, {0}};
  Pool::instance().run(
      [](void* context, int thread, int count) {
        Probe& p = *(Probe*)context;
        const int64_t share = p.bytes / count / 256 * 256;
        p.sink += p.kernels->probe_read(p.memory + thread * share, p.memory + (thread + 1) * share);
      },
      &probe, threads);
}

EA_EXPORT double ea_probe_arithmetic(int isa, int64_t rounds, int threads) {
  Probe probe = {kTables[isa], nullptr, 0, rounds, {0}};
  Pool::instance().run(
      [](void* context, int, int) {
        Probe& p = *(Probe*)context;
        p.sink += (int64_t)p.kernels->probe_arithmetic(p.rounds);
      },
      &probe, threads);
  return (double)probe.sink.load();
}
