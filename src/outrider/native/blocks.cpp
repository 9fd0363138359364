// Linear layers whose weights are codes of 8 or 4 bits, in blocks of 32 inputs x 32 outputs. Each output of a block has a scale.
//
// A pass over one row takes as long as reading the codes from memory. Codes are decoded in registers, once for all rows of a tile,
// and multiplied with activations in one of three precisions:
//
// - 8 bits, one scale per row and block: integer products, four per lane and instruction (AVX-512 VNNI);
// - 16 bits: bfloat16 products, two per lane and instruction, float32 sums (AVX-512 BF16);
// - 32 bits: float32, on any CPU.
//
// Batch-invariant like the other layers: a row's sums are added block by block, and within a block in a fixed order, whatever the
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
#include <memory>
#include <utility>

namespace outrider {
namespace {

constexpr int64_t kInputs = 32;          // inputs of a block; its outputs are kPanel
constexpr int64_t kScales = kPanel * 2;  // bytes of a block's scales, in bfloat16
constexpr int kMaxRows = 12;             // of a tile: 12 rows x 2 vectors of sums leave 8 registers for weights
constexpr int64_t kStretch = 16;         // blocks whose weights stay in the L1 cache while all rows of a pass are multiplied
constexpr int64_t kAhead = 6144;         // bytes to prefetch ahead: the hardware prefetcher stops at page ends

// Values of the 4-bit codes, before the scale.
constexpr int8_t kNumbers[16] = {
#include "codes4.inc"
};

// A block: 32 scales, then groups of `together` inputs; a group has a 32-bit word per output. 8 bits: one input per byte. 4 bits:
// inputs 0 to 3 in the low halves of the bytes, inputs 4 to 7 in the high halves.
struct Bits8 {
  static constexpr int64_t together = 4, bytes = kScales + kInputs * kPanel;
};
struct Bits4 {
  static constexpr int64_t together = 8, bytes = kScales + kInputs * kPanel / 2;
};

inline float scale_at(const uint8_t* block, int64_t output) {
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<char*>(&bits) + 2, block + 2 * output, 2);
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// Decode one code of a block, without its scale.
template <typename Form>
inline float number_at(const uint8_t* block, int64_t input, int64_t output) {
  const uint8_t* word = block + kScales + (input / Form::together * kPanel + output) * 4;
  const int64_t place = input % Form::together;
  if constexpr (Form::together == 4) return static_cast<int8_t>(word[place]);
  return kNumbers[place < 4 ? word[place] & 15 : word[place - 4] >> 4];
}

// Rows of activations in the precision that they are multiplied in, in tiles of `at_once` rows.
struct Rows {
  int64_t count, blocks, at_once;
  std::unique_ptr<int32_t[]> words;   // per tile of n rows: [words of a row][n]
  std::unique_ptr<float[]> scales;    // 8 bits only; per tile of n rows: [blocks][n]
  std::unique_ptr<int32_t[]> starts;  // 8 bits only: initial sums, -128 * (sum of a row's codes), because weights enter as code + 128
};

#if defined(__AVX512F__)
// Load 32 activations of a row; those beyond its end are 0.
inline void load_32(const float* from, int64_t left, __m512& low, __m512& high) {
  const auto mask = [](int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); };
  low = _mm512_maskz_loadu_ps(mask(left), from);
  high = _mm512_maskz_loadu_ps(mask(left - 16), from + 16);
}

inline __m512 scales_of(const uint8_t* block, int half) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + half * 32));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define OUTRIDER_BYTES
// Integer products.
struct Bytes {
  using Sum = __m512i;
  static constexpr int64_t words = kInputs / 4;  // 32 bits each, of a row's block
  static constexpr bool scaled = true;

