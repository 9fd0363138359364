// A compiled pass, run without Python's lock. torch's own binding keeps the lock, so that nothing else in the process would run during
// a pass, such as a server's event loop. A call is also a quarter of a millisecond faster.

#pragma once

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

  // Weights are used in place: the caller must keep them alive.
  void load(const c10::Dict<std::string, at::Tensor>& weights) {
    std::unordered_map<std::string, at::Tensor> given;
    for (const auto& entry : weights) given.emplace(entry.key(), entry.value());
    loader_.load_constants(given, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) { return loader_.boxed_run(std::move(inputs)); }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace outrider
