// Linear layers whose weights are codes of 8, 6 or 4 bits, in blocks of 32 inputs x 32 outputs. A weight is scale * number + offset:
// the number of its code, a scale and, in some forms, an offset, for its output and 32 or 16 of its inputs.
//
// A pass over one row takes as long as reading the codes from memory. Codes are decoded in registers, once for all rows of a tile,
// and multiplied with activations in one of two precisions:
//
// - 8 bits, one scale per row and block: integer products, four per lane and instruction (VNNI) or two (AVX2);
// - 32 bits: float32, on any CPU.
//
// Both multiply numbers, and scale the sums of a block; an offset is multiplied with the sum of the row's activations.
// Batch-invariant like the other layers: a row's sums are added block by block, and within a block in a fixed order, for any
// number of rows in the pass.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "gate.h"
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
#include <type_traits>
#include <utility>

namespace outrider {
namespace {

constexpr int64_t kInputs = 32;   // inputs of a block; its outputs are kPanel
constexpr int64_t kHeader = 64;   // bytes at the start of a panel
constexpr int64_t kSpan = 8;      // blocks that share a base
// Rows of a tile, and vectors of a panel whose sums are computed at once: 12 rows x 2 vectors of sums leave 8 of AVX-512's registers
// for weights, 8 rows x 1 vector leave 8 of AVX2's. More rows than a tile has wait for products, not for weights: then AVX-512's tiles
// have fewer, so that the sums over all blocks stay in registers, too.
constexpr int kMaxRows = kLanes == 16 ? 12 : 8, kRowsOfMany = kLanes == 16 ? 6 : 8;
constexpr int kVectorsAtOnce = kLanes == 16 ? kVectors : 1;
constexpr int64_t kStretch = 16;  // blocks whose weights stay in the L1 cache while all rows of a pass are multiplied
// Bytes to prefetch ahead, because the hardware prefetcher stops at page ends: measured on AMD's Zen 5 (which has AVX-VNNI, unlike Zen 4),
// on Zen 4 and on Intel's Sapphire Rapids.
#if defined(__AVX512BF16__) && defined(__AVXVNNI__) && !defined(__AMX_TILE__)
constexpr int64_t kAhead = 6144;
#else
constexpr int64_t kAhead = 3072;
#endif

// Numbers of codes, and dtypes of scales and offsets. Python's names for them are in runner/blocks.py.
enum Codes : uint8_t { kInt8, kInt6, kTable4, kInt4, kUint4, kFloat4, kIq3S, kIq3Xxs, kIq2, kIq1, kRounded4, kNumCodes };
enum Numbers : uint8_t { kNone, kBfloat16, kFloat16, kFloat32, kZeros, kProducts, kNumNumbers };
constexpr int64_t kWidths[kNumNumbers] = {0, 2, 2, 4, 1, 1};  // bytes

constexpr int8_t kTables[kNumCodes][16] = {
    {}, {},
#include "codes4.inc"
};
constexpr const int8_t* kNumbers = kTables[kRounded4];
// The numbers of these kinds are fractions of the integers above. Passes multiply scales by them: products with a power of 2 are exact.
constexpr float kUnits[kNumCodes] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f / 4, 1.0f / 8, 1.0f / 8, 1.0f};

// Codes of a block are in groups of `together` inputs; a group has `words` 32-bit words per output, first words first. 8 bits: one
// input per byte. 4 bits: inputs 0 to 3 in the low halves of the bytes, inputs 4 to 7 in the high halves. 6 bits: the low 4 bits of
// inputs 0 to 7 and of 8 to 15 in words like those, then a word of the upper bits: inputs j, 4 + j, 8 + j and 12 + j in byte j,
// lowest bits first.
struct Bits8 {
  static constexpr int64_t together = 4, words = 1, bytes = kInputs * kPanel;
};
struct Bits6 {
  static constexpr int64_t together = 16, words = 3, bytes = kInputs * kPanel * 6 / 8;
};
struct Bits4 {
  static constexpr int64_t together = 8, words = 1, bytes = kInputs * kPanel / 2;
};
struct Integers4 : Bits4 {};  // codes are integers, their numbers minus the lowest: no table

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
  int lowest, range;  // the lowest number, and the highest one minus it; a 6-bit code is its number minus the lowest
  int64_t scales_at, offsets_at, bytes, base_bytes;

  // `lowest_`: the lowest number of 6-bit codes.
  Form(uint8_t codes_, uint8_t scales_, uint8_t offsets_, uint8_t groups_, int8_t lowest_ = 0)
      : codes(static_cast<Codes>(codes_)),
        scales(static_cast<Numbers>(scales_)),
        offsets(static_cast<Numbers>(offsets_)),
        groups(groups_),
        lowest(codes == kInt8 ? -128 : codes == kInt6 ? lowest_ : *std::ranges::min_element(kTables[codes])),
        range(codes == kInt8 ? 255 : codes == kInt6 ? 63 : *std::ranges::max_element(kTables[codes]) - lowest),
        scales_at(codes == kInt8 ? Bits8::bytes : codes == kInt6 ? Bits6::bytes : Bits4::bytes),
        offsets_at(scales_at + groups * kPanel * kWidths[scales]),
        bytes(offsets_at + groups * kPanel * kWidths[offsets]),
        base_bytes(((scales == kProducts) + (offsets == kProducts)) * kPanel * kWidths[kFloat16]) {}