  static void prepare(const float* x, int64_t left, int32_t* to, int64_t stride, float* scale, int32_t* start) {
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
    *scale = most > 1e-30f ? most / 127.0f : 0.0f;
    *start = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
  }
  // Weights as codes + 128: the instruction takes one unsigned factor.
  static void decode(const uint8_t* words_of, Bits8, __m512i* weights) {
    weights[0] = _mm512_xor_si512(_mm512_loadu_si512(words_of), _mm512_set1_epi8(-128));
  }
  static void decode(const uint8_t* words_of, Bits4, __m512i* weights) {
    const __m512i codes = _mm512_loadu_si512(words_of), mask = _mm512_set1_epi8(15);
    const __m512i numbers = _mm512_xor_si512(
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNumbers))), _mm512_set1_epi8(-128));
    weights[0] = _mm512_shuffle_epi8(numbers, _mm512_and_si512(codes, mask));
    weights[1] = _mm512_shuffle_epi8(numbers, _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask));
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
  static constexpr bool scaled = false;

  static void prepare(const float* x, int64_t left, int32_t* to, int64_t stride, float*, int32_t*) {
    __m512 low, high;
    load_32(x, left, low, high);
    alignas(64) uint16_t rounded[kInputs];
    _mm512_store_si512(rounded, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    for (int64_t i = 0; i < words; ++i) {
      const int64_t first = i / 2 * 4 + i % 2;
      to[i * stride] = static_cast<int32_t>(rounded[first] | static_cast<uint32_t>(rounded[first + 2]) << 16);
    }
  }
  static void decode(const uint8_t* words_of, Bits8, __m512i* weights) {
    const __m512i codes = _mm512_loadu_si512(words_of);
    const auto number = [](__m512i code) { return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(code, 24))); };
    weights[0] = _mm512_or_si512(_mm512_srli_epi32(number(_mm512_slli_epi32(codes, 24)), 16), number(_mm512_slli_epi32(codes, 8)));
    weights[1] = _mm512_or_si512(_mm512_srli_epi32(number(_mm512_slli_epi32(codes, 16)), 16), number(codes));
  }
  static void decode(const uint8_t* words_of, Bits4, __m512i* weights) {
    const __m512i codes = _mm512_loadu_si512(words_of), numbers = _mm512_load_si512(kTable);
    weights[0] = _mm512_permutexvar_epi16(codes, numbers);  // uses the low five bits: the table repeats the 16 values
    weights[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), numbers);
    weights[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), numbers);
    weights[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), numbers);
  }
  static Sum start(const int32_t*) { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i weights, const int32_t* x) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*x));
    return sum;
  }
  static __m512 result(Sum sum, const float*) { return sum; }

  struct Table {
    alignas(64) uint16_t entries[32];
    Table() {
      for (int i = 0; i < 32; ++i) {
        const float number = kNumbers[i % 16];
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        entries[i] = static_cast<uint16_t>(bits >> 16);  // exact: seven bits of magnitude
      }
    }
    operator const void*() const { return entries; }
  };
  static const Table kTable;
};
const Halves::Table Halves::kTable;
#endif

#if defined(__AVX512F__)
// out[r][32] (+)= blocks [from, to) of one panel times `rows` rows.
template <typename Arithmetic, typename Form, int rows>
void tile(const uint8_t* panel, int64_t from, int64_t to, const int32_t* x, const float* scales, const int32_t* starts, float* out,
          int64_t out_stride, int64_t ahead) {
  constexpr int64_t steps = kInputs / Form::together, words = Arithmetic::words / steps;  // steps of a block; words of x in one
  for (int64_t b = from; b < to; ++b) {
    const uint8_t* block = panel + b * Form::bytes;
    const int32_t* x_of = x + b * Arithmetic::words * rows;
    if (ahead)
      for (int64_t i = 0; i < Form::bytes; i += 64) __builtin_prefetch(block + ahead + i);
    typename Arithmetic::Sum sums[rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = Arithmetic::start(starts + (Arithmetic::scaled ? b * rows + r : 0));
#pragma GCC unroll 8
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512i weights[words];
        Arithmetic::decode(block + kScales + (step * 2 + half) * 64, Form{}, weights);
#pragma GCC unroll 4
        for (int64_t i = 0; i < words; ++i)
#pragma GCC unroll 12
          for (int r = 0; r < rows; ++r)
            sums[r][half] = Arithmetic::add(sums[r][half], weights[i], x_of + (step * words + i) * rows + r);
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = scales_of(block, half);
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        float* sum = out + r * out_stride + half * 16;
        const __m512 before = b == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(sum);
        const __m512 result = Arithmetic::result(sums[r][half], scales + (Arithmetic::scaled ? b * rows + r : 0));
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(result, scale, before));
      }
    }
  }
}

using Tile = void (*)(const uint8_t*, int64_t, int64_t, const int32_t*, const float*, const int32_t*, float*, int64_t, int64_t);
template <typename Arithmetic, typename Form, size_t... index>
constexpr std::array<Tile, sizeof...(index)> make_tiles(std::index_sequence<index...>) {
  return {tile<Arithmetic, Form, static_cast<int>(index) + 1>...};
}
template <typename Arithmetic, typename Form>
constexpr auto kTiles = make_tiles<Arithmetic, Form>(std::make_index_sequence<kMaxRows>{});  // [rows - 1]

