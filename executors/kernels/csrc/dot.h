// The one arithmetic kernel: rows of bf16 times bf16 panels, float32 sums.
//
//   out[i][16 * j + lane] = sum over pairs p of  x[i][2p] * w[j][p][lane][0] + x[i][2p + 1] * w[j][p][lane][1]
//
// Each output is one register's lane, accumulated over p in ascending order from zero, whatever the number of rows or
// columns computed beside it: this fixed order is what makes every layer independent of the batch.
#pragma once
#include "abi.h"

namespace EA_ISA {

// Weights of a dot: a run of equally long blocks (one for a linear layer, one per 16 tokens for attention values).
struct Panel {
  const bf16* const* blocks;
  long pairs;            // total; the last block may be used in part
  long pairs_per_block;
  long lane_stride;      // elements from one group of 16 outputs to the next
  long pair_stride;      // elements from one pair of inputs to the next
};

// Few rows run as fast as memory delivers, and the hardware's own prefetching does best. With more rows a block's
// arithmetic takes as long as its reads, and asking for the weights early, into L2, lets them overlap (measured).
constexpr int kStreamRows = 5;
constexpr int kPrefetchBytes = 32768;

#if defined(__AVX512BF16__)
constexpr int kMaxRows = 12;      // with 2 column groups: 24 accumulators, 2 weights, 1 broadcast of 32 registers
constexpr int kMaxRowsWide = 6;   // with 4 column groups

template <int ROWS, int GROUPS, bool STREAM>
__attribute__((noinline)) void dot(const bf16* x, long ldx, const Panel& panel, float* out, long ldout) {
  __m512 acc[ROWS][GROUPS];
  // Every loop over accumulators must be unrolled early, or the compiler keeps a copy of them in memory.
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < GROUPS; j++) acc[i][j] = _mm512_setzero_ps();
  // Three rows share a pointer (offsets 0, 1 and 2 strides are addressing modes), so that pointers fit in registers.
  const bf16* row[(ROWS + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (ROWS + 2) / 3; i++) row[i] = x + 3 * i * ldx;
  const long lane_stride = panel.lane_stride, pair_stride = panel.pair_stride;
  long left = panel.pairs;
  for (const bf16* const* block = panel.blocks; left > 0; block++) {
    const bf16* w = *block;
    const long pairs = left < panel.pairs_per_block ? left : panel.pairs_per_block;
    left -= pairs;
#pragma GCC unroll 2
    for (long p = 0; p < pairs; p++) {
      __m512bh weight[GROUPS];
      if (STREAM && ROWS >= kStreamRows) {
        _mm_prefetch((const char*)w + kPrefetchBytes, _MM_HINT_T1);
        _mm_prefetch((const char*)w + kPrefetchBytes + 64, _MM_HINT_T1);
      }
#pragma GCC unroll 4
      for (int j = 0; j < GROUPS; j++) weight[j] = (__m512bh)_mm512_loadu_si512(w + j * lane_stride);
#pragma GCC unroll 12
      for (int i = 0; i < ROWS; i++) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int*)(row[i / 3] + (i % 3) * ldx + 2 * p));
#pragma GCC unroll 4
        for (int j = 0; j < GROUPS; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], pair, weight[j]);
      }
      w += pair_stride;
    }
#pragma GCC unroll 4
    for (int i = 0; i < (ROWS + 2) / 3; i++) row[i] += 2 * pairs;
  }
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < GROUPS; j++) _mm512_storeu_ps(out + i * ldout + 16 * j, acc[i][j]);
}

#else
constexpr int kMaxRows = 4;
constexpr int kMaxRowsWide = 4;

template <int ROWS>
static inline void dot_group(const bf16* x, long ldx, const Panel& panel, long offset, float* out, long ldout) {
  __m256 acc[ROWS][2];
  for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  long left = panel.pairs;
  for (const bf16* const* block = panel.blocks; left > 0; block++) {
    const bf16* w = *block + offset;
    const long pairs = left < panel.pairs_per_block ? left : panel.pairs_per_block;
    left -= pairs;
    for (long p = 0; p < pairs; p++) {
      const __m256i w0 = _mm256_loadu_si256((const __m256i*)w), w1 = _mm256_loadu_si256((const __m256i*)(w + 16));
      const __m256 even0 = _mm256_castsi256_ps(_mm256_slli_epi32(w0, 16));
      const __m256 even1 = _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16));
      const __m256 odd0 = _mm256_castsi256_ps(_mm256_and_si256(w0, upper));
      const __m256 odd1 = _mm256_castsi256_ps(_mm256_and_si256(w1, upper));
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) {
        const __m256i pair = _mm256_set1_epi32(*(const int*)(x + i * ldx + 2 * p));
        const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
        const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
        acc[i][0] = _mm256_fmadd_ps(even, even0, acc[i][0]);
        acc[i][1] = _mm256_fmadd_ps(even, even1, acc[i][1]);
        acc[i][0] = _mm256_fmadd_ps(odd, odd0, acc[i][0]);
        acc[i][1] = _mm256_fmadd_ps(odd, odd1, acc[i][1]);
      }
      w += panel.pair_stride;
    }
    x += 2 * pairs;
  }
  for (int i = 0; i < ROWS; i++) {
    _mm256_storeu_ps(out + i * ldout, acc[i][0]);
    _mm256_storeu_ps(out + i * ldout + 8, acc[i][1]);
  }
}

template <int ROWS, int GROUPS, bool STREAM>
void dot(const bf16* x, long ldx, const Panel& panel, float* out, long ldout) {
  for (int j = 0; j < GROUPS; j++) dot_group<ROWS>(x, ldx, panel, j * panel.lane_stride, out + 16 * j, ldout);
}
#endif

typedef void (*DotFn)(const bf16*, long, const Panel&, float*, long);

#define EA_DOT_ROW(G, S) \
  dot<1, G, S>, dot<2, G, S>, dot<3, G, S>, dot<4, G, S>
#if defined(__AVX512BF16__)
#define EA_DOT_WIDE(G, S) EA_DOT_ROW(G, S), dot<5, G, S>, dot<6, G, S>
#define EA_DOT_FULL(G, S) \
  EA_DOT_WIDE(G, S), dot<7, G, S>, dot<8, G, S>, dot<9, G, S>, dot<10, G, S>, dot<11, G, S>, dot<12, G, S>
#else
#define EA_DOT_WIDE(G, S) EA_DOT_ROW(G, S)
#define EA_DOT_FULL(G, S) EA_DOT_ROW(G, S)
#endif

static const DotFn kDot1[] = {EA_DOT_FULL(1, false)};
static const DotFn kDot2[] = {EA_DOT_FULL(2, false)};
static const DotFn kDot2Stream[] = {EA_DOT_FULL(2, true)};
static const DotFn kDot4[] = {EA_DOT_WIDE(4, false)};

// Rows are cut into the fewest blocks of at most `limit`, as equal as possible.
struct RowBlocks {
  int count, base, larger;
  RowBlocks(int rows, int limit) : count((rows + limit - 1) / limit), base(count ? rows / count : 0), larger(count ? rows % count : 0) {}
  int size(int block) const { return base + (block < larger); }
};

}  // namespace EA_ISA
