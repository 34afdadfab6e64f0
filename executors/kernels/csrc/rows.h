// Operations on single rows: norms, rotary embedding and cache writes, embedding look-up, gathering sampled rows.
#pragma once
#include <cmath>
#include <cstring>

#include "cache_layout.h"
#include "linear.h"

namespace EA_ISA {

static float mean_square_scale(const bf16* x, long n, float eps) {
  VF sum = vzero();
  for (long c = 0; c < n; c += 16) {
    const VF v = load_columns(x + c, n - c);
    sum = vfma(v, v, sum);
  }
  return 1.0f / std::sqrt(vhsum(sum) / (float)n + eps);
}

static inline VF load_weight(const float* w, long columns) {
  if (columns >= 16) return vload(w);
  float lanes[16] = {};
  for (long c = 0; c < columns; c++) lanes[c] = w[c];
  return vload(lanes);
}

static inline VF normalised(VF x, float scale, VF weight, int style) {
  const VF unit = vmul(x, vset(scale));
  return vmul(style == NORM_ROUND_THEN_SCALE ? vround_bf16(unit) : unit, weight);
}

static void norm_row(const bf16* x, const float* weight, long n, float eps, int style, bf16* y) {
  const float scale = mean_square_scale(x, n, eps);
  for (long c = 0; c < n; c += 16) {
    const long columns = n - c;
    store_columns(y + c, normalised(load_columns(x + c, columns), scale, load_weight(weight + c, columns), style), columns);
  }
}

static void norm_run(const NormOp& op, long begin, long end) {
  for (long row = begin; row < end; row++) {
    const bf16* h = op.x + row * op.ldx;
    if (op.residual) {
      bf16* residual = op.residual + row * op.ldres;
      const float scale = op.pre_weight ? mean_square_scale(h, op.hidden, op.eps) : 1.0f;
      for (long c = 0; c < op.hidden; c += 16) {
        const long columns = op.hidden - c;
        VF v = load_columns(h + c, columns);
        if (op.pre_weight) v = vround_bf16(normalised(v, scale, load_weight(op.pre_weight + c, columns), op.style));
        store_columns(residual + c, vadd(v, load_columns(residual + c, columns)), columns);
      }
      h = residual;
    }
    if (op.weight) norm_row(h, op.weight, op.hidden, op.eps, op.style, op.y + row * op.ldy);
  }
}

// x[i] and x[i + half] are one pair. Products and sums round to bf16 as element-wise bf16 tensors do.
static void rotate(bf16* x, const float* cos_sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int c = 0; c < half; c += 16) {
    const long columns = half - c;
    const VF cosine = load_weight(cos_sin + c, columns), sine = load_weight(cos_sin + half + c, columns);
    const VF a = load_columns(x + c, columns), b = load_columns(x + half + c, columns);
    store_columns(x + c, vsub(vround_bf16(vmul(a, cosine)), vround_bf16(vmul(b, sine))), columns);
    store_columns(x + half + c, vadd(vround_bf16(vmul(b, cosine)), vround_bf16(vmul(a, sine))), columns);
  }
}

static void write_key(const CacheLayout& cache, bf16* base, int64_t slot, int head, const bf16* key) {
  uint32_t* tile = (uint32_t*)cache.key_tile(base, slot, head) + slot % kTile;
  for (int pair = 0; pair < cache.head_size / 2; pair++) {
    uint32_t bits;
    std::memcpy(&bits, key + 2 * pair, 4);
    tile[pair * kTile] = bits;
  }
}

// Values of two neighbouring tokens share 32-bit words. The first of a pair also clears the second, so that the half
// not yet written is zero; `mate` is the second token's value when it is in the same step.
static void write_value(const CacheLayout& cache, bf16* base, int64_t slot, int head, const bf16* value, const bf16* mate) {
  uint32_t* words = (uint32_t*)cache.value_tile(base, slot, head) + (slot % kTile) / 2 * cache.head_size;
  const int n = cache.head_size;
  if (slot & 1) {
    for (int c = 0; c < n; c++) words[c] = (words[c] & 0xffffu) | (uint32_t)value[c] << 16;
  } else if (mate) {
    for (int c = 0; c < n; c++) words[c] = value[c] | (uint32_t)mate[c] << 16;
  } else {
    for (int c = 0; c < n; c++) words[c] = value[c];
  }
}

