// 16 float lanes as two AVX2 registers; see vec_avx512.h.
#pragma once
#include <immintrin.h>

#include "abi.h"

namespace EA_ISA {

struct VF { __m256 a, b; };

static inline VF vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline VF vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline VF vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vstore(float* p, VF x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline VF vadd(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline VF vsub(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline VF vmul(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline VF vdiv(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline VF vfma(VF x, VF y, VF z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline VF vmax(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline VF vmin(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

static inline __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
static inline VF vload_bf16(const bf16* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// Round to nearest even in the upper 16 bits; NaN keeps its payload and stays quiet.
static inline __m256i round_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
}
static inline void vstore_bf16(bf16* p, VF x) {
  const __m256i low = _mm256_srli_epi32(round_bits(x.a), 16), high = _mm256_srli_epi32(round_bits(x.b), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256((__m256i*)p, packed);
}
static inline void vstore_bf16x2(bf16* p, VF a, VF b) {
  vstore_bf16(p, a);
  vstore_bf16(p + 16, b);
}
static inline VF vround_bf16(VF x) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(round_bits(x.a), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(round_bits(x.b), mask))};
}

static inline __m256 lane_mask(int first_lane, int begin, int end) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first_lane));
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  const __m256i above = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1));
  return _mm256_castsi256_ps(_mm256_and_si256(below, above));
}
static inline VF vkeep_lanes(VF x, int begin, int end, VF other) {
  return {_mm256_blendv_ps(other.a, x.a, lane_mask(0, begin, end)),
          _mm256_blendv_ps(other.b, x.b, lane_mask(8, begin, end))};
}

static inline float vhsum(VF x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float vhmax(VF x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline __m256 exp2_half(__m256 x) {
  const __m256 clamped = _mm256_max_ps(x, _mm256_set1_ps(-127.0f));
  const __m256 magic = _mm256_set1_ps(12582912.0f);
  const __m256 shifted = _mm256_add_ps(clamped, magic);
  const __m256 f = _mm256_sub_ps(clamped, _mm256_sub_ps(shifted, magic));
  __m256 p = _mm256_set1_ps(1.3264752e-3f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6715122e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5507337e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022242e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314698e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
  return _mm256_castsi256_ps(scaled);
}
static inline VF vexp2(VF x) { return {exp2_half(x.a), exp2_half(x.b)}; }
static inline VF vexp2_fast(VF x) { return vexp2(x); }

}  // namespace EA_ISA
