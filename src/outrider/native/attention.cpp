// Attention over Outrider's KV cache. Batch-invariant: a row's additions and their order do not depend on the rest of the pass.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "operators.h"
#include "panels.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

namespace outrider {
namespace {

constexpr int64_t kMostDim = 1024;  // size of a head

// The tokens of a pass are concatenated, those of request b up to ends[b]; the longest request has `width` of them.
struct Pass {
  int64_t rows, total, heads, kv_heads, width, mask_slots, key_dim, value_dim, capacity, window, chunk;
  float scale, softcap;
  const int64_t *cache_rows, *bases, *ends, *positions;
  const bool* visible;  // [rows, width, mask_slots]: which of the last `mask_slots` slots, the widest pass's at their end, each query sees
  const float* sinks;   // [heads]: score of a sink without a value; or null
  int64_t start(int64_t b) const { return b ? ends[b - 1] : 0; }
  int64_t length(int64_t b) const { return ends[b] - start(b); }
  bool is_limited() const { return window > 0 || chunk > 0; }
  // The first position that a token at `position` sees.
  int64_t begin(int64_t position) const {
    const int64_t of_window = window > 0 ? position - window + 1 : 0, of_chunk = chunk > 0 ? position / chunk * chunk : 0;
    return std::max<int64_t>({0, of_window, of_chunk});
  }
  // Whether a token at a position sees one at another, which in a tree may be a later one.
  bool sees(int64_t from, int64_t to) const {
    return (window <= 0 || from - to < window) && (chunk <= 0 || from / chunk == to / chunk);
  }
};

// Adds neighbouring runs of `half` lanes of two vectors: the first halves of the result come from a, the second from b.
template <int half, int... lane>
inline vec add_pairs(vec a, vec b, std::integer_sequence<int, lane...>) {
  return pick<((lane / half % 2 ? kLanes : 0) + lane / half / 2 * 2 * half + lane % half)...>(a, b) +
         pick<((lane / half % 2 ? kLanes : 0) + lane / half / 2 * 2 * half + lane % half + half)...>(a, b);
}
template <int half>
inline void add_level(vec* v) {
  for (int i = 0; i < half; ++i) v[i] = add_pairs<half>(v[i], v[i + half], std::make_integer_sequence<int, kLanes>{});
}
// Sums kLanes vectors to one, lane i holding the sum of vector i: levels of pairwise additions, in a fixed order.
template <int half = kLanes / 2>
inline vec sum_each(vec* v) {
  add_level<half>(v);
  if constexpr (half > 1) sum_each<half / 2>(v);
  return v[0];
}

// Scores of one query against a vector of keys: [kLanes, dim] . [dim]. `chunks`: dim / kLanes as a compile-time constant, or 0.
template <typename Cache, int chunks>
inline vec score_block(const float* query, const Cache* keys, int64_t dim) {
  vec sums[kLanes];
  const int64_t whole = chunks ? chunks : dim / kLanes;
  for (int i = 0; i < kLanes; ++i) {
    vec acc = vec{};
    for (int64_t c = 0; c < whole; ++c) acc = fused(load(query + c * kLanes), load(keys + i * dim + c * kLanes), acc);
    sums[i] = acc;
  }
  vec total = sum_each(sums);
  for (int64_t d = whole * kLanes; d < dim; ++d)
    for (int i = 0; i < kLanes; ++i) total[i] += query[d] * static_cast<float>(keys[i * dim + d]);
  return total;
}

template <typename Cache>
inline vec score_block(const float* query, const Cache* keys, int64_t dim) {
  if (dim == 64) return score_block<Cache, 64 / kLanes>(query, keys, dim);
  if (dim == 128) return score_block<Cache, 128 / kLanes>(query, keys, dim);
  return score_block<Cache, 0>(query, keys, dim);
}

// Keys [kLanes, dim] -> [dim, kLanes] float32; dim is a multiple of kLanes.
template <typename Cache>
inline void transpose_keys(const Cache* keys, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = load(keys + i * dim + d);
    transpose(block);
    for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kLanes, block[i]);
  }
}

