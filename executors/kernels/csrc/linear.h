// Linear layers over packed weights, with what follows them fused in.
#pragma once
#include <cmath>

#include "dot.h"
#include "weight_layout.h"

namespace EA_ISA {

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

// Rounded after each step, as element-wise bf16 tensors are.
static inline VF logits_of(VF value, const LinearOp& op) {
  value = vround_bf16(value);
  if (op.scale != 1.0f) value = vround_bf16(vmul(value, vset(op.scale)));
  if (op.soft_cap > 0.0f) {
    const VF bounded = vround_bf16(vtanh(vround_bf16(vdiv(value, vset(op.soft_cap)))));
    value = vround_bf16(vmul(bounded, vset(op.soft_cap)));
  }
  return value;
}

// Where a panel's results go: `columns` values a row, 32 or 16 except in the last panel.
struct PanelOut {
  bf16* y;
  const bf16* residual;
  int64_t ldy, ldres;
  long columns;
};

static PanelOut panel_out(const LinearOp& op, long first_row, long panel) {
  const bool halves = op.epilogue == EPI_SILU_UP || op.epilogue == EPI_GELU_UP;
  const long width = halves ? 16 : kPanel, total = halves ? op.n / 2 : op.n, column = panel * width;
  const long columns = total - column < width ? total - column : width;
  return {(bf16*)op.y + first_row * op.ldy + column,
          op.residual ? op.residual + first_row * op.ldres + column : nullptr, op.ldy, op.ldres, columns};
}

// One row's sums of a panel, after the epilogue.
template <int EPILOGUE>
static inline void finish_row(const float* sums, const PanelOut& out, long row) {
  const VF low = vload(sums), high = vload(sums + 16);
  bf16* y = out.y + row * out.ldy;
  if (EPILOGUE == EPI_SILU_UP || EPILOGUE == EPI_GELU_UP) {
    const VF gate = vround_bf16(low), up = vround_bf16(high);
    const VF active = vround_bf16(EPILOGUE == EPI_SILU_UP ? vsilu(gate) : vgelu_tanh(gate));
    store_columns(y, vmul(active, up), out.columns);
    return;
  }
  if (out.columns == kPanel) {
    if (EPILOGUE == EPI_STORE) {
      vstore_bf16x2(y, low, high);
    } else {
      const bf16* residual = out.residual + row * out.ldres;
      vstore_bf16x2(y, vadd(vround_bf16(low), vload_bf16(residual)), vadd(vround_bf16(high), vload_bf16(residual + 16)));
    }
    return;
  }
  for (int j = 0; j < 2 && 16 * j < out.columns; j++) {
    const long columns = out.columns - 16 * j;
    VF value = j ? high : low;
    if (EPILOGUE == EPI_RESIDUAL)
      value = vadd(vround_bf16(value), load_columns(out.residual + row * out.ldres + 16 * j, columns));
    store_columns(y + 16 * j, value, columns);
  }
}

template <int EPILOGUE>
static void finish_rows(const float* sums, const PanelOut& out, int rows) {
  for (int i = 0; i < rows; i++) finish_row<EPILOGUE>(sums + i * kPanel, out, i);
}

static void store_logits(const LinearOp& op, const float* sums, long first_row, int rows, long panel) {
  const long column = panel * kPanel, columns = op.n - column;
  for (int i = 0; i < rows; i++) {
    float* y = (float*)op.y + (first_row + i) * op.ldy + column;
    float lanes[kPanel];
    for (int j = 0; j < 2; j++) vstore(lanes + 16 * j, logits_of(vload(sums + i * kPanel + 16 * j), op));
    for (long c = 0; c < kPanel && c < columns; c++) y[c] = lanes[c];
  }
}

// Keeps the largest logit of each row; of equals the one with the lowest index, in whatever order panels come.
static void keep_best(const LinearOp& op, const float* sums, long first_row, int rows, long panel, ArgBest* best) {
  const long column = panel * kPanel, columns = op.n - column;
  for (int i = 0; i < rows; i++) {
    VF value[2];
    for (int j = 0; j < 2; j++) {
      value[j] = logits_of(vload(sums + i * kPanel + 16 * j), op);
      if (columns < kPanel) value[j] = vkeep_lanes(value[j], 0, (int)(columns - 16 * j), vset(-INFINITY));
    }
    ArgBest& b = best[first_row + i];
    const float top = vhmax(vmax(value[0], value[1]));
    if (top < b.value || (top == b.value && column > b.index)) continue;
    float lanes[kPanel];
    for (int j = 0; j < 2; j++) vstore(lanes + 16 * j, value[j]);
    for (int c = 0; c < kPanel; c++)
      if (lanes[c] == top) {
        if (top > b.value || column + c < b.index) b = {top, column + c};
        break;
      }
  }
}

// `sums` [rows][32] of one panel; `best` holds this thread's running maxima for EPI_ARGMAX.
static void finish_panel(const LinearOp& op, float* sums, const PanelOut& out, long first_row, int rows, long panel, ArgBest* best) {
  if (op.bias)
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < kPanel; j += 16)
        vstore(sums + i * kPanel + j, vadd(vload(sums + i * kPanel + j), vload(op.bias + panel * kPanel + j)));
  switch (op.epilogue) {
    case EPI_STORE: finish_rows<EPI_STORE>(sums, out, rows); break;
    case EPI_RESIDUAL: finish_rows<EPI_RESIDUAL>(sums, out, rows); break;
    case EPI_SILU_UP: finish_rows<EPI_SILU_UP>(sums, out, rows); break;
    case EPI_GELU_UP: finish_rows<EPI_GELU_UP>(sums, out, rows); break;
    case EPI_LOGITS: store_logits(op, sums, first_row, rows, panel); break;
    case EPI_ARGMAX: keep_best(op, sums, first_row, rows, panel, best); break;
  }
}

// Tasks of a linear layer are (rows chunk, panel), panels fastest, so that a chunk's inputs stay in cache.
static long bf16_row_chunk(long k) {
  const long rows = (192 * 1024) / (2 * k) / kMaxRows * kMaxRows;
  return rows < 4 * kMaxRows ? 4 * kMaxRows : rows;
}

static void bf16_linear_run(const LinearOp& op, long rows, long begin, long end, ArgBest* best) {
  const long panels = (op.n + kPanel - 1) / kPanel, pairs = (op.k + 1) / 2;
  const long limit = bf16_row_chunk(op.k);
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
      const PanelOut out = panel_out(op, row, panel);
      if (op.epilogue <= EPI_GELU_UP)  // the results' cache lines arrive while the sums are computed
        for (int i = 0; i < n; i++) __builtin_prefetch(out.y + i * out.ldy, 1, 3);
      const DotFn* table = b == 0 && chunk == 0 ? kDot2Stream : kDot2;
      table[n - 1](op.x + row * op.ldx, op.ldx, dots, sums, kPanel);
      finish_panel(op, sums, out, row, n, panel, best);
      row += n;
    }
  }
}

}  // namespace EA_ISA
