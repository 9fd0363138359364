// The sampler's operators on rows of logits and probabilities: one or two passes over a row, where tensor operations take dozens.
//
// Each computes what its reference in Python does (outrider/sampling, outrider/verifiers/base.py).

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include "operators.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace outrider {
namespace {

// Return the k-th highest maximum of interleaved classes: k values are at least that high, so no value below it is in the top k.
template <typename T>
T top_k_bound(const T* row, int64_t size, int64_t top_k, std::vector<T>& maxima) {
  int64_t classes = 16;
  while (classes < 3 * top_k) classes *= 2;
  if (4 * classes > size) return 0;
  maxima.assign(row, row + classes);
  for (int64_t begin = classes; begin + classes <= size; begin += classes)
    for (int64_t i = 0; i < classes; ++i) maxima[i] = row[begin + i] > maxima[i] ? row[begin + i] : maxima[i];
  std::nth_element(maxima.begin(), maxima.begin() + top_k - 1, maxima.end(), std::greater<T>());
  return maxima[top_k - 1];
}

// Cut of a row: values above `border` are kept, and `level` of those equal to it, `total` in all.
template <typename T>
struct Cut {
  T border;
  double total;
  int64_t level;
};

// Return the cut that keeps the highest values until they reach `target`. Sorts only the few values in the last one's bucket.
template <typename T>
Cut<T> reach(const T* values, int64_t count, double target, std::vector<T>& bucket) {
  constexpr int kBuckets = 2048;  // by exponent and the first four bits of the mantissa, for values from 0 to 2
  const auto bucket_of = [](T value) {
    const float single = static_cast<float>(value);
    int32_t bits;
    std::memcpy(&bits, &single, 4);
    return std::min(bits >> 19, kBuckets - 1);
  };
  target = std::max(target, std::numeric_limits<double>::min());  // 0 would be reached by an empty bucket
  double mass[kBuckets] = {}, total = 0;
  int lowest = kBuckets - 1;
  for (int64_t i = 0; i < count; ++i) {
    const int at = bucket_of(values[i]);
    mass[at] += values[i];
    lowest = std::min(lowest, at);
  }
  int last = kBuckets - 1;
  while (last > lowest && total + mass[last] < target) total += mass[last--];
  bucket.clear();
  for (int64_t i = 0; i < count; ++i)
    if (bucket_of(values[i]) == last) bucket.push_back(values[i]);
  std::sort(bucket.begin(), bucket.end(), std::greater<T>());
  Cut<T> cut{bucket[0], total, 0};
  for (const T value : bucket) {
    cut.level = value == cut.border ? cut.level + 1 : 1;
    cut.border = value;
    if (!((cut.total += value) < target)) break;
  }
  return cut;
}

constexpr int64_t kShared = 1 << 15;  // tokens of a piece of work, so that it takes longer than waking a thread
constexpr int64_t kAccumulators = 16;  // independent partial results of a row, so that the compiler may use vectors of them

inline double exp_of(double x) { return std::exp(x); }

// e^x for x <= 0 in float32 to 2 units in the last place (Cephes' polynomial), without branches.
inline float exp_of(float x) {
  x = x < -104.0f ? -104.0f : x;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t power = static_cast<int32_t>(n), half = power / 2;  // 2^n in two factors: the smallest results are denormal
  const int32_t low = (half + 127) << 23, high = (power - half + 127) << 23;
  float first, second;
  std::memcpy(&first, &low, 4);
  std::memcpy(&second, &high, 4);
  return y * first * second;
}

template <typename T>
T peak_of(const T* row, int64_t size) {
  T partial[kAccumulators];
  std::fill(partial, partial + kAccumulators, -std::numeric_limits<T>::infinity());
  int64_t i = 0;
  for (; i + kAccumulators <= size; i += kAccumulators)
    for (int64_t j = 0; j < kAccumulators; ++j) partial[j] = row[i + j] > partial[j] ? row[i + j] : partial[j];
  for (; i < size; ++i) partial[0] = row[i] > partial[0] ? row[i] : partial[0];
  return *std::max_element(partial, partial + kAccumulators);
}

// The sum of each(i) for i < size.
template <typename T, typename Each>
T sum_of(int64_t size, const Each& each) {
  T partial[kAccumulators] = {};
  int64_t i = 0;
  for (; i + kAccumulators <= size; i += kAccumulators)
    for (int64_t j = 0; j < kAccumulators; ++j) partial[j] += each(i + j);
  for (; i < size; ++i) partial[0] += each(i);
  return std::accumulate(partial, partial + kAccumulators, T(0));
}

// The first token of the highest value; -1 for a row with NaN, +inf or only -inf.
template <typename T>
int64_t first_peak(const T* row, int64_t size) {
  constexpr int64_t kBlock = 512;
  T highest = -std::numeric_limits<T>::infinity();
  int64_t block = 0;
  int32_t invalid[kAccumulators] = {};
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t count = std::min(kBlock, size - begin);
    const T peak = peak_of(row + begin, count);
    if (peak > highest) {
      highest = peak;
      block = begin;
    }
    int64_t i = begin;
    for (; i + kAccumulators <= begin + count; i += kAccumulators)
      for (int64_t j = 0; j < kAccumulators; ++j) invalid[j] |= row[i + j] != row[i + j];
    for (; i < begin + count; ++i) invalid[0] |= row[i] != row[i];
  }
  if (std::accumulate(invalid, invalid + kAccumulators, 0) || !std::isfinite(highest)) return -1;
  return std::find(row + block, row + size, highest) - row;
}

