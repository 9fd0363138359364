// The two operations in which a CPU spends a pass: a skinny linear layer and attention over Outrider's KV cache.
//
// Why not a library's: on a CPU without matrix units (AMX), the GEMMs of MKL, oneDNN and FBGEMM take 2-7x the time of one row for
// eight rows, which would make scoring drafts as dear as decoding them. These read each weight once, in its 16-bit form, and
// compute in float32, or in bfloat16 with float32 sums where the processor has such products, so that up to a dozen rows cost about
// what one costs: the memory traffic of the weights. Where there are matrix units, layers run on them (amx.h).
//
// Both are *batch-invariant*: the additions that make a row's result, and their order, do not depend on how many other rows the
// pass holds. The text is therefore the same bits for any draft length, proposer and batch.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "amx.h"
#include "package.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int kLanes = 16;                // floats in a vector: one AVX-512 register, two of AVX2, four of NEON
constexpr int64_t kPanel = 2 * kLanes;    // outputs whose weights stand side by side
// Bytes that a weight is fetched ahead of its use, for the hardware stops at page ends: what was measured best on AMD's Zen 5, and on
// Intel's Cascade Lake.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
constexpr int64_t kAhead = 6144;
#else
constexpr int64_t kAhead = 3072;
#endif
constexpr int64_t kBlock = 512;           // inputs accumulated in registers before they are added to the output
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;              // 12 rows x 2 vectors of accumulators fill the 32 registers
#else
constexpr int kMaxRows = 4;
#endif

typedef float vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t uvec __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t ivec __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t hvec __attribute__((vector_size(kLanes * sizeof(uint16_t))));

inline vec load(const float* from) { vec v; std::memcpy(&v, from, sizeof v); return v; }
inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }
#if defined(__AVX512F__)  // what the portable lines below say; compilers take several instructions for each
inline vec load(const at::BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<vec>(_mm512_slli_epi32(wide, 16));
}
inline vec load(const at::Half* from) {
  return reinterpret_cast<vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline vec splat(float x) { return reinterpret_cast<vec>(_mm512_set1_ps(x)); }
#else
inline vec load(const at::BFloat16* from) {
  hvec h; std::memcpy(&h, from, sizeof h);
  uvec wide = __builtin_convertvector(h, uvec) << 16;
  vec v; std::memcpy(&v, &wide, sizeof v); return v;
}
inline vec load(const at::Half* from) { vec v; for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(from[i]); return v; }
inline vec splat(float x) { return vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#endif

// How 32 weights, of one input and the outputs that stand side by side, are kept and read: as numbers, or as codes of 8 or 4 bits
// that one scale for every kScaled inputs of an output makes numbers of.
constexpr int64_t kScaled = 128;
template <typename Weight>
struct Form {
  static constexpr int64_t width = kPanel;  // entries that hold the 32
  static constexpr bool scaled = false;
};
template <>
struct Form<int8_t> {
  static constexpr int64_t width = kPanel;
  static constexpr bool scaled = true;
};
template <>
struct Form<uint8_t> {  // two codes in a byte: of output j in the low half, of output j + 16 in the high one
  static constexpr int64_t width = kPanel / 2;
  static constexpr bool scaled = true;
};
// The weights of two neighbouring inputs in bfloat16, which some processors multiply by two inputs and add to a sum in one instruction
// (AVX-512 BF16): twice as many products as in float32, and no weight has to be widened. Inputs are then rounded to bfloat16, too,
// and stand by twos in the 32 bits of what is a float elsewhere.
struct Pair {
  at::BFloat16 first, second;
};
// The weights of four neighbouring inputs as codes of 8 bits, multiplied by four inputs that are codes, too (AVX-512 VNNI). Sums are
// whole numbers.
struct Quad {
  int8_t codes[4];
};
template <typename Weight>
inline void load_panel(const Weight* from, vec& low, vec& high) { low = load(from), high = load(from + kLanes); }
// Quantiles of the normal distribution: what the 16 codes stand for (NF4: Dettmers et al. 2023, appendix E).
alignas(64) constexpr float kCodes[kLanes] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
#if defined(__AVX512F__)
inline void load_panel(const int8_t* from, vec& low, vec& high) {
  const __m128i* codes = reinterpret_cast<const __m128i*>(from);
  low = reinterpret_cast<vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes))));
  high = reinterpret_cast<vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1))));
}
inline void load_panel(const uint8_t* from, vec& low, vec& high) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512 codes = _mm512_load_ps(kCodes);  // a lane looks its number up by the low four bits
  low = reinterpret_cast<vec>(_mm512_permutexvar_ps(wide, codes));
  high = reinterpret_cast<vec>(_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), codes));
}
#else
inline void load_panel(const int8_t* from, vec& low, vec& high) {
  for (int i = 0; i < kLanes; ++i) low[i] = from[i], high[i] = from[i + kLanes];
}
inline void load_panel(const uint8_t* from, vec& low, vec& high) {
  for (int i = 0; i < kLanes; ++i) low[i] = kCodes[from[i] & 15], high[i] = kCodes[from[i] >> 4];
}
#endif
inline void store(at::BFloat16* to, vec v) { for (int i = 0; i < kLanes; ++i) to[i] = static_cast<at::BFloat16>(v[i]); }
inline void store(at::Half* to, vec v) { for (int i = 0; i < kLanes; ++i) to[i] = static_cast<at::Half>(v[i]); }
inline float sum(vec v) {
  // A fixed tree, so that the result does not depend on what the compiler prefers.
  for (int half = kLanes / 2; half > 0; half /= 2) for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
inline float largest(vec v) { float m = v[0]; for (int i = 1; i < kLanes; ++i) m = std::max(m, v[i]); return m; }

// a * b + c, rounded once where the processor can. Said, because products and sums are not fused unasked: see cpp_library.py.
#if defined(__AVX512F__)
inline vec fused(vec a, vec b, vec c) {
  return reinterpret_cast<vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
}
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline vec fused(vec a, vec b, vec c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
inline vec fused(vec a, vec b, vec c) { return a * b + c; }
#endif

// c += a * b[0] in every lane, as ``fused`` says it.
#if defined(__AVX512F__)
__attribute__((always_inline)) inline void fused_at(vec a, const float* b, vec& c) {
  vec sum = c;
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));  // a compiler would broadcast first: one instruction more
  c = sum;
}
#else
inline void fused_at(vec a, const float* b, vec& c) { c = fused(a, splat(*b), c); }
#endif

// The same of weights, whatever their form: c += weights * value, and c += weights * value[0].
template <typename Weight>
inline vec add_product(vec weights, vec value, vec c) { return fused(value, weights, c); }
template <typename Weight>
inline void add_product_at(vec weights, const float* value, vec& c) { fused_at(weights, value, c); }
#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
inline vec load(const Pair* from) { return load(reinterpret_cast<const float*>(from)); }
template <>
inline vec add_product<Pair>(vec weights, vec value, vec c) {
  return reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(c), reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(value)));
}
template <>
__attribute__((always_inline)) inline void add_product_at<Pair>(vec weights, const float* value, vec& c) {
  vec sum = c;
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*value));
  c = sum;
}
#else
constexpr bool kHasPairs = false;
#endif
template <typename Weight>
inline vec add_sums(vec a, vec b) { return a + b; }
#if defined(__AVX512VNNI__)
constexpr bool kHasQuads = true;
inline vec load(const Quad* from) {  // the instruction takes one factor without a sign: codes from 1 to 255 (see linear_of_quads)
  return reinterpret_cast<vec>(_mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128)));
}
template <>
inline vec add_product<Quad>(vec weights, vec value, vec c) {
  return reinterpret_cast<vec>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(weights), reinterpret_cast<__m512i>(value)));
}
template <>
__attribute__((always_inline)) inline void add_product_at<Quad>(vec weights, const float* value, vec& c) {
  vec sum = c;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*value));
  c = sum;
}
template <>
inline vec add_sums<Quad>(vec a, vec b) {
  return reinterpret_cast<vec>(_mm512_add_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#else
constexpr bool kHasQuads = false;
#endif

// Lanes of two vectors by number, those of b from kLanes on.
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
template <int... lane>
inline vec pick(vec a, vec b) { return __builtin_shufflevector(a, b, lane...); }
#else  // GCC before 12
template <int... lane>
inline vec pick(vec a, vec b) { return __builtin_shuffle(a, b, ivec{lane...}); }
#endif

// 16 x 16 floats in place, by exchanging halves of ever larger blocks.
template <int half, int... lane>
inline void exchange(vec* v, std::integer_sequence<int, lane...>) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & half) continue;
    const vec a = v[i], b = v[i + half];
    v[i] = pick<(lane & half ? kLanes + lane - half : lane)...>(a, b);
    v[i + half] = pick<(lane & half ? kLanes + lane : lane + half)...>(a, b);
  }
}
inline void transpose(vec* v) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  exchange<1>(v, lanes);
  exchange<2>(v, lanes);
  exchange<4>(v, lanes);
  exchange<8>(v, lanes);
}

