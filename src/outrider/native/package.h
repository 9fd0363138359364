// A compiled pass, run without Python's lock. torch's own binding keeps the lock, so that nothing else in the process would run during
// a pass, such as a server's event loop. A call is also a quarter of a millisecond faster.

#pragma once

#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace outrider {

class Package : public torch::CustomClassHolder {
 public:
  explicit Package(const std::string& path) : loader_(path) {}

  // Names of the weights that it needs.
  std::vector<std::string> names() { return loader_.get_constant_fqns(); }

  // Weights are used in place. The loader never frees its handles of tensors that it does not own: it gets views that own nothing,
  // and the weights live as long as this object.
  void load(const c10::Dict<std::string, at::Tensor>& weights) {
    std::unordered_map<std::string, at::Tensor> given;
    for (const auto& entry : weights) {
      const at::Tensor& weight = weights_.emplace_back(entry.value());
      given.emplace(entry.key(), at::from_blob(weight.data_ptr(), weight.sizes(), weight.strides(), weight.options()));
    }
    loader_.load_constants(given, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) { return loader_.boxed_run(std::move(inputs)); }

 private:
  std::vector<at::Tensor> weights_;
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace outrider
