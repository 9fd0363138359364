// Linear layers whose weights are codes of 8 or 4 bits, in blocks of 32 inputs x 32 outputs. A weight is scale * number + offset:
// the number of its code, a scale and, in some forms, an offset, for its output and 32 or 16 of its inputs.
//
// A pass over one row takes as long as reading the codes from memory. Codes are decoded in registers, once for all rows of a tile,
// and multiplied with activations in one of three precisions:
//
// - 8 bits, one scale per row and block: integer products, four per lane and instruction (AVX-512 VNNI);
// - 16 bits: bfloat16 products, two per lane and instruction, float32 sums (AVX-512 BF16);
// - 32 bits: float32, on any CPU.
//
// The first two multiply numbers, and scale the sums of a block; an offset is multiplied with the sum of the row's activations.
// Batch-invariant like the other layers: a row's sums are added block by block, and within a block in a fixed order, for any
// number of rows in the pass.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "operators.h"
#include "threads.h"
#include "vectors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

namespace outrider {
namespace {

constexpr int64_t kInputs = 32;   // inputs of a block; its outputs are kPanel
constexpr int64_t kHeader = 64;   // bytes at the start of a panel
constexpr int64_t kSpan = 8;      // blocks that share a base
constexpr int kMaxRows = 12;      // of a tile: 12 rows x 2 vectors of sums leave 8 registers for weights
constexpr int64_t kStretch = 16;  // blocks whose weights stay in the L1 cache while all rows of a pass are multiplied
// Bytes to prefetch ahead, because the hardware prefetcher stops at page ends: measured on AMD's Zen 5 and on Intel's Sapphire Rapids.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
constexpr int64_t kAhead = 6144;
#else
constexpr int64_t kAhead = 2048;
#endif

// Numbers of codes, and dtypes of scales and offsets. Python's names for them are in runner/blocks.py.
enum Codes : uint8_t { kInt8, kTable4, kInt4, kUint4, kNumCodes };
enum Numbers : uint8_t { kNone, kBfloat16, kFloat16, kFloat32, kZeros, kProducts, kNumNumbers };
constexpr int64_t kWidths[kNumNumbers] = {0, 2, 2, 4, 1, 1};  // bytes

// Numbers of the 4-bit codes.
constexpr int8_t kTables[kNumCodes][16] = {
    {},
    {
#include "codes4.inc"
    },
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
};
constexpr const int8_t* kNumbers = kTables[kTable4];

// Codes of a block are in groups of `together` inputs; a group has a 32-bit word per output. 8 bits: one input per byte. 4 bits:
// inputs 0 to 3 in the low halves of the bytes, inputs 4 to 7 in the high halves.
struct Bits8 {
  static constexpr int64_t together = 4, bytes = kInputs * kPanel;
};
struct Bits4 {
  static constexpr int64_t together = 8, bytes = kInputs * kPanel / 2;
};

// A panel: a header, bases, blocks. Bases are 32 numbers in float16 for every `kSpan` blocks: those of scales, of offsets, or of both.
struct Panel {
  const uint8_t *bases, *blocks;
};

// Contents of a block of weights: codes, then 32 scales for each group of inputs, then as many offsets. Zeros are integers
// subtracted from numbers before scaling. Products are integers that are multiplied by the base of their blocks.
struct Form {
  Codes codes;
  Numbers scales, offsets;
  uint8_t groups;
  int64_t scales_at, offsets_at, bytes, base_bytes;

  Form(uint8_t codes_, uint8_t scales_, uint8_t offsets_, uint8_t groups_)
      : codes(static_cast<Codes>(codes_)),
        scales(static_cast<Numbers>(scales_)),
        offsets(static_cast<Numbers>(offsets_)),
        groups(groups_),
        scales_at(codes == kInt8 ? Bits8::bytes : Bits4::bytes),
        offsets_at(scales_at + groups * kPanel * kWidths[scales]),
        bytes(offsets_at + groups * kPanel * kWidths[offsets]),
        base_bytes(((scales == kProducts) + (offsets == kProducts)) * kPanel * kWidths[kFloat16]) {}

