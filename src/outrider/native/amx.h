// Linear layers on a CPU's matrix units (AMX): bfloat16 weights times inputs rounded to bfloat16, summed in float32.
//
// A tile instruction multiplies 16 rows x 64 bytes of inputs by as many inputs x 16 outputs in 16 cycles, so dozens of rows cost as
// much as one: the time to read the weights. Batch-invariant like the other kernels: each sum is one chain of additions in the order
// of the inputs. Storing a partial sum to memory and continuing from it, as for many rows, does not change its bits.

#pragma once

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define OUTRIDER_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace outrider::amx {

constexpr int64_t kSide = 16;                // rows, or outputs, of a tile
constexpr int64_t kLine = 64;                // bytes of a row of a tile
constexpr int64_t kTile = kSide * kLine;     // bytes of a tile
constexpr int64_t kDeep = kLine / 2;         // inputs of a tile
static_assert(kPanel == 2 * kSide);           // a panel is two tiles wide
constexpr int64_t kAhead = 1024;             // prefetch distance of weights in bytes
constexpr int64_t kSteps = 64;               // tiles of a panel's depth that fit the L2 cache while many rows use them
constexpr int64_t kRowBytes = 1 << 20;       // bytes of rows, as tiles, that fit the L2 cache while all panels use them
constexpr int64_t kRows = 256;               // maximum rows of a block

// Return whether the operating system lets this process use the tiles; the permission is requested once.
inline bool allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool given = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return given;
}

// Shapes of the eight tile registers: 0 to 3 sums (of the first 16 rows, then of the others), 4 and 5 rows, 6 weights: one register
// for both halves of a panel, because with all eight in use loads do not overlap with products (a third slower).
struct __attribute__((packed, aligned(64))) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configure the tiles for blocks of `first` + `second` rows. In assembly, because GCC's intrinsic does not declare what it reads.
inline void shape(int64_t first, int64_t second) {
  Shapes shapes;
  const int64_t rows[8] = {first, first, second, second, first, second, kSide, 0};
  for (int i = 0; i < 8; ++i)
    if (rows[i]) shapes.row_bytes[i] = 64, shapes.rows[i] = static_cast<uint8_t>(rows[i]);
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

struct alignas(kLine) Line { uint8_t bytes[kLine]; };

// 32 numbers, rounded to bfloat16.
inline __m512i to_halves(const float* x) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + kSide), _mm512_loadu_ps(x)));
}

// Rows, rounded, in the order in which tiles read them: [ceil(rows / 16)][inputs / 32][16][32], so that no two evict each other.
inline void to_tiles(const float* x, int64_t rows, int64_t inputs, uint8_t* tiles) {
  const int64_t row_bytes = inputs / kDeep * kLine;
  parallel_for(0, rows, std::max<int64_t>(1, 65536 / inputs), [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      uint8_t* into = tiles + r / kSide * kSide * row_bytes + r % kSide * kLine;
      for (int64_t k = 0; k < inputs; k += kDeep, into += kTile) _mm512_store_si512(into, to_halves(x + r * inputs + k));
    }
  });
}

// Inputs in the order in which they are added: four streams, each through a quarter of a panel's depth, alternate tile by tile; the
// remainder comes last. Memory bandwidth is a third higher with four streams than with one.
struct Order {
  static constexpr int64_t kStreams = 4;
  const int64_t apart;  // tiles from one stream to the next
  explicit Order(int64_t tiles) : apart(tiles / kStreams) {}
  // Return the index of the step-th tile.
  int64_t operator()(int64_t step) const {
    return step < kStreams * apart ? step % kStreams * apart + step / kStreams : step;
  }
};