// score_block for `count` queries, `stride` apart, with the same additions in the same order: each lane over the chunks, then a tree
// over the lanes. Transposed keys need no exchange of lanes and are loaded once for all queries.
template <int count>
inline void score_transposed(const float* queries, int64_t stride, const float* transposed, int64_t dim, float* scores,
                         int64_t scores_stride) {
  constexpr int fourths = kLanes / 4;
  vec part[4][count];
  for (int lane = 0; lane < 4; ++lane) {
    vec acc[fourths][count];
    for (int j = 0; j < fourths; ++j) for (int i = 0; i < count; ++i) acc[j][i] = vec{};
    for (int64_t c = lane; c < dim; c += kLanes)
      for (int j = 0; j < fourths; ++j) {
        const vec key = load(transposed + (c + 4 * j) * kLanes);
        for (int i = 0; i < count; ++i) acc[j][i] = fused(splat(queries[i * stride + c + 4 * j]), key, acc[j][i]);
      }
    for (int half = fourths / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) for (int i = 0; i < count; ++i) acc[j][i] += acc[j + half][i];
    for (int i = 0; i < count; ++i) part[lane][i] = acc[0][i];
  }
  for (int i = 0; i < count; ++i)
    store(scores + i * scores_stride, (part[0][i] + part[2][i]) + (part[1][i] + part[3][i]));
}

// out[i][0..kLanes * chunks) += sum over slots of weights[i][s] * values[s][...], in slot order, for `count` rows of weights. `masked`:
// slots of weight 0 are skipped, because they may contain anything, including NaN.
template <typename Cache, int count, int chunks, bool masked>
inline void add_weighted_values(const float* weights, int64_t weights_stride, const Cache* values, int64_t slots, int64_t dim, float* out,
                int64_t out_stride) {
  vec acc[count][chunks];
  for (int i = 0; i < count; ++i) for (int c = 0; c < chunks; ++c) acc[i][c] = load(out + i * out_stride + c * kLanes);
  for (int64_t s = 0; s < slots; ++s) {
    if (masked && weights[s] == 0) continue;
    vec value[chunks];
    for (int c = 0; c < chunks; ++c) value[c] = load(values + s * dim + c * kLanes);
    for (int i = 0; i < count; ++i) {
      const vec weight = splat(weights[i * weights_stride + s]);
      for (int c = 0; c < chunks; ++c) acc[i][c] = fused(weight, value[c], acc[i][c]);
    }
  }
  for (int i = 0; i < count; ++i) for (int c = 0; c < chunks; ++c) store(out + i * out_stride + c * kLanes, acc[i][c]);
}

inline int64_t to_lanes(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }  // a tile of matrix units writes 16 rows

// Queries of one request that attend to the same keys and values: `tokens` tokens from `token` on, of a group of heads. Row
// w * group + g of `queries`, `scores` and `out`. Slots count from `first`, and `padded` of them are processed.
template <typename Cache>
struct Attention {
  static constexpr int64_t kTogether = 4;  // queries that share loaded keys and values
  static constexpr int64_t kSlots = 32;    // slots of a block
  static constexpr float kUnseen = -std::numeric_limits<float>::infinity();
  const Pass& pass;
  const int64_t b, length, token, tokens, group, base, open, first, count, padded;
  const float* sinks;  // of the heads of the group; or null
  const Cache *keys, *values;
  float *queries, *scores, *out, *transposed, *tiles;
  // Of a token in a branch of a tree: the slots from `open` on that it sees, in order. Its scores and weights are moved to where they
  // would be in a chain of only these, so that the additions, and with them the bits, are those of the chain. Empty for other tokens.
  std::vector<std::vector<int64_t>> paths;
  bool has_branches = false;

  Attention(const Pass& of, int64_t row, int64_t kv_head, int64_t from, const Cache* k_plane, const Cache* v_plane, float* buffer)
      : pass(of), b(row), length(of.length(row)), token(from), tokens(std::min(tokens_at_once(of), length - from)),
        group(of.heads / of.kv_heads),
        base(of.bases[row]), open(base + of.width - of.mask_slots),  // earlier slots are visible to all queries, unless limited
        first(std::min(earliest(), open) / kSlots * kSlots),  // blocks start at the same slots in every pass
        count(end() - first), padded((count + kSlots - 1) / kSlots * kSlots),
        sinks(of.sinks ? of.sinks + kv_head * group : nullptr), keys(k_plane), values(v_plane), queries(buffer),
        scores(queries + rows() * of.key_dim), out(scores + rows() * padded), transposed(out + to_lanes(rows()) * of.value_dim),
        tiles(transposed + kLanes * (of.key_dim + kLanes)), paths(tokens) {
    for (int64_t w = 0; w < tokens; ++w) {
      const bool *seen = visible(token + w), *last = seen + (base + length - open), *gap = std::find(seen, last, false);
      if (std::find(gap, last, true) == last) continue;  // what it sees is contiguous
      for (const bool* at = seen; at < last; ++at)
        if (*at) paths[w].push_back(open + (at - seen));
      has_branches = true;
    }
  }