// out = softmax(row / temperature). Returns false for a row with NaN, +inf or only -inf.
template <typename T>
bool softmax_row(const T* row, T* out, int64_t size, T temperature) {
  const T scale = 1 / temperature, peak = peak_of(row, size) * scale;
  if (!std::isfinite(peak)) return false;
  const T total = sum_of<T>(size, [=](int64_t i) { return out[i] = exp_of(row[i] * scale - peak); });
  if (!std::isfinite(total)) return false;
  for (int64_t i = 0; i < size; ++i) out[i] /= total;
  return true;
}

// How a request's logits become probabilities: a row of `settings`.
struct Setting {
  double temperature, top_k, top_p, min_p;
  bool truncates() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};
static_assert(sizeof(Setting) == 4 * sizeof(double));

// Set the probabilities of tokens that truncation excludes to 0, and scale the others to a sum of 1.
template <typename T>
void truncate_row(T* row, int64_t size, const Setting& setting, std::vector<T>& found, std::vector<T>& maxima) {
  const int64_t top_k = static_cast<int64_t>(setting.top_k);
  const double top_p = setting.top_p;
  const T least = static_cast<T>(setting.min_p) * peak_of(row, size);
  // All tokens below (1 - top_p) / size together have less mass than top-p excludes; half of that allows for rounding.
  const T bound = top_k ? top_k_bound(row, size, top_k, maxima) : std::max(least, static_cast<T>((1 - top_p) / (2 * size)));
  int64_t count = 0;
  for (int64_t i = 0; i < size; ++i) {
    found[count] = row[i];
    count += row[i] >= bound;
  }
  if (count == 0) return;  // NaN
  T* const values = found.data();
  double target = top_p;
  if (top_k && top_k < count) {
    std::nth_element(values, values + top_k - 1, values + count, std::greater<T>());
    const T last = values[top_k - 1];
    count = std::partition(values, values + count, [last](T value) { return value >= last; }) - values;
  }
  if (top_k && top_p < 1) target *= std::accumulate(values, values + count, 0.0);
  count = std::partition(values, values + count, [least](T value) { return value >= least; }) - values;
  Cut<T> cut{*std::min_element(values, values + count), 0, size};
  if (top_p < 1)
    cut = reach(values, count, target, maxima);
  else
    cut.total = std::accumulate(values, values + count, 0.0);
  const T border = cut.border, scale = static_cast<T>(cut.total);
  if (std::count(values, values + count, border) <= cut.level) {
    for (int64_t i = 0; i < size; ++i) row[i] = row[i] >= border ? row[i] / scale : 0;
    return;
  }
  for (int64_t i = 0; i < size; ++i) row[i] = row[i] > border || (row[i] == border && cut.level-- > 0) ? row[i] / scale : 0;
}