  // `blocks` is a multiple of kSpan if there are bases.
  int64_t panel_bytes(int64_t blocks) const { return kHeader + blocks * bytes + blocks / kSpan * base_bytes; }
  Panel panel(const uint8_t* packed, int64_t index, int64_t blocks) const {
    const uint8_t* bases = packed + index * panel_bytes(blocks) + kHeader;
    return {bases, bases + blocks / kSpan * base_bytes};
  }
  const uint8_t* scale_bases(const Panel& panel, int64_t block) const { return panel.bases + block / kSpan * base_bytes; }
  const uint8_t* offset_bases(const Panel& panel, int64_t block) const {
    return scale_bases(panel, block) + (scales == kProducts ? kPanel * kWidths[kFloat16] : 0);
  }
  const uint8_t* scales_of(const uint8_t* block, int64_t group) const { return block + scales_at + group * kPanel * kWidths[scales]; }
  const uint8_t* offsets_of(const uint8_t* block, int64_t group) const {
    return block + offsets_at + group * kPanel * kWidths[offsets];
  }
};

inline float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

template <typename T>
inline T read_at(const uint8_t* from, int64_t index) {
  T found;
  std::memcpy(&found, from + index * sizeof(T), sizeof(T));
  return found;
}

// One of the 32 scales or offsets.
inline float stored_at(const uint8_t* from, Numbers kind, int64_t output) {
  switch (kind) {
    case kBfloat16: return from_bfloat16(read_at<uint16_t>(from, output));
    case kFloat16: return static_cast<float>(read_at<at::Half>(from, output));
    case kFloat32: return read_at<float>(from, output);
    case kZeros:
    case kProducts: return static_cast<float>(read_at<int8_t>(from, output));
    default: return 0.0f;
  }
}

inline float number_at(const uint8_t* block, Codes codes, int64_t input, int64_t output) {
  const int64_t together = codes == kInt8 ? Bits8::together : Bits4::together, place = input % together;
  const uint8_t* word = block + (input / together * kPanel + output) * 4;
  if (codes == kInt8) return static_cast<int8_t>(word[place]);
  return kTables[codes][place < 4 ? word[place] & 15 : word[place - 4] >> 4];
}

// Decode one weight, in the order in which a checkpoint's reference does.
inline float value_at(const Form& form, const Panel& panel, int64_t b, int64_t input, int64_t output) {
  const uint8_t* block = panel.blocks + b * form.bytes;
  const int64_t group = input * form.groups / kInputs;
  const float number = number_at(block, form.codes, input, output);
  float scale = stored_at(form.scales_of(block, group), form.scales, output);
  if (form.scales == kProducts) scale *= stored_at(form.scale_bases(panel, b), kFloat16, output);
  if (form.offsets == kNone) return scale * number;
  float offset = stored_at(form.offsets_of(block, group), form.offsets, output);
  if (form.offsets == kProducts) offset *= stored_at(form.offset_bases(panel, b), kFloat16, output);
  return form.offsets == kZeros ? scale * (number - offset) : scale * number + offset;
}

// Rows of activations in the precision of the products, in tiles of `at_once` rows.
struct Rows {
  int64_t count, blocks, at_once;
  std::unique_ptr<int32_t[]> words;   // per tile of n rows: [words of a row][n]
  std::unique_ptr<float[]> scales;    // 8 bits only; per tile of n rows: [blocks][n]
  std::unique_ptr<int32_t[]> starts;  // 8 bits only: initial sums, -128 * (sum of a row's codes), because weights enter as code + 128
  std::unique_ptr<float[]> sums;      // of a row's activations; starts and sums per tile of n rows: [blocks][groups][n]
};

// Input of a tile: its rows.
struct Part {
  const int32_t* words;
  const float* scales;
  const int32_t* starts;
  const float* sums;
};

#if defined(__AVX512F__)
// Load 32 activations of a row; those beyond its end are 0.
inline void load_32(const float* from, int64_t left, __m512& low, __m512& high) {
  const auto mask = [](int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); };
  low = _mm512_maskz_loadu_ps(mask(left), from);
  high = _mm512_maskz_loadu_ps(mask(left - 16), from + 16);
}

// 16 of the 32 scales or offsets.
inline __m512 stored(const uint8_t* from, Numbers kind, int half) {
  from += half * 16 * kWidths[kind];
  const auto words = [&] { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
  switch (kind) {
    case kBfloat16: return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words()), 16));
    case kFloat16: return _mm512_cvtph_ps(words());
    case kFloat32: return _mm512_loadu_ps(from);
    default: return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
}

