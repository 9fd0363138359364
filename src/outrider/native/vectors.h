// Vectors of one register: conversions from and to the 16-bit formats, fused products, transposition, exp and tanh.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace outrider {

// Floats in a vector. Larger vectors than a register are correct, but compilers keep them in memory: ten times slower on AVX2.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int64_t kPanel = 32;               // outputs whose weights are adjacent
constexpr int kVectors = kPanel / kLanes;    // of a panel

typedef float vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t uvec __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t ivec __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t hvec __attribute__((vector_size(kLanes * sizeof(uint16_t))));

inline vec load(const float* from) { vec v; std::memcpy(&v, from, sizeof v); return v; }
inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }
#if defined(__AVX512F__)  // same as the portable lines below, for which compilers emit several instructions
inline vec load(const at::BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<vec>(_mm512_slli_epi32(wide, 16));
}
inline vec load(const at::Half* from) {
  return reinterpret_cast<vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline vec splat(float x) { return reinterpret_cast<vec>(_mm512_set1_ps(x)); }
#elif defined(__AVX2__) && defined(__F16C__)
inline vec load(const at::BFloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<vec>(_mm256_slli_epi32(wide, 16));
}
inline vec load(const at::Half* from) {
  return reinterpret_cast<vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline vec splat(float x) { return reinterpret_cast<vec>(_mm256_set1_ps(x)); }
#else
inline vec load(const at::BFloat16* from) {
  hvec h; std::memcpy(&h, from, sizeof h);
  uvec wide = __builtin_convertvector(h, uvec) << 16;
  vec v; std::memcpy(&v, &wide, sizeof v); return v;
}
inline vec load(const at::Half* from) { vec v; for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(from[i]); return v; }
inline vec splat(float x) { vec v; for (int i = 0; i < kLanes; ++i) v[i] = x; return v; }
#endif
inline vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
  return reinterpret_cast<vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))));
#else
  typedef int8_t bytes __attribute__((vector_size(kLanes)));
  bytes b; std::memcpy(&b, from, sizeof b); return __builtin_convertvector(b, vec);
#endif
}
inline ivec load(const int32_t* from) { ivec v; std::memcpy(&v, from, sizeof v); return v; }
inline void store(int32_t* to, ivec v) { std::memcpy(to, &v, sizeof v); }
inline int32_t sum(ivec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v));
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}
inline float largest(vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float m = v[0]; for (int i = 1; i < kLanes; ++i) m = std::max(m, v[i]); return m;
#endif
}

// Call `run` with a number of this type: bfloat16, half or float.
template <typename Run>
inline void by_number(c10::ScalarType type, const Run& run) {
  if (type == c10::ScalarType::BFloat16) return run(at::BFloat16());
  if (type == c10::ScalarType::Half) return run(at::Half());
  run(0.0f);
}

// Hide what a pointer was computed from: compilers would else compute an address per element of a tile, and keep all in memory.
template <typename T>
inline void opaque(T*& pointer) { asm volatile("" : "+r"(pointer)); }

// a * b + c, rounded once if the processor can. Explicit, because compilers must not fuse products and sums: see build.py.
#if defined(__AVX512F__)
inline vec fused(vec a, vec b, vec c) {
  return reinterpret_cast<vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
}
#elif defined(__AVX2__) && defined(__FMA__)
inline vec fused(vec a, vec b, vec c) {
  return reinterpret_cast<vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
}
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline vec fused(vec a, vec b, vec c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
inline vec fused(vec a, vec b, vec c) { return a * b + c; }
#endif

// c += a * b[0] in every lane, rounded like ``fused``.
#if defined(__AVX512F__)
__attribute__((always_inline)) inline void fused_at(vec a, const float* b, vec& c) {
  vec sum = c;
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));  // a compiler would broadcast first: one instruction more
  c = sum;
}
#else
inline void fused_at(vec a, const float* b, vec& c) { c = fused(a, splat(*b), c); }
#endif

// The nearest integers, halves to even.
inline ivec nearest(vec x) {
#if defined(__AVX512F__)
  return reinterpret_cast<ivec>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<ivec>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(x)));
#else
  ivec v; for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int32_t>(__builtin_nearbyintf(x[i])); return v;
#endif
}

