// The integer arithmetic kernel: rows of int8 times panels of int8 or int4, exact int32 sums over each group of 32 inputs,
// scaled and added up in float32 in ascending order of groups, whatever is computed beside them.
//
// Inputs are rounded here, when a layer begins: each group of 32 of a row to int8 with a scale of its own (its largest
// magnitude / 127). Fine inputs are two such rows, whose results are added: the rounded one, and what rounding left. A
// block of ROWS rows is laid out as the kernel reads it, by group: [ROWS][32] int8, then [ROWS] scale, offset and sum.
#pragma once
#include <cstring>

#include "dot.h"
#include "weight_layout.h"

namespace EA_ISA {

#if defined(__AVX512BF16__)
constexpr int kQuantRows = 6;  // 12 int32 sums, 12 float32 sums, weights and inputs in 32 registers
#else
constexpr int kQuantRows = 4;
#endif

constexpr float kFiner = 254.0f;    // what rounding left lies within +-1/2
constexpr int kQuantStreamRows = 4;  // as kStreamRows, of int8; int4 gains nothing (measured)
constexpr int kRowGroupBytes = kQuantGroup + 3 * 4;

struct RowGroup {
  int8_t* q;
  float* scale;
  int32_t* offset;  // int8 panels hold q + 128: what that adds to the integer sum, to be taken off
  float* sum;       // of the group's inputs, for int4's `low`
};

static inline RowGroup row_group(char* block, int rows, int group, int row) {
  char* at = block + (long)group * rows * kRowGroupBytes;
  char* numbers = at + rows * kQuantGroup;
  return {(int8_t*)at + row * kQuantGroup, (float*)numbers + row, (int32_t*)(numbers + 4 * rows) + row,
          (float*)(numbers + 8 * rows) + row};
}

#if defined(__AVX512BF16__)

static inline uint16_t largest_magnitude(const bf16* x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
}

static inline int32_t sum_bytes(const int8_t* q) {
  const __m128i ones = _mm_set1_epi8(1), low = _mm_loadu_si128((const __m128i*)q), high = _mm_loadu_si128((const __m128i*)(q + 16));
  __m128i sum = _mm_dpbusd_epi32(_mm_dpbusd_epi32(_mm_setzero_si128(), ones, low), ones, high);
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}

// 32 values times `inverse`, rounded to int8; what is left of them goes to `rest`, if not null, kFiner times as fine.
static inline void round_group(const bf16* x, float inverse, int8_t* q, int8_t* rest) {
  for (int h = 0; h < 32; h += 16) {
    const __m512 value = _mm512_mul_ps(vload_bf16(x + h).v, _mm512_set1_ps(inverse));
    const __m512i rounded = _mm512_cvtps_epi32(value);
    _mm_storeu_si128((__m128i*)(q + h), _mm512_cvtepi32_epi8(rounded));
    if (!rest) continue;
    const __m512 left = _mm512_sub_ps(value, _mm512_cvtepi32_ps(rounded));
    const __m512i fine = _mm512_cvtps_epi32(_mm512_mul_ps(left, _mm512_set1_ps(kFiner)));
    _mm_storeu_si128((__m128i*)(rest + h), _mm512_cvtepi32_epi8(fine));
  }
}

#else

static inline uint16_t largest_magnitude(const bf16* x) {
  uint16_t top = 0;
  for (int c = 0; c < kQuantGroup; c++) {
    const uint16_t magnitude = x[c] & 0x7fff;
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

static inline int32_t sum_bytes(const int8_t* q) {
  int32_t sum = 0;
  for (int c = 0; c < kQuantGroup; c++) sum += q[c];
  return sum;
}

// |x| < 2^22, ties to even: adding 1.5 * 2^23 leaves no room for a fraction, and the integer in the low bits.
static inline float round_to(float x, int8_t* q) {
  const float shifted = x + 12582912.0f;
  int32_t integer;
  std::memcpy(&integer, &shifted, 4);
  *q = (int8_t)integer;
  return shifted - 12582912.0f;
}

static inline void round_group(const bf16* x, float inverse, int8_t* q, int8_t* rest) {
  for (int c = 0; c < kQuantGroup; c++) {
    const uint32_t bits = (uint32_t)x[c] << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= inverse;
    const float left = value - round_to(value, q + c);
    if (rest) round_to(left * kFiner, rest + c);
  }
}

#endif

// Groups whose largest magnitude is below 1e-30 become zero. Of groups with infinities or NaNs the scale is not finite, and
// so the layer's output is NaN.
static inline void quantize_group(const bf16* x, const RowGroup& out, const RowGroup* rest) {
  const uint32_t top_bits = (uint32_t)largest_magnitude(x) << 16;  // magnitudes order like their bits, NaNs above all
  float top;
  std::memcpy(&top, &top_bits, 4);
  const bool vanishes = top < 1e-30f;
  round_group(x, vanishes ? 0.0f : 127.0f / top, out.q, rest ? rest->q : nullptr);
  const float scale = vanishes ? 0.0f : top * (1.0f / 127.0f);
  const auto finish = [](const RowGroup& group, float scale) {
    const int32_t sum = sum_bytes(group.q);
    *group.scale = scale;
    *group.offset = -128 * sum;
    *group.sum = scale * (float)sum;
  };
  finish(out, scale);
  if (rest) finish(*rest, scale * (1.0f / kFiner));
}

// x [rows][k] -> one block of `rows` int8 rows, or of twice as many with fine inputs.
static void quantize_rows(const bf16* x, long ldx, int rows, long k, bool fine, char* block) {
  const int planes = fine ? 2 : 1;
  for (int i = 0; i < rows; i++) {
    const bf16* row = x + i * ldx;
    const auto quantize = [&](const bf16* from, int group) {
      const RowGroup out = row_group(block, rows * planes, group, i * planes);
      if (!fine) return quantize_group(from, out, nullptr);
      const RowGroup rest = row_group(block, rows * planes, group, i * planes + 1);
      quantize_group(from, out, &rest);
    };
    int group = 0;
    for (; (group + 1) * kQuantGroup <= k; group++) quantize(row + group * kQuantGroup, group);
    if (group * kQuantGroup == k) continue;
    bf16 last[kQuantGroup] = {};
    std::memcpy(last, row + group * kQuantGroup, (k - group * kQuantGroup) * sizeof(bf16));
    quantize(last, group);
  }
}

#if defined(__AVX512BF16__)

static inline __m512i broadcast4(const char* p) { return _mm512_set1_epi32(*(const int*)p); }

// out [ROWS][32], times the panel's scales.
template <int ROWS, int FORMAT, bool STREAM>
__attribute__((noinline)) void dot_quant(const char* x, long groups, const char* w, const float* panel_scale, float* out) {
  __m512 total[ROWS][2];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) total[i][0] = total[i][1] = _mm512_setzero_ps();
  for (; groups > 0; groups--) {
    const char* numbers = x + ROWS * kQuantGroup;
    __m512i acc[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++)
      acc[i][0] = acc[i][1] = FORMAT == WEIGHT_INT8 ? broadcast4(numbers + 4 * (ROWS + i)) : _mm512_setzero_si512();
    if (FORMAT == WEIGHT_INT8) {
#pragma GCC unroll 8
      for (int s = 0; s < 8; s++) {
        if (STREAM && ROWS >= kQuantStreamRows) {
          _mm_prefetch(w + 128 * s + kPrefetchBytes, _MM_HINT_T1);
          _mm_prefetch(w + 128 * s + kPrefetchBytes + 64, _MM_HINT_T1);
        }
        const __m512i w0 = _mm512_loadu_si512(w + 128 * s), w1 = _mm512_loadu_si512(w + 128 * s + 64);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
          const __m512i b = broadcast4(x + kQuantGroup * i + 4 * s);
          acc[i][0] = _mm512_dpbusd_epi32(acc[i][0], w0, b);
          acc[i][1] = _mm512_dpbusd_epi32(acc[i][1], w1, b);
        }
      }
    } else {
      const __m512i low_half = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int s = 0; s < 4; s++) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          const __m512i both = _mm512_loadu_si512(w + 128 * s + 64 * j);
          const __m512i low = _mm512_and_si512(both, low_half), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
#pragma GCC unroll 6
          for (int i = 0; i < ROWS; i++) {
            acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], low, broadcast4(x + kQuantGroup * i + 8 * s));
            acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], high, broadcast4(x + kQuantGroup * i + 8 * s + 4));
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const char* params = w + (FORMAT == WEIGHT_INT8 ? kInt8GroupCodes : kInt4GroupCodes) + 32 * j;
      const __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)params));
      __m512 low = _mm512_setzero_ps();
      if (FORMAT == WEIGHT_INT4) low = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(params + 64)));
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; i++) {
        const __m512 scale = _mm512_set1_ps(*(const float*)(numbers + 4 * i)), value = _mm512_cvtepi32_ps(acc[i][j]);
        total[i][j] = _mm512_fmadd_ps(_mm512_mul_ps(value, scale), step, total[i][j]);
        if (FORMAT == WEIGHT_INT4) {
          const __m512 sum = _mm512_set1_ps(*(const float*)(numbers + 4 * (2 * ROWS + i)));
          total[i][j] = _mm512_fmadd_ps(low, sum, total[i][j]);
        }
      }
    }
    x += ROWS * kRowGroupBytes;
    w += FORMAT == WEIGHT_INT8 ? kInt8GroupBytes : kInt4GroupBytes;
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
      _mm512_storeu_ps(out + kPanel * i + 16 * j, _mm512_mul_ps(total[i][j], _mm512_loadu_ps(panel_scale + 16 * j)));
}