// out = the row's distribution: one-hot at the argmax for temperature 0. Returns false for a row with NaN, +inf or only -inf.
template <typename T>
bool shape_row(const T* row, T* out, int64_t size, const Setting& setting, std::vector<T>* scratch) {
  if (setting.temperature == 0) {
    const int64_t first = first_peak(row, size);
    if (first < 0) return false;
    std::fill(out, out + size, T(0));
    out[first] = 1;
    return true;
  }
  if (!softmax_row(row, out, size, static_cast<T>(setting.temperature))) return false;
  if (setting.truncates()) {
    scratch[0].resize(size + 1);
    truncate_row(out, size, setting, scratch[0], scratch[1]);
  }
  return true;
}

// Calls body(r, row, setting, scratch) for the first counts[b] rows r of each request b (no counts: for all). `scratch` [3]: memory
// that later rows reuse.
template <typename T, typename Body>
void each_row(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef counts, const Body& body) {
  const int64_t width = scores.size(1), size = scores.size(2);
  const T* rows = scores.const_data_ptr<T>();
  const Setting* of_requests = reinterpret_cast<const Setting*>(settings.const_data_ptr<double>());
  parallel_for(0, scores.size(0) * width, 1 + kShared / size, [&](int64_t begin, int64_t end) {
    std::vector<T> scratch[3];
    for (int64_t r = begin; r < end; ++r)
      if (counts.empty() || r % width < counts[r / width]) body(r, rows + r * size, of_requests[r / width], scratch);
  });
}

// The residual of a target's row after a rejected draft: norm(max(0, target - draft)), or the target if that is 0
// (nothing was rejected: num_accepted[b] = lens[b], or rounding). target [B, width + 1, size], draft [B, width, size] or null for
// point masses at `tokens` [B, width].
template <typename T>
void next_token_rows(const T* target, const T* draft, const int64_t* tokens, const int64_t* num_accepted, const int64_t* lens,
                     int64_t batch, int64_t width, int64_t size, T* out) {
  parallel_for(0, batch, 1 + kShared / size, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t accepted = num_accepted[b], node = b * width + accepted;
      const T* row = target + (b * (width + 1) + accepted) * size;
      T* left = out + b * size;
      std::copy(row, row + size, left);
      if (accepted >= lens[b]) continue;
      const T* taken = draft ? draft + node * size : nullptr;
      if (!draft) left[tokens[node]] = 0;
      const T total = draft ? sum_of<T>(size, [=](int64_t i) { return left[i] = std::max(T(0), row[i] - taken[i]); })
                            : sum_of<T>(size, [=](int64_t i) { return left[i]; });
      if (!(total > 0)) std::copy(row, row + size, left);
      const T scale = total > 0 ? total : T(1);
      for (int64_t i = 0; i < size; ++i) left[i] /= scale;
    }
  });
}