  // Whether codes are integers from 0 on: their numbers minus the lowest.
  bool has_integers() const { return codes == kInt6 || codes == kInt4 || codes == kUint4; }
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

// Rows of activations in the precision of the products, in tiles of `at_once` rows.
struct Rows {
  int64_t blocks, at_once;
  std::unique_ptr<int32_t[]> words;   // per tile of n rows: [words of a row][n]
  std::unique_ptr<float[]> scales;    // 8 bits only; per tile of n rows: [blocks][n]
  std::unique_ptr<int32_t[]> starts;  // 8 bits only: initial sums, for numbers that enter as differences from the lowest one
  std::unique_ptr<float[]> sums;  // of a row's activations; starts and sums per tile of n rows: [blocks][groups][n]
};

// Input of a tile: its rows.
struct Part {
  const int32_t* words;
  const float* scales;
  const int32_t* starts;
  const float* sums;
};

// A vector of the 32 scales or offsets.
inline vec stored(const uint8_t* from, Numbers kind, int v) {
  from += v * kLanes * kWidths[kind];
  switch (kind) {
    case kBfloat16: return load(reinterpret_cast<const at::BFloat16*>(from));
    case kFloat16: return load(reinterpret_cast<const at::Half*>(from));
    case kFloat32: return load(reinterpret_cast<const float*>(from));
    default: return load(reinterpret_cast<const int8_t*>(from));
  }
}

// Factors of scales and offsets: bases, and the unit of the numbers.
struct Bases {
  vec scales[kVectors], offsets[kVectors];
  void read(const Form& form, const Panel& panel, int64_t b) {
    for (int v = 0; v < kVectors; ++v) {
      scales[v] = splat(kUnits[form.codes]), offsets[v] = splat(1.0f);
      if (form.scales == kProducts) scales[v] *= stored(form.scale_bases(panel, b), kFloat16, v);
      if (form.offsets == kProducts) offsets[v] = stored(form.offset_bases(panel, b), kFloat16, v);
    }
  }
};

// Activations of a row's block; those beyond its end are 0.
struct Activations {
  vec parts[kVectors];
  Activations(const float* from, int64_t left) {
    float padded[kInputs] = {};
    if (left < kInputs) std::copy_n(from, left, padded), from = padded;
    for (int v = 0; v < kVectors; ++v) parts[v] = load(from + v * kLanes);
  }
};

// Round activations to codes of 8 bits, number = code * scale, four in a word. `totals` and `sums`: of each group's codes and numbers.
template <int groups>
inline void round_to_bytes(const float* x, int64_t left, int32_t* to, int64_t stride, float* scale, int32_t* totals, float* sums) {
  typedef int8_t Lanes __attribute__((vector_size(kLanes)));
  ivec codes[kVectors];
  const Activations some(x, left);
  vec most{}, nans{};  // maxima and integers drop them
  for (const vec part : some.parts) {
    const vec size = part < vec{} ? -part : part;
    most = size > most ? size : most;
    nans = part != part ? splat(1.0f) : nans;
  }
  const float peak = largest(most), inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
  for (int v = 0; v < kVectors; ++v) codes[v] = nearest(some.parts[v] * splat(inverse));
  *scale = largest(nans) > 0.0f ? std::numeric_limits<float>::quiet_NaN() : peak > 1e-30f ? peak / 127.0f : 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    ivec total{};
    for (int v = 0; v < kVectors / groups; ++v) total += codes[g * kVectors / groups + v];
    totals[g] = sum(total);
    sums[g * stride] = static_cast<float>(totals[g]) * *scale;
  }
  for (int v = 0; v < kVectors; ++v) {
    const Lanes bytes = __builtin_convertvector(codes[v], Lanes);
    for (int64_t j = 0; j < kLanes / 4; ++j) std::memcpy(to + (v * kLanes / 4 + j) * stride, reinterpret_cast<const char*>(&bytes) + 4 * j, 4);
  }
}

// The 16 codes of 6 bits of a group, four per word.
inline void six_bits(const uint8_t* words_of, ivec* codes) {
  const int32_t* words = reinterpret_cast<const int32_t*>(words_of);
  const ivec first = load(words), second = load(words + kPanel), upper = load(words + 2 * kPanel);
  codes[0] = (first & 0x0f0f0f0f) | (upper << 4 & 0x30303030);
  codes[1] = (first >> 4 & 0x0f0f0f0f) | (upper << 2 & 0x30303030);
  codes[2] = (second & 0x0f0f0f0f) | (upper & 0x30303030);
  codes[3] = (second >> 4 & 0x0f0f0f0f) | (upper >> 2 & 0x30303030);
}

// A word in all lanes. Compilers would move their own broadcasts out of the loop over a panel's vectors, and keep them in memory.
#if defined(__AVX2__)
inline ivec broadcast(const int32_t* x) {
  ivec found;
  asm volatile("vpbroadcastd %1, %0" : "=v"(found) : "m"(*x));
  return found;
}
#endif

#if (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define OUTRIDER_BYTES
// Integer products, four per lane and instruction.
struct Bytes {
  using Sum = ivec;
  using Weights = ivec;
  static constexpr int max_rows = kMaxRows;
  static constexpr int64_t words = kInputs / 4;  // 32 bits each, of a row's block

  template <int groups>
  static void prepare(const Form& form, const float* x, int64_t left, int32_t* to, int64_t stride, float* scale, int32_t* starts,
                      float* sums) {
    int32_t totals[groups];
    round_to_bytes<groups>(x, left, to, stride, scale, totals, sums);
    for (int64_t g = 0; g < groups; ++g) starts[g * stride] = (form.has_integers() ? form.lowest : -128) * totals[g];
  }
  // Weights as numbers + 128, or as codes that are numbers minus the lowest: the instruction takes one unsigned factor.
  static ivec raised(ivec numbers) { return numbers ^ static_cast<int32_t>(0x80808080); }
  static ivec table(const Form& form) { return raised(repeated(kTables[form.codes])); }
  static void decode(const uint8_t* words_of, Bits8, ivec, ivec* weights) {
    weights[0] = raised(load(reinterpret_cast<const int32_t*>(words_of)));
  }
  static void decode(const uint8_t* words_of, Bits6, ivec, ivec* weights) { six_bits(words_of, weights); }
  static void decode(const uint8_t* words_of, Bits4, ivec table, ivec* weights) {
    const ivec codes = load(reinterpret_cast<const int32_t*>(words_of));
    weights[0] = look_up(table, codes & 0x0f0f0f0f);
    weights[1] = look_up(table, codes >> 4 & 0x0f0f0f0f);
  }
  static void decode(const uint8_t* words_of, Integers4, ivec, ivec* weights) {
    const ivec codes = load(reinterpret_cast<const int32_t*>(words_of));
    weights[0] = codes & 0x0f0f0f0f;
    weights[1] = codes >> 4 & 0x0f0f0f0f;
  }
  static Sum start(const int32_t* from) { return ivec{} + *from; }
  static ivec spread(const int32_t* x) { return broadcast(x); }
  static void add(Sum& sum, ivec weights, ivec x, int64_t) {
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));  // compilers would keep sums in memory
#else
    sum = reinterpret_cast<ivec>(
        _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(weights), reinterpret_cast<__m256i>(x)));
