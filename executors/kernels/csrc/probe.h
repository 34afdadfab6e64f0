// What the machine can do at most, for benchmarks/kernels.py to compare with.
#pragma once
#include "dot.h"

namespace EA_ISA {

// Sums every 64 bytes of [begin, end), so that the reads cannot be skipped.
static long probe_read(const char* begin, const char* end) {
  __m256i sum[4] = {};
  for (const char* p = begin; p + 256 <= end; p += 256)
    for (int i = 0; i < 4; i++) {
      sum[i] = _mm256_or_si256(sum[i], _mm256_load_si256((const __m256i*)(p + 64 * i)));
      sum[i] = _mm256_or_si256(sum[i], _mm256_load_si256((const __m256i*)(p + 64 * i + 32)));
    }
  const __m256i all = _mm256_or_si256(_mm256_or_si256(sum[0], sum[1]), _mm256_or_si256(sum[2], sum[3]));
  return _mm256_extract_epi64(all, 0) | _mm256_extract_epi64(all, 2);
}

// Multiply-adds on registers only; returns how many floating point operations were done.
static double probe_arithmetic(long rounds) {
#if defined(__AVX512BF16__)
#define EA_PROBE(i) "vdpbf16ps %%zmm31, %%zmm30, %%zmm" #i "\n"
  constexpr double per_instruction = 64;
  asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\n vpxord %%zmm31, %%zmm31, %%zmm31\n" ::: "xmm30", "xmm31");
#else
#define EA_PROBE(i) "vfmadd231ps %%ymm15, %%ymm14, %%ymm" #i "\n"
  constexpr double per_instruction = 16;
  asm volatile("vxorps %%ymm14, %%ymm14, %%ymm14\n vxorps %%ymm15, %%ymm15, %%ymm15\n" ::: "xmm14", "xmm15");
#endif
  for (long r = 0; r < rounds; r++)
    asm volatile(EA_PROBE(0) EA_PROBE(1) EA_PROBE(2) EA_PROBE(3) EA_PROBE(4) EA_PROBE(5) EA_PROBE(6) EA_PROBE(7) EA_PROBE(8)
                     EA_PROBE(9) EA_PROBE(10) EA_PROBE(11)
                 :
                 :
                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
  return (double)rounds * 12 * per_instruction;
}

}  // namespace EA_ISA