template <typename Arithmetic>
Rows prepare(const float* x, int64_t count, int64_t inputs) {
  const int64_t blocks = (inputs + kInputs - 1) / kInputs, tiles = (count + kMaxRows - 1) / kMaxRows;
  Rows rows{count, blocks, (count + tiles - 1) / tiles, {}, {}, {}};
  rows.words.reset(new int32_t[count * blocks * Arithmetic::words]);
  rows.scales.reset(new float[Arithmetic::scaled ? count * blocks : 1]);
  rows.starts.reset(new int32_t[Arithmetic::scaled ? count * blocks : 1]);
  parallel_for(0, count * blocks, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / blocks, b = i % blocks, first = r / rows.at_once * rows.at_once, n = std::min(rows.at_once, count - first);
      const int64_t place = first * blocks + b * n + r - first;
      int32_t* to = rows.words.get() + first * blocks * Arithmetic::words + b * Arithmetic::words * n + r - first;
      const int64_t at = Arithmetic::scaled ? place : 0;
      Arithmetic::prepare(x + r * inputs + b * kInputs, inputs - b * kInputs, to, n, rows.scales.get() + at, rows.starts.get() + at);
    }
  });
  return rows;
}

template <typename Arithmetic, typename Form>
void multiply(const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out) {
  const Rows rows = prepare<Arithmetic>(x, count, inputs);
  const int64_t blocks = rows.blocks, stride = panels * kPanel;
  const int64_t stretch = count == rows.at_once ? blocks : kStretch;
  const int64_t grain = std::max<int64_t>(1, 200'000 / (inputs * kPanel * (count + 4)));  // about 10 microseconds of work per thread
  parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t b = 0; b < blocks; b += stretch)
        for (int64_t r = 0; r < count; r += rows.at_once) {
          const int64_t n = std::min(rows.at_once, count - r), at = Arithmetic::scaled ? r * blocks : 0;
          kTiles<Arithmetic, Form>[n - 1](packed + p * blocks * Form::bytes, b, std::min(blocks, b + stretch),
                                          rows.words.get() + r * blocks * Arithmetic::words, rows.scales.get() + at,
                                          rows.starts.get() + at, out + r * stride + p * kPanel, stride, r == 0 ? kAhead : 0);
        }
  });
}
#endif

// float32, on any CPU. Each block is decoded once for all rows.
template <typename Form>
void multiply_floats(const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out) {
  typedef float wide __attribute__((vector_size(kPanel * sizeof(float))));
  const int64_t blocks = (inputs + kInputs - 1) / kInputs, stride = panels * kPanel;
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    wide numbers[kInputs], scale;
    for (int64_t p = begin; p < end; ++p)
      for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = packed + (p * blocks + b) * Form::bytes;
        const int64_t depth = std::min(kInputs, inputs - b * kInputs);
        for (int64_t j = 0; j < kPanel; ++j) scale[j] = scale_at(block, j);
        for (int64_t k = 0; k < depth; ++k)
          for (int64_t j = 0; j < kPanel; ++j) numbers[k][j] = number_at<Form>(block, k, j);
        for (int64_t r = 0; r < count; ++r) {
          const float* row = x + r * inputs + b * kInputs;
          wide sum = wide{}, before = wide{};
          for (int64_t k = 0; k < depth; ++k) sum += numbers[k] * row[k];
          float* to = out + r * stride + p * kPanel;
          if (b) std::memcpy(&before, to, sizeof before);
          before += sum * scale;
          std::memcpy(to, &before, sizeof before);
        }
      }
  });
}

template <typename Form>
void multiply_any(const float* x, int64_t count, int64_t inputs, const uint8_t* packed, int64_t panels, float* out, int64_t bits) {
#if defined(OUTRIDER_BYTES)
  if (bits == 8) return multiply<Bytes, Form>(x, count, inputs, packed, panels, out);
#endif
#if defined(OUTRIDER_HALVES)
  if (bits == 16) return multiply<Halves, Form>(x, count, inputs, packed, panels, out);
#endif
  TORCH_CHECK(bits == 32, "linear_blocks: this CPU does not multiply activations of ", bits, " bits");
  multiply_floats<Form>(x, count, inputs, packed, panels, out);
}

void check_blocks(const at::Tensor& packed, int64_t inputs) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.dim() == 3 && packed.is_contiguous() &&
                  (packed.size(2) == Bits8::bytes || packed.size(2) == Bits4::bytes),
              "linear_blocks: weights ", packed.sizes(), " are not blocks of 8 or 4 bits");
  TORCH_CHECK(packed.size(1) == (inputs + kInputs - 1) / kInputs, "linear_blocks: input of size ", inputs, ", weight for ", packed.size(1),
              " blocks of ", kInputs);
}