#endif
  }
  static vec result(Sum sum, const int32_t*, const float* scale) { return __builtin_convertvector(sum, vec) * splat(*scale); }
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define OUTRIDER_BYTES
// Integer products of two bytes, one of them unsigned, with sums of two in 16 bits. Numbers of a small range enter as
// differences from the lowest one, which have no sign, and `narrow_sums` sums are added in 16 bits before they are widened. Others enter
// as sizes, with activations that have the numbers' signs, and each sum is widened (`narrow_sums` is 0).
template <int narrow_sums>
struct Bytes {
  struct Sum {
    ivec wide, narrow;
  };
  struct Weights {
    ivec sizes, numbers;
  };
  static constexpr int max_rows = kMaxRows;
  static constexpr int64_t words = kInputs / 4;  // 32 bits each, of a row's block

  template <int groups>
  static void prepare(const Form& form, const float* x, int64_t left, int32_t* to, int64_t stride, float* scale, int32_t* starts,
                      float* sums) {
    int32_t totals[groups];
    round_to_bytes<groups>(x, left, to, stride, scale, totals, sums);
    for (int64_t g = 0; g < groups; ++g) starts[g * stride] = narrow_sums ? form.lowest * totals[g] : 0;
  }
  static ivec table(const Form& form) {
    int8_t numbers[16];
    const int lowest = narrow_sums ? form.lowest : 0;
    for (int i = 0; i < 16; ++i) numbers[i] = static_cast<int8_t>(kTables[form.codes][i] - lowest);
    return repeated(numbers);
  }
  static Weights split(ivec numbers) {
    return {narrow_sums ? numbers : reinterpret_cast<ivec>(_mm256_abs_epi8(reinterpret_cast<__m256i>(numbers))), numbers};
  }
  static void decode(const uint8_t* words_of, Bits8, ivec, Weights* weights) {
    static_assert(narrow_sums == 0);
    weights[0] = split(load(reinterpret_cast<const int32_t*>(words_of)));
  }
  static void decode(const uint8_t* words_of, Bits6, ivec, Weights* weights) {
    static_assert(narrow_sums != 0);
    ivec codes[4];
    six_bits(words_of, codes);
    for (int i = 0; i < 4; ++i) weights[i] = split(codes[i]);
  }
  static void decode(const uint8_t* words_of, Bits4, ivec table, Weights* weights) {
    const ivec codes = load(reinterpret_cast<const int32_t*>(words_of));
    weights[0] = split(look_up(table, codes & 0x0f0f0f0f));
    weights[1] = split(look_up(table, codes >> 4 & 0x0f0f0f0f));
  }
  static void decode(const uint8_t* words_of, Integers4, ivec, Weights* weights) {
    static_assert(narrow_sums != 0);
    const ivec codes = load(reinterpret_cast<const int32_t*>(words_of));
    weights[0] = split(codes & 0x0f0f0f0f);
    weights[1] = split(codes >> 4 & 0x0f0f0f0f);
  }
  static Sum start(const int32_t*) { return {ivec{}, ivec{}}; }
  static ivec spread(const int32_t* x) { return broadcast(x); }
  // Add the products with a word of x, the `index`-th of its group.
  static void add(Sum& sum, const Weights& weights, ivec x, int64_t index) {
    __m256i x_of = reinterpret_cast<__m256i>(x);
    if (narrow_sums == 0) x_of = _mm256_sign_epi8(x_of, reinterpret_cast<__m256i>(weights.numbers));
    __m256i twos = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights.sizes), x_of), narrow = reinterpret_cast<__m256i>(sum.narrow);
    constexpr int64_t run = std::max(narrow_sums, 1);
    if (index % run == 0) narrow = twos;
    else asm("vpaddw %1, %0, %0" : "+x"(narrow) : "x"(twos));  // compilers would sum products as a tree, in memory
    sum.narrow = reinterpret_cast<ivec>(narrow);
    if (index % run != run - 1) return;
    const ivec fours = reinterpret_cast<ivec>(_mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
    if (index == run - 1) sum.wide = fours;
    else asm("vpaddd %1, %0, %0" : "+x"(sum.wide) : "x"(fours));
  }
  static vec result(Sum sum, const int32_t* start, const float* scale) {
    const ivec total = narrow_sums ? sum.wide + broadcast(start) : sum.wide;
    return __builtin_convertvector(total, vec) * reinterpret_cast<vec>(broadcast(reinterpret_cast<const int32_t*>(scale)));
  }
};
#endif

// float32 products, on any CPU.
struct Floats {
  using Sum = vec;
  using Weights = vec;
  static constexpr int max_rows = 4;
  static constexpr int64_t words = kInputs;

  template <int groups>
  static void prepare(const Form&, const float* x, int64_t left, int32_t* to, int64_t stride, float*, int32_t*, float* sums) {
    const Activations some(x, left);
    for (int64_t g = 0; g < groups; ++g) sums[g * stride] = 0.0f;
    for (int64_t k = 0; k < kInputs; ++k) {
      const float number = some.parts[k / kLanes][k % kLanes];
      std::memcpy(to + k * stride, &number, sizeof number);
      sums[k * groups / kInputs * stride] += number;
    }
  }
  static ivec table(const Form& form) { return form.codes == kInt6 ? ivec{} + form.lowest : repeated(kTables[form.codes]); }
  static void widen(ivec numbers, vec* weights) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = __builtin_convertvector(numbers << (24 - 8 * i) >> 24, vec);
  }
  static void decode(const uint8_t* words_of, Bits8, ivec, vec* weights) {
    widen(load(reinterpret_cast<const int32_t*>(words_of)), weights);
  }
  static void decode(const uint8_t* words_of, Bits6, ivec lowest, vec* weights) {
    ivec codes[4];
    six_bits(words_of, codes);
    for (int i = 0; i < 4; ++i) widen(codes[i], weights + 4 * i);
    for (int i = 0; i < 16; ++i) weights[i] += __builtin_convertvector(lowest, vec);
  }
  static void decode(const uint8_t* words_of, Bits4, ivec table, vec* weights) {
    const ivec codes = load(reinterpret_cast<const int32_t*>(words_of));
    widen(look_up(table, codes & 0x0f0f0f0f), weights);
    widen(look_up(table, codes >> 4 & 0x0f0f0f0f), weights + 4);
  }
  static Sum start(const int32_t*) { return vec{}; }
  // In memory: a product takes it from there.
  static const float* spread(const int32_t* x) { return reinterpret_cast<const float*>(x); }
  static void add(Sum& sum, vec weights, const float* x, int64_t) { fused_at(weights, x, sum); }
  static vec result(Sum sum, const int32_t*, const float*) { return sum; }
};

