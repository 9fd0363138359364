// Activations, and gates: the activation of one half of a layer's outputs times the other half.

#pragma once

#include <c10/util/Exception.h>

#include "vectors.h"

#include <cstdint>
#include <string_view>

namespace outrider {

// activation(x), and activation(gate) * up. silu is x times the sigmoid of x; gelu's approximation by tanh is x times that of a cubic in
// x, since (1 + tanh(y)) / 2 is the sigmoid of 2 y; gelu itself is x times the normal distribution function. gpt-oss limits both
// numbers to 7, multiplies the gate by the sigmoid of 1.702 times itself, and adds 1 to the other.
struct Gate {
  static constexpr int64_t panels = 2;
  enum Kind { kSilu, kGeluTanh, kGelu, kSwishClamped, kReluSquared } kind;
  explicit Gate(std::string_view activation)
      : kind(activation == "silu"            ? kSilu
             : activation == "gelu"          ? kGelu
             : activation == "swish_clamped" ? kSwishClamped
             : activation == "relu_squared"  ? kReluSquared
                                             : kGeluTanh) {
    TORCH_CHECK(kind != kGeluTanh || activation == "gelu_tanh", "no activation ", activation);
  }
  vec operator()(vec x) const {
    if (kind == kGelu) return x * normal(x);
    if (kind == kReluSquared) return x < splat(0.f) ? splat(0.f) : x * x;
    const vec y = kind == kGeluTanh ? fused(x * x * x, splat(0.0713548163f), x * 1.5957691216f) : kind == kSwishClamped ? x * 1.702f : x;
    const vec small = exp_nonpositive(y < splat(0.f) ? y : -y);
    return x * ((y < splat(0.f) ? small : splat(1.f)) / (1.f + small));
  }
  vec operator()(vec gate, vec up) const {
    if (kind != kSwishClamped) return (*this)(gate) * up;
    const vec most = splat(7.f), below = up > most ? most : up;
    return (*this)(gate > most ? most : gate) * ((below < -most ? -most : below) + 1.f);
  }

 private:
  // The normal distribution function, error 8e-8 (Abramowitz and Stegun 1964, 7.1.26).
  static vec normal(vec x) {
    const vec u = magnitude(x) * 0.7071067812f, t = 1.f / fused(u, splat(0.3275911f), splat(1.f));
    vec y = splat(0.5307027145f);
    y = fused(y, t, splat(-0.7265760135f));
    y = fused(y, t, splat(0.7107068705f));
    y = fused(y, t, splat(-0.142248368f));
    y = fused(y, t, splat(0.127414796f));
    const vec tail = y * t * exp_nonpositive(-u * u);
    return x < splat(0.f) ? tail : 1.f - tail;
  }
};

}  // namespace outrider
