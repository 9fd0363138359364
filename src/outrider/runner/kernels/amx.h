// Linear layers on a CPU's matrix units (AMX): bfloat16 weights times inputs rounded to bfloat16, summed in float32.
//
// A tile instruction multiplies 16 rows x 32 inputs by 32 inputs x 16 outputs in 16 cycles, so that dozens of rows cost what one
// costs: reading the weights. Batch-invariant as the rest: each sum is one chain of additions in the order of the inputs, and a
// chain that is put down in memory and taken up again, as long ones of many rows are, goes on with the same bits.

#pragma once

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define OUTRIDER_AMX 1

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace amx {

constexpr int64_t kSide = 16;                // rows, or outputs, of a tile
constexpr int64_t kDeep = 32;                // inputs of a tile
constexpr int64_t kTile = kSide * kDeep;     // numbers in a tile of bfloat16
constexpr int64_t kPanel = 2 * kSide;        // outputs whose weights stand side by side
constexpr int64_t kAhead = 1024;             // bytes that weights are fetched ahead of their use
constexpr int64_t kSteps = 16;               // tiles of a panel's depth that stay in the L1 cache while many rows pass
constexpr int64_t kRowBytes = 1 << 20;       // of rows, as tiles, that stay in the L2 cache while all panels pass

// Whether the system lets this process use the tiles: asked for once, before the first of them.
inline bool allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool given = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return given;
}

// Shapes of the eight tile registers: 0 to 3 sums (of the first 16 rows, then of the others), 4 and 5 rows, 6 weights: one register
// for both halves of a panel, because with all eight in use tiles are not loaded while others are multiplied (by a third slower).
struct __attribute__((packed, aligned(64))) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Takes the tiles for blocks of `first` + `second` rows. Said in assembly: GCC's intrinsic does not say what it reads.
inline void shape(int64_t first, int64_t second) {
  Shapes shapes;
  const int64_t rows[8] = {first, first, second, second, first, second, kSide, 0};
  for (int i = 0; i < 8; ++i)
    if (rows[i]) shapes.row_bytes[i] = 64, shapes.rows[i] = static_cast<uint8_t>(rows[i]);
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

struct alignas(64) Line { uint16_t numbers[kDeep]; };

// Rows in the order in which tiles read them: [ceil(rows / 16)][inputs / 32][16][32], so that no two evict each other.
inline void to_tiles(const float* x, int64_t rows, int64_t inputs, uint16_t* tiles) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 65536 / inputs), [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      uint16_t* into = tiles + r / kSide * kSide * inputs + r % kSide * kDeep;
      for (int64_t k = 0; k < inputs; k += kDeep, into += kTile) {
        const float* at = x + r * inputs + k;
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + kSide), _mm512_loadu_ps(at));
        _mm512_store_si512(into, reinterpret_cast<__m512i>(both));
      }
    }
  });
}

// Inputs in the order in which they are added: four streams, each through a quarter of a panel's depth, take turns tile by tile, and
// what does not divide by four comes last. Memory gives a third more to four streams than to one.
struct Order {
  static constexpr int64_t kStreams = 4;
  const int64_t apart;  // tiles from a stream to the next
  explicit Order(int64_t tiles) : apart(tiles / kStreams) {}
  // Of the step-th tile, where it stands.
  int64_t operator()(int64_t step) const {
    return step < kStreams * apart ? step % kStreams * apart + step / kStreams : step;
  }
};

// sums[rows][32] = (its own, after step 0) + x . w over the tiles from `step` to `end`; rows: 16 + up to 16 where `two`, else up to 16.
// x and w stand at the first tile of these rows and this panel, `second` is from there to the next 16 rows; `fetch`: weights ahead.
template <bool two, bool fetch>
inline void block(const uint16_t* x, int64_t second, const uint16_t* w, const Order order, int64_t step, int64_t end, float* sums,
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
    const uint16_t *rows = x + tile * kTile, *weights = w + tile * 2 * kTile;
    const char* ahead = reinterpret_cast<const char*>(weights) + kAhead;
    _tile_loadd(4, rows, 64);
    if (two) _tile_loadd(5, rows + second, 64);
    _tile_loadd(6, weights, 128);
    _tile_dpbf16ps(0, 4, 6);
    if (two) _tile_dpbf16ps(2, 5, 6);
    for (int i = 0; fetch && i < 1024; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
    _tile_loadd(6, weights + kDeep, 128);
    _tile_dpbf16ps(1, 4, 6);
    if (two) _tile_dpbf16ps(3, 5, 6);
    for (int i = 1024; fetch && i < 2048; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kSide, bytes);
  if (two) _tile_stored(2, sums + kSide * stride, bytes);
  if (two) _tile_stored(3, sums + kSide * stride + kSide, bytes);
}

// As `linear`, of rows that fit the cache.
inline void some_rows(const float* x, int64_t rows, int64_t inputs, const uint16_t* w, int64_t panels, float* out) {
  const int64_t whole = (rows + kSide - 1) / kSide * kSide, stride = panels * kPanel, panel_stride = inputs * kPanel;
  const std::unique_ptr<Line[]> lines(new Line[whole * inputs / kDeep]);
  uint16_t* tiles = lines[0].numbers;
  to_tiles(x, rows, inputs, tiles);
  const bool in_one = rows <= 2 * kSide;  // one block of rows: its sums stay in the registers
  const int64_t depth = inputs / kDeep, steps = in_one ? depth : std::min(kSteps, depth);
  const Order order(depth);
  const int64_t work = panel_stride * (2 + whole / kSide);
  at::parallel_for(0, panels, std::max<int64_t>(1, 400'000 / work), [&](int64_t begin, int64_t end) {
    std::vector<float> kept(in_one ? 0 : whole * kPanel);
    int64_t shaped = 0;
    for (int64_t panel = begin; panel < end; ++panel) {
      float* to = out + panel * kPanel;
      for (int64_t step = 0; step < depth; step += steps) {
        for (int64_t r = 0; r < rows; r += 2 * kSide) {
          const int64_t count = std::min(2 * kSide, rows - r), first = std::min(kSide, count);
          if (shaped != count) shape(first, count - first), shaped = count;
          const auto run = count > kSide ? (r == 0 ? block<true, true> : block<true, false>)
                                         : (r == 0 ? block<false, true> : block<false, false>);
          run(tiles + r * inputs, kSide * inputs, w + panel * panel_stride, order, step, std::min(depth, step + steps),
              in_one ? to : kept.data() + r * kPanel, in_one ? stride : kPanel);
        }
      }
      for (int64_t r = 0; !in_one && r < rows; ++r) std::copy_n(kept.data() + r * kPanel, kPanel, to + r * stride);
    }
    _tile_release();
  });
}

// x[rows][inputs] times w [panels][inputs / 2][32 outputs][2] -> out[rows][panels * 32]. inputs: a multiple of 32.
inline void linear(const float* x, int64_t rows, int64_t inputs, const uint16_t* w, int64_t panels, float* out) {
  const int64_t pair = 2 * kSide, fitting = kRowBytes / static_cast<int64_t>(sizeof(uint16_t)) / inputs / pair * pair;
  const int64_t at_once = std::max(pair, fitting);
  for (int64_t r = 0; r < rows; r += at_once)
    some_rows(x + r * inputs, std::min(at_once, rows - r), inputs, w, panels, out + r * panels * kPanel);
}

}  // namespace amx

#endif