inline __m512 scale_of(const Form& form, const Panel& panel, int64_t b, int64_t group, int half) {
  const __m512 scale = stored(form.scales_of(panel.blocks + b * form.bytes, group), form.scales, half);
  return form.scales == kProducts ? _mm512_mul_ps(scale, stored(form.scale_bases(panel, b), kFloat16, half)) : scale;
}

// What an offset, or a zero, adds to a weight.
inline __m512 added(const Form& form, const Panel& panel, int64_t b, int64_t group, int half, __m512 scale) {
  const __m512 offset = stored(form.offsets_of(panel.blocks + b * form.bytes, group), form.offsets, half);
  if (form.offsets == kProducts) return _mm512_mul_ps(offset, stored(form.offset_bases(panel, b), kFloat16, half));
  return form.offsets == kZeros ? _mm512_fnmadd_ps(offset, scale, _mm512_setzero_ps()) : offset;
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define OUTRIDER_BYTES
// Integer products.
struct Bytes {
  using Sum = __m512i;
  static constexpr int64_t words = kInputs / 4;  // 32 bits each, of a row's block

  template <int groups>
  static void prepare(const float* x, int64_t left, int32_t* to, int64_t stride, float* scale, int32_t* starts, float* sums) {
    __m512 low, high;
    load_32(x, left, low, high);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(inverse)));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(inverse)));
    alignas(32) int32_t codes[words];
    _mm_store_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtsepi32_epi8(first));
    _mm_store_si128(reinterpret_cast<__m128i*>(codes + 4), _mm512_cvtsepi32_epi8(second));
    for (int64_t i = 0; i < words; ++i) to[i * stride] = codes[i];
    const bool has_nan = _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) != 0;  // maxima and integers drop it
    *scale = has_nan ? std::numeric_limits<float>::quiet_NaN() : most > 1e-30f ? most / 127.0f : 0.0f;
    const int32_t totals[2] = {_mm512_reduce_add_epi32(first), _mm512_reduce_add_epi32(second)};
    for (int64_t g = 0; g < groups; ++g) {
      const int32_t total = groups == 1 ? totals[0] + totals[1] : totals[g];
      starts[g * stride] = -128 * total;
      sums[g * stride] = static_cast<float>(total) * *scale;
    }
  }
  // Weights as numbers + 128: the instruction takes one unsigned factor.
  static __m512i table(Codes codes) {
    return _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTables[codes]))),
                            _mm512_set1_epi8(-128));
  }
  static void decode(const uint8_t* words_of, Bits8, __m512i, __m512i* weights) {
    weights[0] = _mm512_xor_si512(_mm512_loadu_si512(words_of), _mm512_set1_epi8(-128));
  }
  static void decode(const uint8_t* words_of, Bits4, __m512i table, __m512i* weights) {
    const __m512i codes = _mm512_loadu_si512(words_of), mask = _mm512_set1_epi8(15);
    weights[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
    weights[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask));
  }
  static Sum start(const int32_t* from) { return _mm512_set1_epi32(*from); }
  static Sum add(Sum sum, __m512i weights, const int32_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));  // compilers would add a broadcast
    return sum;
  }
  static __m512 result(Sum sum, const float* scale) { return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(*scale)); }
};
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define OUTRIDER_HALVES
// bfloat16 products. Pairs of every four inputs are (0, 2) and (1, 3), so that one shift decodes a pair.
struct Halves {
  using Sum = __m512;
  static constexpr int64_t words = kInputs / 2;

