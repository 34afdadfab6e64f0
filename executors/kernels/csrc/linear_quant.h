// Linear layers of every weight format; here the integer ones. A thread rounds the inputs of its rows to int8 once.
#pragma once
#include "dot_quant.h"
#include "kernel_table.h"
#include "linear.h"

namespace EA_ISA {

// int8 rows for each row of inputs.
static int quant_planes(const LinearOp& op) { return op.fine_inputs ? 2 : 1; }

static long quant_row_bytes(const LinearOp& op) { return quant_groups(op.k) * kRowGroupBytes * quant_planes(op); }

static long quant_row_chunk(const LinearOp& op) {
  const long rows = (192 * 1024) / quant_row_bytes(op) / kQuantRows * kQuantRows;
  return rows < 4 * kQuantRows ? 4 * kQuantRows : rows;
}

static long linear_row_chunk(const LinearOp& op) {
  return op.weight_format == WEIGHT_BF16 ? bf16_row_chunk(op.k) : quant_row_chunk(op);
}

static long linear_tasks(const LinearOp& op, long rows) {
  const long chunk = linear_row_chunk(op);
  return (rows + chunk - 1) / chunk * ((op.n + kPanel - 1) / kPanel);
}

static long linear_scratch_bytes(const LinearOp& op) {
  return op.weight_format == WEIGHT_BF16 ? 0 : quant_row_chunk(op) * quant_row_bytes(op);
}

static void quant_linear_run(const LinearOp& op, long rows, long begin, long end, LinearWork& work) {
  const long panels = (op.n + kPanel - 1) / kPanel, groups = quant_groups(op.k), limit = quant_row_chunk(op);
  const long row_bytes = quant_row_bytes(op);
  const int chunks = (int)((rows + limit - 1) / limit), planes = quant_planes(op);
  const auto& tables = op.weight_format == WEIGHT_INT8 ? kDotInt8 : kDotInt4;
  alignas(64) float sums[kQuantRows * kPanel];
  for (long task = begin; task < end; task++) {
    const long chunk = task / panels, panel = task % panels;
    const long first = chunk * rows / chunks, last = (chunk + 1) * rows / chunks;
    const RowBlocks blocks((int)(last - first), kQuantRows / planes);
    if (work.scratch_chunk != chunk) {
      for (long b = 0, row = first; b < blocks.count; row += blocks.size(b++))
        quantize_rows(op.x + row * op.ldx, op.ldx, blocks.size(b), op.k, planes == 2, work.scratch + (row - first) * row_bytes);
      work.scratch_chunk = chunk;
    }
    const char* weight = (const char*)op.weight + panel * panel_bytes(op.weight_format, op.k);
    for (long b = 0, row = first; b < blocks.count; row += blocks.size(b++)) {
      const int n = blocks.size(b);
      const PanelOut out = panel_out(op, row, panel);
      if (op.epilogue <= EPI_GELU_UP)
        for (int i = 0; i < n; i++) __builtin_prefetch(out.y + i * out.ldy, 1, 3);
      tables[b == 0 && chunk == 0][n * planes - 1](work.scratch + (row - first) * row_bytes, groups, weight,
                                                   op.weight_scale + panel * kPanel, sums);
      for (int i = 0; i < n && planes == 2; i++)
        for (int j = 0; j < kPanel; j += 16)
          vstore(sums + i * kPanel + j, vadd(vload(sums + 2 * i * kPanel + j), vload(sums + (2 * i + 1) * kPanel + j)));
      finish_panel(op, sums, out, row, n, panel, work.best);
    }
  }
}

static void linear_run(const LinearOp& op, long rows, long begin, long end, LinearWork& work) {
  if (op.weight_format == WEIGHT_BF16) bf16_linear_run(op, rows, begin, end, work.best);
  else quant_linear_run(op, rows, begin, end, work);
}

}  // namespace EA_ISA
