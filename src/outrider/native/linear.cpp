// Linear layers of few rows, in which a CPU spends most of a pass.
//
// Libraries are not used because, on a CPU without matrix units (AMX), the GEMMs of MKL, oneDNN and FBGEMM take 2-7x the time of one
// row for eight rows, so scoring drafts would cost as much as decoding them. These kernels read each weight once, in 16 bits, and
// compute in float32, or in bfloat16 with float32 sums if the processor has such products. With AVX-512 up to a dozen rows cost about as
// much as one, the memory traffic of the weights; with AVX2 up to three do. On CPUs with matrix units, layers run on them (amx.h).
//
// Batch-invariant, like attention: the additions that make a row's result, and their order, do not depend on the number of other rows
// in the pass. The tokens are therefore the same for any draft length, proposer and batch.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "gate.h"
#include "operators.h"
#include "panels.h"
#include "threads.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace outrider {
namespace {

// Tiles of the same weights that fetch those used next: two with AVX-512; others wait for their instructions, not for memory.
constexpr int kFetching = kLanes == 16 ? 2 : 1;

// Prefetch distance of weights in bytes, because hardware prefetching stops at page ends: the fastest ones measured on AMD's Zen 5 (which
// has AVX-VNNI), on Zen 4, whose own prefetching follows several panels at once better, and on Intel's Cascade Lake.
// `panels`: of a tile, each read at its own place.
constexpr int64_t prefetch_distance([[maybe_unused]] int panels) {
#if defined(__AVX512BF16__) && defined(__AVXVNNI__) && !defined(__AMX_TILE__)
  return panels == 1 ? 16384 : 4096;
#elif defined(__AVX512BF16__) && !defined(__AMX_TILE__)
  return panels == 1 ? 3072 : 0;
#else
  return 3072;
#endif
}
// Inputs accumulated in registers before they are added to the output: a panel of `kBlock` inputs is read again from the L1 cache.
constexpr int64_t kBlock = kLanes == 16 ? 512 : 256;

// out[r][vectors] (+)= x[0..depth)[r] . w, for `rows` rows and `vectors` vectors of outputs: a slice of a panel, or neighbouring panels;
// one chain of additions a lane.
template <typename Weight, int rows, int vectors>
inline void tile(const float* x, const Weight* w, int64_t panel_stride, int64_t depth, float* out, int64_t out_stride, bool first,
                 const Ahead ahead) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(Weight));  // entries of a cache line
  constexpr int panels = std::max(1, vectors / kVectors);
  const bool in_parts = ahead.parts > 1;
  const int64_t step = kPanel / ahead.parts, jump = in_parts ? depth : std::max<int64_t>(0, depth - ahead.by);
  const Weight* coming = in_parts ? w + ahead.next + ahead.part * depth * step : w + ahead.by * kPanel;
  vec acc[rows][vectors];  // in registers only if every loop over them is unrolled early
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) acc[r][v] = vec{};
  for (int64_t k = 0; k < depth; ++k) {
    if (k == jump) coming += ahead.next - depth * kPanel;
    for (int j = 0; ahead.by && j < panels; ++j)
      for (int64_t i = 0; i < kPanel; i += line) __builtin_prefetch(coming + j * panel_stride + i);
    coming += step;
    vec weights[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) weights[v] = load(w + v / kVectors * panel_stride + k * kPanel + v % kVectors * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      // With many rows, every second one is a memory operand of its additions: this balances loads and instructions, also if a
      // hyperthread on the same core takes half of the issue slots.
      if (rows > 4 && r % 2) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) add_product_at<Weight>(weights[v], x + k * rows + r, acc[r][v]);
      } else {
        const vec value = splat(x[k * rows + r]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) acc[r][v] = add_product<Weight>(weights[v], value, acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      float* to = out + r * out_stride + v * kLanes;
      store(to, first ? acc[r][v] : load(to) + acc[r][v]);
    }
  }
}