template <typename T>
void inverse_cdf_rows(const T* rows, int64_t num_rows, int64_t size, int64_t stride, const double* heights, int64_t* token_ids) {
  constexpr int64_t kBlock = 64;
  parallel_for(0, num_rows, 1 + kShared / size, [&](int64_t from, int64_t to) {
    std::vector<double> sums((size + kBlock - 1) / kBlock);
    for (int64_t r = from; r < to; ++r) {
      const T* row = rows + r * stride;
      double total = 0;
      for (size_t b = 0; b < sums.size(); ++b) {
        const int64_t begin = b * kBlock, end = std::min(size, begin + kBlock);
        double partial[8] = {};
        int64_t i = begin;
        for (; i + 8 <= end; i += 8)
          for (int64_t j = 0; j < 8; ++j) partial[j] += row[i + j];
        for (; i < end; ++i) partial[0] += row[i];
        sums[b] = ((partial[0] + partial[1]) + (partial[2] + partial[3])) + ((partial[4] + partial[5]) + (partial[6] + partial[7]));
        total += sums[b];
      }
      const double height = heights[r] * total;
      double reached = 0;
      size_t block = 0;
      while (block + 1 < sums.size() && !(reached + sums[block] > height)) reached += sums[block++];
      int64_t taken = size - 1;
      const int64_t end = std::min<int64_t>(size, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < end; ++i) {
        if (!(row[i] > 0)) continue;  // a token of probability 0 is never selected, even if rounding leaves a remainder
        taken = i;
        if ((reached += row[i]) > height) break;
      }
      token_ids[r] = taken;
    }
  });
}

