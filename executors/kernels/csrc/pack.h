// Row-major weights to panels and back. With `interleave_halves`, rows [0, n / 2) are gates and the rest ups: each panel
// holds 16 gates and the 16 ups that go with them.
#pragma once
#include "abi.h"

int64_t packed_panels(int64_t n, bool interleave_halves);
// The weight row behind lane `lane` of a panel; -1 is padding.
int64_t panel_source_row(int64_t panel, int lane, int64_t n, bool interleave_halves);
void pack_bf16(const bf16* weight, int64_t ldw, int64_t n, int64_t k, bool interleave_halves, bf16* packed);
void unpack_bf16(const bf16* packed, int64_t n, int64_t k, bool interleave_halves, bf16* weight, int64_t ldw);