  template <int groups>
  static void prepare(const float* x, int64_t left, int32_t* to, int64_t stride, float*, int32_t*, float* sums) {
    __m512 low, high;
    load_32(x, left, low, high);
    alignas(64) uint16_t rounded[kInputs];
    _mm512_store_si512(rounded, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    for (int64_t i = 0; i < words; ++i) {
      const int64_t first = i / 2 * 4 + i % 2;
      to[i * stride] = static_cast<int32_t>(rounded[first] | static_cast<uint32_t>(rounded[first + 2]) << 16);
    }
    const auto* numbers = reinterpret_cast<const uint8_t*>(rounded);
    const float totals[2] = {_mm512_reduce_add_ps(stored(numbers, kBfloat16, 0)), _mm512_reduce_add_ps(stored(numbers, kBfloat16, 1))};
    for (int64_t g = 0; g < groups; ++g) sums[g * stride] = groups == 1 ? totals[0] + totals[1] : totals[g];
  }
  static __m512i table(Codes codes) { return _mm512_load_si512(kEntries[codes].entries); }
  static void decode(const uint8_t* words_of, Bits8, __m512i, __m512i* weights) {
    const __m512i codes = _mm512_loadu_si512(words_of);
    const auto number = [](__m512i code) { return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(code, 24))); };
    weights[0] = _mm512_or_si512(_mm512_srli_epi32(number(_mm512_slli_epi32(codes, 24)), 16), number(_mm512_slli_epi32(codes, 8)));
    weights[1] = _mm512_or_si512(_mm512_srli_epi32(number(_mm512_slli_epi32(codes, 16)), 16), number(codes));
  }
  static void decode(const uint8_t* words_of, Bits4, __m512i table, __m512i* weights) {
    const __m512i codes = _mm512_loadu_si512(words_of);
    weights[0] = _mm512_permutexvar_epi16(codes, table);  // uses the low five bits: the table repeats the 16 values
    weights[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    weights[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    weights[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
  static Sum start(const int32_t*) { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i weights, const int32_t* x) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
    return sum;
  }
  static __m512 result(Sum sum, const float*) { return sum; }

  struct Table {
    alignas(64) uint16_t entries[32];
  };
  static const std::array<Table, kNumCodes> kEntries;
};
const std::array<Halves::Table, kNumCodes> Halves::kEntries = [] {
  std::array<Table, kNumCodes> tables;
  for (int codes = 0; codes < kNumCodes; ++codes)
    for (int i = 0; i < 32; ++i) {
      const float number = kTables[codes][i % 16];
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      tables[codes].entries[i] = static_cast<uint16_t>(bits >> 16);  // exact: seven bits of magnitude
    }
  return tables;
}();
#endif

#if defined(__AVX512F__)
// out[r][32] (+)= blocks [from, to) of one panel times `rows` rows.
template <typename Arithmetic, typename Bits, int groups, int rows>
void tile(const Form& form, const Panel& panel, int64_t from, int64_t to, const Part& x, float* out, int64_t out_stride, int64_t ahead) {
  // Steps of a group; words of x in one.
  constexpr int64_t steps = kInputs / Bits::together / groups, words = Arithmetic::words / steps / groups;
  const __m512i table = Arithmetic::table(form.codes);
  const int64_t bytes = form.bytes;
  const bool shifted = form.offsets != kNone;
  __m512 totals[rows][2];  // of all blocks, in float32
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      totals[r][half] = from == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * out_stride + half * 16);
  for (int64_t b = from; b < to; ++b) {
    const uint8_t* block = panel.blocks + b * bytes;
    if (ahead)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + ahead + i);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t place = (b * groups + group) * rows;
      const int32_t* x_of = x.words + place * steps * words;
      typename Arithmetic::Sum sums[rows][2];
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = Arithmetic::start(x.starts + place + r);
#pragma GCC unroll 8
      for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          __m512i weights[words];
          Arithmetic::decode(block + ((group * steps + step) * 2 + half) * 64, Bits{}, table, weights);
#pragma GCC unroll 4
          for (int64_t i = 0; i < words; ++i)
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r)
              sums[r][half] = Arithmetic::add(sums[r][half], weights[i], x_of + (step * words + i) * rows + r);
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512 scale = scale_of(form, panel, b, group, half);
        const __m512 offset = shifted ? added(form, panel, b, group, half, scale) : _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int r = 0; r < rows; ++r) {
          __m512 before = totals[r][half];
          if (shifted) before = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.sums[place + r]), before);
          const __m512 result = Arithmetic::result(sums[r][half], x.scales + b * rows + r);
          totals[r][half] = _mm512_fmadd_ps(result, scale, before);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + r * out_stride + half * 16, totals[r][half]);
}

using Tile = void (*)(const Form&, const Panel&, int64_t, int64_t, const Part&, float*, int64_t, int64_t);
template <typename Arithmetic, typename Bits, int groups, size_t... index>
constexpr std::array<Tile, sizeof...(index)> make_tiles(std::index_sequence<index...>) {
  return {tile<Arithmetic, Bits, groups, static_cast<int>(index) + 1>...};
}
template <typename Arithmetic, typename Bits, int groups>
constexpr auto kTiles = make_tiles<Arithmetic, Bits, groups>(std::make_index_sequence<kMaxRows>{});  // [rows - 1]