// sums[rows][32] = (its own, after step 0) + x . w over the tiles from `step` to `end`; rows: 16 + up to 16 where `two`, else up to 16.
// x and w point to the first tile of these rows and this panel, `second` is from there to the next 16 rows; `fetch`: weights ahead.
template <bool two, bool fetch>
inline void block(const uint8_t* x, int64_t second, const uint8_t* w, const Order order, int64_t step, int64_t end, float* sums,
                  int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  if (step > 0) {
    _tile_loadd(0, sums, bytes);
    _tile_loadd(1, sums + kSide, bytes);
    if (two) _tile_loadd(2, sums + kSide * stride, bytes);
    if (two) _tile_loadd(3, sums + kSide * stride + kSide, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
  }
  for (; step < end; ++step) {
    const int64_t tile = order(step);
    const uint8_t *rows = x + tile * kTile, *weights = w + tile * 2 * kTile, *ahead = weights + kAhead;
    _tile_loadd(4, rows, kLine);
    if (two) _tile_loadd(5, rows + second, kLine);
    _tile_loadd(6, weights, 2 * kLine);
    _tile_dpbf16ps(0, 4, 6);
    if (two) _tile_dpbf16ps(2, 5, 6);
    for (int i = 0; fetch && i < kTile; i += kLine) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
    _tile_loadd(6, weights + kLine, 2 * kLine);
    _tile_dpbf16ps(1, 4, 6);
    if (two) _tile_dpbf16ps(3, 5, 6);
    for (int i = kTile; fetch && i < 2 * kTile; i += kLine) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T0);
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kSide, bytes);
  if (two) _tile_stored(2, sums + kSide * stride, bytes);
  if (two) _tile_stored(3, sums + kSide * stride + kSide, bytes);
}

// Store 32 sums of one panel as results, or combine those of two panels with the epilogue. `past_caches`: with non-temporal stores. For a
// wide layer, caches would first fetch the lines to overwrite, which takes a third of the layer's time.
template <typename Epilogue>
inline void put(const Epilogue epilogue, const float* sums, const float* others, float* to, bool past_caches) {
  for (int64_t j = 0; j < kPanel; j += kSide) {
    __m512 result = _mm512_loadu_ps(sums + j);
    if constexpr (Epilogue::panels == 2) result = epilogue(result, _mm512_loadu_ps(others + j));
    if (past_caches)
      _mm512_stream_ps(to + j, result);
    else
      _mm512_storeu_ps(to + j, result);
  }
}