// out[r][32] (+)= blocks [from, to) of one panel times `rows` rows.
template <typename Arithmetic, typename Bits, int groups, int rows>
void tile(const Form& form, const Panel& panel, int64_t from, int64_t to, const Part& x, float* out, int64_t out_stride, int64_t ahead) {
  // Steps of a group; words of x in one.
  constexpr int64_t steps = kInputs / Bits::together / groups, words = Arithmetic::words / steps / groups;
  const ivec table = Arithmetic::table(form);
  const int64_t bytes = form.bytes;
  // float32 numbers have their zeros subtracted, so that each weight is the checkpoint's to the bit.
  const bool subtracts = std::is_same_v<Arithmetic, Floats> && form.offsets == kZeros, shifted = form.offsets != kNone && !subtracts;
  vec totals[kVectors][rows];  // of all blocks, in float32
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) totals[v][r] = from == 0 ? vec{} : load(out + r * out_stride + v * kLanes);
  Bases bases;
  for (int64_t b = from; b < to; ++b) {
    const uint8_t* block = panel.blocks + b * bytes;
    if (b == from || (form.base_bytes && b % kSpan == 0)) bases.read(form, panel, b);
    if (ahead)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + ahead + i);
    for (int64_t group = 0; group < groups; ++group)
#pragma GCC unroll 1
      for (int first = 0; first < kVectors; first += kVectorsAtOnce) {
        const int64_t place = (b * groups + group) * rows;
        const int32_t *x_of = x.words + place * steps * words, *starts = x.starts + place;
        const float *scales = x.scales + b * rows, *x_sums = x.sums + place;
        opaque(x_of), opaque(starts), opaque(scales);
        typename Arithmetic::Sum sums[kVectorsAtOnce][rows];
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsAtOnce; ++v)
#pragma GCC unroll 12
          for (int r = 0; r < rows; ++r) sums[v][r] = Arithmetic::start(starts + r);
#pragma GCC unroll 8
        for (int64_t step = 0; step < steps; ++step) {
          typename Arithmetic::Weights weights[kVectorsAtOnce][words];
#pragma GCC unroll 2
          for (int v = 0; v < kVectorsAtOnce; ++v) {
            Arithmetic::decode(block + ((group * steps + step) * Bits::words * kPanel + (first + v) * kLanes) * 4, Bits{}, table, weights[v]);
            if constexpr (std::is_same_v<Arithmetic, Floats>)
              if (subtracts) for (vec& numbers : weights[v]) numbers -= stored(form.offsets_of(block, group), kZeros, first + v);
          }
#pragma GCC unroll 16
          for (int64_t i = 0; i < words; ++i)
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
              const int64_t word = step * words + i;
              const auto factor = Arithmetic::spread(x_of + word * rows + r);  // once for all vectors
#pragma GCC unroll 2
              for (int v = 0; v < kVectorsAtOnce; ++v) Arithmetic::add(sums[v][r], weights[v][i], factor, word);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsAtOnce; ++v) {
          const vec scale = stored(form.scales_of(block, group), form.scales, first + v) * bases.scales[first + v];
          vec offset{};  // what an offset, or a zero, adds to a weight
          if (shifted) {
            offset = stored(form.offsets_of(block, group), form.offsets, first + v);
            offset = form.offsets == kZeros ? -(offset * scale) : offset * bases.offsets[first + v];
          }
#pragma GCC unroll 12
          for (int r = 0; r < rows; ++r) {
            vec before = totals[first + v][r];
            if (shifted) before = fused(offset, splat(x_sums[r]), before);
            totals[first + v][r] = fused(Arithmetic::result(sums[v][r], starts + r, scales + r), scale, before);
          }
        }
      }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) store(out + r * out_stride + v * kLanes, totals[v][r]);
}

using Tile = void (*)(const Form&, const Panel&, int64_t, int64_t, const Part&, float*, int64_t, int64_t);
template <typename Arithmetic, typename Bits, int groups, size_t... index>
constexpr std::array<Tile, sizeof...(index)> make_tiles(std::index_sequence<index...>) {
  return {tile<Arithmetic, Bits, groups, static_cast<int>(index) + 1>...};
}
template <typename Arithmetic, typename Bits, int groups>
constexpr auto kTiles = make_tiles<Arithmetic, Bits, groups>(std::make_index_sequence<Arithmetic::max_rows>{});  // [rows - 1]

template <typename Arithmetic, int groups>
Rows prepare(const Form& form, const float* x, int64_t count, int64_t inputs) {
  const int64_t blocks = (inputs + kInputs - 1) / kInputs;
  const int64_t most = count > Arithmetic::max_rows ? std::min(Arithmetic::max_rows, kRowsOfMany) : Arithmetic::max_rows;
  const int64_t tiles = (count + most - 1) / most;
  Rows rows{blocks, (count + tiles - 1) / tiles, {}, {}, {}, {}};
  rows.words.reset(new int32_t[count * blocks * Arithmetic::words]);
  rows.scales.reset(new float[count * blocks]);
  rows.starts.reset(new int32_t[count * blocks * groups]);
  rows.sums.reset(new float[count * blocks * groups]);
  parallel_for(0, tiles * blocks, std::max<int64_t>(1, 512 / rows.at_once), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / blocks * rows.at_once, b = i % blocks, n = std::min(rows.at_once, count - first);
      for (int64_t r = 0; r < n; ++r) {
        const auto place = [&](int64_t size) { return (first * blocks + b * n) * size + r; };
        Arithmetic::template prepare<groups>(form, x + (first + r) * inputs + b * kInputs, inputs - b * kInputs,
                                             rows.words.get() + place(Arithmetic::words), n, rows.scales.get() + place(1),
                                             rows.starts.get() + place(groups), rows.sums.get() + place(groups));
      }
    }
  });
  return rows;
}