// Vectors of outputs of a tile. Few rows leave registers free: several panels at once hide the latency of the additions. The order of
// additions is the same for all.
constexpr int vectors_of_a_tile(int64_t rows) {
  if (kLanes == 16) return kVectors * (rows <= 2 ? 4 : rows == 3 ? 3 : rows <= 7 ? 2 : 1);
  return rows == 1 ? 8 : rows <= 3 ? 4 : rows <= 6 ? 2 : 1;
}

// `ahead`: of all panels; `next` from the first one's weights.
template <typename Weight, int rows>
void run_panels(const float* x, const Weight* w, int64_t panel_stride, int64_t depth, float* out, int64_t out_stride, bool first,
                int64_t panels, const Ahead ahead) {
  constexpr int vectors = vectors_of_a_tile(rows), wide = std::max(1, vectors / kVectors), slice = std::min(vectors, kVectors);
  constexpr int slices = kVectors / slice;
  int64_t done = 0;
  // From a tile's weights, `count` panels, to those used next.
  const auto next = [&](int64_t count) { return done + count < panels ? count * panel_stride : ahead.next - done * panel_stride; };
  if constexpr (wide > 1)
    for (; done + wide <= panels; done += wide)
      tile<Weight, rows, vectors>(x, w + done * panel_stride, panel_stride, depth, out + done * kPanel, out_stride, first,
                                  {ahead.by, next(wide), ahead.part, ahead.parts});
  for (; done < panels; ++done)
    for (int v = 0; v < slices; ++v)
      tile<Weight, rows, slice>(x, w + done * panel_stride + v * slice * kLanes, panel_stride, depth,
                                out + done * kPanel + v * slice * kLanes, out_stride, first,
                                {ahead.by, next(1) - v * slice * kLanes, ahead.part * slices + v, ahead.parts * slices});
}

template <typename Weight, size_t... index>
constexpr std::array<RunPanels<Weight>, sizeof...(index)> make_table(std::index_sequence<index...>) {
  return {run_panels<Weight, static_cast<int>(index) + 1>...};
}
template <typename Weight>
constexpr auto kRunPanels = make_table<Weight>(std::make_index_sequence<kMaxRows>{});  // [rows - 1]

// x[rows][inputs] -> for each `at_once` of the rows [inputs][at_once], the last with as many as are left.
inline void transpose_all(const float* x, int64_t rows, int64_t inputs, int64_t at_once, float* to) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock, groups = (rows + at_once - 1) / at_once;
  parallel_for(0, groups * blocks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / blocks * at_once, k = i % blocks * kBlock, count = std::min(at_once, rows - r);
      transpose_rows(x + r * inputs + k, inputs, count, std::min(kBlock, inputs - k), to + r * inputs + k * count);
    }
  });
}

// Conversion of sums to results: unchanged, or, for an epilogue of two panels, one number from two sums (see Gate).
struct NoEpilogue {
  static constexpr int64_t panels = 1;
};