template <typename Arithmetic, int groups>
Rows prepare(const float* x, int64_t count, int64_t inputs) {
  const int64_t blocks = (inputs + kInputs - 1) / kInputs, tiles = (count + kMaxRows - 1) / kMaxRows;
  Rows rows{count, blocks, (count + tiles - 1) / tiles, {}, {}, {}, {}};
  rows.words.reset(new int32_t[count * blocks * Arithmetic::words]);
  rows.scales.reset(new float[count * blocks]);
  rows.starts.reset(new int32_t[count * blocks * groups]);
  rows.sums.reset(new float[count * blocks * groups]);
  parallel_for(0, count * blocks, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / blocks, b = i % blocks, first = r / rows.at_once * rows.at_once, n = std::min(rows.at_once, count - first);
      const auto place = [&](int64_t size) { return (first * blocks + b * n) * size + r - first; };
      Arithmetic::template prepare<groups>(x + r * inputs + b * kInputs, inputs - b * kInputs, rows.words.get() + place(Arithmetic::words), n,
                                           rows.scales.get() + place(1), rows.starts.get() + place(groups),
                                           rows.sums.get() + place(groups));
    }
  });
  return rows;
}

template <typename Arithmetic, typename Bits, int groups>
void multiply(const Form& form, const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out) {
  const Rows rows = prepare<Arithmetic, groups>(x, count, inputs);
  const int64_t blocks = rows.blocks, stride = panels * kPanel;
  const int64_t stretch = count == rows.at_once ? blocks : kStretch;
  const int64_t grain = std::max<int64_t>(1, 200'000 / (inputs * kPanel * (count + 4)));  // about 10 microseconds of work per thread
  parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const Panel panel = form.panel(packed, p, blocks);
      for (int64_t b = 0; b < blocks; b += stretch)
        for (int64_t r = 0; r < count; r += rows.at_once) {
          const int64_t n = std::min(rows.at_once, count - r), at = r * blocks;
          const Part part{rows.words.get() + at * Arithmetic::words, rows.scales.get() + at, rows.starts.get() + at * groups,
                          rows.sums.get() + at * groups};
          kTiles<Arithmetic, Bits, groups>[n - 1](form, panel, b, std::min(blocks, b + stretch), part, out + r * stride + p * kPanel, stride,
                                                  r == 0 ? kAhead : 0);
        }
    }
  });
}

template <typename Arithmetic>
void multiply(const Form& form, const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out) {
  const auto run = form.codes == kInt8 ? (form.groups == 1 ? multiply<Arithmetic, Bits8, 1> : multiply<Arithmetic, Bits8, 2>)
                                       : (form.groups == 1 ? multiply<Arithmetic, Bits4, 1> : multiply<Arithmetic, Bits4, 2>);
  run(form, x, count, inputs, packed, panels, out);
}
#endif

// Write the numbers of a panel's 4-bit codes of four inputs, which are in the low or the high halves of bytes.
inline void look_up(const int8_t* table, const uint8_t* from, int shift, uint8_t* to) {
#if defined(__has_builtin) && __has_builtin(__builtin_shuffle)
  typedef uint8_t bytes __attribute__((vector_size(16)));  // one instruction for 16 codes
  bytes numbers, codes;
  std::memcpy(&numbers, table, sizeof numbers);
  for (int64_t i = 0; i < 4 * kPanel; i += 16) {
    std::memcpy(&codes, from + i, sizeof codes);
    codes = __builtin_shuffle(numbers, codes >> shift & 15);
    std::memcpy(to + i, &codes, sizeof codes);
  }
#else
  for (int64_t i = 0; i < 4 * kPanel; ++i) to[i] = static_cast<uint8_t>(table[from[i] >> shift & 15]);
#endif
}

