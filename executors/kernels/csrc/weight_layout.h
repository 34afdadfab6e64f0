// Packed weights: panels of 32 outputs, padded with zeros where outputs or inputs end inside one.
//   bf16  [inputs / 2][32 outputs][2 inputs]
//   int8  by group of 32 inputs, [8][32 outputs][4 inputs] of q + 128, then float16 step[32 outputs];
//         weight = q * step * scale[output]
//   int4  by group of 32 inputs, [4][32 outputs][4 bytes], where byte j holds inputs j (low half) and 4 + j (high half),
//         then float16 step[32 outputs] and low[32 outputs]; weight = (q * step + low) * scale[output], q in 0..15
#pragma once
#include "abi.h"

constexpr int kPanel = 32;
constexpr int kQuantGroup = 32;
constexpr int kInt8GroupCodes = kQuantGroup * kPanel;  // bytes before step
constexpr int kInt8GroupBytes = kInt8GroupCodes + 2 * kPanel;
constexpr int kInt4GroupCodes = kQuantGroup * kPanel / 2;  // bytes before step and low
constexpr int kInt4GroupBytes = kInt4GroupCodes + 2 * 2 * kPanel;

static inline int64_t quant_groups(int64_t k) { return (k + kQuantGroup - 1) / kQuantGroup; }

static inline int64_t panel_bytes(int format, int64_t k) {
  if (format == WEIGHT_INT8) return quant_groups(k) * kInt8GroupBytes;
  if (format == WEIGHT_INT4) return quant_groups(k) * kInt4GroupBytes;
  return (k + 1) / 2 * 2 * kPanel * (int64_t)sizeof(bf16);
}