// The 64 random bits of a token, which randomness.mix computes from `key + (token + 1) * GOLDEN`.
inline uint64_t noise_word(uint64_t key, int64_t token) {
  uint64_t word = key + static_cast<uint64_t>(token + 1) * 0x9E3779B97F4A7C15u;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

// Gumbel noise: -log(-log(u)) for the uniform u in (0, 1) of the first 52 bits.
inline float noise_of(uint64_t word) {
  const double uniform = (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
  return static_cast<float>(-std::log(-std::log(uniform)));
}

// A number that is at least the noise of a word with these first 24 bits. The noise is at most -log(1 - u), because -log(u) >= 1 - u,
// and 1 - u is at least 2^(exponent - 24), by the exponent of (1 - u) * 2^24 rounded down.
inline float noise_bound(int32_t bits) {
  const float rest = static_cast<float>((1 << 24) - 1 - bits);
  int32_t word;
  std::memcpy(&word, &rest, 4);
  return static_cast<float>(151 - (word >> 23)) * 0.69314724f;
}

template <typename T>
struct Best {
  T value;
  int64_t token;
};

// The order of candidates: the highest value first, the lowest token among equal ones.
template <typename T>
bool operator<(const Best<T>& a, const Best<T>& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// Calls `visit` for every token whose row / temperature + noise of `key` is at least `least`, and perhaps for others; only for tokens
// with a probability above 0 if `probs` is not null. `visit` returns the next `least`. Few tokens need logarithms: a bound excludes
// the others.
template <typename T, typename Visit>
void visit_noisy(const T* row, const T* probs, int64_t size, T temperature, uint64_t key, T least, const Visit& visit) {
  constexpr int64_t kBlock = 64;
  const float scale = static_cast<float>(1 / temperature);
  int32_t bits[kBlock];
  float bounds[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t count = std::min(kBlock, size - begin);
    const T* block = row + begin;
    if (probs && !(peak_of(probs + begin, count) > 0)) continue;
    // Bounds are in float32, and 1e-6 is many times its rounding.
    const float low = std::isfinite(least) ? static_cast<float>(least) - 1e-3f - 1e-6f * std::fabs(static_cast<float>(least))
                                           : -std::numeric_limits<float>::infinity();
    int32_t any = 0;
    for (int64_t j = 0; j < count; ++j) bits[j] = static_cast<int32_t>(noise_word(key, begin + j) >> 40);  // a loop that compilers vectorise
    for (int64_t j = 0; j < count; ++j) {
      bounds[j] = static_cast<float>(block[j]) * scale + noise_bound(bits[j]);
      any |= bounds[j] >= low;
    }
    if (!any) continue;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = begin + j;
      if (bounds[j] < low || (probs && !(probs[i] > 0))) continue;
      least = visit(Best<T>{row[i] / temperature + static_cast<T>(noise_of(noise_word(key, i))), i});
    }
  }
}

// softmax(row / temperature) of the tokens that truncation keeps, in scratch[0]; null if it keeps all. `first`: a token of the highest
// value, set to one that is kept, or to -1 if the row is invalid at this temperature.
template <typename T>
const T* kept_probs(const T* row, int64_t size, const Setting& setting, std::vector<T>* scratch, int64_t* first) {
  if (!setting.truncates()) return nullptr;
  scratch[0].resize(size);
  scratch[1].resize(size + 1);
  T* const probs = scratch[0].data();
  if (!softmax_row(row, probs, size, static_cast<T>(setting.temperature))) {
    *first = -1;
    return nullptr;
  }
  truncate_row(probs, size, setting, scratch[1], scratch[2]);
  // Almost equal values can have the same probability, of which only that of the lower id is kept.
  if (!(probs[*first] > 0)) *first = std::max_element(probs, probs + size) - probs;
  return probs;
}

// The token of a deterministic round: the argmax of row / temperature + noise among the tokens that truncation keeps, without
// noise for temperature 0. -1 for a row with NaN, +inf or only -inf. `scratch` [3]: memory that later rows reuse.
template <typename T>
int64_t choose_in(const T* row, int64_t size, const Setting& setting, uint64_t key, std::vector<T>* scratch) {
  int64_t first = first_peak(row, size);
  if (first < 0 || setting.temperature == 0) return first;
  const T temperature = static_cast<T>(setting.temperature);
  const T* const probs = kept_probs(row, size, setting, scratch, &first);
  if (first < 0) return -1;
  Best<T> best{row[first] / temperature + static_cast<T>(noise_of(noise_word(key, first))), first};
  visit_noisy(row, probs, size, temperature, key, best.value, [&](const Best<T>& found) {
    best = std::min(best, found);
    return best.value;
  });
  return best.token;
}

// The result for a row with NaN, +inf or only -inf.
template <typename T>
void fill_invalid(int64_t top_k, std::vector<Best<T>>& found) {
  for (int64_t k = 0; k < top_k; ++k) found.push_back({std::numeric_limits<T>::quiet_NaN(), k});
}

// The probability of token `best`, a highest of the row, in softmax(row): the reciprocal of the sum.
template <typename T>
T best_prob(const T* row, int64_t size, int64_t best) {
  const T peak = row[best];
  return 1 / sum_of<T>(size, [=](int64_t i) { return exp_of(row[i] - peak); });
}

// The `top_k` highest probabilities of softmax(row), a valid row with the highest value at `first`: `found`, in order.
template <typename T>
void likeliest_in(const T* row, int64_t size, int64_t top_k, int64_t first, std::vector<Best<T>>& found, std::vector<T>* scratch) {
  if (top_k == 1) {
    found.push_back({best_prob(row, size, first), first});
    return;
  }
  scratch[0].resize(size);
  T* const probs = scratch[0].data();
  softmax_row(row, probs, size, T(1));
  const T bound = top_k_bound(probs, size, top_k, scratch[1]);
  for (int64_t i = 0; i < size; ++i)
    if (probs[i] >= bound) found.push_back({probs[i], i});
  std::partial_sort(found.begin(), found.begin() + top_k, found.end());
}

// The `num_noisy` highest values of which `choose_in` takes the highest, as their softmax: `found`, in order, with other tokens of
// probability 0 if truncation keeps fewer than `top_k`.
template <typename T>
void likeliest_noisy(const T* row, int64_t size, const Setting& setting, uint64_t key, int64_t top_k, int64_t num_noisy, int64_t first,
                     std::vector<Best<T>>& found, std::vector<T>* scratch) {
  const T* const probs = kept_probs(row, size, setting, scratch, &first);
  if (first < 0) return fill_invalid(top_k, found);
  const T lowest = -std::numeric_limits<T>::infinity(), temperature = static_cast<T>(setting.temperature);
  visit_noisy(row, probs, size, temperature, key, lowest, [&](const Best<T>& candidate) {  // a heap, the last in order first
    if (static_cast<int64_t>(found.size()) < num_noisy || candidate < found.front()) {
      if (static_cast<int64_t>(found.size()) == num_noisy) {
        std::pop_heap(found.begin(), found.end());
        found.pop_back();
      }
      found.push_back(candidate);
      std::push_heap(found.begin(), found.end());
    }
    return static_cast<int64_t>(found.size()) < num_noisy ? lowest : found.front().value;
  });
  std::sort_heap(found.begin(), found.end());
  const T peak = found[0].value;
  T total = 0;
  for (Best<T>& each : found) total += each.value = exp_of(each.value - peak);
  for (Best<T>& each : found) each.value /= total;
  for (int64_t i = 0; static_cast<int64_t>(found.size()) < top_k; ++i)
    if (std::none_of(found.begin(), found.end(), [i](const Best<T>& each) { return each.token == i; })) found.push_back({0, i});
}

// The indices of marks that are not 0.
std::vector<int64_t> marked(const std::vector<char>& marks) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < marks.size(); ++i)
    if (marks[i]) found.push_back(i);
  return found;
}

