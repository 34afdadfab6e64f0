#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "pack.h"
#include "pool.h"
#include "weight_layout.h"

namespace {

float from_bf16(bf16 bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Nearest integer, ties to even, of |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction. (A library call for each
// weight would take ten times as long.)
float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

// IEEE binary16, round to nearest even. |value| <= 65504.
uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  const float magnitude = std::fabs(value);
  if (magnitude < 6.103515625e-05f)  // subnormal: multiples of 2^-24
    return sign | (uint16_t)round_even(magnitude * 16777216.0f);
  bits &= 0x7fffffff;
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | (uint16_t)((bits >> 13) - (112 << 10));
}

float from_half(uint16_t half) {
  const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;  // the exponent is short of 112, of subnormals too
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  magnitude *= 5.192296858534828e33f;  // 2^112
  return half & 0x8000 ? -magnitude : magnitude;
}

// Largest magnitude; not a number if some element is not finite.
float largest(const float* row, int64_t k) {
  float top = 0.0f, zero = 0.0f;
  for (int64_t c = 0; c < k; c++) {
    const float magnitude = std::fabs(row[c]);
    top = magnitude > top ? magnitude : top;
    zero += row[c] * 0.0f;
  }
  return top + zero;
}

constexpr int kLanes = 8;  // partial sums, so that the compiler may use vectors

float total(const float (&lanes)[kLanes]) {
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// One group's code: weights are q * step + low.
struct Code {
  float step, low;
  float q[kQuantGroup];
  float error;
};

// The nearest codes for the given step and low, as float16 will hold them.
Code encode(const float* x, const float* weights, float step, float low) {
  Code code;
  code.step = from_half(to_half(step));
  code.low = from_half(to_half(low));
  float error[kLanes] = {};
  const float inverse = code.step > 0.0f ? 1.0f / code.step : 0.0f;
  for (int c = 0; c < kQuantGroup; c += kLanes)
    for (int i = 0; i < kLanes; i++) {
      float q = (x[c + i] - code.low) * inverse;
      q = q > 0.0f ? q : 0.0f;
      q = round_even(q < 15.0f ? q : 15.0f);
      code.q[c + i] = q;
      const float off = q * code.step + code.low - x[c + i];
      error[i] += weights[c + i] * off * off;
    }
  code.error = total(error);
  return code;
}

// Step and low that fit the codes best (least squares).
Code refit(const float* x, const float* weights, const Code& code) {
  float w_lanes[kLanes] = {}, q_lanes[kLanes] = {}, qq_lanes[kLanes] = {}, x_lanes[kLanes] = {}, qx_lanes[kLanes] = {};
  for (int c = 0; c < kQuantGroup; c += kLanes)
    for (int i = 0; i < kLanes; i++) {
      const float q = code.q[c + i];
      const float weight = weights[c + i];
      w_lanes[i] += weight;
      q_lanes[i] += weight * q;
      qq_lanes[i] += weight * q * q;
      x_lanes[i] += weight * x[c + i];
      qx_lanes[i] += weight * q * x[c + i];
    }
  const float sum_w = total(w_lanes);
  const float sum_q = total(q_lanes), sum_qq = total(qq_lanes), sum_x = total(x_lanes), sum_qx = total(qx_lanes);
  const float determinant = sum_w * sum_qq - sum_q * sum_q;
  if (determinant <= 0.0f) return code;
  const float step = (sum_w * sum_qx - sum_q * sum_x) / determinant;
  if (!(step > 0.0f)) return code;
  return encode(x, weights, step, (sum_x - step * sum_q) / sum_w);
}

// Of several codes the one with the least squared error. They span the group's range with 15 steps; a part of it, which
// clips the extremes; or all of it with fewer steps, for weights that lie on such a lattice already.
Code best_code(const float* x, const float* weights) {
  float low = x[0], high = x[0];
  for (int c = 1; c < kQuantGroup; c++) {
    low = x[c] < low ? x[c] : low;
    high = x[c] > high ? x[c] : high;
  }
  const float range = high - low;
  Code best = encode(x, weights, range / 15.0f, low);
  const auto consider = [&](Code code, int refits) {
    if (code.error < best.error) best = code;
    for (; refits > 0 && best.error > 0.0f; refits--) {
      code = refit(x, weights, code);
      if (code.error < best.error) best = code;
    }
  };
  consider(best, 2);
  for (float steps = 14.0f; steps >= 12.0f && best.error > 0.0f; steps--) consider(encode(x, weights, range / steps, low), 0);
  for (const float span : {0.92f, 0.84f}) consider(encode(x, weights, range * span / 15.0f, low + range * (1.0f - span) / 2), 1);
  return best;
}

struct Job {
  const bf16* source;
  float* target;
  char* packed;
  float* scale;
  const float* importance;  // of each input, quant_groups(k) * 32
  int64_t ld, n, k;
  bool interleave;
  int format;
  char* panel(int64_t index) const { return packed + index * panel_bytes(format, k); }
};

uint8_t* int8_at(char* panel, int lane, int64_t c) {
  const int64_t in_group = c % kQuantGroup;
  return (uint8_t*)panel + c / kQuantGroup * kInt8GroupBytes + in_group / 4 * (kPanel * 4) + lane * 4 + in_group % 4;
}

uint16_t* int8_steps(char* panel, int64_t group) { return (uint16_t*)(panel + group * kInt8GroupBytes + kInt8GroupCodes); }

// The byte of an int4 code, and by how much it is shifted in it.
uint8_t* int4_at(char* panel, int lane, int64_t c, int* shift) {
  const int64_t group = c / kQuantGroup, in_group = c % kQuantGroup;
  *shift = in_group % 8 / 4 * 4;
  return (uint8_t*)panel + group * kInt4GroupBytes + in_group / 8 * (kPanel * 4) + lane * 4 + in_group % 4;
}

uint16_t* int4_params(char* panel, int64_t group) { return (uint16_t*)(panel + group * kInt4GroupBytes + kInt4GroupCodes); }

void quantize_int8_group(char* panel, int lane, int64_t group, const float* x) {
  const uint16_t half = to_half(largest(x, kQuantGroup) / 127.0f);
  const float step = from_half(half), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  int8_steps(panel, group)[lane] = half;
  for (int c = 0; c < kQuantGroup; c++) {
    float q = round_even(x[c] * inverse);
    q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
    *int8_at(panel, lane, group * kQuantGroup + c) = (uint8_t)(128 + (int)q);
  }
}

// `row` has quant_groups(k) * 32 elements, zero behind k.
void quantize_row(const Job& job, char* panel, int lane, const float* row, float* scale) {
  const int64_t padded = quant_groups(job.k) * kQuantGroup;
  const float top = largest(row, job.k);
  const float divisor = std::isfinite(top) && top > 0.0f ? top : INFINITY;  // of such rows all codes are zero
  *scale = top;
  for (int64_t group = 0; group < padded / kQuantGroup; group++) {
    float x[kQuantGroup];
    for (int c = 0; c < kQuantGroup; c++) x[c] = std::isinf(divisor) ? 0.0f : row[group * kQuantGroup + c] / divisor;
    if (job.format == WEIGHT_INT8) {
      quantize_int8_group(panel, lane, group, x);
      continue;
    }
    const Code code = best_code(x, job.importance + group * kQuantGroup);
    for (int c = 0; c < kQuantGroup; c++) {
      int shift;
      uint8_t* byte = int4_at(panel, lane, group * kQuantGroup + c, &shift);
      *byte |= (uint8_t)((int)code.q[c] << shift);
    }
    int4_params(panel, group)[lane] = to_half(code.step);
    int4_params(panel, group)[kPanel + lane] = to_half(code.low);
  }
}

void quantize_panel(const Job& job, int64_t index) {
  char* panel = job.panel(index);
  const int64_t padded = quant_groups(job.k) * kQuantGroup;
  std::memset(panel, 0, panel_bytes(job.format, job.k));
  std::vector<float> row(padded);
  for (int lane = 0; lane < kPanel; lane++) {
    float* scale = job.scale + index * kPanel + lane;
    const int64_t source = panel_source_row(index, lane, job.n, job.interleave);
    if (source < 0) {
      *scale = 0.0f;
      continue;
    }
    for (int64_t c = 0; c < job.k; c++) row[c] = from_bf16(job.source[source * job.ld + c]);
    quantize_row(job, panel, lane, row.data(), scale);
  }
}

void dequantize_panel(const Job& job, int64_t index) {
  char* panel = job.panel(index);
  for (int lane = 0; lane < kPanel; lane++) {
    const int64_t target = panel_source_row(index, lane, job.n, job.interleave);
    if (target < 0) continue;
    const float scale = job.scale[index * kPanel + lane];
    for (int64_t c = 0; c < job.k; c++) {
      float value;
      if (job.format == WEIGHT_INT8) {
        value = (float)((int)*int8_at(panel, lane, c) - 128) * from_half(int8_steps(panel, c / kQuantGroup)[lane]);
      } else {
        int shift;
        const int q = *int4_at(panel, lane, c, &shift) >> shift & 15;
        const uint16_t* params = int4_params(panel, c / kQuantGroup);
        value = (float)q * from_half(params[lane]) + from_half(params[kPanel + lane]);
      }
      job.target[target * job.ld + c] = value * scale;
    }
  }
}

template <void (*DO)(const Job&, int64_t)>
void run(Job job) {
  Pool::instance().run(
      [](void* context, int thread, int threads) {
        const Job& job = *(const Job*)context;
        const int64_t panels = packed_panels(job.n, job.interleave);
        for (int64_t p = panels * thread / threads; p < panels * (thread + 1) / threads; p++) DO(job, p);
      },
      &job, 0);
}

}  // namespace

void quantize_weight(const bf16* weight, int64_t ldw, int64_t n, int64_t k, bool interleave_halves, int format,
                     const float* importance, char* packed, float* scale) {
  std::vector<float> padded(quant_groups(k) * kQuantGroup, 1.0f);
  if (importance) std::copy(importance, importance + k, padded.begin());
  run<quantize_panel>({weight, nullptr, packed, scale, padded.data(), ldw, n, k, interleave_halves, format});
}

void dequantize_weight(const char* packed, const float* scale, int64_t n, int64_t k, bool interleave_halves, int format,
                       float* weight, int64_t ldw) {
  run<dequantize_panel>({nullptr, weight, (char*)packed, (float*)scale, nullptr, ldw, n, k, interleave_halves, format});
}