// With a gate, the first half of the panels are gates, and `out` has half of the panels' outputs. An output panel: 32 of them.
template <typename Arithmetic, typename Bits, int groups>
void multiply(const Form& form, const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, const Gate* gate,
              float* out) {
  const Rows rows = prepare<Arithmetic, groups>(form, x, count, inputs);
  const bool in_one_tile = count == rows.at_once;
  const int64_t blocks = rows.blocks, stretch = in_one_tile ? blocks : kStretch;
  const int64_t panels_per_output = gate ? Gate::panels : 1, output_panels = panels / panels_per_output, width = panels_per_output * kPanel, stride = output_panels * kPanel;
  const int64_t grain = std::max<int64_t>(1, 200'000 / (inputs * width * (count + 4)));  // about 10 microseconds of work per thread
  parallel_for(0, output_panels, grain, [&](int64_t begin, int64_t end) {
    // Sums of several stretches, or panels, are in a buffer: rows of `out` are far apart, in the same sets of the caches.
    const std::unique_ptr<float[]> buffer(!in_one_tile || gate ? new float[count * width] : nullptr);
    for (int64_t output_panel = begin; output_panel < end; ++output_panel) {
      float* const results = out + output_panel * kPanel;
      for (int64_t i = 0; i < panels_per_output; ++i) {
        const Panel panel = form.panel(packed, output_panel + i * output_panels, blocks);
        float* const to = buffer ? buffer.get() + i * kPanel : results;
        const int64_t to_stride = buffer ? width : stride;
        for (int64_t b = 0; b < blocks; b += stretch)
          for (int64_t r = 0; r < count; r += rows.at_once) {
            const int64_t n = std::min(rows.at_once, count - r), at = r * blocks;
            const Part part{rows.words.get() + at * Arithmetic::words, rows.scales.get() + at, rows.starts.get() + at * groups,
                            rows.sums.get() + at * groups};
            kTiles<Arithmetic, Bits, groups>[n - 1](form, panel, b, std::min(blocks, b + stretch), part, to + r * to_stride, to_stride,
                                                    r == 0 ? kAhead : 0);
          }
      }
      for (int64_t r = 0; buffer && r < count; ++r)
        for (int64_t j = 0; j < kPanel; j += kLanes) {
          const float* sums = buffer.get() + r * width + j;
          store(results + r * stride + j, gate ? (*gate)(load(sums), load(sums + kPanel)) : load(sums));
        }
    }
  });
}

using Multiply = void (*)(const Form&, const float*, int64_t, int64_t, const uint8_t*, int64_t, const Gate*, float*);
template <typename Arithmetic, typename Bits>
Multiply grouped(const Form& form) {
  return form.groups == 1 ? multiply<Arithmetic, Bits, 1> : multiply<Arithmetic, Bits, 2>;
}
template <typename Arithmetic>
Multiply wide(const Form& form) {
  if (form.codes == kInt6) return grouped<Arithmetic, Bits6>(form);
  if (form.codes == kInt8) return grouped<Arithmetic, Bits8>(form);
  if constexpr (!std::is_same_v<Arithmetic, Floats>)
    if (form.has_integers()) return grouped<Arithmetic, Integers4>(form);
  return grouped<Arithmetic, Bits4>(form);
}
#if defined(OUTRIDER_BYTES)
Multiply of_bytes(const Form& form) {
#if defined(__AVX512F__) || defined(__AVXVNNI__)
  return wide<Bytes>(form);
#else
  const int narrow_sums = std::numeric_limits<int16_t>::max() / (2 * 127 * form.range);  // sums of two products that fit in 16 bits
  if (form.codes == kInt6) return grouped<Bytes<2>, Bits6>(form);
  if (form.codes == kInt8) return grouped<Bytes<0>, Bits8>(form);
  if (form.has_integers()) return grouped<Bytes<4>, Integers4>(form);
  if (narrow_sums < 2) return grouped<Bytes<0>, Bits4>(form);
  return narrow_sums < 4 ? grouped<Bytes<2>, Bits4>(form) : grouped<Bytes<4>, Bits4>(form);
#endif
}
#endif

Multiply for_bits(const Form& form, int64_t bits) {
  Multiply run = bits == 32 ? wide<Floats>(form) : nullptr;
#if defined(OUTRIDER_BYTES)
  if (bits == 8) run = of_bytes(form);
#endif
  TORCH_CHECK(run, "linear: this CPU does not multiply activations of ", bits, " bits");
  return run;
}

// Read the form of a weight from the header of its first panel.
Form form_of(const at::Tensor& packed, int64_t inputs) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.dim() == 2 && packed.is_contiguous() && packed.size(0) > 0 &&
                  packed.size(1) > kHeader,
              "linear: weights ", packed.sizes(), " are not in blocks");
  const uint8_t* header = packed.const_data_ptr<uint8_t>();
  TORCH_CHECK(header[0] < kNumCodes && header[1] > kNone && header[1] < kNumNumbers && header[1] != kZeros && header[2] < kNumNumbers && (header[3] == 1 || header[3] == 2),
              "linear: weights ", packed.sizes(), " are in blocks of an unknown form");
  const Form form(header[0], header[1], header[2], header[3], static_cast<int8_t>(header[4]));
  const int64_t blocks = (packed.size(1) - kHeader) / (form.bytes + form.base_bytes / kSpan);
  TORCH_CHECK(packed.size(1) == form.panel_bytes(blocks), "linear: weights ", packed.sizes(), " are not in blocks of ",
              form.bytes, " bytes");
  TORCH_CHECK(blocks == (inputs + kInputs - 1) / kInputs, "linear: input of size ", inputs, ", weight for ", blocks, " blocks of ",
              kInputs);
  return form;
}

// ---------------------------------------------------------------------------------------------------------------------------
// Packing
// ---------------------------------------------------------------------------------------------------------------------------

// The border between the values of 4-bit codes i and i + 1.
constexpr float border(int i) { return static_cast<float>(kNumbers[i] + kNumbers[i + 1]) / 2.0f; }

constexpr auto kBorders = std::make_integer_sequence<int, 15>{};

// Sum `step` of each value of 4-bit codes but the first that is nearer to x than the one before.
template <typename Sum, typename Step, int... i>
inline Sum over_borders(vec x, Sum first, const Step& step, std::integer_sequence<int, i...>) {
  Sum found[3] = {first, Sum{}, Sum{}};  // short chains of additions; integers, so their order does not matter
  ((found[i % 3] += x > splat(border(i)) ? step(i) : Sum{}), ...);
  return found[0] + found[1] + found[2];
}
inline vec nearest_numbers(vec x) {
  return over_borders(x, splat(kNumbers[0]), [](int i) { return splat(static_cast<float>(kNumbers[i + 1] - kNumbers[i])); }, kBorders);
}
inline ivec nearest_codes(vec x) { return over_borders(x, ivec{}, [](int) { return ivec{} + 1; }, kBorders); }