void check_rows(const char* name, const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef keys, at::IntArrayRef counts) {
  const int64_t batch = scores.size(0), num_keys = keys.size(), num_counts = counts.size();
  TORCH_CHECK(scores.is_contiguous() && settings.is_contiguous() && settings.numel() == 4 * batch &&
                  (keys.empty() || num_keys == batch * scores.size(1)) && (counts.empty() || num_counts == batch),
              name, ": settings ", settings.sizes(), ", ", num_keys, " keys and ", num_counts, " counts for scores ", scores.sizes());
}

}  // namespace

// scores [B, M, V], settings float64 [B, 4] of temperature, top_k, top_p and min_p -> probabilities [B, M, V] and the numbers of rows
// with NaN, +inf or only -inf. Only the first counts[b] rows of request b are processed: the others are undefined.
std::tuple<at::Tensor, std::vector<int64_t>> shape_probs(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef counts) {
  check_rows("shape_probs", scores, settings, {}, counts);
  const int64_t size = scores.size(2);
  at::Tensor probs = scores.new_empty(scores.sizes());
  std::vector<char> invalid(scores.size(0) * scores.size(1));
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "shape_probs", [&] {
    scalar_t* out = probs.mutable_data_ptr<scalar_t>();
    each_row<scalar_t>(scores, settings, counts, [&](int64_t r, const scalar_t* row, const Setting& setting, auto* scratch) {
      invalid[r] = !shape_row(row, out + r * size, size, setting, scratch);
    });
  });
  return {probs, marked(invalid)};
}

// scores [B, M, V], settings as above, keys of the noise [B * M] (none: all temperatures are 0) -> int64 [B, M], each row's token in a
// deterministic round, and the numbers of invalid rows as above. Rows that are not processed have token 0.
std::tuple<at::Tensor, std::vector<int64_t>> choose(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef keys,
                                                    at::IntArrayRef counts) {
  check_rows("choose", scores, settings, keys, counts);
  at::Tensor token_ids = scores.new_zeros({scores.size(0), scores.size(1)}, at::kLong);
  std::vector<char> invalid(token_ids.numel());
  int64_t* chosen = token_ids.mutable_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "choose", [&] {
    each_row<scalar_t>(scores, settings, counts, [&](int64_t r, const scalar_t* row, const Setting& setting, auto* scratch) {
      const int64_t token = choose_in(row, scores.size(2), setting, keys.empty() ? 0 : keys[r], scratch);
      invalid[r] = token < 0;
      chosen[r] = std::max<int64_t>(token, 0);
    });
  });
  return {token_ids, marked(invalid)};
}

