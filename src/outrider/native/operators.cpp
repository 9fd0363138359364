// Registers the operators with torch. No other file includes torch/library.h, which takes many seconds to compile.

#include <torch/library.h>

#include "operators.h"
#include "package.h"
#include "weights.h"

namespace outrider {

// Operators of a pass, which Python declares (runner/kernels.py, blocks.py, experts.py, recurrence.py). Those of attention and
// recurrent layers have references there, which run without C++; layers are packed only where the C++ is loaded.
TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("linear", linear);
  library.impl("linear_gated", linear_gated);
  library.impl("activate", activate);
  library.impl("embed", embed);
  library.impl("experts", experts);
  library.impl("attend", attend);
  library.impl("delta_scan", delta_scan);
  library.impl("selective_scan", selective_scan);
  library.impl("short_conv", short_conv);
}

// Operators of the sampler run on CPUs only. Without C++ and on other devices the sampler calls its references.
TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("shape_probs(Tensor scores, Tensor settings, int[] counts) -> (Tensor, int[])", shape_probs);
  library.def("choose(Tensor scores, Tensor settings, int[] keys, int[] counts) -> (Tensor, int[])", choose);
  library.def("likeliest(Tensor scores, Tensor settings, int[] keys, int top_k, int num_noisy) -> (Tensor, Tensor)", likeliest);
  library.def("next_token_probs(Tensor target, Tensor? draft, Tensor tokens, Tensor num_accepted, Tensor lens) -> Tensor",
              next_token_probs);
  library.def("sample_inverse_cdf(Tensor probs, float[] heights) -> Tensor", sample_inverse_cdf);
  library.def("fill_blocks(Tensor codes, Tensor scales, Tensor? offsets, int group, Tensor(a!) packed) -> ()", fill_blocks);
  library.def("pack_blocks(Tensor weight, int bits, Tensor(a!) packed) -> ()", pack_blocks);
  library.def("repack_blocks(Tensor packed, int inputs, int bits, Tensor(a!) rounded) -> ()", repack_blocks);
  library.def("block_activation_bits() -> int", block_activation_bits);
  library.def("has_matrix_units() -> bool", has_matrix_units);
  library.def("has_fast_bfloat16() -> bool", has_fast_bfloat16);
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("names", &Package::names)
      .def("load", &Package::load)
      .def("run", &Package::run);
}

}  // namespace outrider