// `linear` for at most kRows rows.
template <typename Epilogue>
void some_rows(const Epilogue epilogue, const float* x, int64_t rows, int64_t inputs, const uint8_t* w, int64_t panels,
               float* out) {
  const int64_t whole = (rows + kSide - 1) / kSide * kSide, depth = inputs / kDeep;
  const int64_t row_bytes = depth * kLine, panel_bytes = depth * 2 * kTile;
  const int64_t output_panels = panels / Epilogue::panels, stride = output_panels * kPanel;  // an output panel: 32 results
  const std::unique_ptr<Line[]> lines(new Line[whole * depth]);
  uint8_t* tiles = lines[0].bytes;
  to_tiles(x, rows, inputs, tiles);
  const bool in_one = rows <= 2 * kSide;  // one block of rows: its sums stay in the registers
  const bool in_place = in_one && Epilogue::panels == 1;
  const int64_t steps = in_one ? depth : std::min(kSteps, depth);
  const int64_t part = in_one ? depth : std::max(steps, kRowBytes / (whole * kLine) / steps * steps);
  const Order order(depth);
  const int64_t work = panel_bytes / 2 * (2 + whole / kSide) * Epilogue::panels;
  // Weights are read once: rows that exceed the cache are processed in parts of their depth. Partial sums are stored where results
  // will be, if there is room.
  const std::unique_ptr<float[]> room(part < depth && Epilogue::panels > 1 ? new float[rows * panels * kPanel] : nullptr);
  float* waiting = room ? room.get() : out;
  parallel_for(0, output_panels, std::max<int64_t>(1, 400'000 / work), [&](int64_t begin, int64_t end) {
    std::vector<float> kept(in_place ? 0 : whole * kPanel * Epilogue::panels);
    int64_t shaped = 0;
    for (int64_t from = 0; from < depth; from += part) {
      const int64_t till = std::min(depth, from + part);
      for (int64_t output_panel = begin; output_panel < end; ++output_panel) {
        for (int64_t i = 0; i < Epilogue::panels; ++i) {
          const int64_t panel = output_panel + i * output_panels, sums_stride = in_place ? stride : kPanel, wait_stride = panels * kPanel;
          float *sums = in_place ? out + output_panel * kPanel : kept.data() + i * whole * kPanel, *wait = waiting + panel * kPanel;
          for (int64_t r = 0; from > 0 && r < rows; ++r) std::copy_n(wait + r * wait_stride, kPanel, sums + r * kPanel);
          for (int64_t step = from; step < till; step += steps) {
            for (int64_t r = 0; r < rows; r += 2 * kSide) {
              const int64_t count = std::min(2 * kSide, rows - r), first = std::min(kSide, count);
              if (shaped != count) shape(first, count - first), shaped = count;
              const auto run = count > kSide ? (r == 0 ? block<true, true> : block<true, false>)
                                             : (r == 0 ? block<false, true> : block<false, false>);
              run(tiles + r * row_bytes, kSide * row_bytes, w + panel * panel_bytes, order, step, std::min(till, step + steps),
                  sums + r * sums_stride, sums_stride);
            }
          }
          for (int64_t r = 0; till < depth && r < rows; ++r) std::copy_n(sums + r * kPanel, kPanel, wait + r * wait_stride);
        }
        for (int64_t r = 0; !in_place && till == depth && r < rows; ++r) {
          const float* sums = kept.data() + r * kPanel;
          put(epilogue, sums, sums + (Epilogue::panels - 1) * whole * kPanel, out + r * stride + output_panel * kPanel, !in_one);
        }
      }
    }
    _mm_sfence();  // order non-temporal stores before later reads
    _tile_release();
  });
}

// x[rows][inputs] times w [panels][inputs / 2][32 outputs][2] -> out[rows][panels / Epilogue::panels * 32]. inputs: a multiple of kDeep;
// out: at the beginning of a line.
template <typename Epilogue>
void linear(const Epilogue epilogue, const float* x, int64_t rows, int64_t inputs, const void* w, int64_t panels,
            float* out) {
  for (int64_t r = 0; r < rows; r += kRows)
    some_rows(epilogue, x + r * inputs, std::min(kRows, rows - r), inputs, static_cast<const uint8_t*>(w), panels,
              out + r * panels / Epilogue::panels * kPanel);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Attention: tiles of 16 x 64 bytes throughout, as `shape(16, 16)` takes them
// ---------------------------------------------------------------------------------------------------------------------------

constexpr int64_t kSlotsAtOnce = 256;  // slots whose paired values fit the cache while all queries use them

// Return the floats of buffer for one attention's tiles: queries, then weights and values. tall: its rows, rounded up to whole tiles.
inline int64_t attention_size(int64_t tall, int64_t slots, int64_t key_dim, int64_t value_dim) {
  return kLine + std::max(tall * key_dim, tall * slots + kSlotsAtOnce * value_dim) / 2;
}

inline uint16_t* next_line(float* from) {
  return reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(from) + kLine - 1) / kLine * kLine);
}

// Prefetch `bytes` bytes.
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) _mm_prefetch(static_cast<const char*>(from) + i, _MM_HINT_T1);
}

// Queries [rows][dim] -> for each 16 of them and each 32 numbers of theirs a right-hand tile, [16 pairs][16 queries][2]. Rows that
// are missing to 16 are 0.
inline void transpose_queries(const float* queries, int64_t rows, int64_t dim, uint16_t* to) {
  constexpr int64_t numbers = kTile / 2;
  for (int64_t from = 0; from < rows; from += kSide) {
    const int64_t count = std::min(kSide, rows - from);
    for (int64_t d = 0; d < dim; d += 32, to += numbers) {
      vec block[kSide] = {};
      for (int64_t q = 0; q < count; ++q) block[q] = reinterpret_cast<vec>(to_halves(queries + (from + q) * dim + d));
      transpose(block);
      std::memcpy(to, block, kTile);
    }
  }
}