#else

// Sums of one group for 8 outputs, from weights as bytes [8 quads of inputs][8 outputs][4 inputs].
static inline __m256i dot_group8(const char* x, const __m128i (&w)[8][2], __m256i sum) {
  __m256i pairs[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int s = 0; s < 8; s++) {
    const __m256i four = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(*(const int*)(x + 4 * s))));
    for (int h = 0; h < 2; h++)
      pairs[h] = _mm256_add_epi32(pairs[h], _mm256_madd_epi16(_mm256_cvtepu8_epi16(w[s][h]), four));
  }
  return _mm256_add_epi32(sum, _mm256_permute4x64_epi64(_mm256_hadd_epi32(pairs[0], pairs[1]), 0xd8));
}

template <int ROWS, int FORMAT, bool STREAM>
void dot_quant(const char* x, long groups, const char* w, const float* panel_scale, float* out) {
  for (int i = 0; i < ROWS * kPanel; i++) out[i] = 0.0f;
  for (; groups > 0; groups--) {
    const char* numbers = x + ROWS * kQuantGroup;
    for (int lane = 0; lane < kPanel; lane += 8) {
      __m128i bytes[8][2];
      for (int s = 0; s < 8; s++)
        for (int h = 0; h < 2; h++) {
          if (FORMAT == WEIGHT_INT8) {
            bytes[s][h] = _mm_loadu_si128((const __m128i*)(w + 128 * s + 4 * lane + 16 * h));
          } else {
            const __m128i both = _mm_loadu_si128((const __m128i*)(w + 128 * (s / 2) + 4 * lane + 16 * h));
            bytes[s][h] = _mm_and_si128(s % 2 ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15));
          }
        }
      for (int i = 0; i < ROWS; i++) {
        const int32_t offset = FORMAT == WEIGHT_INT8 ? *(const int32_t*)(numbers + 4 * (ROWS + i)) : 0;
        const __m256 value = _mm256_cvtepi32_ps(dot_group8(x + kQuantGroup * i, bytes, _mm256_set1_epi32(offset)));
        const __m256 scale = _mm256_set1_ps(*(const float*)(numbers + 4 * i));
        float* at = out + kPanel * i + lane;
        __m256 total = _mm256_loadu_ps(at);
        const char* params = w + (FORMAT == WEIGHT_INT8 ? kInt8GroupCodes : kInt4GroupCodes) + 2 * lane;
        const __m256 step = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)params));
        total = _mm256_fmadd_ps(_mm256_mul_ps(value, scale), step, total);
        if (FORMAT == WEIGHT_INT4) {
          const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(params + 64)));
          total = _mm256_fmadd_ps(low, _mm256_set1_ps(*(const float*)(numbers + 4 * (2 * ROWS + i))), total);
        }
        _mm256_storeu_ps(at, total);
      }
    }
    x += ROWS * kRowGroupBytes;
    w += FORMAT == WEIGHT_INT8 ? kInt8GroupBytes : kInt4GroupBytes;
  }
  for (int i = 0; i < ROWS * kPanel; i++) out[i] *= panel_scale[i % kPanel];
}

#endif

typedef void (*DotQuantFn)(const char*, long, const char*, const float*, float*);

#define EA_DOT_QUANT4(F, S) dot_quant<1, F, S>, dot_quant<2, F, S>, dot_quant<3, F, S>, dot_quant<4, F, S>
#if defined(__AVX512BF16__)
#define EA_DOT_QUANT(F, S) EA_DOT_QUANT4(F, S), dot_quant<5, F, S>, dot_quant<6, F, S>
#else
#define EA_DOT_QUANT(F, S) EA_DOT_QUANT4(F, S)
#endif

static const DotQuantFn kDotInt8[2][kQuantRows] = {{EA_DOT_QUANT(WEIGHT_INT8, false)}, {EA_DOT_QUANT(WEIGHT_INT8, true)}};
static const DotQuantFn kDotInt4[2][kQuantRows] = {{EA_DOT_QUANT(WEIGHT_INT4, false)}, {EA_DOT_QUANT(WEIGHT_INT4, true)}};

}  // namespace EA_ISA