// Decode a block to [inputs][outputs], as value_at does.
void decode_block(const Form& form, const Panel& panel, int64_t b, float (*values)[kPanel]) {
  const uint8_t* block = panel.blocks + b * form.bytes;
  const int64_t together = form.codes == kInt8 ? Bits8::together : Bits4::together, depth = kInputs / form.groups;
  for (int64_t group = 0; group < form.groups; ++group) {
    float scales[kPanel], offsets[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) {
      scales[j] = stored_at(form.scales_of(block, group), form.scales, j);
      if (form.scales == kProducts) scales[j] *= stored_at(form.scale_bases(panel, b), kFloat16, j);
      offsets[j] = form.offsets == kNone ? 0.0f : stored_at(form.offsets_of(block, group), form.offsets, j);
      if (form.offsets == kProducts) offsets[j] *= stored_at(form.offset_bases(panel, b), kFloat16, j);
    }
    for (int64_t k = group * depth; k < (group + 1) * depth; k += 4) {
      const uint8_t* words = block + k / together * kPanel * 4;  // of an output each: four inputs
      uint8_t numbers[4 * kPanel];
      if (form.codes != kInt8) look_up(kTables[form.codes], words, static_cast<int>(k % together), numbers), words = numbers;
      for (int64_t v = 0; v < kVectors; ++v) {
        ivec word;
        vec scale, offset;
        std::memcpy(&word, words + v * sizeof(vec), sizeof(vec));
        std::memcpy(&scale, scales + v * kLanes, sizeof(vec));
        std::memcpy(&offset, offsets + v * kLanes, sizeof(vec));
        for (int i = 0; i < 4; ++i) {
          const vec number = __builtin_convertvector(word << (24 - 8 * i) >> 24, vec);
          const vec value = form.offsets == kNone    ? scale * number
                               : form.offsets == kZeros ? scale * (number - offset)
                                                        : scale * number + offset;
          std::memcpy(values[k + i] + v * kLanes, &value, sizeof(vec));
        }
      }
    }
  }
}

// float32, on any CPU. Each block is decoded once for all rows.
void multiply_floats(const Form& form, const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out) {
  const int64_t blocks = (inputs + kInputs - 1) / kInputs, stride = panels * kPanel;
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    alignas(sizeof(vec)) float values[kInputs][kPanel];
    for (int64_t p = begin; p < end; ++p) {
      const Panel panel = form.panel(packed, p, blocks);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t depth = std::min(kInputs, inputs - b * kInputs);
        decode_block(form, panel, b, values);
        for (int64_t r = 0; r < count; ++r) {
          const float* row = x + r * inputs + b * kInputs;
          float* to = out + r * stride + p * kPanel;
          vec sums[kVectors] = {};
          for (int64_t k = 0; k < depth; ++k)
#pragma GCC unroll 8
            for (int64_t v = 0; v < kVectors; ++v) {
              vec value;
              std::memcpy(&value, values[k] + v * kLanes, sizeof(vec));
              sums[v] += value * row[k];
            }
#pragma GCC unroll 8
          for (int64_t v = 0; v < kVectors; ++v) {
            vec before = {};
            if (b) std::memcpy(&before, to + v * kLanes, sizeof(vec));
            before += sums[v];
            std::memcpy(to + v * kLanes, &before, sizeof(vec));
          }
        }
      }
    }
  });
}

void multiply_any(const Form& form, const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out,
                  int64_t bits) {
#if defined(OUTRIDER_BYTES)
  if (bits == 8) return multiply<Bytes>(form, x, count, inputs, packed, panels, out);
#endif
#if defined(OUTRIDER_HALVES)
  if (bits == 16) return multiply<Halves>(form, x, count, inputs, packed, panels, out);
#endif
  TORCH_CHECK(bits == 32, "linear_blocks: this CPU does not multiply activations of ", bits, " bits");
  multiply_floats(form, x, count, inputs, packed, panels, out);
}

// Read the form of a weight from the header of its first panel.
Form form_of(const at::Tensor& packed, int64_t inputs) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.dim() == 2 && packed.is_contiguous() && packed.size(0) > 0 &&
                  packed.size(1) > kHeader,
              "linear_blocks: weights ", packed.sizes(), " are not in blocks");
  const uint8_t* said = packed.const_data_ptr<uint8_t>();
  TORCH_CHECK(said[0] < kNumCodes && said[1] > kNone && said[1] < kNumNumbers && said[1] != kZeros && said[2] < kNumNumbers && (said[3] == 1 || said[3] == 2),
              "linear_blocks: weights ", packed.sizes(), " are in blocks of an unknown form");
  const Form form(said[0], said[1], said[2], said[3]);
  const int64_t blocks = (packed.size(1) - kHeader) / (form.bytes + form.base_bytes / kSpan);
  TORCH_CHECK(packed.size(1) == form.panel_bytes(blocks), "linear_blocks: weights ", packed.sizes(), " are not in blocks of ",
              form.bytes, " bytes");
  TORCH_CHECK(blocks == (inputs + kInputs - 1) / kInputs, "linear_blocks: input of size ", inputs, ", weight for ", blocks, " blocks of ",
              kInputs);
  return form;
}