// exp(x) for x <= 0, relative error 2e-7 (Cephes' expf); below -87 the result is 0 to float32.
inline vec exp_nonpositive(vec x) {
  const ivec tiny = x < splat(-87.f);
  x = tiny ? splat(-87.f) : x;
  vec n = fused(x, splat(1.44269504f), splat(-0.5f));
  ivec whole = __builtin_convertvector(n, ivec);  // towards zero: n is negative, so this rounds x / ln 2 to nearest
  n = __builtin_convertvector(whole, vec);
  const vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
  vec y = splat(1.9875691500e-4f);
  y = fused(y, r, splat(1.3981999507e-3f));
  y = fused(y, r, splat(8.3334519073e-3f));
  y = fused(y, r, splat(4.1665795894e-2f));
  y = fused(y, r, splat(1.6666665459e-1f));
  y = fused(y, r, splat(5.0000001201e-1f));
  y = fused(y * r, r, r + 1.0f);
  ivec bits = (whole + 127) << 23;
  vec scale; std::memcpy(&scale, &bits, sizeof scale);
  return tiny ? splat(0.f) : y * scale;
}

// ---------------------------------------------------------------------------------------------------------------------------
// Linear
// ---------------------------------------------------------------------------------------------------------------------------

// Weights to fetch while others are used: those `by` inputs on, none where that is 0, and behind the end of a tile's those that are used
// next, which stand `jump` entries further than if they followed.
struct Ahead {
  int64_t by, jump;
};

// out[r][panels * 32] (+)= x[0..depth)[r] . w, for `rows` rows and `panels` neighbouring panels; one chain of additions a lane.
template <typename Weight, int rows, int panels>
inline void tile(const float* x, const Weight* w, int64_t panel_stride, int64_t depth, const float* scales, float* out,
                 int64_t out_stride, bool first, const Ahead ahead) {
  constexpr int64_t width = Form<Weight>::width;
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(Weight));  // entries of a cache line
  constexpr int64_t together = std::max<int64_t>(1, line / width);     // inputs in one
  const int64_t turn = std::max<int64_t>(0, depth - ahead.by);
  const int64_t stretch = Form<Weight>::scaled ? kScaled : depth;  // inputs that share a scale
  for (int64_t begin = 0; begin < depth; begin += stretch) {
    const int64_t end = std::min(depth, begin + stretch);
    vec acc[rows][2 * panels];  // in registers only where every loop over them is unrolled before the compiler looks
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < 2 * panels; ++j) acc[r][j] = vec{};
    const auto add = [&](int64_t k) {
      vec weights[2 * panels];
      for (int j = 0; j < panels; ++j) load_panel(w + j * panel_stride + k * width, weights[2 * j], weights[2 * j + 1]);
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        // Of many rows every second one is read by the additions themselves: reads and instructions then take about the same time,
        // also where another's thread on the same core leaves half of the instructions that can be begun.
        if (rows > 4 && r % 2) {
#pragma GCC unroll 8
          for (int j = 0; j < 2 * panels; ++j) add_product_at<Weight>(weights[j], x + k * rows + r, acc[r][j]);
        } else {
          const vec value = splat(x[k * rows + r]);
#pragma GCC unroll 8
          for (int j = 0; j < 2 * panels; ++j) acc[r][j] = add_product<Weight>(weights[j], value, acc[r][j]);
        }
      }
    };
    int64_t k = begin;
    for (; k + together <= end; k += together) {
      const Weight* coming = w + (k + ahead.by) * width + (k < turn ? 0 : ahead.jump);
      for (int j = 0; ahead.by && j < panels; ++j)
        for (int64_t i = 0; i < together * width; i += line) __builtin_prefetch(coming + j * panel_stride + i);
      for (int64_t i = 0; i < together; ++i) add(k + i);
    }
    for (; k < end; ++k) add(k);
#pragma GCC unroll 8
    for (int j = 0; j < 2 * panels; ++j) {
      const vec scale = Form<Weight>::scaled ? load(scales + begin / kScaled * out_stride + j * kLanes) : vec{};
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        float* to = out + r * out_stride + j * kLanes;
        const bool fresh = first && begin == 0;
        if constexpr (Form<Weight>::scaled) {
          const vec before = fresh ? vec{} : load(to);
          store(to, fused(acc[r][j], scale, before));
        } else {
          store(to, fresh ? acc[r][j] : add_sums<Weight>(load(to), acc[r][j]));
        }
      }
    }
  }
}

// `ahead_by`: 0 where all weights are in the caches, else how many inputs ahead they are fetched; of one panel after the other if `in_turn`.
template <typename Weight, int rows>
void run_panels(const float* x, const Weight* w, int64_t panel_stride, int64_t depth, const float* scales, float* out,
                int64_t out_stride, bool first, int64_t panels, int64_t ahead_by, bool in_turn) {
  // Few rows leave registers free: several panels at once hide the latency of the additions without changing their order.
  constexpr int wide = kMaxRows < 12 ? 1 : rows <= 2 ? 4 : rows == 3 ? 3 : rows <= 7 ? 2 : 1;
  const int64_t rest = depth * Form<Weight>::width;
  int64_t done = 0;
  for (; done + wide <= panels; done += wide)
    tile<Weight, rows, wide>(x, w + done * panel_stride, panel_stride, depth, scales + done * kPanel, out + done * kPanel,
                             out_stride, first, {ahead_by, in_turn ? wide * panel_stride - rest : 0});
  for (; done < panels; ++done)
    tile<Weight, rows, 1>(x, w + done * panel_stride, panel_stride, depth, scales + done * kPanel, out + done * kPanel,
                          out_stride, first, {ahead_by, in_turn ? panel_stride - rest : 0});
}

template <typename Weight>
using RunPanels = void (*)(const float*, const Weight*, int64_t, int64_t, const float*, float*, int64_t, bool, int64_t, int64_t, bool);

template <typename Weight, size_t... index>
constexpr std::array<RunPanels<Weight>, sizeof...(index)> make_table(std::index_sequence<index...>) {
  return {run_panels<Weight, static_cast<int>(index) + 1>...};
}
template <typename Weight>
constexpr auto kRunPanels = make_table<Weight>(std::make_index_sequence<kMaxRows>{});  // [rows - 1]
constexpr float kNoScales[1] = {};

// x[rows][0..depth), rows `stride` apart -> [depth][rows], at most 16 rows. A tile then reads straight ahead, where rows a power of
// two apart would evict each other from the cache.
inline void turn_rows(const float* x, int64_t stride, int64_t rows, int64_t depth, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    vec block[kLanes];
    for (int r = 0; r < kLanes; ++r) block[r] = r < rows ? load(x + r * stride + k) : vec{};
    transpose(block);
    for (int i = 0; i < kLanes; ++i) {
      if ((k + i) * rows + kLanes <= depth * rows)
        store(to + (k + i) * rows, block[i]);  // in order: the next mends what is too much
      else
        std::memcpy(to + (k + i) * rows, &block[i], rows * sizeof(float));
    }
  }
  for (; k < depth; ++k)
    for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = x[r * stride + k];
}