static void qkv_run(const QkvOp& op, const Step& step, long begin, long end) {
  const StepGroup& group = step.groups[op.group];
  const int64_t* slots = group.slot_mapping;
  const CacheLayout cache(op.block_stride, op.head_size, group.block_size);
  const int q_size = op.num_heads * op.head_size, kv_size = op.num_kv_heads * op.head_size;
  // A token whose pair-mate precedes it is done by whoever does the mate.
  const auto follows = [&](long t) {
    return t > 0 && t < step.num_tokens && (slots[t] & 1) && slots[t] > 0 && slots[t - 1] == slots[t] - 1;
  };
  if (follows(begin)) begin++;
  if (follows(end)) end++;
  for (long t = begin; t < end; t++) {
    bf16* q = op.qkv + t * op.ldqkv;
    bf16* k = q + q_size;
    for (int h = 0; h < op.num_heads + op.num_kv_heads; h++) {
      bf16* x = q + h * op.head_size;
      if (op.q_weight)
        norm_row(x, h < op.num_heads ? op.q_weight : op.k_weight, op.head_size, op.eps, op.style, x);
      if (op.cos_sin) rotate(x, op.cos_sin + step.positions[t] * op.rotary_dim, op.rotary_dim);
    }
    const int64_t slot = slots[t];
    if (slot < 0) continue;
    const bool mate = t + 1 < end && follows(t + 1);
    for (int h = 0; h < op.num_kv_heads; h++) {
      write_key(cache, op.kv_cache, slot, h, k + h * op.head_size);
      const bf16* value = k + kv_size + h * op.head_size;
      if (!follows(t)) write_value(cache, op.kv_cache, slot, h, value, mate ? value + op.ldqkv : nullptr);
    }
  }
}

static void embed_bf16(const EmbedOp& op, int64_t id, bf16* y) {
  const char* source = (const char*)op.weight + id / kPanel * panel_bytes(WEIGHT_BF16, op.k) + id % kPanel * 4;
  for (long p = 0; p < op.k / 2; p++) std::memcpy(y + 2 * p, source + p * (4 * kPanel), 4);
}

static void embed_int8(const EmbedOp& op, int64_t id, bf16* y) {
  const int lane = (int)(id % kPanel);
  const char* group = (const char*)op.weight + id / kPanel * panel_bytes(WEIGHT_INT8, op.k);
  const VF scale = vset(op.weight_scale[id]);
  for (long first = 0; first < op.k; first += kQuantGroup, group += kInt8GroupBytes) {
    uint16_t half;
    std::memcpy(&half, group + kInt8GroupCodes + 2 * lane, 2);
    const VF step = vset(_cvtsh_ss(half));
    for (long c = 0; c < kQuantGroup && first + c < op.k; c += 16) {
      float q[16];
      for (int i = 0; i < 16; i++) q[i] = (float)((int)(uint8_t)group[(c + i) / 4 * (4 * kPanel) + lane * 4 + i % 4] - 128);
      store_columns(y + first + c, vmul(vmul(vload(q), step), scale), op.k - first - c);
    }
  }
}

static void embed_run(const EmbedOp& op, const Step& step, long begin, long end) {
  const bf16 scale_bits = [&] { bf16 lanes[16]; vstore_bf16(lanes, vset(op.scale)); return lanes[0]; }();
  float scale;
  const uint32_t wide = (uint32_t)scale_bits << 16;
  std::memcpy(&scale, &wide, 4);
  for (long t = begin; t < end; t++) {
    bf16* y = op.y + t * op.ldy;
    if (op.weight_format == WEIGHT_INT8) embed_int8(op, step.input_ids[t], y);
    else embed_bf16(op, step.input_ids[t], y);
    if (op.scale != 1.0f)
      for (long c = 0; c < op.k; c += 16)
        store_columns(y + c, vmul(load_columns(y + c, op.k - c), vset(scale)), op.k - c);
  }
}

static void gather_run(const GatherOp& op, const Step& step, long begin, long end) {
  for (long i = begin; i < end; i++)
    std::memcpy(op.dst + i * op.lddst, op.src + step.sample_rows[i] * op.ldsrc, op.columns * sizeof(bf16));
}

}  // namespace EA_ISA