  // Whether this uses matrix units, or products of pairs. Queries and weights are then rounded to bfloat16, like keys and values.
  static bool on_units(const Pass& pass) {
    return std::is_same_v<Cache, at::BFloat16> && has_matrix_units() && pass.key_dim % 32 == 0 && pass.value_dim % 16 == 0;
  }
  static bool in_pairs(const Pass& pass) {
    return std::is_same_v<Cache, at::BFloat16> && kHasPairs && !on_units(pass) && pass.key_dim % kPanel == 0 && pass.value_dim % kPanel == 0;
  }
  // About 32 queries are processed together, or 64 if they are smaller, so that their scores stay in the cache.
  static int64_t tokens_at_once(const Pass& pass) {
    return std::clamp<int64_t>((on_units(pass) || in_pairs(pass) ? 64 : 32) * pass.kv_heads / pass.heads, 1, pass.width);
  }
  static int64_t buffer_size(const Pass& pass, int64_t longest) {
    const int64_t rows = tokens_at_once(pass) * pass.heads / pass.kv_heads, slots = longest + 2 * kSlots;
    int64_t size = rows * (pass.key_dim + slots) + to_lanes(rows) * pass.value_dim + kLanes * (pass.key_dim + kLanes);
#if defined(OUTRIDER_AMX)
    if (on_units(pass)) size += amx::attention_size(to_lanes(rows), slots, pass.key_dim, pass.value_dim);
#endif
    if (in_pairs(pass)) size += pairs_size(rows, slots, pass.key_dim, pass.value_dim);
    return size;
  }
  int64_t rows() const { return tokens * group; }
  int64_t position(int64_t w) const { return pass.positions[pass.start(b) + w]; }
  const bool* visible(int64_t w) const { return pass.visible + (b * pass.width + w) * pass.mask_slots; }
  // The first committed slot visible to token w.
  int64_t begin(int64_t w) const { return pass.begin(position(w)); }
  // The first slot visible to any of the tokens: in a tree a later node may have an earlier position.
  int64_t earliest() const {
    int64_t least = begin(token);
    for (int64_t w = token + 1; pass.is_limited() && w < token + tokens; ++w) least = std::min(least, begin(w));
    return least;
  }
  // One past the last slot visible to any of the tokens.
  int64_t end() const {
    int64_t last = open;
    for (int64_t w = token; w < token + tokens; ++w)
      for (int64_t slot = base + length; slot > last; --slot)
        if (visible(w)[slot - 1 - open]) last = slot;
    return last;
  }