// Rows that a tile takes of so many: all tiles about as many, for one of few waits for its own additions.
inline int64_t rows_of_a_tile(int64_t rows) {
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  return (rows + tiles - 1) / tiles;
}

// x[rows][inputs] -> for each `at_once` of the rows [inputs][at_once], the last with as many as are left.
inline void turn_all(const float* x, int64_t rows, int64_t inputs, int64_t at_once, float* to) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock, groups = (rows + at_once - 1) / at_once;
  at::parallel_for(0, groups * blocks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / blocks * at_once, k = i % blocks * kBlock, count = std::min(at_once, rows - r);
      turn_rows(x + r * inputs + k, inputs, count, std::min(kBlock, inputs - k), to + r * inputs + k * count);
    }
  });
}

// How sums become results: as they are, or, where an ending takes two panels, one number from two sums (see Gate).
struct Alone {
  static constexpr int64_t panels = 1;
};

// scales: [ceil(inputs / kScaled), panels * 32], for weights that are codes. An ending that takes two panels is for more rows than a tile
// takes, and for weights that are numbers.
template <typename Weight, typename Ending>
void linear_rows(const Ending ending, const float* x, int64_t rows, int64_t inputs, const Weight* w, const float* scales, int64_t panels,
                 float* out) {
  constexpr int64_t width = Form<Weight>::width, ahead_by = kAhead / (width * static_cast<int64_t>(sizeof(Weight)));
  static_assert(kBlock % kScaled == 0);
  if (rows == 0) return;
  const int64_t panel_stride = inputs * width, out_stride = panels * kPanel, at_once = rows_of_a_tile(rows);
  const std::unique_ptr<float[]> turned(rows > 1 ? new float[rows * inputs] : nullptr);
  if (rows > 1) turn_all(x, rows, inputs, at_once, turned.get());
  const float* from = rows > 1 ? turned.get() : x;
  // Rows from r on, inputs from k on, `count` panels from `panel` on, to results `stride` apart.
  const auto run = [&](int64_t r, int64_t k, int64_t panel, int64_t count, float* to, int64_t stride, int64_t by, bool in_turn) {
    const int64_t depth = std::min(kBlock, inputs - k), some = std::min(at_once, rows - r);
    const float* scales_at = Form<Weight>::scaled ? scales + k / kScaled * out_stride + panel * kPanel : kNoScales;
    kRunPanels<Weight>[some - 1](from + r * inputs + k * some, w + panel * panel_stride + k * width, panel_stride, depth, scales_at,
                                 to + r * stride, stride, k == 0, count, by, in_turn);
  };
  // A block of weights stays in the cache while all rows pass, and the next one is fetched beside the first of them.
  const auto run_panel = [&](int64_t panel, float* to, int64_t stride) {
    for (int64_t k = 0; k < inputs; k += kBlock)
      for (int64_t r = 0; r < rows; r += at_once) run(r, k, panel, 1, to, stride, r == 0 ? kBlock : 0, false);
  };
  // A thread is worth waking for some 10 microseconds of work.
  const int64_t work = inputs * kPanel * (rows + 4) * Ending::panels;
  const int64_t grain = std::max<int64_t>(1, 200'000 / work);
  at::parallel_for(0, panels / Ending::panels, grain, [&](int64_t begin, int64_t end) {
    if constexpr (Ending::panels == 2) {
      const int64_t half = panels / 2, half_stride = half * kPanel;
      std::vector<float> both(rows * 2 * kPanel);  // stays in the cache, where results of all panels would go to memory and back
      for (int64_t panel = begin; panel < end; ++panel) {
        run_panel(panel, both.data(), 2 * kPanel);
        run_panel(panel + half, both.data() + kPanel, 2 * kPanel);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t j = 0; j < kPanel; j += kLanes) {
            const float* sums = both.data() + r * 2 * kPanel + j;
            store(out + r * half_stride + panel * kPanel + j, ending(load(sums), load(sums + kPanel)));
          }
      }
    } else if (rows == at_once) {
      for (int64_t k = 0; k < inputs; k += kBlock) run(0, k, begin, end - begin, out + begin * kPanel, out_stride, ahead_by, true);
    } else {
      for (int64_t panel = begin; panel < end; ++panel) run_panel(panel, out + panel * kPanel, out_stride);
    }
  });
}

template <typename Weight, typename Ending>
void linear_of(const Ending ending, const float* x, int64_t rows, const at::Tensor& packed, const float* scales, float* out) {
  if constexpr (Ending::panels == 1 || !Form<Weight>::scaled)
    linear_rows(ending, x, rows, packed.size(1), packed.const_data_ptr<Weight>(), scales, packed.size(0), out);
}

// Whether this process may use the CPU's matrix units.
bool has_matrix_units() {
#if defined(OUTRIDER_AMX)
  return amx::allowed();
#else
  return false;
#endif
}

// Whether weights in pairs of inputs are what this processor multiplies fastest, and whether it multiplies codes in fours.
bool prefers_pairs() { return kHasPairs || has_matrix_units(); }
bool takes_fours() { return kHasQuads || has_matrix_units(); }

// A weight whose inputs are multiplied by twos or fours, [panels, inputs / n, 32, n]: n of an output stand side by side, two in bfloat16
// or four in 8 bits.
inline bool in_groups(const at::Tensor& packed) { return packed.dim() == 4; }
inline int64_t together(const at::Tensor& packed) { return in_groups(packed) ? packed.size(3) : 1; }

inline bool on_units(const at::Tensor& packed) { return in_groups(packed) && has_matrix_units(); }

template <typename Ending>
void linear_on_units(const Ending ending, const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, const float* scales,
                     float* out) {
#if defined(OUTRIDER_AMX)
  if (packed.scalar_type() == at::kChar)
    amx::linear(amx::Bytes{scales}, ending, x, rows, inputs, packed.const_data_ptr(), packed.size(0), out);
  else
    amx::linear(amx::Halves{}, ending, x, rows, inputs, packed.const_data_ptr(), packed.size(0), out);
#endif
}

#if defined(__AVX512BF16__)
// 32 numbers, rounded to bfloat16: two in each float.
inline void to_pairs(const float* from, float* to) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + kLanes);
  _mm512_storeu_ps(to, reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(high, low)));
}

// Lanes of 16 bits that make pairs of two vectors' first and last halves: of a, of b, of a ...
template <int from, int... lane>
inline __m512i twos(std::integer_sequence<int, lane...>) {
  typedef uint16_t lanes __attribute__((vector_size(64)));
  return reinterpret_cast<__m512i>(lanes{static_cast<uint16_t>(lane % 2 * 32 + from + lane / 2)...});
}
const __m512i kLowTwos = twos<0>(std::make_integer_sequence<int, 32>{}), kHighTwos = twos<16>(std::make_integer_sequence<int, 32>{});
#endif

// x[rows][inputs], rounded to bfloat16, times weights in pairs.
template <typename Ending>
void linear_of_pairs(const Ending ending, const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, float* out) {
#if defined(__AVX512BF16__)
  const at::Tensor rounded = at::empty({rows, inputs / 2}, at::kFloat);
  float* to = rounded.mutable_data_ptr<float>();
  at::parallel_for(0, rows * (inputs / kPanel), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to_pairs(x + i * kPanel, to + i * kLanes);
  });
  linear_rows(ending, to, rows, inputs / 2, static_cast<const Pair*>(packed.const_data_ptr()), nullptr, packed.size(0), out);
#endif
}