// scores, settings and keys as above -> the K likeliest tokens int64 [B, M, K] of each row in a deterministic round, the first of equal
// ones first, and estimates of their probabilities: softmax(scores) for temperature 0, else the softmax of the `num_noisy` highest
// values with noise. NaN for a row with NaN, +inf or only -inf.
std::tuple<at::Tensor, at::Tensor> likeliest(const at::Tensor& scores, const at::Tensor& settings, at::IntArrayRef keys, int64_t top_k,
                                             int64_t num_noisy) {
  check_rows("likeliest", scores, settings, keys, {});
  const int64_t size = scores.size(2);
  TORCH_CHECK(top_k > 0 && top_k <= num_noisy && top_k <= size, "likeliest: ", top_k, " of ", size, " tokens, ", num_noisy, " with noise");
  at::Tensor token_ids = scores.new_empty({scores.size(0), scores.size(1), top_k}, at::kLong), probs = scores.new_empty(token_ids.sizes());
  int64_t* ids = token_ids.mutable_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "likeliest", [&] {
    scalar_t* out = probs.mutable_data_ptr<scalar_t>();
    each_row<scalar_t>(scores, settings, {}, [&](int64_t r, const scalar_t* row, const Setting& setting, auto* scratch) {
      std::vector<Best<scalar_t>> found;
      const int64_t first = first_peak(row, size);
      if (first < 0)
        fill_invalid(top_k, found);
      else if (keys.empty() || setting.temperature == 0)
        likeliest_in(row, size, top_k, first, found, scratch);
      else
        likeliest_noisy(row, size, setting, keys[r], top_k, std::min(num_noisy, size), first, found, scratch);
      for (int64_t k = 0; k < top_k; ++k) {
        ids[r * top_k + k] = found[k].token;
        out[r * top_k + k] = found[k].value;
      }
    });
  });
  return {token_ids, probs};
}

// target [B, N + 1, V], draft [B, N, V] or none for point masses at tokens [B, N]; num_accepted and lens [B] -> [B, V]: the
// distribution of the token after the accepted drafts, which is the residual of the target's row if a draft was rejected.
at::Tensor next_token_probs(const at::Tensor& target, const std::optional<at::Tensor>& draft, const at::Tensor& tokens,
                            const at::Tensor& num_accepted, const at::Tensor& lens) {
  const at::Tensor rows = target.contiguous(), ids = tokens.contiguous(), accepted = num_accepted.contiguous(), counts = lens.contiguous();
  const at::Tensor taken = draft.has_value() ? draft->to(target.scalar_type()).contiguous() : at::Tensor();
  const int64_t batch = ids.size(0), width = ids.size(1), size = rows.size(2);
  TORCH_CHECK(rows.size(0) == batch && rows.size(1) == width + 1, "next_token_probs: target ", rows.sizes(), " for drafts ", ids.sizes());
  at::Tensor out = rows.new_empty({batch, size});
  AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "next_token_probs", [&] {
    next_token_rows(rows.const_data_ptr<scalar_t>(), taken.defined() ? taken.const_data_ptr<scalar_t>() : nullptr,
                    ids.const_data_ptr<int64_t>(), accepted.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>(), batch, width,
                    size, out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

// probs [B, V], heights [B] in [0, 1) -> int64 [B]: the first token whose cumulative probability exceeds heights[b] of the total.
at::Tensor sample_inverse_cdf(const at::Tensor& probs, at::ArrayRef<double> heights) {
  const at::Tensor rows = probs.stride(1) == 1 ? probs : probs.contiguous();
  TORCH_CHECK(static_cast<int64_t>(heights.size()) == rows.size(0), "sample_inverse_cdf: ", heights.size(), " heights for ", rows.sizes());
  at::Tensor token_ids = rows.new_empty({rows.size(0)}, at::kLong);
  AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "sample_inverse_cdf", [&] {
    inverse_cdf_rows(rows.const_data_ptr<scalar_t>(), rows.size(0), rows.size(1), rows.stride(0), heights.data(),
                     token_ids.mutable_data_ptr<int64_t>());
  });
  return token_ids;
}

}  // namespace outrider