// An epilogue of two panels requires more rows than a tile has.
template <typename Weight, typename Epilogue>
void linear_rows(const Epilogue epilogue, const float* x, int64_t rows, int64_t inputs, const Weight* w, int64_t panels, float* out) {
  if (rows == 0) return;
  const int64_t panel_stride = inputs * kPanel, out_stride = panels * kPanel, at_once = rows_of_a_tile(rows);
  const int64_t ahead_by = prefetch_distance(vectors_of_a_tile(at_once) / kVectors) / (kPanel * static_cast<int64_t>(sizeof(Weight)));
  const std::unique_ptr<float[]> transposed(rows > 1 ? new float[rows * inputs] : nullptr);
  if (rows > 1) transpose_all(x, rows, inputs, at_once, transposed.get());
  const float* from = rows > 1 ? transposed.get() : x;
  // Rows from r on, inputs from k on, `count` panels from `panel` on, to results `stride` apart.
  const auto run = [&](int64_t r, int64_t k, int64_t panel, int64_t count, float* to, int64_t stride, Ahead ahead) {
    const int64_t depth = std::min(kBlock, inputs - k), some = std::min(at_once, rows - r);
    ahead.next = k + depth < inputs ? depth * kPanel : count * panel_stride - k * kPanel;  // the next block, or the next panel's first
    kRunPanels<Weight>[some - 1](from + r * inputs + k * some, w + panel * panel_stride + k * kPanel, panel_stride, depth,
                                 to + r * stride, stride, k == 0, count, ahead);
  };
  // A block of weights stays in the cache for all rows; the next one is fetched during the first tiles.
  const auto run_panel = [&](int64_t panel, float* to, int64_t stride) {
    for (int64_t k = 0; k < inputs; k += kBlock)
      for (int part = 0; part * at_once < rows; ++part)
        run(part * at_once, k, panel, 1, to, stride, {part < kFetching ? kBlock : 0, 0, part, kFetching});
  };
  // Waking a thread pays from about 10 microseconds of work.
  const int64_t work = 1 + inputs * kPanel * (rows + 4) * Epilogue::panels;
  const int64_t grain = std::max<int64_t>(1, 200'000 / work);
  parallel_for(0, panels / Epilogue::panels, grain, [&](int64_t begin, int64_t end) {
    if constexpr (Epilogue::panels == 2) {
      const int64_t half = panels / 2, half_stride = half * kPanel;
      std::vector<float> both(rows * 2 * kPanel);  // stays in the cache, where results of all panels would go to memory and back
      for (int64_t panel = begin; panel < end; ++panel) {
        run_panel(panel, both.data(), 2 * kPanel);
        run_panel(panel + half, both.data() + kPanel, 2 * kPanel);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t j = 0; j < kPanel; j += kLanes) {
            const float* sums = both.data() + r * 2 * kPanel + j;
            store(out + r * half_stride + panel * kPanel + j, epilogue(load(sums), load(sums + kPanel)));
          }
      }
    } else if (rows == at_once) {
      for (int64_t k = 0; k < inputs; k += kBlock) run(0, k, begin, end - begin, out + begin * kPanel, out_stride, {ahead_by});
    } else {
      for (int64_t panel = begin; panel < end; ++panel) run_panel(panel, out + panel * kPanel, out_stride);
    }
  });
}

// A weight in pairs, [panels, inputs / 2, 32, 2]: two inputs of an output are adjacent.
inline bool is_interleaved(const at::Tensor& packed) { return packed.dim() == 4; }
inline int64_t together(const at::Tensor& packed) { return is_interleaved(packed) ? packed.size(3) : 1; }
// A weight in blocks, see blocks.cpp.
inline bool is_in_blocks(const at::Tensor& packed) { return packed.scalar_type() == at::kByte; }

inline bool on_units(const at::Tensor& packed) { return is_interleaved(packed) && has_matrix_units(); }

template <typename Epilogue>
void linear_on_units(const Epilogue epilogue, const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, float* out) {
#if defined(OUTRIDER_AMX)
  amx::linear(epilogue, x, rows, inputs, packed.const_data_ptr(), packed.size(0), out);
#endif
}

// x[rows][inputs], rounded to bfloat16, times weights in pairs.
template <typename Epilogue>
void linear_of_pairs(const Epilogue epilogue, const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, float* out) {
#if defined(__AVX512BF16__)
  const at::Tensor rounded = at::empty({rows, inputs / 2}, at::kFloat);
  float* to = rounded.mutable_data_ptr<float>();
  parallel_for(0, rows * (inputs / kPanel), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to_pairs(x + i * kPanel, to + i * kLanes);
  });
  linear_rows(epilogue, to, rows, inputs / 2, static_cast<const Pair*>(packed.const_data_ptr()), packed.size(0), out);
#endif
}

template <typename Epilogue>
void linear_on_vectors(const Epilogue epilogue, const float* x, int64_t rows, int64_t inputs, const at::Tensor& packed, float* out) {
  if (is_interleaved(packed)) return linear_of_pairs(epilogue, x, rows, inputs, packed, out);
  by_number(packed.scalar_type(), [&](auto number) {
    linear_rows(epilogue, x, rows, inputs, packed.const_data_ptr<decltype(number)>(), packed.size(0), out);
  });
}