// x[rows][inputs] as codes of 8 bits, a scale for each row, times codes in fours, a scale for each output. Codes of weights w enter as
// w + 128, so that a row's sums are too large by 128 times the sum of its own codes.
void linear_of_quads(const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, const float* scales, float* out) {
#if defined(__AVX512VNNI__)
  const at::Tensor codes = at::empty({rows, inputs / 4}, at::kFloat);  // four in each
  float* to = codes.mutable_data_ptr<float>();
  std::vector<float> row_scales(rows);
  std::vector<int32_t> row_sums(rows);
  at::parallel_for(0, rows, std::max<int64_t>(1, 65536 / inputs), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = x + r * inputs;
      __m512 most = _mm512_set1_ps(1e-30f);
      for (int64_t k = 0; k < inputs; k += kLanes) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(row + k)));
      row_scales[r] = _mm512_reduce_max_ps(most) / 127.0f;
      __m512i sum = _mm512_setzero_si512();
      for (int64_t k = 0; k < inputs; k += kLanes) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(_mm512_loadu_ps(row + k), _mm512_set1_ps(row_scales[r])));
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (r * inputs + k) / 4), _mm512_cvtsepi32_epi8(whole));
      }
      row_sums[r] = _mm512_reduce_add_epi32(sum);
    }
  });
  linear_rows(Alone{}, to, rows, inputs / 4, static_cast<const Quad*>(packed.const_data_ptr()), nullptr, packed.size(0), out);
  const int64_t vectors = packed.size(0) * 2;
  at::parallel_for(0, rows * vectors, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / vectors;
      const __m512i sums = _mm512_sub_epi32(_mm512_loadu_si512(out + i * kLanes), _mm512_set1_epi32(128 * row_sums[r]));
      const __m512 each = _mm512_mul_ps(_mm512_loadu_ps(scales + i % vectors * kLanes), _mm512_set1_ps(row_scales[r]));
      _mm512_storeu_ps(out + i * kLanes, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), each));
    }
  });
#endif
}

template <typename Ending>
void linear_on_vectors(const Ending ending, const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, const float* scales,
                       float* out) {
  if (in_groups(packed) && scales) return linear_of_quads(x, rows, inputs, packed, scales, out);
  if (in_groups(packed)) return linear_of_pairs(ending, x, rows, inputs, packed, out);
  switch (packed.scalar_type()) {
    case at::kBFloat16: return linear_of<at::BFloat16>(ending, x, rows, packed, scales, out);
    case at::kHalf: return linear_of<at::Half>(ending, x, rows, packed, scales, out);
    case at::kChar: return linear_of<int8_t>(ending, x, rows, packed, scales, out);
    case at::kByte: return linear_of<uint8_t>(ending, x, rows, packed, scales, out);
    default: return linear_of<float>(ending, x, rows, packed, scales, out);
  }
}

// What an operator is given: rows of float32, and room for results of `width` numbers each.
struct Rows {
  at::Tensor source, out;
  int64_t count, inputs;
  Rows(const at::Tensor& x, const at::Tensor& packed, int64_t width) : inputs(packed.size(1) * together(packed)) {
    TORCH_CHECK(x.size(-1) == inputs, "linear: input of size ", x.size(-1), ", weight for ", inputs);
    const bool is_taken = packed.scalar_type() == at::kBFloat16 ? packed.size(-1) == 2 && inputs % 32 == 0 && prefers_pairs()
                                                                : packed.scalar_type() == at::kChar && inputs % 64 == 0 && takes_fours();
    TORCH_CHECK(!in_groups(packed) || is_taken,
                "linear: this processor does not multiply weights packed so: pairs of bfloat16 take AVX-512 BF16 or matrix units (AMX), "
                "32 inputs at a time, fours of 8 bits AVX-512 VNNI or matrix units, 64 at a time");
    source = x.to(at::kFloat).contiguous();
    count = source.numel() / std::max<int64_t>(1, inputs);
    auto shape = x.sizes().vec();
    shape.back() = width;
    out = at::empty(shape, source.options());
  }
  const float* from() const { return source.const_data_ptr<float>(); }
  float* to() { return out.mutable_data_ptr<float>(); }
};

at::Tensor apply(const at::Tensor& x, const at::Tensor& packed, const float* scales, const std::optional<at::Tensor>& bias,
                 int64_t outputs) {
  Rows rows(x, packed, packed.size(0) * kPanel);
  if (on_units(packed))
    linear_on_units(Alone{}, rows.from(), rows.count, rows.inputs, packed, scales, rows.to());
  else
    linear_on_vectors(Alone{}, rows.from(), rows.count, rows.inputs, packed, scales, rows.to());
  at::Tensor out = rows.out;
  if (outputs != out.size(-1)) out = out.narrow(-1, 0, outputs).contiguous();
  if (bias.has_value()) out.add_(*bias);
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

// x [..., inputs] float32 or bfloat16, packed [panels, inputs, 32] or in pairs -> [..., outputs] in x's type; outputs <= panels * 32.
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs) {
  TORCH_CHECK(packed.is_floating_point(), "linear: weights that are codes need scales");
  return apply(x, packed, nullptr, bias, outputs);
}

void check_scales(const at::Tensor& packed, const at::Tensor& scales) {
  TORCH_CHECK(scales.is_contiguous() && scales.size(0) == (in_groups(packed) ? 1 : (packed.size(1) + kScaled - 1) / kScaled) &&
                  scales.size(1) == packed.size(0) * kPanel && !packed.is_floating_point(),
              "linear_scaled: scales ", scales.sizes(), " for weights ", packed.sizes());
}

// The same for codes: packed int8 [panels, inputs, 32] or uint8 [panels, inputs, 16], scales [ceil(inputs / 128), panels * 32]; or in
// fours, and x is rounded to 8 bits, too: int8 [panels, inputs / 4, 32, 4], scales [1, panels * 32].
at::Tensor linear_scaled(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                         const std::optional<at::Tensor>& bias, int64_t outputs) {
  check_scales(packed, scales);
  return apply(x, packed, scales.const_data_ptr<float>(), bias, outputs);
}

// activation(gate) * up. Both activations are x times a sigmoid: silu of x itself, gelu's approximation by tanh of a cubic in x, since
// (1 + tanh(y)) / 2 is the sigmoid of 2 y.
struct Gate {
  static constexpr int64_t panels = 2;
  const bool is_gelu;
  vec operator()(vec gate, vec up) const {
    const vec x = is_gelu ? fused(gate * gate * gate, splat(0.0713548163f), gate * 1.5957691216f) : gate;
    const vec small = exp_nonpositive(x < splat(0.f) ? x : -x);
    return gate * ((x < splat(0.f) ? small : splat(1.f)) / (1.f + small)) * up;
  }
};

// from[rows][2 * half] -> to[rows][half], half a multiple of a vector.
inline void gate_rows(const Gate gate, const float* from, int64_t rows, int64_t half, float* to) {
  at::parallel_for(0, rows * (half / kLanes), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* at = from + i * kLanes + i * kLanes / half * half;
      store(to + i * kLanes, gate(load(at), load(at + half)));
    }
  });
}

// both [..., 2 n] float32 -> [..., n]: activation(of the first n) * the others.
at::Tensor gate_halves(const at::Tensor& both, std::string_view activation) {
  TORCH_CHECK(activation == "silu" || activation == "gelu_tanh", "gate_halves: no activation ", activation);
  TORCH_CHECK(both.size(-1) % (2 * kLanes) == 0, "gate_halves: halves of ", both.size(-1), " are not whole vectors of ", kLanes);
  const at::Tensor source = both.to(at::kFloat).contiguous();
  const int64_t half = both.size(-1) / 2;
  auto shape = both.sizes().vec();
  shape.back() = half;
  const at::Tensor out = at::empty(shape, source.options());
  gate_rows(Gate{activation == "gelu_tanh"}, source.const_data_ptr<float>(), out.numel() / half, half, out.mutable_data_ptr<float>());
  return both.scalar_type() == at::kFloat ? out : out.to(both.scalar_type());
}