template <typename Form>
void decode_row(const uint8_t* panel, int64_t output, int64_t inputs, float* out) {
  for (int64_t k = 0; k < inputs; ++k) {
    const uint8_t* block = panel + k / kInputs * Form::bytes;
    out[k] = number_at<Form>(block, k % kInputs, output) * scale_at(block, output);
  }
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
inline float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
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
  const vec parts[2] = {load(weights), load(weights + kLanes)};
  float most = 0.0f;
  for (int64_t k = 0; k < kInputs; ++k)
    if (std::abs(weights[k]) > std::abs(most)) most = weights[k];
  uint16_t bits = 0;
  if (std::abs(most) >= kTiny) {
    const vec typical = splat(std::sqrt(sum(parts[0] * parts[0] + parts[1] * parts[1]) / kInputs));
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

template <typename Form>
void pack_panel(const float* rows, int64_t outputs, int64_t inputs, uint8_t* panel) {
  for (int64_t b = 0; b * kInputs < inputs; ++b) {
    uint8_t* block = panel + b * Form::bytes;
    std::memset(block, 0, Form::bytes);
    for (int64_t j = 0; j < kPanel; ++j) {
      float weights[kInputs] = {};
      uint8_t codes[kInputs];
      if (j < outputs)
        std::memcpy(weights, rows + j * inputs + b * kInputs, std::min(kInputs, inputs - b * kInputs) * sizeof(float));
      const uint16_t scale = round_to(Form{}, weights, codes);
      std::memcpy(block + 2 * j, &scale, 2);
      for (int64_t k = 0; k < kInputs; ++k) {
        const int64_t place = k % Form::together;
        uint8_t* word = block + kScales + (k / Form::together * kPanel + j) * 4;
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

// x [..., inputs], packed uint8 [panels, blocks, bytes] -> [..., outputs] in x's type; outputs <= panels * 32.
at::Tensor linear_blocks(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs,
                         int64_t activation_bits) {
  const int64_t inputs = x.size(-1), panels = packed.size(0);
  check_blocks(packed, inputs);
  const at::Tensor source = x.to(at::kFloat).contiguous();
  auto shape = x.sizes().vec();
  shape.back() = panels * kPanel;
  at::Tensor out = at::empty(shape, source.options());
  const int64_t count = out.numel() / std::max<int64_t>(1, panels * kPanel);
  if (count > 0) {
    const auto run = packed.size(2) == Bits8::bytes ? multiply_any<Bits8> : multiply_any<Bits4>;
    run(source.const_data_ptr<float>(), count, inputs, packed.const_data_ptr<uint8_t>(), panels, out.mutable_data_ptr<float>(),
        activation_bits);
  }
  if (outputs != out.size(-1)) out = out.narrow(-1, 0, outputs).contiguous();
  if (bias.has_value()) out.add_(*bias);
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

// token_ids [...] -> [..., inputs] float32: rows of a weight in blocks.
at::Tensor embed_blocks(const at::Tensor& token_ids, const at::Tensor& packed, int64_t inputs) {
  check_blocks(packed, inputs);
  const at::Tensor ids = token_ids.contiguous();
  const int64_t *from = ids.const_data_ptr<int64_t>(), count = ids.numel(), rows = packed.size(0) * kPanel;
  for (int64_t i = 0; i < count; ++i) TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < rows, "embed: no token ", from[i]);
  auto shape = ids.sizes().vec();
  shape.push_back(inputs);
  at::Tensor out = at::empty(shape, packed.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  const auto decode = packed.size(2) == Bits8::bytes ? decode_row<Bits8> : decode_row<Bits4>;
  const int64_t panel_bytes = packed.size(1) * packed.size(2);
  for (int64_t i = 0; i < count; ++i)
    decode(packed.const_data_ptr<uint8_t>() + from[i] / kPanel * panel_bytes, from[i] % kPanel, inputs, to + i * inputs);
  return out;
}

// Round weight [outputs, inputs] into packed uint8 [panels, blocks, bytes], which the caller allocates (in huge pages).
void pack_blocks(const at::Tensor& weight, int64_t bits, at::Tensor packed) {
  TORCH_CHECK(weight.dim() == 2 && (bits == 4 || bits == 8), "pack_blocks: weight ", weight.sizes(), " in ", bits, " bits");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = (outputs + kPanel - 1) / kPanel;
  const int64_t blocks = (inputs + kInputs - 1) / kInputs, bytes = bits == 8 ? Bits8::bytes : Bits4::bytes;
  check_blocks(packed, inputs);
  TORCH_CHECK(packed.size(0) == panels && packed.size(2) == bytes, "pack_blocks: weight ", weight.sizes(), " into ", packed.sizes());
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t some = std::min(kPanel, outputs - p * kPanel);
      const at::Tensor rows = weight.narrow(0, p * kPanel, some).to(at::kFloat).contiguous();
      (bits == 8 ? pack_panel<Bits8> : pack_panel<Bits4>)(rows.const_data_ptr<float>(), some, inputs, to + p * blocks * bytes);
    }
  });
}

}  // namespace outrider
