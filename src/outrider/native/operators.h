// The operators that Python calls through torch.ops.outrider. Their definitions say what each computes.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace outrider {

struct Gate;

// linear.cpp
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs,
                  int64_t activation_bits);
at::Tensor linear_gated(const at::Tensor& x, const at::Tensor& packed, std::string_view activation, int64_t activation_bits);
at::Tensor gate_halves(const at::Tensor& both, std::string_view activation);
at::Tensor activate(const at::Tensor& x, std::string_view activation);
at::Tensor embed(const at::Tensor& token_ids, const at::Tensor& packed, int64_t inputs);

// blocks.cpp
int64_t block_activation_bits();
at::Tensor linear_blocks(const at::Tensor& x, const at::Tensor& packed, const Gate* gate, int64_t activation_bits);
void embed_blocks(const int64_t* ids, int64_t count, const at::Tensor& packed, int64_t inputs, float* out);
void fill_blocks(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& offsets, int64_t group, at::Tensor packed);
void pack_blocks(const at::Tensor& weight, int64_t bits, at::Tensor packed);
void repack_blocks(const at::Tensor& packed, int64_t inputs, int64_t bits, at::Tensor rounded);

// experts.cpp
at::Tensor experts(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down, const std::optional<at::Tensor>& up_bias,
                   const std::optional<at::Tensor>& down_bias, const at::Tensor& chosen, const at::Tensor& shares, int64_t num_experts,
                   std::string_view activation, bool has_gate, int64_t activation_bits);

// attention.cpp
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys,
                  const at::Tensor& values, int64_t layer, const at::Tensor& cache_rows, const at::Tensor& bases, const at::Tensor& ends,
                  const at::Tensor& positions, const at::Tensor& visible, double scale, double softcap, int64_t window, int64_t chunk,
                  const std::optional<at::Tensor>& sinks);

// recurrence.cpp
at::Tensor delta_scan(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& decay,
                      const std::optional<at::Tensor>& beta, const at::Tensor& states, int64_t layer, const at::Tensor& cache_rows,
                      const at::Tensor& bases, const at::Tensor& ends, double scale, bool normalize);
at::Tensor selective_scan(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                          const at::Tensor& states, int64_t layer, const at::Tensor& cache_rows, const at::Tensor& bases,
                          const at::Tensor& ends);
at::Tensor short_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool silu,
                      const at::Tensor& history, int64_t layer, const at::Tensor& cache_rows, const at::Tensor& bases,
                      const at::Tensor& ends);

// sampling.cpp
std::tuple<at::Tensor, std::vector<int64_t>> shape_probs(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef counts);
std::tuple<at::Tensor, std::vector<int64_t>> choose(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef keys,
                                                    at::IntArrayRef counts);
std::tuple<at::Tensor, at::Tensor> likeliest(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef keys, int64_t top_k,
                                             int64_t num_noisy);
at::Tensor next_token_probs(const at::Tensor& target, const std::optional<at::Tensor>& draft, const at::Tensor& tokens,
                            const at::Tensor& num_accepted, const at::Tensor& lens);
at::Tensor sample_inverse_cdf(const at::Tensor& probs, at::ArrayRef<double> heights);

}  // namespace outrider