  void run() {
    score();
    std::vector<float> inverse(rows());
    for (int64_t row = 0; row < rows(); ++row) {
      const std::vector<int64_t>& path = paths[row / group];
      float *of_row = scores + row * padded, *moved = of_row + open - first;
      for (const int64_t slot : path) *moved++ = of_row[slot - first];
      inverse[row] = softmax_weights(token + row / group, of_row, sinks ? sinks[row % group] : kUnseen);
    }
    sum_values();
    for (int64_t row = 0; row < rows(); ++row)
      for (int64_t d = 0; d < pass.value_dim; ++d) out[row * pass.value_dim + d] *= inverse[row];
  }

#if defined(OUTRIDER_AMX)
  // `score` by tiles: keys in cache layout times transposed queries.
  void score_on_units() {
    uint16_t* transposed_queries = amx::next_line(tiles);
    amx::transpose_queries(queries, rows(), pass.key_dim, transposed_queries);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int64_t slot = first + i, there = std::min<int64_t>(kLanes, pass.capacity - slot);
      if (there <= 0) {  // beyond the cache: visible to no query
        for (int64_t row = 0; row < rows(); ++row) store(scores + row * padded + i, vec{});
        continue;
      }
      const uint16_t* block = reinterpret_cast<const uint16_t*>(keys + slot * pass.key_dim);
      amx::fetch(keys + (slot + 4 * kLanes) * pass.key_dim, kLanes * pass.key_dim * 2);
      amx::fetch(values + slot * pass.value_dim, kLanes * pass.value_dim * 2);
      std::vector<uint16_t> copied;
      if (there < kLanes) {
        copied.resize(kLanes * pass.key_dim);
        std::copy_n(block, there * pass.key_dim, copied.data());
        block = copied.data();
      }
      for (int64_t from = 0; from < rows(); from += amx::kSide) {
        alignas(64) float products[kLanes * kLanes];
        amx::score_block(block, pass.key_dim, transposed_queries + from * pass.key_dim, products);
        vec by_query[kLanes];
        for (int j = 0; j < kLanes; ++j) by_query[j] = load(products + j * kLanes);
        transpose(by_query);
        const int64_t till = std::min(rows(), from + amx::kSide);
        for (int64_t row = from; row < till; ++row) store(scores + row * padded + i, by_query[row - from]);
      }
    }
  }

  // `sum_values` by tiles. Sums go over the slots in blocks of 32 at fixed positions, so that a row's bits do not depend on other rows.
  // Slots that a row does not see have weight 0, and unwritten ones count as 0. In a tree the last blocks are summed token by token.
  void sum_values_on_units() {
    uint16_t *weights = amx::next_line(tiles), *paired = weights + to_lanes(rows()) * padded;
    const int64_t written = base + length - first;  // later slots may contain anything
    for (int64_t row = 0; row < rows(); ++row)
      amx::to_line_of_tiles(scores + row * padded, padded, weights + row / amx::kSide * amx::kSide * padded + row % amx::kSide * 32);
    const int64_t shared = num_shared();
    for (int64_t from = 0; from < shared; from += amx::kSlotsAtOnce) {
      const int64_t slots = std::min(amx::kSlotsAtOnce, shared - from);
      amx::pair_values(reinterpret_cast<const uint16_t*>(values + (first + from) * pass.value_dim), slots,
                       std::clamp<int64_t>(written - from, 0, slots), pass.value_dim, paired);
      for (int64_t row = 0; row < rows(); row += amx::kSide)
        amx::add_weighted_values(weights + row * padded + from * amx::kSide, paired, slots, pass.value_dim, out + row * pass.value_dim, from > 0);
    }
    if (shared == padded) return;
    std::vector<float> buffer(amx::kSide * (amx::kSlotsAtOnce / 2 + pass.value_dim) + 2 * kLanes);
    uint16_t* of_token = amx::next_line(buffer.data());
    float* sums = reinterpret_cast<float*>(of_token + amx::kSide * amx::kSlotsAtOnce);
    for (int64_t from = shared; from < padded; from += amx::kSlotsAtOnce) {
      const int64_t slots = std::min(amx::kSlotsAtOnce, padded - from);
      std::vector<Cache> along = values_at(from, slots);
      for (int64_t w = 0; w < tokens; ++w) {
        follow(w, from, slots, along.data());
        amx::pair_values(reinterpret_cast<const uint16_t*>(along.data()), slots, slots, pass.value_dim, paired);
        for (int64_t head = 0; head < group; head += amx::kSide) {
          const int64_t row = w * group + head, some = std::min(amx::kSide, group - head);
          std::fill_n(of_token, amx::kSide * slots, uint16_t{0});
          for (int64_t i = 0; i < some; ++i) amx::to_line_of_tiles(scores + (row + i) * padded + from, slots, of_token + i * 32);
          std::copy_n(out + row * pass.value_dim, some * pass.value_dim, sums);
          amx::add_weighted_values(of_token, paired, slots, pass.value_dim, sums, from > 0);
          std::copy_n(sums, some * pass.value_dim, out + row * pass.value_dim);
        }
      }
    }
  }
#endif

  // Slots whose values are summed for all tokens together: all, or in a tree the blocks before the first slot that not all see.
  int64_t num_shared() const { return has_branches ? (open - first) / kSlots * kSlots : padded; }

  // The values [slots][value_dim] at `from` and the following slots, 0 where none are written.
  std::vector<Cache> values_at(int64_t from, int64_t slots) const {
    const int64_t start = first + from, written = std::clamp<int64_t>(base + length - start, 0, slots);
    std::vector<Cache> found(slots * pass.value_dim, static_cast<Cache>(0.0f));
    std::copy_n(values + start * pass.value_dim, written * pass.value_dim, found.data());
    return found;
  }

  // Replace those of `values_at` that not all tokens see by those along token w's path. What follows it has weight 0. Called in the order
  // of tokens: those outside branches come first, because everything before a token that sees all before itself is no branch.
  void follow(int64_t w, int64_t from, int64_t slots, Cache* along) const {
    const int64_t dim = pass.value_dim, skipped = std::max<int64_t>(0, first + from - open);  // of the path, in earlier blocks
    Cache* into = along + (open + skipped - first - from) * dim;
    const int64_t seen = static_cast<int64_t>(paths[w].size()), till = std::min(seen, first + from + slots - open);
    for (int64_t i = skipped; i < till; ++i, into += dim) std::copy_n(values + paths[w][i] * dim, dim, into);
  }

  // Buffer for queries or weights in pairs, original and transposed, and for a panel of keys or values.
  static int64_t pairs_size(int64_t rows, int64_t slots, int64_t key_dim, int64_t value_dim) {
    return rows * std::max(key_dim, slots + kPanel) + kPanel * std::max(key_dim / 2, value_dim);
  }