// x [..., inputs], packed weights of 2 n outputs -> [..., n] in x's type: activation(of the first n) * the others. What lies between
// never leaves the caches: of wide passes, writing and reading it takes long.
at::Tensor linear_gated(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& scales, std::string_view activation) {
  TORCH_CHECK(activation == "silu" || activation == "gelu_tanh", "linear_gated: no activation ", activation);
  TORCH_CHECK(packed.size(0) % 2 == 0, "linear_gated: gates and what they let through take an even number of panels");
  if (scales.has_value()) check_scales(packed, *scales);
  else TORCH_CHECK(packed.is_floating_point(), "linear_gated: weights that are codes need scales");
  const float* scale = scales.has_value() ? scales->const_data_ptr<float>() : nullptr;
  const int64_t half = packed.size(0) / 2 * kPanel;
  const Gate gate{activation == "gelu_tanh"};
  Rows rows(x, packed, half);
  if (on_units(packed)) {
    linear_on_units(gate, rows.from(), rows.count, rows.inputs, packed, scale, rows.to());
  } else if (rows.count > kMaxRows && !scale) {
    linear_on_vectors(gate, rows.from(), rows.count, rows.inputs, packed, scale, rows.to());
  } else {
    const at::Tensor both = at::empty({rows.count, 2 * half}, rows.out.options());
    linear_on_vectors(Alone{}, rows.from(), rows.count, rows.inputs, packed, scale, both.mutable_data_ptr<float>());
    gate_rows(gate, both.const_data_ptr<float>(), rows.count, half, rows.to());
  }
  return x.scalar_type() == at::kFloat ? rows.out : rows.out.to(x.scalar_type());
}

template <typename Weight>
void embed_rows(const int64_t* ids, int64_t count, const Weight* w, int64_t inputs, int64_t together, float* out) {
  for (int64_t i = 0; i < count; ++i) {  // `together` inputs of an output stand side by side
    const Weight* row = w + ids[i] / kPanel * inputs * kPanel + ids[i] % kPanel * together;
    for (int64_t k = 0; k < inputs; k += together)
      for (int64_t j = 0; j < together; ++j) out[i * inputs + k + j] = static_cast<float>(row[k * kPanel + j]);
  }
}

// token_ids [...] -> [..., inputs] float32: rows of a packed weight, for an embedding that is tied to the output head.
at::Tensor embed(const at::Tensor& token_ids, const at::Tensor& packed) {
  const at::Tensor ids = token_ids.contiguous();
  const int64_t *from = ids.const_data_ptr<int64_t>(), count = ids.numel(), rows = packed.size(0) * kPanel;
  for (int64_t i = 0; i < count; ++i) TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < rows, "embed: no token ", from[i]);
  auto shape = ids.sizes().vec();
  const int64_t side_by_side = together(packed), inputs = packed.size(1) * side_by_side;
  shape.push_back(inputs);
  at::Tensor out = at::empty(shape, packed.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  if (packed.scalar_type() == at::kBFloat16)
    embed_rows(from, count, packed.const_data_ptr<at::BFloat16>(), inputs, side_by_side, to);
  else if (packed.scalar_type() == at::kHalf)
    embed_rows(from, count, packed.const_data_ptr<at::Half>(), inputs, side_by_side, to);
  else
    embed_rows(from, count, packed.const_data_ptr<float>(), inputs, side_by_side, to);
  return out;
}

// ---------------------------------------------------------------------------------------------------------------------------
// Attention
// ---------------------------------------------------------------------------------------------------------------------------

// The tokens of a pass stand one behind the other, those of request b up to ends[b]; the longest text has `width` of them.
struct Pass {
  int64_t rows, total, heads, kv_heads, width, reach, key_dim, value_dim, capacity, window;
  float scale, softcap;
  const int64_t *cache_rows, *bases, *ends, *positions;
  const bool* visible;  // [rows, width, reach]: which of the last `reach` slots, the widest pass's at their end, each query sees
  int64_t start(int64_t b) const { return b ? ends[b - 1] : 0; }
  int64_t length(int64_t b) const { return ends[b] - start(b); }
};

// Adds neighbouring runs of `half` lanes of two vectors: the first halves of the result come from a, the second from b.
template <int half, int... lane>
inline vec add_pairs(vec a, vec b, std::integer_sequence<int, lane...>) {
  return pick<((lane / half % 2 ? kLanes : 0) + lane / half / 2 * 2 * half + lane % half)...>(a, b) +
         pick<((lane / half % 2 ? kLanes : 0) + lane / half / 2 * 2 * half + lane % half + half)...>(a, b);
}
template <int half>
inline void add_level(vec* v) {
  for (int i = 0; i < half; ++i) v[i] = add_pairs<half>(v[i], v[i + half], std::make_integer_sequence<int, kLanes>{});
}
// Sums 16 vectors to one, lane i holding the sum of vector i: four levels of pairwise additions, in a fixed order.
inline vec sum_each(vec* v) {
  add_level<8>(v);
  add_level<4>(v);
  add_level<2>(v);
  add_level<1>(v);
  return v[0];
}

// Scores of one query against 16 keys: [16, dim] . [dim]. `chunks`: dim / 16 where the compiler may know it, else 0.
template <typename Cache, int chunks>
inline vec score_block(const float* query, const Cache* keys, int64_t dim) {
  vec sums[kLanes];
  const int64_t whole = chunks ? chunks : dim / kLanes;
  for (int i = 0; i < kLanes; ++i) {
    vec acc = vec{};
    for (int64_t c = 0; c < whole; ++c) acc = fused(load(query + c * kLanes), load(keys + i * dim + c * kLanes), acc);
    sums[i] = acc;
  }
  vec total = sum_each(sums);
  for (int64_t d = whole * kLanes; d < dim; ++d)
    for (int i = 0; i < kLanes; ++i) total[i] += query[d] * static_cast<float>(keys[i * dim + d]);
  return total;
}

template <typename Cache>
inline vec score_block(const float* query, const Cache* keys, int64_t dim) {
  if (dim == 64) return score_block<Cache, 4>(query, keys, dim);
  if (dim == 128) return score_block<Cache, 8>(query, keys, dim);
  return score_block<Cache, 0>(query, keys, dim);
}

// 16 keys [16, dim] -> [dim, 16] float32; dim is a multiple of 16.
template <typename Cache>
inline void turn_keys(const Cache* keys, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = load(keys + i * dim + d);
    transpose(block);
    for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kLanes, block[i]);
  }
}

// What score_block says of `count` queries, `stride` apart, by the same additions in the same order: of each lane over the chunks,
// then of the lanes by a tree. Turned keys need no exchange of lanes, and are loaded once for all.
template <int count>
inline void score_turned(const float* queries, int64_t stride, const float* turned, int64_t dim, float* scores,
                         int64_t scores_stride) {
  vec part[4][count];
  for (int lane = 0; lane < 4; ++lane) {
    vec acc[4][count];
    for (int j = 0; j < 4; ++j) for (int i = 0; i < count; ++i) acc[j][i] = vec{};
    for (int64_t c = lane; c < dim; c += kLanes)
      for (int j = 0; j < 4; ++j) {
        const vec key = load(turned + (c + 4 * j) * kLanes);
        for (int i = 0; i < count; ++i) acc[j][i] = fused(splat(queries[i * stride + c + 4 * j]), key, acc[j][i]);
      }
    for (int i = 0; i < count; ++i) part[lane][i] = (acc[0][i] + acc[2][i]) + (acc[1][i] + acc[3][i]);
  }
  for (int i = 0; i < count; ++i)
    store(scores + i * scores_stride, (part[0][i] + part[2][i]) + (part[1][i] + part[3][i]));
}