void decode_row(const Form& form, const Panel& panel, int64_t output, int64_t inputs, float* out) {
  for (int64_t k = 0; k < inputs; ++k) out[k] = value_at(form, panel, k / kInputs, k % kInputs, output);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Packing
// ---------------------------------------------------------------------------------------------------------------------------

// The border between the values of 4-bit codes i and i + 1.
constexpr float border(int i) { return static_cast<float>(kNumbers[i] + kNumbers[i + 1]) / 2.0f; }

constexpr auto kBorders = std::make_integer_sequence<int, 15>{};

// Round to the nearest values of 4-bit codes.
template <int... i>
inline vec nearest_numbers(vec x, std::integer_sequence<int, i...>) {
  vec found[3] = {splat(kNumbers[0]), vec{}, vec{}};  // short chains of additions; integers, so their order does not matter
  ((found[i % 3] += x > splat(border(i)) ? splat(static_cast<float>(kNumbers[i + 1] - kNumbers[i])) : vec{}), ...);
  return found[0] + found[1] + found[2];
}

inline uint16_t to_bfloat16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr float kTiny = 1e-30f;  // weights below it become 0: their reciprocal could overflow

// Round 32 weights to codes; return their scale's bits. The scale is rounded up, so that the largest weight is not clipped.
inline uint16_t round_to(Bits8, const float* weights, uint8_t* codes) {
  float most = 0.0f;
  for (int64_t k = 0; k < kInputs; ++k) most = std::max(most, std::abs(weights[k]));
  uint16_t bits = most < kTiny ? 0 : to_bfloat16(most / 127.0f);
  if (most >= kTiny && from_bfloat16(bits) * 127.0f < most) ++bits;
  const float inverse = bits ? 1.0f / from_bfloat16(bits) : 0.0f;
  for (int64_t k = 0; k < kInputs; ++k) {
    const int code = static_cast<int>(std::nearbyint(weights[k] * inverse));
    codes[k] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(code, -127, 127)));
  }
  return bits;
}

// Search the scale with the least squared error, weighted by magnitude. Candidates map the largest weight to values around either end
// of the table; each is then replaced by the optimal scale for its codes.
inline uint16_t round_to(Bits4, const float* weights, uint8_t* codes) {
  vec parts[kVectors], squares{};
  for (int v = 0; v < kVectors; ++v) parts[v] = load(weights + v * kLanes), squares += parts[v] * parts[v];
  float most = 0.0f;
  for (int64_t k = 0; k < kInputs; ++k)
    if (std::abs(weights[k]) > std::abs(most)) most = weights[k];
  uint16_t bits = 0;
  if (std::abs(most) >= kTiny) {
    const vec typical = splat(std::sqrt(sum(squares) / kInputs));
    float best = -1.0f, scale = 0.0f;
    for (int candidate = 0; candidate < 18; ++candidate) {
      const float end = (candidate % 2 ? 1.0f : -1.0f) * (91.0f + 7.0f * static_cast<float>(candidate / 2));  // 91 to 147
      vec dots{}, norms{};
      for (const vec part : parts) {
        const vec numbers = nearest_numbers(part * splat(end / most), kBorders);
        const vec weighted = (typical + (part < vec{} ? -part : part)) * numbers;
        dots += weighted * part;
        norms += weighted * numbers;
      }
      const float dot = sum(dots), norm = sum(norms);
      if (dot * dot > best * norm) best = dot * dot / norm, scale = dot / norm;
    }
    bits = to_bfloat16(scale);
  }
  const float inverse = from_bfloat16(bits) == 0.0f ? 0.0f : 1.0f / from_bfloat16(bits);
  for (int64_t k = 0; k < kInputs; ++k) {
    int code = 0;
    for (int i = 0; i < 15; ++i) code += weights[k] * inverse > border(i);
    codes[k] = static_cast<uint8_t>(code);
  }
  return bits;
}