#if defined(__AVX512BF16__)
  // `score` as a linear layer with the keys as weights: a panel has 32 of them.
  void score_in_pairs() {
    const int64_t depth = pass.key_dim / 2, at_once = rows_of_a_tile(rows());
    float *rounded = tiles, *transposed_queries = rounded + rows() * depth, *panel = transposed_queries + rows() * depth;
    for (int64_t i = 0; i < rows() * depth; i += kLanes) to_pairs(queries + 2 * i, rounded + i);
    for (int64_t row = 0; row < rows(); row += at_once)
      transpose_rows(rounded + row * depth, depth, std::min(at_once, rows() - row), depth, transposed_queries + row * depth);
    for (int64_t i = 0; i < padded; i += kPanel) {
      for (int64_t half = 0; half < kPanel; half += kLanes)
        for (int64_t d = 0; d < depth; d += kLanes) {
          vec block[kLanes];
          for (int64_t j = 0; j < kLanes; ++j) {
            const int64_t slot = first + i + half + j;  // beyond the cache: visible to no query
            block[j] = slot < pass.capacity ? load(reinterpret_cast<const float*>(keys + slot * pass.key_dim) + d) : vec{};
          }
          transpose(block);
          for (int64_t j = 0; j < kLanes; ++j) store(panel + (d + j) * kPanel + half, block[j]);
        }
      products(transposed_queries, depth, panel, scores + i, padded, true, rows());
    }
  }

  // `sum_values` as linear layers of 32 slots each, at fixed positions, so that a row's bits do not depend on other rows. Slots that a row
  // does not see have weight 0, and unwritten ones count as 0.
  void sum_values_in_pairs() {
    const int64_t written = base + length - first, at_once = rows_of_a_tile(rows()), depth = padded / 2;
    float *rounded = tiles, *transposed_weights = rounded + rows() * depth, *panel = transposed_weights + rows() * kLanes;
    for (int64_t i = 0; i < rows() * depth; i += kLanes) to_pairs(scores + 2 * i, rounded + i);
    const int64_t shared = num_shared();
    for (int64_t from = 0; from < shared; from += kSlots) {
      for (int64_t row = 0; row < rows(); row += at_once)
        transpose_rows(rounded + row * depth + from / 2, depth, std::min(at_once, rows() - row), kLanes, transposed_weights + row * kLanes);
      for (int64_t d = 0; d < pass.value_dim; d += kPanel) {
        for (int64_t k = 0; k < kLanes; ++k) {
          const auto value = [&](int64_t slot) {
            return slot < written ? _mm512_loadu_si512(values + (first + slot) * pass.value_dim + d) : _mm512_setzero_si512();
          };
          pair_panel(value(from + 2 * k), value(from + 2 * k + 1), panel + k * kPanel);
        }
        products(transposed_weights, kLanes, panel, out + d, pass.value_dim, from == 0, rows());
      }
    }
    for (int64_t from = shared; from < padded; from += kSlots) {
      std::vector<Cache> along = values_at(from, kSlots);
      for (int64_t w = 0; w < tokens; ++w) {
        follow(w, from, kSlots, along.data());
        const int64_t first_row = w * group, some = rows_of_a_tile(group);
        for (int64_t head = 0; head < group; head += some)
          transpose_rows(rounded + (first_row + head) * depth + from / 2, depth, std::min(some, group - head), kLanes,
                    transposed_weights + head * kLanes);
        for (int64_t d = 0; d < pass.value_dim; d += kPanel) {
          for (int64_t k = 0; k < kLanes; ++k)
            pair_panel(_mm512_loadu_si512(along.data() + 2 * k * pass.value_dim + d),
                       _mm512_loadu_si512(along.data() + (2 * k + 1) * pass.value_dim + d), panel + k * kPanel);
          products(transposed_weights, kLanes, panel, out + first_row * pass.value_dim + d, pass.value_dim, from == 0, group);
        }
      }
    }
  }

  // 32 values of two slots -> 32 pairs.
  static void pair_panel(__m512i even, __m512i odd, float* to) {
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, kLowTwos, odd));
    _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(even, kHighTwos, odd));
  }

  // `count` transposed rows of pairs, for each tile [depth][its rows], times a panel [depth][32] -> to[row][32], rows `stride` apart.
  void products(const float* transposed_rows, int64_t depth, const float* panel, float* to, int64_t stride, bool fresh, int64_t count) {
    const int64_t at_once = rows_of_a_tile(count);
    for (int64_t row = 0; row < count; row += at_once)
      kRunPairs[std::min(at_once, count - row) - 1](transposed_rows + row * depth, reinterpret_cast<const Pair*>(panel), depth * kPanel, depth,
                                                     to + row * stride, stride, fresh, 1, {});
  }
