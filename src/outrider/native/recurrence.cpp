// Recurrent layers over a cache of states: short convolutions, gated delta rule and linear attention, selective scan.
//
// A layer's cache is a ring over positions: the state after position p is in slot p mod S. A pass starts from the state after the
// last cached position and writes the state after each of its last S positions, so going back to any of them moves no data. Each
// request runs token by token, so its bits depend neither on the batch nor on the number of tokens in the pass.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include "operators.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

namespace outrider {

using at::Tensor;

namespace {

struct Requests {  // of one pass: tokens [start, end) of request b have the positions base, base + 1, ...
  const int64_t *rows, *bases, *ends;
  int64_t count;

  // `states` [L, R, S, ...] of all layers, of which the pass reads `layer`.
  Requests(const Tensor& cache_rows, const Tensor& bases, const Tensor& ends, int64_t tokens, const Tensor& states, int64_t layer)
      : rows(cache_rows.const_data_ptr<int64_t>()),
        bases(bases.const_data_ptr<int64_t>()),
        ends(ends.const_data_ptr<int64_t>()),
        count(ends.numel()) {
    TORCH_CHECK(cache_rows.is_contiguous() && bases.is_contiguous() && ends.is_contiguous() && states.is_contiguous() && layer >= 0 &&
                    layer < states.size(0) && cache_rows.numel() == count && bases.numel() == count,
                "recurrent layers: layer ", layer, " of ", count, " requests does not fit states ", states.sizes());
    for (int64_t b = 0; b < count; ++b)
      TORCH_CHECK(rows[b] >= 0 && rows[b] < states.size(1) && start(b) <= this->ends[b], "recurrent layers: request ", b, " has no row");
    TORCH_CHECK(start(count) == tokens, "recurrent layers: ", tokens, " tokens, but ends[-1] is ", start(count));
  }
  int64_t start(int64_t b) const { return b ? ends[b - 1] : 0; }
};

struct Ring {  // one layer's states of one request
  float* states;
  int64_t slots, size;

  float* at(int64_t position) const { return states + (position % slots) * size; }
};

Ring ring_of(const Tensor& states, int64_t layer, int64_t row) {  // states [L, R, S, ...], contiguous
  const int64_t slots = states.size(2), size = states.stride(2);
  float* first = states.data_ptr<float>() + (layer * states.size(1) + row) * slots * size;
  return {first, slots, size};
}

// Call step(t, state, next) for each token t of request r, in order: `state` is the part of `size` floats from `offset` on of the state
// before it, `next` the same after it. Only the last S states are kept; earlier ones are computed in `scratch`, in place.
template <typename Step>
void scan(const Requests& requests, int64_t r, const Ring& ring, int64_t offset, int64_t size, float* scratch, const Step& step) {
  const int64_t base = requests.bases[r], first = requests.start(r), last = requests.ends[r];
  float* state = scratch;
  if (base == 0) std::fill_n(state, size, 0.0f);
  else state = ring.at(base - 1) + offset;
  for (int64_t t = first; t < last; ++t) {
    float* next = last - t <= ring.slots ? ring.at(base + t - first) + offset : scratch;
    step(t, state, next);
    state = next;
  }
}

constexpr int64_t kBlock = 64;  // value features summed in registers

// One token of a head: state' = decay * state + key (x) write, with write = beta * (value - key . (decay * state)) for the delta rule,
// else value; out = query . state'. State [keys, values], value features contiguous. `from` may be `to`.
void advance(const float* from, float* to, const float* decay, const float* key, const float* query, const float* value,
             const float* beta, int64_t keys, int64_t values, float* out) {
  auto block = [&](int64_t j, auto width_of) {
    const int64_t width = width_of;
    float write[kBlock], sum[kBlock];
    for (int64_t l = 0; l < width; ++l) sum[l] = 0;
    if (beta) {
      for (int64_t i = 0; i < keys; ++i) {
        const float weight = key[i] * decay[i];
        const float* state = from + i * values + j;
        for (int64_t l = 0; l < width; ++l) sum[l] += weight * state[l];
      }
      for (int64_t l = 0; l < width; ++l) write[l] = *beta * (value[j + l] - sum[l]);
      for (int64_t l = 0; l < width; ++l) sum[l] = 0;
    } else {
      for (int64_t l = 0; l < width; ++l) write[l] = value[j + l];
    }
    for (int64_t i = 0; i < keys; ++i) {
      const float* state = from + i * values + j;
      float* next = to + i * values + j;
      for (int64_t l = 0; l < width; ++l) {
        const float updated = decay[i] * state[l] + key[i] * write[l];
        next[l] = updated;
        sum[l] += query[i] * updated;
      }
    }
    for (int64_t l = 0; l < width; ++l) out[j + l] = sum[l];
  };
  int64_t j = 0;
  for (; j + kBlock <= values; j += kBlock) block(j, std::integral_constant<int64_t, kBlock>());
  if (j < values) block(j, values - j);
}

float inverse_norm(const float* x, int64_t size) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum + 1e-6f);
}

}  // namespace