// The bits of bfloat16 numbers, in the lower halves.
inline uvec to_bfloat16(vec numbers) {
  const uvec bits = reinterpret_cast<uvec>(numbers);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline vec from_bfloat16(uvec bits) { return reinterpret_cast<vec>(bits << 16); }

constexpr float kTiny = 1e-30f;  // weights below it become 0: their reciprocal could overflow

// The bits of NaN in bfloat16 where a block has NaN or infinite weights, which integers cannot show.
inline uvec nan_where(ivec is_damaged) { return reinterpret_cast<uvec>(is_damaged) & 0x7fc0; }

// Round the weights [kInputs] of a block, one output per lane, to codes; return the bits of their scales. These are rounded up, so that
// the largest weight is not clipped.
inline uvec round_to(Bits8, const vec* weights, ivec* codes) {
  vec most{}, sum{};
  for (int64_t k = 0; k < kInputs; ++k) {
    const vec size = magnitude(weights[k]);
    most = size > most ? size : most;
    sum += weights[k];
  }
  uvec bits = to_bfloat16(most / splat(127.0f));
  bits -= reinterpret_cast<uvec>(from_bfloat16(bits) * splat(127.0f) < most);  // true is -1
  const ivec is_zero = most < splat(kTiny);
  const vec inverse = is_zero ? vec{} : splat(1.0f) / from_bfloat16(bits);
  for (int64_t k = 0; k < kInputs; ++k) codes[k] = nearest(weights[k] * inverse);
  return (bits & ~reinterpret_cast<uvec>(is_zero)) | nan_where(sum != sum);
}

// Where candidates for a scale map the largest weight: near either end of the table. Chosen one after the other among -45 to 45 for the
// least error on Qwen2.5-Coder-0.5B's weights and on normal ones: 0.5% more than that of 18 from -41 to 41 (docs/log/kernels.md).
constexpr float kEnds[] = {-35.0f, 30.0f, -29.0f, -33.0f, -37.0f, 29.0f};

// Search the scales with the least squared error, weighted by magnitude. Each candidate is replaced by the optimal scale for its codes.
inline uvec round_to(Bits4, const vec* weights, ivec* codes) {
  vec most{}, squares{}, typical{};
  for (int64_t k = 0; k < kInputs; ++k) {
    squares += weights[k] * weights[k];
    most = magnitude(weights[k]) > magnitude(most) ? weights[k] : most;
  }
  for (int i = 0; i < kLanes; ++i) typical[i] = std::sqrt(squares[i] / kInputs);
  most = magnitude(most) < splat(kTiny) ? splat(1.0f) : most;
  vec best = splat(-1.0f), best_dots{}, best_norms = splat(1.0f);
  for (const float end : kEnds) {
    const vec factors = splat(end) / most;
    vec dots{}, norms{};
    for (int64_t k = 0; k < kInputs; ++k) {
      const vec numbers = nearest_numbers(weights[k] * factors), weighted = (typical + magnitude(weights[k])) * numbers;
      dots += weighted * weights[k];
      norms += weighted * numbers;
    }
    const ivec is_better = dots * dots > best * norms;
    best = is_better ? dots * dots / norms : best;
    best_dots = is_better ? dots : best_dots;
    best_norms = is_better ? norms : best_norms;
  }
  const uvec bits = to_bfloat16(best_dots / best_norms);
  const vec scales = from_bfloat16(bits), inverse = scales == vec{} ? vec{} : splat(1.0f) / scales;
  for (int64_t k = 0; k < kInputs; ++k) codes[k] = nearest_codes(weights[k] * inverse);
  return bits | nan_where(squares - squares != vec{});
}

// The first 32-bit words of codes.
inline ivec word_of(Bits8, const ivec* codes) {
  return (codes[0] & 255) | (codes[1] & 255) << 8 | (codes[2] & 255) << 16 | codes[3] << 24;
}
inline ivec word_of(Bits4, const ivec* codes) {
  ivec word{};
  for (int i = 0; i < 4; ++i) word |= codes[i] << 8 * i | codes[4 + i] << (8 * i + 4);
  return word;
}

// Round a panel, whose weights `columns(b, v, out)` gives: those of block b, for the outputs in vector v, [kInputs].
template <typename Bits, typename Columns>
void round_panel(const Form& form, int64_t blocks, const Columns& columns, uint8_t* panel) {
  const uint8_t header[] = {form.codes, form.scales, form.offsets, form.groups};
  std::memset(panel, 0, kHeader);
  std::memcpy(panel, header, sizeof header);
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* block = panel + kHeader + b * form.bytes;
    for (int v = 0; v < kVectors; ++v) {
      vec weights[kInputs];
      ivec codes[kInputs];
      columns(b, v, weights);
      const hvec scales = __builtin_convertvector(round_to(Bits{}, weights, codes), hvec);
      std::memcpy(block + form.scales_at + v * sizeof scales, &scales, sizeof scales);
      for (int64_t i = 0; i < kInputs / Bits::together; ++i)
        store(reinterpret_cast<int32_t*>(block) + i * kPanel + v * kLanes, word_of(Bits{}, codes + i * Bits::together));
    }
  }
}

// Weights of a block of up to 32 rows, see `round_panel`.
template <typename Number>
void columns_of_rows(const Number* rows, int64_t outputs, int64_t inputs, int64_t b, int v, vec* columns) {
  for (int64_t k = 0; k < kInputs; k += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const int64_t row = v * kLanes + i, left = row < outputs ? std::clamp<int64_t>(inputs - b * kInputs - k, 0, kLanes) : 0;
      Number padded[kLanes] = {};
      if (left) std::copy_n(rows + row * inputs + b * kInputs + k, left, padded);
      columns[k + i] = load(padded);
    }
    transpose(columns + k);
  }
}

// Weights of a block in a packed panel, see `round_panel`: decoded in the order in which a checkpoint's reference does.
template <typename Bits>
void columns_of_blocks(const Form& form, const Panel& panel, int64_t b, int v, vec* columns) {
  const uint8_t* block = panel.blocks + b * form.bytes;
  for (int64_t k = 0; k < kInputs; k += Bits::together)
    Floats::decode(block + (k / Bits::together * Bits::words * kPanel + v * kLanes) * 4, Bits{}, Floats::table(form), columns + k);
  Bases bases;
  bases.read(form, panel, b);
  for (int64_t group = 0, size = kInputs / form.groups; group < form.groups; ++group) {
    const vec scale = stored(form.scales_of(block, group), form.scales, v) * bases.scales[v];
    const vec offset = form.offsets == kNone ? vec{} : stored(form.offsets_of(block, group), form.offsets, v) * bases.offsets[v];
    for (int64_t k = group * size; k < (group + 1) * size; ++k)
      columns[k] = form.offsets == kZeros ? (columns[k] - offset) * scale : columns[k] * scale + offset;
  }
}

