// Storage formats of weights (numbers, pairs of bfloat16, fours of 8 bits), and how a vector of each is multiplied and added.

#pragma once

#include "amx.h"
#include "vectors.h"

namespace outrider {

// The weights of two neighbouring inputs in bfloat16, which some processors multiply by two inputs and add to a sum in one instruction
// (AVX-512 BF16): twice as many products as in float32, without widening weights. Inputs are rounded to bfloat16, too, and stored in
// pairs, in the 32 bits of a float.
struct Pair {
  at::BFloat16 first, second;
};
// 8-bit codes of the weights of four neighbouring inputs, multiplied by codes of four inputs (AVX-512 VNNI). Sums are integers.
struct Quad {
  int8_t codes[4];
};

// Products of weights of any form: c += weights * value, and c += weights * value[0].
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
inline vec load(const Quad* from) {  // one factor of the instruction is unsigned: codes from 1 to 255 (see linear_of_quads)
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

// Whether this process may use the CPU's matrix units.
inline bool has_matrix_units() {
#if defined(OUTRIDER_AMX)
  return amx::allowed();
#else
  return false;
#endif
}

// Whether this processor multiplies paired weights fastest, and whether it multiplies codes in fours.
inline bool has_fast_bfloat16() { return kHasPairs || has_matrix_units(); }
inline bool has_int8_products() { return kHasQuads || has_matrix_units(); }

#if defined(__AVX512BF16__)
// 32 numbers, rounded to bfloat16: two in each float.
inline void to_pairs(const float* from, float* to) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + kLanes);
  _mm512_storeu_ps(to, reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(high, low)));
}
#endif

}  // namespace outrider