// query, key [1, T, Hk, D], value [1, T, H, Dv], decay (its logarithm) [1, T, H, D or 1], beta [1, T, H]; states [L, R, S, H, D, Dv].
Tensor delta_scan(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                  const std::optional<Tensor>& beta, const Tensor& states, int64_t layer, const Tensor& cache_rows,
                  const Tensor& bases, const Tensor& ends, double scale, bool normalize) {
  const Requests requests(cache_rows, bases, ends, query.size(1), states, layer);
  const int64_t key_heads = key.size(2), keys = key.size(3), heads = value.size(2), values = value.size(3);
  const int64_t group = heads / key_heads, gates = decay.size(3), size = keys * values;
  Tensor out = at::empty_like(value, at::MemoryFormat::Contiguous);
  const float *q = query.const_data_ptr<float>(), *k = key.const_data_ptr<float>(), *v = value.const_data_ptr<float>();
  const float *g = decay.const_data_ptr<float>(), *b = beta ? beta->const_data_ptr<float>() : nullptr;
  float* y = out.data_ptr<float>();
  parallel_for(0, requests.count * heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size), own_key(keys), own_query(keys), own_decay(keys);
    for (int64_t work = begin; work < end; ++work) {
      const int64_t r = work / heads, h = work % heads;
      const Ring ring = ring_of(states, layer, requests.rows[r]);
      scan(requests, r, ring, h * size, size, scratch.data(), [&](int64_t t, const float* state, float* next) {
        const float* head_key = k + (t * key_heads + h / group) * keys;
        const float* head_query = q + (t * key_heads + h / group) * keys;
        const float by_key = normalize ? inverse_norm(head_key, keys) : 1.0f;
        const float by_query = float(scale) * (normalize ? inverse_norm(head_query, keys) : 1.0f);
        const float* gate = g + (t * heads + h) * gates;
        for (int64_t i = 0; i < keys; ++i) {
          own_key[i] = head_key[i] * by_key;
          own_query[i] = head_query[i] * by_query;
          own_decay[i] = gates > 1 || i == 0 ? std::exp(gate[gates > 1 ? i : 0]) : own_decay[0];
        }
        const int64_t at = t * heads + h;
        advance(state, next, own_decay.data(), own_key.data(), own_query.data(), v + at * values, b ? b + at : nullptr, keys,
                values, y + at * values);
      });
    }
  });
  return out;
}

// x, dt [1, T, C], a [C, N], b, c [1, T, N]; states [L, R, S, C, N] -> [1, T, C]: h' = exp(dt a) h + dt x b, y = h' . c.
Tensor selective_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& states,
                      int64_t layer, const Tensor& cache_rows, const Tensor& bases, const Tensor& ends) {
  const Requests requests(cache_rows, bases, ends, x.size(1), states, layer);
  const int64_t channels = x.size(2), size = a.size(1), chunk = 64, chunks = (channels + chunk - 1) / chunk;
  Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const float *xs = x.const_data_ptr<float>(), *dts = dt.const_data_ptr<float>(), *as = a.const_data_ptr<float>();
  const float *bs = b.const_data_ptr<float>(), *cs = c.const_data_ptr<float>();
  float* y = out.data_ptr<float>();
  parallel_for(0, requests.count * chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(chunk * size);
    for (int64_t work = begin; work < end; ++work) {
      const int64_t r = work / chunks, from = work % chunks * chunk, to = std::min(channels, from + chunk);
      const Ring ring = ring_of(states, layer, requests.rows[r]);
      scan(requests, r, ring, from * size, (to - from) * size, scratch.data(), [=](int64_t t, const float* state, float* next) {
        for (int64_t channel = from; channel < to; ++channel) {
          const float step = dts[t * channels + channel], write = step * xs[t * channels + channel];
          float sum = 0;
          for (int64_t n = 0; n < size; ++n) {
            const int64_t at = (channel - from) * size + n;
            next[at] = std::exp(step * as[channel * size + n]) * state[at] + write * bs[t * size + n];
            sum += next[at] * cs[t * size + n];
          }
          y[t * channels + channel] = sum;
        }
      });
    }
  });
  return out;
}

// x [1, T, C], weight [C, K]; history [L, R, S, C], the inputs themselves -> [1, T, C]: K taps that end at each token.
Tensor short_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool silu, const Tensor& history,
                  int64_t layer, const Tensor& cache_rows, const Tensor& bases, const Tensor& ends) {
  const Requests requests(cache_rows, bases, ends, x.size(1), history, layer);
  const int64_t channels = x.size(2), taps = weight.size(1);
  const Tensor transposed = weight.t().contiguous();  // [K, C]
  Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const float *xs = x.const_data_ptr<float>(), *w = transposed.const_data_ptr<float>();
  const float* add = bias ? bias->const_data_ptr<float>() : nullptr;
  float* y = out.data_ptr<float>();
  for (int64_t r = 0; r < requests.count; ++r) {
    const int64_t base = requests.bases[r], first = requests.start(r), last = requests.ends[r];
    const Ring ring = ring_of(history, layer, requests.rows[r]);
    parallel_for(first, last, std::max<int64_t>(1, 65536 / channels), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* sums = y + t * channels;
        for (int64_t i = 0; i < channels; ++i) sums[i] = add ? add[i] : 0.0f;
        for (int64_t tap = 0; tap < taps; ++tap) {
          const int64_t place = t - taps + 1 + tap, position = base + place - first;
          if (position < 0) continue;
          const float* input = place < first ? ring.at(position) : xs + place * channels;
          for (int64_t i = 0; i < channels; ++i) sums[i] += w[tap * channels + i] * input[i];
        }
        if (silu)
          for (int64_t i = 0; i < channels; ++i) sums[i] = sums[i] / (1.0f + std::exp(-sums[i]));
      }
    });
    for (int64_t t = std::max(first, last - ring.slots); t < last; ++t)  // after all reads of the old contents
      std::copy_n(xs + t * channels, channels, ring.at(base + t - first));
  }
  return out;
}

}  // namespace outrider
