// Where keys and values of a token lie. A cache is [blocks][kv heads][keys, values][block_size * head_size], cut into
// tiles of 16 tokens that the dot kernel reads as weights:
//   key tile   [head_size / 2][16 tokens][2 dims]      value tile  [8 token pairs][head_size][2 tokens]
#pragma once
#include "abi.h"

constexpr int kTile = 16;

struct CacheLayout {
  int64_t block_stride, head_stride, value_offset, tile_size;
  int head_size, block_size;
  CacheLayout(int64_t block_stride_, int head_size_, int block_size_)
      : block_stride(block_stride_),
        head_stride((int64_t)2 * block_size_ * head_size_),
        value_offset((int64_t)block_size_ * head_size_),
        tile_size((int64_t)kTile * head_size_),
        head_size(head_size_),
        block_size(block_size_) {}

  bf16* key_tile(bf16* base, int64_t slot, int head) const {
    const int64_t block = slot / block_size, offset = slot % block_size;
    return base + block * block_stride + head * head_stride + offset / kTile * tile_size;
  }
  bf16* value_tile(bf16* base, int64_t slot, int head) const { return key_tile(base, slot, head) + value_offset; }
};