// Operands of an operator: rows in float32, and memory for results of `width` numbers each.
struct Rows {
  at::Tensor source, out;
  int64_t count, inputs;
  Rows(const at::Tensor& x, const at::Tensor& packed, int64_t width) : inputs(packed.size(1) * together(packed)) {
    TORCH_CHECK(x.size(-1) == inputs, "linear: input of size ", x.size(-1), ", weight for ", inputs);
    TORCH_CHECK(!is_interleaved(packed) || (packed.scalar_type() == at::kBFloat16 && packed.size(3) == 2 && inputs % 32 == 0 && has_fast_bfloat16()),
                "linear: this processor does not multiply weights packed so: pairs of bfloat16 take AVX-512 BF16 or matrix units (AMX), "
                "32 inputs at a time");
    source = x.to(at::kFloat).contiguous();
    count = source.numel() / std::max<int64_t>(1, inputs);
    auto shape = x.sizes().vec();
    shape.back() = width;
    out = at::empty(shape, source.options());
  }
  const float* from() const { return source.const_data_ptr<float>(); }
  float* to() { return out.mutable_data_ptr<float>(); }
};

// from [rows][2 * half] -> to [rows][half]; half is a multiple of a vector.
inline void gate_rows(const Gate gate, const float* from, int64_t rows, int64_t half, float* to) {
  parallel_for(0, rows * (half / kLanes), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* at = from + i * kLanes + i * kLanes / half * half;
      store(to + i * kLanes, gate(load(at), load(at + half)));
    }
  });
}

// x times a packed weight that is not in blocks -> [..., panels * 32] float32.
at::Tensor multiply(const at::Tensor& x, const at::Tensor& packed) {
  Rows rows(x, packed, packed.size(0) * kPanel);
  if (on_units(packed))
    linear_on_units(NoEpilogue{}, rows.from(), rows.count, rows.inputs, packed, rows.to());
  else
    linear_on_vectors(NoEpilogue{}, rows.from(), rows.count, rows.inputs, packed, rows.to());
  return rows.out;
}

// The same with a gate -> [..., panels * 16].
at::Tensor multiply_gated(const at::Tensor& x, const at::Tensor& packed, const Gate gate) {
  const int64_t half = packed.size(0) / 2 * kPanel;
  Rows rows(x, packed, half);
  if (on_units(packed)) {
    linear_on_units(gate, rows.from(), rows.count, rows.inputs, packed, rows.to());
  } else if (rows.count > kMaxRows) {
    linear_on_vectors(gate, rows.from(), rows.count, rows.inputs, packed, rows.to());
  } else {
    const at::Tensor both = at::empty({rows.count, 2 * half}, rows.out.options());
    linear_on_vectors(NoEpilogue{}, rows.from(), rows.count, rows.inputs, packed, both.mutable_data_ptr<float>());
    gate_rows(gate, both.const_data_ptr<float>(), rows.count, half, rows.to());
  }
  return rows.out;
}

template <typename Weight>
void embed_rows(const int64_t* ids, int64_t count, const Weight* w, int64_t inputs, int64_t together, float* out) {
  for (int64_t i = 0; i < count; ++i) {  // `together` inputs of an output are adjacent
    const Weight* row = w + ids[i] / kPanel * inputs * kPanel + ids[i] % kPanel * together;
    for (int64_t k = 0; k < inputs; k += together)
      for (int64_t j = 0; j < together; ++j) out[i * inputs + k + j] = static_cast<float>(row[k * kPanel + j]);
  }
}

}  // namespace

#if defined(__AVX512BF16__)
const std::array<RunPanels<Pair>, kMaxRows> kRunPairs = kRunPanels<Pair>;
#endif