template <typename Bits>
void pack_panel(const Form& form, const float* rows, int64_t outputs, int64_t inputs, uint8_t* panel) {
  const uint8_t said[] = {form.codes, form.scales, form.offsets, form.groups};
  std::memset(panel, 0, kHeader);
  std::memcpy(panel, said, sizeof said);
  for (int64_t b = 0; b * kInputs < inputs; ++b) {
    uint8_t* block = panel + kHeader + b * form.bytes;
    std::memset(block, 0, form.bytes);
    for (int64_t j = 0; j < kPanel; ++j) {
      float weights[kInputs] = {};
      uint8_t codes[kInputs];
      if (j < outputs)
        std::memcpy(weights, rows + j * inputs + b * kInputs, std::min(kInputs, inputs - b * kInputs) * sizeof(float));
      const uint16_t scale = round_to(Bits{}, weights, codes);
      std::memcpy(block + form.scales_at + 2 * j, &scale, 2);
      for (int64_t k = 0; k < kInputs; ++k) {
        const int64_t place = k % Bits::together;
        uint8_t* word = block + (k / Bits::together * kPanel + j) * 4;
        word[place % 4] |= static_cast<uint8_t>(codes[k] << (place < 4 ? 0 : 4));
      }
    }
  }
}

}  // namespace

// Bits of activations that this CPU multiplies fastest with blocks: 8, 16 or 32.
int64_t block_activation_bits() {
#if defined(OUTRIDER_BYTES)
  return 8;
#elif defined(OUTRIDER_HALVES)
  return 16;
#else
  return 32;
#endif
}

// x [..., inputs], packed uint8 [panels, bytes] -> [..., outputs] in x's type; outputs <= panels * 32.
at::Tensor linear_blocks(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs,
                         int64_t activation_bits) {
  const int64_t inputs = x.size(-1), panels = packed.size(0);
  const Form form = form_of(packed, inputs);
  const at::Tensor source = x.to(at::kFloat).contiguous();
  auto shape = x.sizes().vec();
  shape.back() = panels * kPanel;
  at::Tensor out = at::empty(shape, source.options());
  const int64_t count = out.numel() / std::max<int64_t>(1, panels * kPanel);
  if (count > 0)
    multiply_any(form, source.const_data_ptr<float>(), count, inputs, packed.const_data_ptr<uint8_t>(), panels,
                 out.mutable_data_ptr<float>(), activation_bits);
  if (outputs != out.size(-1)) out = out.narrow(-1, 0, outputs).contiguous();
  if (bias.has_value()) out.add_(*bias);
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

// token_ids [...] -> [..., inputs] float32: rows of a weight in blocks.
at::Tensor embed_blocks(const at::Tensor& token_ids, const at::Tensor& packed, int64_t inputs) {
  const Form form = form_of(packed, inputs);
  const at::Tensor ids = token_ids.contiguous();
  const int64_t *from = ids.const_data_ptr<int64_t>(), count = ids.numel(), rows = packed.size(0) * kPanel;
  for (int64_t i = 0; i < count; ++i) TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < rows, "embed: no token ", from[i]);
  auto shape = ids.sizes().vec();
  shape.push_back(inputs);
  at::Tensor out = at::empty(shape, packed.options().dtype(at::kFloat));
  const uint8_t* panels = packed.const_data_ptr<uint8_t>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i)
    decode_row(form, form.panel(panels, from[i] / kPanel, (inputs + kInputs - 1) / kInputs), from[i] % kPanel, inputs, to + i * inputs);
  return out;
}

// Round weight [outputs, inputs] into packed uint8 [panels, bytes], which the caller allocates (in huge pages).
void pack_blocks(const at::Tensor& weight, int64_t bits, at::Tensor packed) {
  TORCH_CHECK(weight.dim() == 2 && (bits == 4 || bits == 8), "pack_blocks: weight ", weight.sizes(), " in ", bits, " bits");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = (outputs + kPanel - 1) / kPanel;
  const Form form(bits == 8 ? kInt8 : kTable4, kBfloat16, kNone, 1);
  const int64_t panel_bytes = form.panel_bytes((inputs + kInputs - 1) / kInputs);
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.sizes() == at::IntArrayRef({panels, panel_bytes}),
              "pack_blocks: weight ", weight.sizes(), " into ", packed.sizes());
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t some = std::min(kPanel, outputs - p * kPanel);
      const at::Tensor rows = weight.narrow(0, p * kPanel, some).to(at::kFloat).contiguous();
      (bits == 8 ? pack_panel<Bits8> : pack_panel<Bits4>)(form, rows.const_data_ptr<float>(), some, inputs, to + p * panel_bytes);
    }
  });
}

}  // namespace outrider