#endif

  // Products of all queries with all keys, kLanes slots at a time.
  void score() {
#if defined(OUTRIDER_AMX)
    if (on_units(pass)) return score_on_units();
#endif
#if defined(__AVX512BF16__)
    if (in_pairs(pass)) return score_in_pairs();
#endif
    const int64_t dim = pass.key_dim;
    const bool transposes = rows() >= kTogether && dim % kLanes == 0;  // if transposing the keys is worthwhile; the bits are the same
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int64_t slot = first + i;
      const Cache* block = keys + slot * dim;
      int64_t row = 0;
      if (slot + kLanes > pass.capacity) {  // the cache ends within this block
        for (; row < rows(); ++row) score_end(queries + row * dim, slot, scores + row * padded + i);
      } else if (transposes) {
        transpose_keys(block, dim, transposed);
        for (; row + kTogether <= rows(); row += kTogether)
          score_transposed<kTogether>(queries + row * dim, dim, transposed, dim, scores + row * padded + i, padded);
        for (; row < rows(); ++row) score_transposed<1>(queries + row * dim, dim, transposed, dim, scores + row * padded + i, padded);
      } else {
        for (; row < rows(); ++row) store(scores + row * padded + i, score_block(queries + row * dim, block, dim));
      }
    }
  }

  void score_end(const float* query, int64_t slot, float* to) {
    vec score = vec{};
    for (int64_t j = 0; slot + j < first + count; ++j) {
      Cache block[kLanes * kMostDim];
      for (int64_t d = 0; d < pass.key_dim; ++d) block[d] = keys[(slot + j) * pass.key_dim + d];
      for (int64_t d = pass.key_dim; d < kLanes * pass.key_dim; ++d) block[d] = static_cast<Cache>(0.0f);
      score[j] = score_block(query, block, pass.key_dim)[0];
    }
    store(to, score);
  }

  // Convert products of token w to unnormalised weights. Returns the reciprocal of their sum, that of the sink included.
  float softmax_weights(int64_t w, float* from, float sink) {
    vec peak = splat(kUnseen);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const int64_t slot = first + i;
      vec score = load(from + i) * pass.scale;
      if (pass.softcap > 0) score = pass.softcap * tanh_of(score / pass.softcap);
      if (slot >= open && slot + kLanes <= first + count && !pass.is_limited() && paths[w - token].empty()) {  // `sees` of a prompt
        static_assert(sizeof(bool) == sizeof(int8_t));
        score = load(reinterpret_cast<const int8_t*>(visible(w) + slot - open)) > vec{} ? score : splat(kUnseen);
      } else if (slot < begin(w) || slot + kLanes > open) {
        for (int64_t j = 0; j < kLanes; ++j)
          if (!sees(w, slot + j)) score[j] = kUnseen;
      }
      store(from + i, score);
      peak = score > peak ? score : peak;
    }
    const float most = std::max(largest(peak), sink);
    const vec top = splat(most);
    vec total = vec{};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const vec weight = exp_nonpositive(load(from + i) - top);
      store(from + i, weight);
      total += weight;
    }
    return 1.0f / (sum(total) + (sinks ? std::exp(sink - most) : 0.0f));
  }

  bool sees(int64_t w, int64_t slot) const {
    if (slot >= first + count) return false;
    if (slot >= open) {
      const std::vector<int64_t>& path = paths[w - token];
      if (path.empty() ? !visible(w)[slot - open] : slot - open >= static_cast<int64_t>(path.size())) return false;
      if (!path.empty()) slot = path[slot - open];
    }
    if (slot < base) return slot >= begin(w);
    return pass.sees(position(w), position(slot - base));
  }

  // Sum all values by weight.
  void sum_values() {
#if defined(OUTRIDER_AMX)
    if (on_units(pass)) return sum_values_on_units();
#endif
#if defined(__AVX512BF16__)
    if (in_pairs(pass)) return sum_values_in_pairs();
#endif
    for (int64_t w = 0; w < tokens; ++w) move_back(w);
    std::fill_n(out, rows() * pass.value_dim, 0.0f);
    const int64_t shared = pass.is_limited() ? 0 : std::max<int64_t>(0, open - first);
    int64_t row = 0;
    for (; row + kTogether <= rows(); row += kTogether) add_values<kTogether, false>(row, 0, shared);
    for (; row < rows(); ++row) add_values<1, false>(row, 0, shared);
    for (row = 0; row < rows(); ++row) add_values<1, true>(row, shared, count);
  }

  // Move the weights of token w from its path back to their slots: sums in the order of slots skip those of weight 0.
  void move_back(int64_t w) {
    const std::vector<int64_t>& path = paths[w];
    for (int64_t row = w * group; row < (w + 1) * group && !path.empty(); ++row) {
      float* of_row = scores + row * padded - first;
      for (int64_t i = static_cast<int64_t>(path.size()) - 1; i >= 0; --i) {
        const float weight = of_row[open + i];
        of_row[open + i] = 0.0f;
        of_row[path[i]] = weight;
      }
    }
  }

  // Add the values of slots [from, to), by weight, to the outputs of `together` rows.
  template <int together, bool masked>
  void add_values(int64_t row, int64_t from, int64_t to) {
    const int64_t dim = pass.value_dim, slots = to - from;
    const float* weights = scores + row * padded + from;
    const Cache* start = values + (first + from) * dim;
    float* into = out + row * dim;
    constexpr int chunks = kLanes == 16 ? 4 : 2;  // as many as leave the sums of all rows in registers
    int64_t d = 0;
    for (; d + chunks * kLanes <= dim; d += chunks * kLanes)
      add_weighted_values<Cache, together, chunks, masked>(weights, padded, start + d, slots, dim, into + d, dim);
    for (; d + kLanes <= dim; d += kLanes) add_weighted_values<Cache, together, 1, masked>(weights, padded, start + d, slots, dim, into + d, dim);
    for (; d < dim; ++d)
      for (int i = 0; i < together; ++i)
        for (int64_t s = 0; s < slots; ++s)
          if (!masked || weights[i * padded + s] != 0)
            into[i * dim + d] += weights[i * padded + s] * static_cast<float>(start[s * dim + d]);
  }
};