// 16 bytes, repeated, and those of them whose places 0 to 15 are the bytes of `places`.
inline ivec repeated(const int8_t* bytes) {
  int8_t all[sizeof(ivec)];
  for (size_t i = 0; i < sizeof all; i += 16) std::memcpy(all + i, bytes, 16);
  ivec v; std::memcpy(&v, all, sizeof v); return v;
}
inline ivec look_up(ivec table, ivec places) {
#if defined(__AVX512BW__)
  return reinterpret_cast<ivec>(_mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return reinterpret_cast<ivec>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(places)));
#elif defined(__aarch64__)  // clang has no __builtin_shuffle
  return reinterpret_cast<ivec>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(places)));
#elif defined(__has_builtin) && __has_builtin(__builtin_shuffle) && !defined(__AVX512F__)
  typedef uint8_t bytes __attribute__((vector_size(sizeof(ivec))));
  return reinterpret_cast<ivec>(__builtin_shuffle(reinterpret_cast<bytes>(table), reinterpret_cast<bytes>(places)));
#else
  uint8_t numbers[sizeof(ivec)], bytes[sizeof(ivec)];
  std::memcpy(numbers, &table, sizeof numbers);
  std::memcpy(bytes, &places, sizeof bytes);
  for (uint8_t& byte : bytes) byte = numbers[byte];
  std::memcpy(&places, bytes, sizeof bytes);
  return places;
#endif
}

// Lanes of two vectors by number, those of b from kLanes on.
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
template <int... lane>
inline vec pick(vec a, vec b) { return __builtin_shufflevector(a, b, lane...); }
#else  // GCC before 12
template <int... lane>
inline vec pick(vec a, vec b) { return __builtin_shuffle(a, b, ivec{lane...}); }
#endif

// The sum of the lanes, added in halves, so that the result does not depend on what the compiler prefers.
template <int half, int... lane>
inline float sum_halves(vec v, std::integer_sequence<int, lane...> lanes) {
  v += pick<(lane + half) % kLanes...>(v, v);
  if constexpr (half > 1) return sum_halves<half / 2>(v, lanes);
  return v[0];
}
inline float sum(vec v) { return sum_halves<kLanes / 2>(v, std::make_integer_sequence<int, kLanes>{}); }

// kLanes x kLanes floats in place, by exchanging halves of ever larger blocks.
template <int half, int... lane>
inline void exchange(vec* v, std::integer_sequence<int, lane...> lanes) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & half) continue;
    const vec a = v[i], b = v[i + half];
    v[i] = pick<(lane & half ? kLanes + lane - half : lane)...>(a, b);
    v[i + half] = pick<(lane & half ? kLanes + lane : lane + half)...>(a, b);
  }
  if constexpr (2 * half < kLanes) exchange<2 * half>(v, lanes);
}
inline void transpose(vec* v) { exchange<1>(v, std::make_integer_sequence<int, kLanes>{}); }

#if defined(__AVX512BF16__)
// Lanes of 16 bits that make pairs of two vectors' first and last halves: of a, of b, of a ...
template <int from, int... lane>
inline __m512i twos(std::integer_sequence<int, lane...>) {
  typedef uint16_t lanes __attribute__((vector_size(64)));
  return reinterpret_cast<__m512i>(lanes{static_cast<uint16_t>(lane % 2 * 32 + from + lane / 2)...});
}
const __m512i kLowTwos = twos<0>(std::make_integer_sequence<int, 32>{}), kHighTwos = twos<16>(std::make_integer_sequence<int, 32>{});
#endif

inline vec magnitude(vec x) { return x < vec{} ? -x : x; }

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

// tanh(x), relative error 2e-7 (Cephes' tanhf).
inline vec tanh_of(vec x) {
  const vec size = magnitude(x), square = x * x, rest = exp_nonpositive(-2.f * size), far = (1.f - rest) / (1.f + rest);
  vec y = splat(-5.70498872745e-3f);
  y = fused(y, square, splat(2.06390887954e-2f));
  y = fused(y, square, splat(-5.37397155531e-2f));
  y = fused(y, square, splat(1.33314422036e-1f));
  y = fused(y, square, splat(-3.33332819422e-1f));
  return size < splat(0.625f) ? fused(y * square, x, x) : x < splat(0.f) ? -far : far;
}

}  // namespace outrider
