// 16 float lanes on AVX-512 with BF16. The same names exist in vec_avx2.h; kernels are written against them once.
#pragma once
#include <immintrin.h>

#include "abi.h"

namespace EA_ISA {

struct VF { __m512 v; };

static inline VF vzero() { return {_mm512_setzero_ps()}; }
static inline VF vset(float x) { return {_mm512_set1_ps(x)}; }
static inline VF vload(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void vstore(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
static inline VF vadd(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline VF vsub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline VF vmul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline VF vdiv(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline VF vfma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline VF vmax(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline VF vmin(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }

static inline VF vload_bf16(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline void vstore_bf16(bf16* p, VF a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
static inline void vstore_bf16x2(bf16* p, VF a, VF b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)); }
static inline VF vround_bf16(VF a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v)), 16))};
}

// Lanes begin <= lane < end keep `a`, others become `other`.
static inline VF vkeep_lanes(VF a, int begin, int end, VF other) {
  const unsigned upper = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
  const unsigned lower = begin <= 0 ? 0u : begin >= 16 ? 0xffffu : (1u << begin) - 1;
  return {_mm512_mask_blend_ps((__mmask16)(upper & ~lower), other.v, a.v)};
}

static inline float vhsum(VF a) { return _mm512_reduce_add_ps(a.v); }
static inline float vhmax(VF a) { return _mm512_reduce_max_ps(a.v); }

// 2^x for x <= 127, to 9e-8 of its value; 0 from x = -127 down.
static inline VF vexp2(VF x) {
  const __m512 clamped = _mm512_max_ps(x.v, _mm512_set1_ps(-127.0f));
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const __m512 shifted = _mm512_add_ps(clamped, magic);
  const __m512 f = _mm512_sub_ps(clamped, _mm512_sub_ps(shifted, magic));
  __m512 p = _mm512_set1_ps(1.3264752e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6715122e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5507337e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022242e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314698e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)))};
}

// The same to 3e-6, for softmax weights, which are then rounded to bf16.
static inline VF vexp2_fast(VF x) {
  const __m512 clamped = _mm512_max_ps(x.v, _mm512_set1_ps(-127.0f));
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  const __m512 shifted = _mm512_add_ps(clamped, magic);
  const __m512 f = _mm512_sub_ps(clamped, _mm512_sub_ps(shifted, magic));
  __m512 p = _mm512_set1_ps(9.5828907e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5906429e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024098e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312419e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)))};
}

}  // namespace EA_ISA