// Vectors [1, heads, tokens, dim] in float32, each contiguous; models transpose heads and tokens, which needs no copy.
struct Vectors {
  const at::Tensor all;
  const float* const data;
  const int64_t head, token;  // strides
  explicit Vectors(const at::Tensor& x)
      : all(adjacent(x.to(at::kFloat))), data(all.const_data_ptr<float>()), head(all.stride(1)), token(all.stride(2)) {}
  const float* at(int64_t h, int64_t t) const { return data + h * head + t * token; }

 private:
  static at::Tensor adjacent(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }
};

template <typename Cache>
void attend_all(const Pass& pass, const Vectors& query, const Vectors& key, const Vectors& value, Cache* keys, Cache* values, float* out) {
  const int64_t group = pass.heads / pass.kv_heads;
  int64_t longest = 0;
  for (int64_t b = 0; b < pass.rows; ++b) longest = std::max(longest, pass.bases[b] + pass.width);
  // Up to `at_once` tokens of request b, from `token` on, and one head of keys. Listed, so that threads divide a prompt's if others decode.
  struct Tile { int64_t b, h, token; };
  const int64_t at_once = Attention<Cache>::tokens_at_once(pass);
  std::vector<Tile> tiles;
  for (int64_t b = 0; b < pass.rows; ++b)
    for (int64_t h = 0; h < pass.kv_heads; ++h)
      for (int64_t token = 0; token < pass.length(b); token += at_once) tiles.push_back({b, h, token});
  // Write the keys and values of tiles [from, to) to their slots, which follow the committed ones.
  const auto write = [&](int64_t from, int64_t to) {
    for (; from < to; ++from) {
      const auto [b, h, token] = tiles[from];
      const int64_t start = pass.start(b), end = std::min(token + at_once, pass.length(b));
      const int64_t slot = (pass.cache_rows[b] * pass.kv_heads + h) * pass.capacity + pass.bases[b];
      for (int64_t w = token; w < end; ++w) {
        std::copy_n(key.at(h, start + w), pass.key_dim, keys + (slot + w) * pass.key_dim);
        std::copy_n(value.at(h, start + w), pass.value_dim, values + (slot + w) * pass.value_dim);
      }
    }
  };
  const bool writes_first = at_once < pass.width;  // a tile reads what other tiles of the request write
  if (writes_first) parallel_for(0, tiles.size(), std::max<int64_t>(1, 100'000 / (at_once * (pass.key_dim + pass.value_dim))), write);
  const int64_t work = at_once * group * longest * (pass.key_dim + pass.value_dim);
  parallel_for(0, tiles.size(), std::max<int64_t>(1, 100'000 / work), [&](int64_t from, int64_t to) {
    if (!writes_first) write(from, to);
    const std::unique_ptr<float[]> buffer(new float[Attention<Cache>::buffer_size(pass, longest)]);
#if defined(OUTRIDER_AMX)
    const bool on_units = Attention<Cache>::on_units(pass);
    if (on_units) amx::shape(amx::kSide, amx::kSide);
#endif
    for (; from < to; ++from) {
      const auto [b, h, token] = tiles[from];
      const int64_t plane = (pass.cache_rows[b] * pass.kv_heads + h) * pass.capacity, start = pass.start(b);
      Attention<Cache> attention(pass, b, h, token, keys + plane * pass.key_dim, values + plane * pass.value_dim, buffer.get());
      for (int64_t w = 0; w < attention.tokens; ++w)
        for (int64_t g = 0; g < group; ++g)
          std::copy_n(query.at(h * group + g, start + token + w), pass.key_dim, attention.queries + (w * group + g) * pass.key_dim);
      attention.run();
      for (int64_t w = 0; w < attention.tokens; ++w)
        std::copy_n(attention.out + w * group * pass.value_dim, group * pass.value_dim,
                    out + ((start + token + w) * pass.heads + h * group) * pass.value_dim);
    }
#if defined(OUTRIDER_AMX)
    if (on_units) _tile_release();
#endif
  });
}

}  // namespace

// Write the key and value [1, Hkv, T, D] of request b's tokens into slots base.. of its cache row of layer `layer`, then attend.
// query [1, H, T, D] -> [1, T, H, Dv]. keys / values: [L, R, Hkv, S, D], changed in place without being declared as such: each layer's
// slots are written and read in this one call, so the compiler cannot reorder it, and does not copy the cache.
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& keys,
                  const at::Tensor& values, int64_t layer, const at::Tensor& cache_rows, const at::Tensor& bases,
                  const at::Tensor& ends, const at::Tensor& positions, const at::Tensor& visible, double scale, double softcap, int64_t window,
                  int64_t chunk, const std::optional<at::Tensor>& sinks) {
  const Vectors queries(query), new_keys(key), new_values(value);
  const at::Tensor &q = queries.all, &k = new_keys.all, &v = new_values.all;
  const at::Tensor seen = visible.contiguous();
  const at::Tensor rows = cache_rows.contiguous(), starts = bases.contiguous(), places = positions.contiguous(), till = ends.contiguous();
  const at::Tensor of_sinks = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  Pass pass{rows.size(0), q.size(2), q.size(1), k.size(1), seen.size(1), seen.size(2), k.size(3), v.size(3), keys.size(3), window, chunk,
            static_cast<float>(scale), static_cast<float>(softcap), rows.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>(),
            till.const_data_ptr<int64_t>(), places.const_data_ptr<int64_t>(), seen.const_data_ptr<bool>(),
            sinks ? of_sinks.const_data_ptr<float>() : nullptr};
  const int64_t last = till.numel() > 0 ? till.const_data_ptr<int64_t>()[till.numel() - 1] : 0;
  TORCH_CHECK(pass.key_dim <= kMostDim, "attend: head size over ", kMostDim);
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && values.sizes().slice(0, 4) == keys.sizes().slice(0, 4),
              "attend: keys ", keys.sizes(), " and values ", values.sizes(), " are not of one cache");
  TORCH_CHECK(!sinks || of_sinks.numel() == pass.heads, "attend: ", of_sinks.numel(), " sinks for ", pass.heads, " heads");
  TORCH_CHECK(pass.key_dim == keys.size(4) && pass.value_dim == values.size(4) && pass.kv_heads == keys.size(2) &&
                  q.size(3) == pass.key_dim && pass.heads % pass.kv_heads == 0 && layer >= 0 && layer < keys.size(0) && v.size(1) == pass.kv_heads,
              "attend: heads of query ", q.sizes(), ", key ", k.sizes(), " and value ", v.sizes(), " do not fit the cache ", keys.sizes());
  TORCH_CHECK(q.size(0) == 1 && places.numel() == pass.total && till.size(0) == pass.rows && last == pass.total,
              "attend: ", pass.total, " tokens of ", pass.rows, " requests, but ends[-1] is ", last, " of ", till.size(0), ", and there are ",
              places.numel(), " positions");
  for (int64_t b = 0; b < pass.rows; ++b)
    TORCH_CHECK(pass.length(b) >= 0 && pass.length(b) <= pass.width && pass.bases[b] + pass.length(b) <= pass.capacity &&
                    pass.cache_rows[b] >= 0 && pass.cache_rows[b] < keys.size(1) && pass.mask_slots >= pass.width &&
                    pass.bases[b] + pass.width >= pass.mask_slots,
                "attend: request ", b, " does not fit the cache: base ", pass.bases[b], ", length ", pass.length(b), " of width ",
                pass.width, ", capacity ", pass.capacity, ", row ", pass.cache_rows[b], " of ", keys.size(1), ", mask of ",
                pass.mask_slots, " slots");
  at::Tensor out = at::empty({1, pass.total, pass.heads, pass.value_dim}, q.options());
  float* to = out.mutable_data_ptr<float>();
  const at::Tensor k_layer = keys.select(0, layer), v_layer = values.select(0, layer);
  if (pass.total > 0) by_number(keys.scalar_type(), [&](auto number) {
    using Cache = decltype(number);
    attend_all(pass, queries, new_keys, new_values, k_layer.data_ptr<Cache>(), v_layer.data_ptr<Cache>(), to);
  });
  return query.scalar_type() == at::kFloat ? out : out.to(query.scalar_type());
}

}  // namespace outrider
