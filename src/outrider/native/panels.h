// Products of rows with panels of 32 outputs, which linear layers and attention in bfloat16 pairs share.

#pragma once

#include "weights.h"

#include <array>

namespace outrider {

// Rows of a tile: with 2 vectors of accumulators each they fill AVX-512's 32 registers; AVX2's 16 hold 6 such rows, or 8 with 1 vector.
constexpr int kMaxRows = kLanes == 16 ? 12 : kLanes == 8 ? 8 : 4;

// Prefetch of weights: those `by` inputs later (0: none), and after the end of a tile's weights those used next, `next` entries from its
// first. Tiles that use the same weights, or slices of a panel, fetch what is used next instead, each its part, so that memory is never idle.
struct Ahead {
  int64_t by = 0, next = 0;
  int part = 0, parts = 1;
};

// See run_panels of linear.cpp.
template <typename Weight>
using RunPanels = void (*)(const float*, const Weight*, int64_t, int64_t, float*, int64_t, bool, int64_t, Ahead);

#if defined(__AVX512BF16__)
extern const std::array<RunPanels<Pair>, kMaxRows> kRunPairs;  // [rows - 1], of linear.cpp
#endif

// x[rows][0..depth), rows `stride` apart -> [depth][rows], at most kLanes rows. A tile then reads sequentially; rows a power of two
// apart would evict each other from the cache.
inline void transpose_rows(const float* x, int64_t stride, int64_t rows, int64_t depth, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    vec block[kLanes];
    for (int r = 0; r < kLanes; ++r) block[r] = r < rows ? load(x + r * stride + k) : vec{};
    transpose(block);
    for (int i = 0; i < kLanes; ++i) {
      if ((k + i) * rows + kLanes <= depth * rows)
        store(to + (k + i) * rows, block[i]);  // in order: the next store overwrites the excess
      else
        std::memcpy(to + (k + i) * rows, &block[i], rows * sizeof(float));
    }
  }
  for (; k < depth; ++k)
    for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = x[r * stride + k];
}

// Rows per tile for this many rows: nearly equal tiles, because a tile with few rows waits for its own additions.
inline int64_t rows_of_a_tile(int64_t rows) {
  const int64_t most = kLanes == 8 && rows > kMaxRows ? 6 : kMaxRows, tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

}  // namespace outrider