// out[i][0..16 * chunks) += sum over slots of weights[i][s] * values[s][...], in slot order, for `count` rows of weights. `masked`:
// slots of weight 0 are passed over, for they may hold anything, NaN too.
template <typename Cache, int count, int chunks, bool masked>
inline void mix(const float* weights, int64_t weights_stride, const Cache* values, int64_t slots, int64_t dim, float* out,
                int64_t out_stride) {
  vec acc[count][chunks];
  for (int i = 0; i < count; ++i) for (int c = 0; c < chunks; ++c) acc[i][c] = load(out + i * out_stride + c * kLanes);
  for (int64_t s = 0; s < slots; ++s) {
    if (masked && weights[s] == 0) continue;
    vec value[chunks];
    for (int c = 0; c < chunks; ++c) value[c] = load(values + s * dim + c * kLanes);
    for (int i = 0; i < count; ++i) {
      const vec weight = splat(weights[i * weights_stride + s]);
      for (int c = 0; c < chunks; ++c) acc[i][c] = fused(weight, value[c], acc[i][c]);
    }
  }
  for (int i = 0; i < count; ++i) for (int c = 0; c < chunks; ++c) store(out + i * out_stride + c * kLanes, acc[i][c]);
}

inline int64_t to_lanes(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }  // a tile puts out 16, be they fewer

// Queries of one request that look at the same keys and values: those of `tokens` tokens from `token` on, of a group of heads. Row
// w * group + g of `queries`, `scores` and `out`. Slots count from `first`, and `padded` of them are looked at.
template <typename Cache>
struct Attention {
  static constexpr int64_t kTogether = 4;  // queries that share what is loaded
  static constexpr int64_t kSlots = 32;    // of a block
  static constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  const Pass& pass;
  const int64_t b, length, token, tokens, group, base, open, first, count, padded;
  const Cache *keys, *values;
  float *queries, *scores, *out, *turned, *tiles;

  Attention(const Pass& of, int64_t row, int64_t from, const Cache* k_plane, const Cache* v_plane, float* buffer)
      : pass(of), b(row), length(of.length(row)), token(from), tokens(std::min(tokens_at_once(of), length - from)),
        group(of.heads / of.kv_heads),
        base(of.bases[row]), open(base + of.width - of.reach),  // slots before it are seen by all, but for a window
        first(std::min(earliest(), open) / kSlots * kSlots),  // blocks start at the same slots whatever the pass
        count(end() - first), padded((count + kSlots - 1) / kSlots * kSlots), keys(k_plane), values(v_plane), queries(buffer),
        scores(queries + rows() * of.key_dim), out(scores + rows() * padded), turned(out + to_lanes(rows()) * of.value_dim),
        tiles(turned + kLanes * (of.key_dim + kLanes)) {}

  // Whether this runs on matrix units, or by products of pairs: queries and weights are then rounded to bfloat16, as keys and values are.
  static bool on_units(const Pass& pass) {
    return std::is_same_v<Cache, at::BFloat16> && has_matrix_units() && pass.key_dim % 32 == 0 && pass.value_dim % 16 == 0;
  }
  static bool in_pairs(const Pass& pass) {
    return std::is_same_v<Cache, at::BFloat16> && kHasPairs && !on_units(pass) && pass.key_dim % kPanel == 0 && pass.value_dim % kPanel == 0;
  }
  // So that about 32 queries are looked at together, or 64 where they take less: their scores stay in the cache.
  static int64_t tokens_at_once(const Pass& pass) {
    return std::clamp<int64_t>((on_units(pass) || in_pairs(pass) ? 64 : 32) * pass.kv_heads / pass.heads, 1, pass.width);
  }
  static int64_t buffer_size(const Pass& pass, int64_t longest) {
    const int64_t rows = tokens_at_once(pass) * pass.heads / pass.kv_heads, slots = longest + 2 * kSlots;
    int64_t size = rows * (pass.key_dim + slots) + to_lanes(rows) * pass.value_dim + kLanes * (pass.key_dim + kLanes);
#if defined(OUTRIDER_AMX)
    if (on_units(pass)) size += amx::attention_size(to_lanes(rows), slots, pass.key_dim, pass.value_dim);
#endif
    if (in_pairs(pass)) size += pairs_size(rows, slots, pass.key_dim, pass.value_dim);
    return size;
  }
  int64_t rows() const { return tokens * group; }
  int64_t position(int64_t w) const { return pass.positions[pass.start(b) + w]; }
  const bool* visible(int64_t w) const { return pass.visible + (b * pass.width + w) * pass.reach; }
  // The first slot that token w sees of those committed before.
  int64_t begin(int64_t w) const { return pass.window > 0 ? std::max<int64_t>(0, position(w) - pass.window + 1) : 0; }
  // The first that any of the tokens sees: in a tree a later node may stand at an earlier position.
  int64_t earliest() const {
    int64_t least = begin(token);
    for (int64_t w = token + 1; pass.window > 0 && w < token + tokens; ++w) least = std::min(least, begin(w));
    return least;
  }
  // The slot behind the last that any of the tokens sees.
  int64_t end() const {
    int64_t last = open;
    for (int64_t w = token; w < token + tokens; ++w)
      for (int64_t slot = base + length; slot > last; --slot)
        if (visible(w)[slot - 1 - open]) last = slot;
    return last;
  }

  void run() {
    score();
    std::vector<float> inverse(rows());
    for (int64_t row = 0; row < rows(); ++row) inverse[row] = weigh(token + row / group, scores + row * padded);
    gather();
    for (int64_t row = 0; row < rows(); ++row)
      for (int64_t d = 0; d < pass.value_dim; ++d) out[row * pass.value_dim + d] *= inverse[row];
  }

#if defined(OUTRIDER_AMX)
  // `score` by tiles: keys as they lie in the cache times queries, turned once.
  void score_on_units() {
    uint16_t* turned_queries = amx::next_line(tiles);
    amx::turn_queries<vec>(queries, rows(), pass.key_dim, turned_queries, [](vec* block) { transpose(block); });
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int64_t slot = first + i, there = std::min<int64_t>(kLanes, pass.capacity - slot);
      if (there <= 0) {  // behind the cache's end: seen by none
        for (int64_t row = 0; row < rows(); ++row) store(scores + row * padded + i, vec{});
        continue;
      }
      const uint16_t* block = reinterpret_cast<const uint16_t*>(keys + slot * pass.key_dim);
      amx::fetch(keys + (slot + 4 * kLanes) * pass.key_dim, kLanes * pass.key_dim * 2);
      amx::fetch(values + slot * pass.value_dim, kLanes * pass.value_dim * 2);
      std::vector<uint16_t> copied;
      if (there < kLanes) {
        copied.resize(kLanes * pass.key_dim);
        std::copy_n(block, there * pass.key_dim, copied.data());
        block = copied.data();
      }
      for (int64_t from = 0; from < rows(); from += amx::kSide) {
        alignas(64) float products[kLanes * kLanes];
        amx::score_block(block, pass.key_dim, turned_queries + from * pass.key_dim, products);
        vec by_query[kLanes];
        for (int j = 0; j < kLanes; ++j) by_query[j] = load(products + j * kLanes);
        transpose(by_query);
        const int64_t till = std::min(rows(), from + amx::kSide);
        for (int64_t row = from; row < till; ++row) store(scores + row * padded + i, by_query[row - from]);
      }
    }
  }

  // `gather` by tiles. Sums run through the slots in blocks of 32 that stand at the same places whatever the pass, so that
  // a row's bits do not depend on the other rows either; what a row does not see has weight 0, and what was never written counts as 0.
  void gather_on_units() {
    uint16_t *weights = amx::next_line(tiles), *paired = weights + to_lanes(rows()) * padded;
    const int64_t written = base + length - first;  // slots behind it may hold anything
    for (int64_t row = 0; row < rows(); ++row)
      amx::to_line_of_tiles(scores + row * padded, padded, weights + row / amx::kSide * amx::kSide * padded + row % amx::kSide * 32);
    for (int64_t from = 0; from < padded; from += amx::kSlotsAtOnce) {
      const int64_t slots = std::min(amx::kSlotsAtOnce, padded - from);
      amx::pair_values(reinterpret_cast<const uint16_t*>(values + (first + from) * pass.value_dim), slots,
                       std::clamp<int64_t>(written - from, 0, slots), pass.value_dim, paired);
      for (int64_t row = 0; row < rows(); row += amx::kSide)
        amx::mix(weights + row * padded + from * amx::kSide, paired, slots, pass.value_dim, out + row * pass.value_dim, from > 0);
    }
  }
