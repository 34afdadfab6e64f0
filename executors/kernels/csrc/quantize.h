// Row-major bf16 weights to panels of integers (weight_layout.h), and back to what these stand for. Run by the pool.
#pragma once
#include "abi.h"

// importance: of each input, float32 [k] above zero, or null: how much int4 shall care for the errors of its weights.
// scale: [panels * 32]. A row that is not finite gets a scale that is not a number, so that it cannot pass unseen.
void quantize_weight(const bf16* weight, int64_t ldw, int64_t n, int64_t k, bool interleave_halves, int format,
                     const float* importance, char* packed, float* scale);
void dequantize_weight(const char* packed, const float* scale, int64_t n, int64_t k, bool interleave_halves, int format,
                       float* weight, int64_t ldw);