// x [..., inputs] float32 or bfloat16, packed [panels, inputs, 32], in pairs or in blocks -> [..., outputs] in x's type; outputs <=
// panels * 32. `activation_bits`: for weights in blocks.
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, int64_t activation_bits) {
  at::Tensor out = is_in_blocks(packed) ? linear_blocks(x, packed, nullptr, activation_bits) : multiply(x, packed);
  if (outputs != out.size(-1)) out = out.narrow(-1, 0, outputs).contiguous();
  if (bias.has_value()) out.add_(*bias);
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

// x [..., inputs], packed weights of 2 n outputs -> [..., n] in x's type: activation(first n) * remaining n. The intermediate result
// stays in the caches, because writing and reading it takes long in wide passes.
at::Tensor linear_gated(const at::Tensor& x, const at::Tensor& packed, std::string_view activation, int64_t activation_bits) {
  TORCH_CHECK(packed.size(0) % 2 == 0, "linear_gated: ", packed.size(0), " panels: expected an even number (gates, then up projections)");
  const Gate gate(activation);
  const at::Tensor out = is_in_blocks(packed) ? linear_blocks(x, packed, &gate, activation_bits) : multiply_gated(x, packed, gate);
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

// both [..., 2 n] -> [..., n] in its type: activation(first n) * remaining n.
at::Tensor gate_halves(const at::Tensor& both, std::string_view activation) {
  TORCH_CHECK(both.size(-1) % (2 * kLanes) == 0, "gate_halves: halves of ", both.size(-1), " are not multiples of ", kLanes);
  const at::Tensor source = both.to(at::kFloat).contiguous();
  auto shape = both.sizes().vec();
  const int64_t half = shape.back() /= 2;
  const at::Tensor out = at::empty(shape, source.options());
  gate_rows(Gate(activation), source.const_data_ptr<float>(), out.numel() / half, half, out.mutable_data_ptr<float>());
  return both.scalar_type() == at::kFloat ? out : out.to(both.scalar_type());
}

// x -> activation(x), of the same shape and type. Every element is computed alike, whereas torch's kernels compute those at the end of
// a thread's part by another formula, so that an element's last bit would depend on the number of rows.
at::Tensor activate(const at::Tensor& x, std::string_view activation) {
  const Gate gate(activation);
  const at::Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  if (out.numel() == 0) return out.to(x.scalar_type());
  const int64_t width = x.dim() == 0 ? 1 : x.size(-1), vectors = (width + kLanes - 1) / kLanes;
  at::Tensor rows = x.to(at::kFloat).reshape({-1, width});
  if (rows.stride(1) != 1) rows = rows.contiguous();
  const float* from = rows.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t stride = rows.stride(0);
  parallel_for(0, rows.size(0) * vectors, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin / vectors, at = begin % vectors * kLanes, i = begin; i < end; ++i) {
      const int64_t here = row * stride + at, there = row * width + at, left = width - at;
      if (left > kLanes) {
        store(to + there, gate(load(from + here)));
        at += kLanes;
        continue;
      }
      vec rest{};
      std::memcpy(&rest, from + here, left * sizeof(float));
      rest = gate(rest);
      std::memcpy(to + there, &rest, left * sizeof(float));
      ++row;
      at = 0;
    }
  });
  return x.scalar_type() == at::kFloat ? out : out.to(x.scalar_type());
}

// token_ids [...] -> [..., inputs] float32: rows of a packed weight, for an embedding that is tied to the output head.
at::Tensor embed(const at::Tensor& token_ids, const at::Tensor& packed, int64_t inputs) {
  const at::Tensor ids = token_ids.contiguous();
  const int64_t *from = ids.const_data_ptr<int64_t>(), count = ids.numel(), rows = packed.size(0) * kPanel;
  for (int64_t i = 0; i < count; ++i) TORCH_CHECK_INDEX(from[i] >= 0 && from[i] < rows, "embed: no token ", from[i]);
  auto shape = ids.sizes().vec();
  shape.push_back(inputs);
  at::Tensor out = at::empty(shape, packed.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  if (is_in_blocks(packed)) {
    embed_blocks(from, count, packed, inputs, to);
    return out;
  }
  const int64_t side_by_side = together(packed);
  TORCH_CHECK(inputs == packed.size(1) * side_by_side, "embed: ", inputs, " inputs, weight of ", packed.size(1) * side_by_side);
  by_number(packed.scalar_type(), [&](auto number) {
    embed_rows(from, count, packed.const_data_ptr<decltype(number)>(), inputs, side_by_side, to);
  });
  return out;
}

}  // namespace outrider