using Columns = void (*)(const Form&, const Panel&, int64_t, int, vec*);
Columns columns_for(const Form& form) {
  return form.codes == kInt8 ? columns_of_blocks<Bits8> : form.codes == kInt6 ? columns_of_blocks<Bits6> : columns_of_blocks<Bits4>;
}

inline uint64_t eight(const uint8_t* codes) {
  uint64_t found;
  std::memcpy(&found, codes, sizeof found);
  return found;
}
inline uint32_t pair_up(uint64_t codes) { return static_cast<uint32_t>((codes & 0x0f0f0f0f) | (codes >> 32 & 0x0f0f0f0f) << 4); }

// Write 32 codes of an output into its words of a block.
inline void put(Bits8, const uint8_t* codes, uint8_t* words) {
  for (int64_t i = 0; i < kInputs / 4; ++i) std::memcpy(words + i * kPanel * 4, codes + 4 * i, 4);
}
inline void put(Bits6, const uint8_t* codes, uint8_t* words) {
  for (int64_t group = 0; group < 2; ++group, codes += 16, words += Bits6::words * kPanel * 4) {
    const uint64_t first = eight(codes), second = eight(codes + 8);
    const auto upper = [](uint64_t some, int half) { return static_cast<uint32_t>(some >> 32 * half >> 4 & 0x03030303); };
    const uint32_t all[] = {pair_up(first), pair_up(second), upper(first, 0) | upper(first, 1) << 2 | upper(second, 0) << 4 | upper(second, 1) << 6};
    for (int64_t i = 0; i < Bits6::words; ++i) std::memcpy(words + i * kPanel * 4, all + i, 4);
  }
}
inline void put(Bits4, const uint8_t* codes, uint8_t* words) {
  for (int64_t i = 0; i < kInputs / 8; ++i) {
    const uint32_t word = pair_up(eight(codes + 8 * i));
    std::memcpy(words + i * kPanel * 4, &word, 4);
  }
}

// The same in a panel of numbers, `together` inputs of an output side by side (see runner/kernels.py).
template <typename Number>
void columns_of_numbers(const Number* panel, int64_t inputs, int64_t together, int64_t b, int v, vec* columns) {
  for (int64_t k = 0; k < kInputs; ++k) {
    const int64_t input = b * kInputs + k;
    columns[k] = vec{};
    if (input >= inputs) continue;
    const Number* from = panel + (input / together * kPanel + v * kLanes) * together + input % together;
    if (together == 1)
      columns[k] = load(from);
    else
      for (int i = 0; i < kLanes; ++i) columns[k][i] = static_cast<float>(from[i * together]);
  }
}

// Round `panels` panels to 8 or 4 bits. `give(p, round)` calls round(columns), see `round_panel`.
template <typename Give>
void round_panels(int64_t panels, int64_t inputs, int64_t bits, at::Tensor& packed, const Give& give) {
  TORCH_CHECK(bits == 4 || bits == 8, "weights are rounded to 4 or 8 bits, not ", bits);
  const Form form(bits == 8 ? kInt8 : kRounded4, kBfloat16, kNone, 1);
  const int64_t blocks = (inputs + kInputs - 1) / kInputs, bytes = form.panel_bytes(blocks);
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.sizes() == at::IntArrayRef({panels, bytes}), panels, " panels of ",
              inputs, " inputs into ", packed.sizes());
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      give(p, [&](const auto& columns) {
        if (bits == 8)
          round_panel<Bits8>(form, blocks, columns, to + p * bytes);
        else
          round_panel<Bits4>(form, blocks, columns, to + p * bytes);
      });
  });
}

template <typename Number>
void repack_numbers(const at::Tensor& packed, int64_t inputs, int64_t bits, at::Tensor& rounded) {
  const Number* from = packed.const_data_ptr<Number>();
  const int64_t together = packed.dim() == 4 ? packed.size(3) : 1, size = packed.stride(0);
  round_panels(packed.size(0), inputs, bits, rounded, [=](int64_t p, const auto& round) {
    round([=](int64_t b, int v, vec* columns) { columns_of_numbers(from + p * size, inputs, together, b, v, columns); });
  });
}

// Scales or offsets of a weight: [outputs, groups] of `group` inputs each, or one per output.
struct GroupNumbers {
  const uint8_t* numbers;
  int64_t count, group, width;  // width: bytes of each
  GroupNumbers(const at::Tensor& from, const at::Tensor& codes, int64_t group_, Numbers kind)
      : numbers(static_cast<const uint8_t*>(from.const_data_ptr())),
        count(from.size(1)),
        group(count == 1 ? std::max<int64_t>(1, codes.size(1)) : group_),
        width(kWidths[kind]) {
    TORCH_CHECK(from.is_contiguous() && from.dim() == 2 && from.size(0) == codes.size(0) && from.element_size() == width && group > 0,
                "fill_blocks: codes ", codes.sizes(), ", numbers ", from.sizes());
  }
  // Write those of `outputs` rows for the inputs from `input` on, each row's after the one before; 0 beyond the end.
  void put(int64_t row, int64_t outputs, int64_t input, uint8_t* to) const {
    const int64_t at = input / group;
    std::memset(to, 0, kPanel * width);
    if (at >= count) return;
    for (int64_t j = 0; j < outputs; ++j) std::memcpy(to + j * width, numbers + ((row + j) * count + at) * width, width);
  }
};

