// Linear layers over packed weights, with what follows them fused in.
#pragma once
#include <cmath>

#include "dot.h"

namespace EA_ISA {

constexpr int kPanel = 32;

static inline VF vexp(VF x) { return vexp2(vmul(x, vset(1.44269504f))); }
static inline VF vsilu(VF x) { return vdiv(x, vadd(vset(1.0f), vexp(vsub(vzero(), x)))); }
// tanh(x) = 1 - 2 / (exp(2x) + 1), with x bounded where the result is 1 in float32 anyway
static inline VF vtanh(VF x) {
  const VF bounded = vmin(vmax(x, vset(-12.0f)), vset(12.0f));
  return vsub(vset(1.0f), vdiv(vset(2.0f), vadd(vexp(vadd(bounded, bounded)), vset(1.0f))));
}
static inline VF vgelu_tanh(VF x) {
  const VF inner = vmul(vset(0.79788456f), vfma(vmul(vmul(x, x), x), vset(0.044715f), x));
  return vmul(vmul(vset(0.5f), x), vadd(vset(1.0f), vtanh(inner)));
}

static inline void store_columns(bf16* y, VF value, long columns) {
  if (columns >= 16) {
    vstore_bf16(y, value);
    return;
  }
  bf16 lanes[16];
  vstore_bf16(lanes, value);
  for (long c = 0; c < columns; c++) y[c] = lanes[c];
}

static inline VF load_columns(const bf16* x, long columns) {
  if (columns >= 16) return vload_bf16(x);
  bf16 lanes[16] = {};
  for (long c = 0; c < columns; c++) lanes[c] = x[c];
  return vload_bf16(lanes);
}

static inline VF logits_of(VF value, const LinearOp& op) {
  value = vround_bf16(value);
  if (op.scale != 1.0f) value = vround_bf16(vmul(value, vset(op.scale)));
  if (op.soft_cap > 0.0f) value = vround_bf16(vmul(vtanh(vdiv(value, vset(op.soft_cap))), vset(op.soft_cap)));
  return value;
}

// `sums` [rows][32] of one panel; `best` holds this thread's running maxima for EPI_ARGMAX.
static void finish_panel(const LinearOp& op, float* sums, long first_row, int rows, long panel, ArgBest* best) {
  const long column = panel * kPanel, columns = op.n - column;
  for (int i = 0; i < rows; i++) {
    VF v[2] = {vload(sums + i * kPanel), vload(sums + i * kPanel + 16)};
    if (op.bias)
      for (int j = 0; j < 2; j++) v[j] = vadd(v[j], vload(op.bias + column + 16 * j));
    const long row = first_row + i;
    switch (op.epilogue) {
      case EPI_STORE:
        for (int j = 0; j < 2 && 16 * j < columns; j++)
          store_columns((bf16*)op.y + row * op.ldy + column + 16 * j, v[j], columns - 16 * j);
        break;
      case EPI_RESIDUAL:
        for (int j = 0; j < 2 && 16 * j < columns; j++) {
          const VF residual = load_columns(op.residual + row * op.ldres + column + 16 * j, columns - 16 * j);
          store_columns((bf16*)op.y + row * op.ldy + column + 16 * j, vadd(vround_bf16(v[j]), residual), columns - 16 * j);
        }
        break;
      case EPI_SILU_UP:
      case EPI_GELU_UP: {
        const VF gate = vround_bf16(v[0]), up = vround_bf16(v[1]);
        const VF active = vround_bf16(op.epilogue == EPI_SILU_UP ? vsilu(gate) : vgelu_tanh(gate));
        store_columns((bf16*)op.y + row * op.ldy + panel * 16, vmul(active, up), op.n / 2 - panel * 16);
        break;
      }
      case EPI_LOGITS: {
        float* y = (float*)op.y + row * op.ldy + column;
        float lanes[kPanel];
        for (int j = 0; j < 2; j++) vstore(lanes + 16 * j, logits_of(v[j], op));
        for (long c = 0; c < kPanel && c < columns; c++) y[c] = lanes[c];
        break;
      }
      case EPI_ARGMAX: {
        VF value[2];
        for (int j = 0; j < 2; j++)
          value[j] = vkeep_lanes(logits_of(v[j], op), 0, (int)(columns - 16 * j > 16 ? 16 : columns - 16 * j), vset(-INFINITY));
        ArgBest& b = best[row];
        const float top = vhmax(vmax(value[0], value[1]));
        if (top < b.value || (top == b.value && column > b.index)) break;
        float lanes[kPanel];
        for (int j = 0; j < 2; j++) vstore(lanes + 16 * j, value[j]);
        for (int c = 0; c < kPanel; c++)
          if (lanes[c] == top) {
            if (top > b.value || column + c < b.index) b = {top, column + c};
            break;
          }
        break;
      }
    }
  }
}

// Tasks of a linear layer are (rows chunk, panel), panels fastest, so that a chunk's inputs stay in cache.
static long linear_row_chunk(long k) {
  const long rows = (384 * 1024) / (2 * k) / kMaxRows * kMaxRows;
  return rows < 4 * kMaxRows ? 4 * kMaxRows : rows;
}

static long linear_tasks(const LinearOp& op, long rows) {
  const long chunk = linear_row_chunk(op.k);
  return (rows + chunk - 1) / chunk * ((op.n + kPanel - 1) / kPanel);
}

static void linear_run(const LinearOp& op, long rows, long begin, long end, ArgBest* best) {
  const long panels = (op.n + kPanel - 1) / kPanel, pairs = (op.k + 1) / 2;
  const long limit = linear_row_chunk(op.k);
  const int chunks = (int)((rows + limit - 1) / limit);
  alignas(64) float sums[kMaxRows * kPanel];
  for (long task = begin; task < end; task++) {
    const long chunk = task / panels, panel = task % panels;
    const long first = chunk * rows / chunks, last = (chunk + 1) * rows / chunks;
    const bf16* weight = (const bf16*)op.weight + panel * pairs * 2 * kPanel;
    const Panel dots = {&weight, pairs, pairs, 2 * 16, 2 * kPanel};
    const RowBlocks blocks((int)(last - first), kMaxRows);
    long row = first;
    for (int b = 0; b < blocks.count; b++) {
      const int n = blocks.size(b);
      const DotFn* table = b == 0 && chunk == 0 ? kDot2Stream : kDot2;
      table[n - 1](op.x + row * op.ldx, op.ldx, dots, sums, kPanel);
      finish_panel(op, sums, row, n, panel, best);
      row += n;
    }
  }
}

}  // namespace EA_ISA