// products[16 slots][16 queries] = keys [16][dim] . queries, as transposed.
inline void score_block(const uint16_t* keys, int64_t dim, const uint16_t* queries, float* products) {
  _tile_zero(0);
  for (int64_t d = 0; d < dim; d += 32, queries += kTile / 2) {
    _tile_loadd(4, keys + d, dim * 2);
    _tile_loadd(6, queries, kLine);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, products, kLine);
}

// Weights of `slots` slots of one row -> bfloat16, in its line of a left-hand tile for every 32.
inline void to_line_of_tiles(const float* weights, int64_t slots, uint16_t* to) {
  for (int64_t s = 0; s < slots; s += 32, to += kTile / 2) _mm512_store_si512(to, to_halves(weights + s));
}

// Values [slots][dim], 0 from `written` on -> for every 32 slots and 16 numbers a right-hand tile, [16 pairs of slots][16][2].
inline void pair_values(const uint16_t* values, int64_t slots, int64_t written, int64_t dim, uint16_t* to) {
  for (int64_t s = 0; s < slots; s += 2) {
    uint16_t* into = to + s / 32 * 32 * dim + s % 32 / 2 * 32;
    for (int64_t d = 0; d < dim; d += 32) {
      const bool is_whole = d + 32 <= dim;
      const __mmask32 some = is_whole ? 0xffffffffu : 0xffffu;
      const __m512i first = _mm512_maskz_loadu_epi16(s < written ? some : 0, values + s * dim + d);
      const __m512i second = _mm512_maskz_loadu_epi16(s + 1 < written ? some : 0, values + (s + 1) * dim + d);
      _mm512_store_si512(into + d / 16 * (kTile / 2), _mm512_permutex2var_epi16(first, kLowTwos, second));
      if (is_whole) _mm512_store_si512(into + (d / 16 + 1) * (kTile / 2), _mm512_permutex2var_epi16(first, kHighTwos, second));
    }
  }
}

// sums[16][dim] = (their own, where `more`) + weights, as lines of tiles, . values, as paired, of `slots` slots.
inline void add_weighted_values(const uint16_t* weights, const uint16_t* values, int64_t slots, int64_t dim, float* sums, bool more) {
  constexpr int64_t numbers = kTile / 2;
  const int64_t tiles = dim / kSide, bytes = dim * static_cast<int64_t>(sizeof(float));
  for (int64_t tile = 0; tile < tiles; tile += 4) {
    const int64_t count = std::min<int64_t>(4, tiles - tile);
    float* to = sums + tile * kSide;
    if (more) {
      _tile_loadd(0, to, bytes);
      if (count > 1) _tile_loadd(1, to + kSide, bytes);
      if (count > 2) _tile_loadd(2, to + 2 * kSide, bytes);
      if (count > 3) _tile_loadd(3, to + 3 * kSide, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < slots; s += 32) {
      const uint16_t* from = values + (s / 32 * tiles + tile) * numbers;
      _tile_loadd(4, weights + s / 32 * numbers, kLine);
      _tile_loadd(5, from, kLine);
      _tile_dpbf16ps(0, 4, 5);
      if (count > 1) {
        _tile_loadd(6, from + numbers, kLine);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (count > 2) {
        _tile_loadd(5, from + 2 * numbers, kLine);
        _tile_dpbf16ps(2, 4, 5);
      }
      if (count > 3) {
        _tile_loadd(6, from + 3 * numbers, kLine);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, to, bytes);
    if (count > 1) _tile_stored(1, to + kSide, bytes);
    if (count > 2) _tile_stored(2, to + 2 * kSide, bytes);
    if (count > 3) _tile_stored(3, to + 3 * kSide, bytes);
  }
}

}  // namespace outrider::amx

#endif
