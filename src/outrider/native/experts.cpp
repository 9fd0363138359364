// Layers with experts: each row is multiplied with the weights of the few experts that its router chose.
//
// Rows are collected expert by expert, so that each expert's weights are read once per pass, and run through the kernels of linear
// layers. Those compute a row alike whatever the other rows are, and a row's results are added in the order of the experts: its bits
// depend neither on the other rows nor on the order of its choices, which torch.topk may leave open.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "operators.h"
#include "threads.h"
#include "vectors.h"

#include <cstring>
#include <vector>

namespace outrider {
namespace {

// The part of one expert in weights, or biases, of all experts, one after the other.
at::Tensor part(const at::Tensor& all, int64_t expert, int64_t num_experts) {
  const int64_t size = all.size(0) / num_experts;
  return all.narrow(0, expert * size, size);
}

std::optional<at::Tensor> part(const std::optional<at::Tensor>& all, int64_t expert, int64_t num_experts) {
  return all.has_value() ? std::optional(part(*all, expert, num_experts)) : std::nullopt;
}

}  // namespace

// x [rows, inputs] -> [rows, outputs] in x's type: sum over j of shares[r][j] * down(inner(up(x[r]))) of expert chosen[r][j]. `inner` is
// the activation; with `has_gate`, `up` has twice the inputs of `down` as outputs, and the activation of the first ones multiplies the
// others. Weights are packed for `linear`, all experts' panels one after the other; biases are [experts * outputs].
at::Tensor experts(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down, const std::optional<at::Tensor>& up_bias,
                   const std::optional<at::Tensor>& down_bias, const at::Tensor& chosen, const at::Tensor& shares, int64_t num_experts,
                   std::string_view activation, bool has_gate, int64_t activation_bits) {
  const int64_t rows = x.size(0), inputs = x.size(1), each = chosen.size(1), outputs = down.size(0) / num_experts * kPanel;
  TORCH_CHECK(x.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == rows && shares.sizes() == chosen.sizes(), "experts: rows ", x.sizes(),
              ", choices ", chosen.sizes(), ", shares ", shares.sizes());
  TORCH_CHECK(num_experts > 0 && up.size(0) % ((has_gate ? 2 : 1) * num_experts) == 0 && down.size(0) % num_experts == 0,
              "experts: panels ", up.size(0), " and ", down.size(0), " of ", num_experts, " experts");
  const at::Tensor source = x.to(at::kFloat).contiguous(), choices = chosen.to(at::kLong).contiguous(),
                   factors = shares.to(at::kFloat).contiguous();
  const int64_t* of = choices.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> places(num_experts);  // indices into `chosen`
  for (int64_t i = 0; i < rows * each; ++i) {
    TORCH_CHECK_INDEX(of[i] >= 0 && of[i] < num_experts, "experts: no expert ", of[i], " of ", num_experts);
    places[of[i]].push_back(i);
  }
  const at::Tensor out = at::zeros({rows, outputs}, source.options());
  const float *from = source.const_data_ptr<float>(), *share = factors.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const auto& own = places[expert];
    const int64_t count = static_cast<int64_t>(own.size());
    if (count == 0) continue;
    const at::Tensor collected = at::empty({count, inputs}, source.options());
    float* row = collected.mutable_data_ptr<float>();
    for (int64_t i = 0; i < count; ++i) std::memcpy(row + i * inputs, from + own[i] / each * inputs, inputs * sizeof(float));
    const at::Tensor wide = linear(collected, part(up, expert, num_experts), part(up_bias, expert, num_experts),
                                   up.size(0) / num_experts * kPanel, activation_bits),
                     inner = has_gate ? gate_halves(wide, activation) : activate(wide, activation),
                     result = linear(inner, part(down, expert, num_experts), part(down_bias, expert, num_experts), outputs, activation_bits);
    const float* found = result.const_data_ptr<float>();
    const int64_t vectors = outputs / kLanes;
    parallel_for(0, vectors, 8192 / count + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes) {
          float* sum = to + own[i] / each * outputs + at;
          store(sum, fused(splat(share[own[i]]), load(found + i * outputs + at), load(sum)));
        }
    });
  }
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

}  // namespace outrider
