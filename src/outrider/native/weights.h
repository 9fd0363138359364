// Storage formats of weights (numbers, pairs of bfloat16), and how a vector of each is multiplied and added.

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

// Whether this process may use the CPU's matrix units.
inline bool has_matrix_units() {
#if defined(OUTRIDER_AMX)
  return amx::allowed();
#else
  return false;
#endif
}

// Whether this processor multiplies paired weights fastest.
inline bool has_fast_bfloat16() { return kHasPairs || has_matrix_units(); }

#if defined(__AVX512BF16__)
// 32 numbers, rounded to bfloat16: two in each float.
inline void to_pairs(const float* from, float* to) {
  const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + kLanes);
  _mm512_storeu_ps(to, reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(high, low)));
}
#endif

}  // namespace outrider