#endif

  // Room for queries or weights in pairs, as they stand and turned, and for a panel of keys or values.
  static int64_t pairs_size(int64_t rows, int64_t slots, int64_t key_dim, int64_t value_dim) {
    return rows * std::max(key_dim, slots + kPanel) + kPanel * std::max(key_dim / 2, value_dim);
  }

#if defined(__AVX512BF16__)
  // `score` as a linear layer whose weights are the keys: 32 of them are a panel.
  void score_in_pairs() {
    const int64_t depth = pass.key_dim / 2, at_once = rows_of_a_tile(rows());
    float *rounded = tiles, *turned_queries = rounded + rows() * depth, *panel = turned_queries + rows() * depth;
    for (int64_t i = 0; i < rows() * depth; i += kLanes) to_pairs(queries + 2 * i, rounded + i);
    for (int64_t row = 0; row < rows(); row += at_once)
      turn_rows(rounded + row * depth, depth, std::min(at_once, rows() - row), depth, turned_queries + row * depth);
    for (int64_t i = 0; i < padded; i += kPanel) {
      for (int64_t half = 0; half < kPanel; half += kLanes)
        for (int64_t d = 0; d < depth; d += kLanes) {
          vec block[kLanes];
          for (int64_t j = 0; j < kLanes; ++j) {
            const int64_t slot = first + i + half + j;  // behind the cache's end: seen by none
            block[j] = slot < pass.capacity ? load(reinterpret_cast<const float*>(keys + slot * pass.key_dim) + d) : vec{};
          }
          transpose(block);
          for (int64_t j = 0; j < kLanes; ++j) store(panel + (d + j) * kPanel + half, block[j]);
        }
      products(turned_queries, depth, panel, scores + i, padded, true);
    }
  }

  // `gather` as linear layers of 32 slots each, which stand at the same places whatever the pass: a row's bits do not depend on the
  // other rows. What a row does not see has weight 0, and what was never written counts as 0.
  void gather_in_pairs() {
    const int64_t written = base + length - first, at_once = rows_of_a_tile(rows()), depth = padded / 2;
    float *rounded = tiles, *turned_weights = rounded + rows() * depth, *panel = turned_weights + rows() * kLanes;
    for (int64_t i = 0; i < rows() * depth; i += kLanes) to_pairs(scores + 2 * i, rounded + i);
    for (int64_t from = 0; from < padded; from += kSlots) {
      for (int64_t row = 0; row < rows(); row += at_once)
        turn_rows(rounded + row * depth + from / 2, depth, std::min(at_once, rows() - row), kLanes, turned_weights + row * kLanes);
      for (int64_t d = 0; d < pass.value_dim; d += kPanel) {
        for (int64_t k = 0; k < kLanes; ++k) {
          const auto value = [&](int64_t slot) {
            return slot < written ? _mm512_loadu_si512(values + (first + slot) * pass.value_dim + d) : _mm512_setzero_si512();
          };
          const __m512i even = value(from + 2 * k), odd = value(from + 2 * k + 1);
          _mm512_storeu_si512(panel + k * kPanel, _mm512_permutex2var_epi16(even, kLowTwos, odd));
          _mm512_storeu_si512(panel + k * kPanel + kLanes, _mm512_permutex2var_epi16(even, kHighTwos, odd));
        }
        products(turned_weights, kLanes, panel, out + d, pass.value_dim, from == 0);
      }
    }
  }

  // Turned rows of pairs, for each tile [depth][rows of it], times a panel [depth][32] -> to[row][32], rows `stride` apart.
  void products(const float* turned_rows, int64_t depth, const float* panel, float* to, int64_t stride, bool fresh) {
    const int64_t at_once = rows_of_a_tile(rows());
    for (int64_t row = 0; row < rows(); row += at_once)
      kRunPanels<Pair>[std::min(at_once, rows() - row) - 1](turned_rows + row * depth, reinterpret_cast<const Pair*>(panel), depth * kPanel,
                                                            depth, kNoScales, to + row * stride, stride, fresh, 1, 0, false);
  }
#endif

  // Products of all queries with all keys, 16 slots at a time.
  void score() {
#if defined(OUTRIDER_AMX)
    if (on_units(pass)) return score_on_units();
#endif
#if defined(__AVX512BF16__)
    if (in_pairs(pass)) return score_in_pairs();
#endif
    const int64_t dim = pass.key_dim;
    const bool turn = rows() >= kTogether && dim % kLanes == 0;  // where turning the keys pays off; the bits are the same
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int64_t slot = first + i;
      const Cache* block = keys + slot * dim;
      int64_t row = 0;
      if (slot + kLanes > pass.capacity) {  // the cache ends within this block
        for (; row < rows(); ++row) score_end(queries + row * dim, slot, scores + row * padded + i);
      } else if (turn) {
        turn_keys(block, dim, turned);
        for (; row + kTogether <= rows(); row += kTogether)
          score_turned<kTogether>(queries + row * dim, dim, turned, dim, scores + row * padded + i, padded);
        for (; row < rows(); ++row) score_turned<1>(queries + row * dim, dim, turned, dim, scores + row * padded + i, padded);
      } else {
        for (; row < rows(); ++row) store(scores + row * padded + i, score_block(queries + row * dim, block, dim));
      }
    }
  }

  void score_end(const float* query, int64_t slot, float* to) {
    TORCH_CHECK(pass.key_dim <= 1024, "attend: head size over 1024");
    vec score = vec{};
    for (int64_t j = 0; slot + j < first + count; ++j) {
      Cache block[kLanes * 1024];
      for (int64_t d = 0; d < pass.key_dim; ++d) block[d] = keys[(slot + j) * pass.key_dim + d];
      for (int64_t d = pass.key_dim; d < kLanes * pass.key_dim; ++d) block[d] = static_cast<Cache>(0.0f);
      score[j] = score_block(query, block, pass.key_dim)[0];
    }
    store(to, score);
  }

  // Products of token w -> weights that are yet to be divided by their sum. Returns one over it.
  float weigh(int64_t w, float* from) {
    vec peak = splat(kUnseen);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int64_t slot = first + i;
      vec score = load(from + i) * pass.scale;
      if (pass.softcap > 0) for (int j = 0; j < kLanes; ++j) score[j] = pass.softcap * std::tanh(score[j] / pass.softcap);
      if (slot < begin(w) || slot + kLanes > open) {
        for (int64_t j = 0; j < kLanes; ++j)
          if (!sees(w, slot + j)) score[j] = kUnseen;
      }
      store(from + i, score);
      peak = score > peak ? score : peak;
    }
    const vec top = splat(largest(peak));
    vec total = vec{};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const vec weight = exp_nonpositive(load(from + i) - top);
      store(from + i, weight);
      total += weight;
    }
    return 1.0f / sum(total);
  }

  bool sees(int64_t w, int64_t slot) const {
    if (slot >= first + count || (slot >= open && !visible(w)[slot - open])) return false;
    if (slot < base) return slot >= begin(w);
    return pass.window <= 0 || position(w) - position(slot - base) < pass.window;
  }

  // All values by weight.
  void gather() {
#if defined(OUTRIDER_AMX)
    if (on_units(pass)) return gather_on_units();
#endif
#if defined(__AVX512BF16__)
    if (in_pairs(pass)) return gather_in_pairs();
#endif
    std::fill_n(out, rows() * pass.value_dim, 0.0f);
    const int64_t shared = pass.window > 0 ? 0 : std::max<int64_t>(0, open - first);
    int64_t row = 0;
    for (; row + kTogether <= rows(); row += kTogether) add_values<kTogether, false>(row, 0, shared);
    for (; row < rows(); ++row) add_values<1, false>(row, 0, shared);
    for (row = 0; row < rows(); ++row) add_values<1, true>(row, shared, count);
  }

  // Adds the values of the slots from..to, by weight, to what `together` rows put out.
  template <int together, bool masked>
  void add_values(int64_t row, int64_t from, int64_t to) {
    const int64_t dim = pass.value_dim, slots = to - from;
    const float* weights = scores + row * padded + from;
    const Cache* start = values + (first + from) * dim;
    float* into = out + row * dim;
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
      mix<Cache, together, 4, masked>(weights, padded, start + d, slots, dim, into + d, dim);
    for (; d + kLanes <= dim; d += kLanes) mix<Cache, together, 1, masked>(weights, padded, start + d, slots, dim, into + d, dim);
    for (; d < dim; ++d)
      for (int i = 0; i < together; ++i)
        for (int64_t s = 0; s < slots; ++s)
          if (!masked || weights[i * padded + s] != 0)
            into[i * dim + d] += weights[i * padded + s] * static_cast<float>(start[s * dim + d]);
  }
};