// Put up to 32 rows of codes and numbers, the first of which is `row`, into the blocks of a panel.
template <typename Bits>
void fill_panel(const Form& form, const uint8_t* codes, int64_t inputs, int64_t row, int64_t outputs, const GroupNumbers& scales, const GroupNumbers* offsets,
                uint8_t* block) {
  for (int64_t b = 0; b * kInputs < inputs; ++b, block += form.bytes) {
    for (int64_t j = 0; j < kPanel; ++j) {
      const uint8_t* from = codes + (row + j) * inputs + b * kInputs;
      const int64_t left = j < outputs ? inputs - b * kInputs : 0;
      uint8_t padded[kInputs] = {};
      if (left < kInputs) from = static_cast<const uint8_t*>(std::memcpy(padded, left ? from : padded, left));
      put(Bits{}, from, block + 4 * j);
    }
    for (int64_t group = 0; group < form.groups; ++group) {
      const int64_t input = b * kInputs + group * kInputs / form.groups;
      scales.put(row, outputs, input, block + form.scales_at + group * kPanel * scales.width);
      if (offsets) offsets->put(row, outputs, input, block + form.offsets_at + group * kPanel * offsets->width);
    }
  }
}

}  // namespace

// Bits of activations that this CPU multiplies fastest with blocks: 8 or 32.
int64_t block_activation_bits() {
#if defined(OUTRIDER_BYTES)
  return 8;
#else
  return 32;
#endif
}

// x [..., inputs], packed uint8 [panels, bytes] -> [..., panels * 32] or, with a gate, half as many; float32.
at::Tensor linear_blocks(const at::Tensor& x, const at::Tensor& packed, const Gate* gate, int64_t activation_bits) {
  const int64_t inputs = x.size(-1), panels = packed.size(0);
  const Form form = form_of(packed, inputs);
  const at::Tensor source = x.to(at::kFloat).contiguous();
  auto shape = x.sizes().vec();
  shape.back() = panels * kPanel / (gate ? Gate::panels : 1);
  at::Tensor out = at::empty(shape, source.options());
  const int64_t count = out.numel() / std::max<int64_t>(1, shape.back());
  if (count > 0)
    for_bits(form, activation_bits)(form, source.const_data_ptr<float>(), count, inputs, packed.const_data_ptr<uint8_t>(), panels, gate,
                                    out.mutable_data_ptr<float>());
  return out;
}

// out[count][inputs]: rows `ids` of a weight in blocks.
void embed_blocks(const int64_t* ids, int64_t count, const at::Tensor& packed, int64_t inputs, float* out) {
  const Form form = form_of(packed, inputs);
  const int64_t blocks = (inputs + kInputs - 1) / kInputs;
  const Columns columns = columns_for(form);
  for (int64_t i = 0; i < count; ++i, out += inputs) {
    const Panel panel = form.panel(packed.const_data_ptr<uint8_t>(), ids[i] / kPanel, blocks);
    const int64_t output = ids[i] % kPanel;
    for (int64_t b = 0; b < blocks; ++b) {
      vec some[kInputs];
      columns(form, panel, b, static_cast<int>(output / kLanes), some);
      for (int64_t k = 0; k < std::min(kInputs, inputs - b * kInputs); ++k) out[b * kInputs + k] = some[k][output % kLanes];
    }
  }
}

// Put codes uint8 [outputs, inputs], each in a byte, and scales and offsets [outputs, groups] of `group` inputs each, in the types in which
// blocks keep them, into packed uint8 [panels, bytes]. The caller writes the header of the first panel before, and bases after: the
// system clears memory when it is first written to, here by all threads.
void fill_blocks(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& offsets, int64_t group, at::Tensor packed) {
  const int64_t outputs = codes.size(0), inputs = codes.size(1), panels = (outputs + kPanel - 1) / kPanel;
  const Form form = form_of(packed, inputs);
  TORCH_CHECK(codes.scalar_type() == at::kByte && codes.is_contiguous() && packed.size(0) == panels && offsets.has_value() == (form.offsets != kNone),
              "fill_blocks: codes ", codes.sizes(), " into ", packed.sizes());
  const GroupNumbers all_scales(scales, codes, group, form.scales);
  std::optional<GroupNumbers> all_offsets;
  if (offsets) all_offsets.emplace(*offsets, codes, group, form.offsets);
  const auto fill = form.codes == kInt8 ? fill_panel<Bits8> : form.codes == kInt6 ? fill_panel<Bits6> : fill_panel<Bits4>;
  const uint8_t* from = codes.const_data_ptr<uint8_t>();
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  const int64_t bytes = packed.size(1), start = bytes - (inputs + kInputs - 1) / kInputs * form.bytes;
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (p) std::memcpy(to + p * bytes, to, kHeader);
      fill(form, from, inputs, p * kPanel, std::min(kPanel, outputs - p * kPanel), all_scales, all_offsets ? &*all_offsets : nullptr, to + p * bytes + start);
    }
  });
}

// Round a weight [outputs, inputs] into packed uint8 [panels, bytes], which the caller allocates (in huge pages).
void pack_blocks(const at::Tensor& weight, int64_t bits, at::Tensor packed) {
  TORCH_CHECK(weight.dim() == 2, "pack_blocks: weight ", weight.sizes());
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  // Converted all at once: within a panel, torch would start threads of its own.
  const at::Tensor all = (weight.scalar_type() == at::kDouble ? weight.to(at::kFloat) : weight).contiguous();
  by_number(all.scalar_type(), [&](auto number) {
    const auto* from = all.const_data_ptr<decltype(number)>();
    round_panels((outputs + kPanel - 1) / kPanel, inputs, bits, packed, [=](int64_t p, const auto& round) {
      const int64_t first = p * kPanel, some = std::min(kPanel, outputs - first);
      round([=](int64_t b, int v, vec* columns) { columns_of_rows(from + first * inputs, some, inputs, b, v, columns); });
    });
  });
}

// Round a packed weight, in blocks or of numbers, into rounded uint8 [panels, bytes], which the caller allocates.
void repack_blocks(const at::Tensor& packed, int64_t inputs, int64_t bits, at::Tensor rounded) {
  TORCH_CHECK(packed.is_contiguous(), "repack_blocks: packed weights are contiguous");
  if (packed.is_floating_point())
    return by_number(packed.scalar_type(), [&](auto number) { repack_numbers<decltype(number)>(packed, inputs, bits, rounded); });
  const Form form = form_of(packed, inputs);
  const uint8_t* from = packed.const_data_ptr<uint8_t>();
  const Columns columns = columns_for(form);
  round_panels(packed.size(0), inputs, bits, rounded, [&](int64_t p, const auto& round) {
    const Panel panel = form.panel(from, p, (inputs + kInputs - 1) / kInputs);
    round([&](int64_t b, int v, vec* out) { columns(form, panel, b, v, out); });
  });
}

}  // namespace outrider