template <typename Cache>
void attend_all(const Pass& pass, const float* query, const float* key, const float* value, Cache* keys, Cache* values, float* out) {
  const int64_t group = pass.heads / pass.kv_heads;
  int64_t longest = 0;
  for (int64_t b = 0; b < pass.rows; ++b) longest = std::max(longest, pass.bases[b]);
  longest += pass.width;
  const int64_t work = pass.width * group * longest * (pass.key_dim + pass.value_dim);
  at::parallel_for(0, pass.rows * pass.kv_heads, std::max<int64_t>(1, 100'000 / work), [&](int64_t from, int64_t to) {
    std::vector<float> buffer(Attention<Cache>::buffer_size(pass, longest));
#if defined(OUTRIDER_AMX)
    const bool on_units = Attention<Cache>::on_units(pass);
    if (on_units) amx::shape(amx::kSide, amx::kSide);
#endif
    for (int64_t task = from; task < to; ++task) {
      const int64_t b = task / pass.kv_heads, h = task % pass.kv_heads;
      const int64_t plane = (pass.cache_rows[b] * pass.kv_heads + h) * pass.capacity;
      Cache* k_plane = keys + plane * pass.key_dim;
      Cache* v_plane = values + plane * pass.value_dim;
      const int64_t start = pass.start(b), length = pass.length(b);
      for (int64_t w = 0; w < length; ++w) {  // this pass's keys and values go to the slots after the committed ones
        const int64_t at = h * pass.total + start + w, slot = pass.bases[b] + w;
        for (int64_t d = 0; d < pass.key_dim; ++d) k_plane[slot * pass.key_dim + d] = static_cast<Cache>(key[at * pass.key_dim + d]);
        for (int64_t d = 0; d < pass.value_dim; ++d)
          v_plane[slot * pass.value_dim + d] = static_cast<Cache>(value[at * pass.value_dim + d]);
      }
      for (int64_t token = 0; token < length; token += Attention<Cache>::tokens_at_once(pass)) {
        Attention<Cache> attention(pass, b, token, k_plane, v_plane, buffer.data());
        for (int64_t w = 0; w < attention.tokens; ++w)
          for (int64_t g = 0; g < group; ++g)
            std::copy_n(query + ((h * group + g) * pass.total + start + token + w) * pass.key_dim, pass.key_dim,
                        attention.queries + (w * group + g) * pass.key_dim);
        attention.run();
        for (int64_t w = 0; w < attention.tokens; ++w)
          std::copy_n(attention.out + w * group * pass.value_dim, group * pass.value_dim,
                      out + ((start + token + w) * pass.heads + h * group) * pass.value_dim);
      }
    }
#if defined(OUTRIDER_AMX)
    if (on_units) _tile_release();
#endif
  });
}

// Writes the key and value [1, Hkv, T, D] of request b's tokens into slots base.. of its cache row of layer `layer`, then attends.
// query [1, H, T, D] -> [1, T, H, Dv]. keys / values: [L, R, Hkv, S, D], changed in place: hidden from the compiler on purpose, for
// each layer's slots are written and read in this one call, so that nothing can be reordered around it and nothing be copied.
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys,
                  const at::Tensor& values, int64_t layer, const at::Tensor& cache_rows, const at::Tensor& bases,
                  const at::Tensor& ends, const at::Tensor& positions, const at::Tensor& visible, double scale, double softcap, int64_t window) {
  const at::Tensor q = query.to(at::kFloat).contiguous(), k = key.to(at::kFloat).contiguous(), v = value.to(at::kFloat).contiguous();
  const at::Tensor seen = visible.contiguous();
  const at::Tensor rows = cache_rows.contiguous(), starts = bases.contiguous(), places = positions.contiguous(), till = ends.contiguous();
  Pass pass{rows.size(0), q.size(2), q.size(1), k.size(1), seen.size(1), seen.size(2), k.size(3), v.size(3), keys.size(3), window,
            static_cast<float>(scale), static_cast<float>(softcap), rows.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>(),
            till.const_data_ptr<int64_t>(), places.const_data_ptr<int64_t>(), seen.const_data_ptr<bool>()};
  TORCH_CHECK(pass.key_dim == keys.size(4) && pass.value_dim == values.size(4) && pass.kv_heads == keys.size(2) &&
                  q.size(3) == pass.key_dim && pass.heads % pass.kv_heads == 0 && layer < keys.size(0) && v.size(1) == pass.kv_heads,
              "attend: heads of query ", q.sizes(), ", key ", k.sizes(), " and value ", v.sizes(), " do not fit the cache ", keys.sizes());
  TORCH_CHECK(q.size(0) == 1 && places.numel() == pass.total && till.size(0) == pass.rows && pass.ends[pass.rows - 1] == pass.total,
              "attend: ", pass.total, " tokens do not stand as their ends say");
  for (int64_t b = 0; b < pass.rows; ++b)
    TORCH_CHECK(pass.length(b) >= 0 && pass.length(b) <= pass.width && pass.bases[b] + pass.width <= pass.capacity && pass.cache_rows[b] < keys.size(1) &&
                    pass.reach >= pass.width && pass.bases[b] + pass.width >= pass.reach,
                "attend: the pass does not fit the cache");
  at::Tensor out = at::empty({1, pass.total, pass.heads, pass.value_dim}, q.options());
  float* to = out.mutable_data_ptr<float>();
  const at::Tensor k_layer = keys.select(0, layer), v_layer = values.select(0, layer);
  const float *qp = q.const_data_ptr<float>(), *kp = k.const_data_ptr<float>(), *vp = v.const_data_ptr<float>();
  if (keys.scalar_type() == at::kBFloat16)
    attend_all(pass, qp, kp, vp, k_layer.data_ptr<at::BFloat16>(), v_layer.data_ptr<at::BFloat16>(), to);
  else if (keys.scalar_type() == at::kHalf)
    attend_all(pass, qp, kp, vp, k_layer.data_ptr<at::Half>(), v_layer.data_ptr<at::Half>(), to);
  else
    attend_all(pass, qp, kp, vp, k_layer.data_ptr<float>(), v_layer.data_ptr<float>(), to);
  return query.scalar_type() == at::kFloat ? out : out.to(query.scalar_type());
}

}  // namespace

// The operators are declared in Python, beside their reference.
TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("linear", linear);
  library.impl("linear_scaled", linear_scaled);
  library.impl("linear_gated", linear_gated);
  library.impl("gate_halves", gate_halves);
  library.impl("embed", embed);
  library.impl("attend", attend);
}

TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("names", &Package::names)
      .def("load", &Package::load)
      .def("run", &Package::run);
}

TORCH_LIBRARY_IMPL(outrider, CompositeExplicitAutograd, library) { 
  library.impl("has_matrix_units", has_matrix_units);
  library.impl("prefers_pairs", prefers_pairs);
  library.impl("takes_fours", takes_fours);
}
