// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernels of expert_stream.h and expert_quantized_stream.h (csrc/cuda/kernels) on the CPU
// (fibers.h), against the bits of linear_stream.h and linear_quantized_stream.h with the matrix of
// each pair's expert. Prints a line for each failure, and how many results were compared.

#include "fibers.h"

#include "kernels/expert_quantized_stream.h"
#include "kernels/expert_stream.h"
#include "kernels/sorted_experts.h"
#include "operands.h"

using namespace mlx_paged::cuda;

namespace {

constexpr int kExperts = 5;

// Pairs of a row and an expert, in the order of route_experts.
struct Pairs {
  int num_rows;
  int top_k;
  std::vector<int> experts;  // [num_rows * top_k]
  std::vector<int> sorted;
  std::vector<int> items;

  // Nobody has the last expert, and some items are left over.
  Pairs(std::mt19937& rng, int num_rows, int top_k, int item_rows)
      : num_rows(num_rows), top_k(top_k) {
    for (int row = 0; row < num_rows; row++) {
      std::vector<int> all(kExperts - 1);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), rng);
      experts.insert(experts.end(), all.begin(), all.begin() + top_k);
    }
    sorted.resize(experts.size());
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(
        sorted.begin(), sorted.end(), [&](int a, int b) { return experts[a] < experts[b]; });
    for (size_t place = 0; place < sorted.size();) {
      size_t end = place;
      while (end < sorted.size() && end < place + item_rows &&
             experts[sorted[end]] == experts[sorted[place]]) {
        end++;
      }
      items.insert(items.end(), {experts[sorted[place]], int(place), int(end - place)});
      place = end;
    }
    items.insert(items.end(), {77777, 77777, 0, 77777, 77777, 0});
  }

  int num_items() const { return int(items.size() / 3); }
  int row_of(int pair) const { return pair / top_k; }
};

template <typename T>
void fill(std::mt19937& rng, Aligned<T>& to) {
  std::normal_distribution<double> normal;
  for (size_t i = 0; i < to.size; i++) {
    to[i] = rounded_to<T>(normal(rng));
  }
}

// Weights of 16 bits, and of quantized ones of 4 bits in groups of 64.
template <typename T>
struct Dense {
  static constexpr int kRows = kStreamRows;
  static constexpr int kThreads = kStreamThreads;
  int n;
  int k;
  Aligned<T> all;
  Aligned<T> bias;
  Dense(std::mt19937& rng, int n, int k)
      : n(n), k(k), all(size_t(kExperts) * n * k), bias(size_t(kExperts) * n) {
    fill(rng, all);
    fill(rng, bias);
  }
  static int scratch(int tiles) { return stream_scratch(tiles); }
  static int alone(int tiles) { return stream_scratch(tiles); }
};

template <typename T>
struct Codes {
  static constexpr CodeFormat kFormat = CodeFormat::affine;
  static constexpr int kBits = 4;
  static constexpr int kGroup = 64;
  static constexpr int kRows = kQuantizedStreamRows;
  static constexpr int kThreads = kQuantizedStreamThreads;
  int n;
  int k;
  Aligned<unsigned int> all;
  Aligned<T> scales;
  Aligned<T> biases;
  Aligned<T> padded_scales;  // to multiples of 16 bytes
  Aligned<T> padded_biases;
  Aligned<T> bias;
  int groups() const { return k / kGroup; }
  int stride() const { return (groups() + 7) / 8 * 8; }
  bool is_whole() const { return groups() % 8 != 0; }
  Codes(std::mt19937& rng, int n, int k)
      : n(n),
        k(k),
        all(size_t(kExperts) * n * k / 8),
        scales(size_t(kExperts) * n * k / kGroup),
        biases(size_t(kExperts) * n * k / kGroup),
        padded_scales(size_t(kExperts) * n * stride()),
        padded_biases(size_t(kExperts) * n * stride()),
        bias(size_t(kExperts) * n) {
    for (size_t i = 0; i < all.size; i++) {
      all[i] = rng();
    }
    fill(rng, scales);
    fill(rng, biases);
    fill(rng, bias);
    for (size_t i = 0; i < scales.size; i++) {
      size_t to = i / groups() * stride() + i % groups();
      padded_scales[to] = scales[i];
      padded_biases[to] = biases[i];
    }
  }
  int scratch(int tiles) const {
    return quantized_stream_shape(kFormat, kBits, kGroup, tiles, is_whole()).scratch;
  }
  static int alone(int tiles) {
    return quantized_stream_shape(kFormat, kBits, kGroup, tiles).scratch;
  }
};

template <typename T>
void add_codes(QuantizedMaps& maps, int i, const Codes<T>& w, int first, int count) {
  int words = w.k * Codes<T>::kBits / 32;
  maps.weights[i].codes = map_of(
      w.all.data + size_t(first) * w.n * words, 4, w.n * count, words, words,
      kQuantizedStreamRows / 2, quantized_stream_chunk(Codes<T>::kBits) * Codes<T>::kBits / 32);
}

// The maps of some experts' matrices, from expert `first` on.
template <typename T>
void add_map(StreamMaps& maps, int i, const Dense<T>& w, int first, int count) {
  const T* data = w.all.data + size_t(first) * w.n * w.k;
  maps.weights[i] = map_of(data, 2, w.n * count, w.k, w.k, kStreamRows / 2, kLinearChunk);
}

template <typename T>
void add_map(QuantizedMaps& maps, int i, const Codes<T>& w, int first, int count) {
  add_codes(maps, i, w, first, count);
  if (w.is_whole()) {
    return;  // (there are none: the kernel must not use them)
  }
  auto of_groups = [&](const Aligned<T>& a) {
    return map_of(
        a.data + size_t(first) * w.n * w.groups(), 2, w.n * count, w.groups(), w.groups(),
        kQuantizedStreamRows / 2, 8, false);
  };
  maps.weights[i].scales = of_groups(w.scales);
  maps.weights[i].biases = of_groups(w.biases);
}

// Adds one expert's map, for the reference kernels.
template <typename T>
void add_alone(StreamMaps& maps, int i, const Dense<T>& w, int expert) {
  add_map(maps, i, w, expert, 1);
}

template <typename T>
void add_alone(QuantizedMaps& maps, int i, const Codes<T>& w, int expert) {
  add_codes(maps, i, w, expert, 1);
  auto of_groups = [&](const Aligned<T>& a) {
    return map_of(
        a.data + size_t(expert) * w.n * w.stride(), 2, w.n, w.groups(), w.stride(),
        kQuantizedStreamRows / 2, 8, false);
  };
  maps.weights[i].scales = of_groups(w.padded_scales);
  maps.weights[i].biases = of_groups(w.padded_biases);
}

template <typename T>
auto entry(const Dense<T>&, int tiles) {
  return tiles == 1   ? expert_stream_entry<T, 1>
         : tiles == 2 ? expert_stream_entry<T, 2>
         : tiles == 4 ? expert_stream_entry<T, 4>
                      : expert_stream_entry<T, 8>;
}

template <typename T>
auto entry(const Codes<T>& w, int tiles) {
  using C = Codes<T>;
  if (w.is_whole()) {
    return tiles == 1 ? expert_quantized_stream_entry<T, C::kFormat, C::kBits, C::kGroup, 1, true>
                      : expert_quantized_stream_entry<T, C::kFormat, C::kBits, C::kGroup, 4, true>;
  }
  return tiles == 1 ? expert_quantized_stream_entry<T, C::kFormat, C::kBits, C::kGroup, 1, false>
                    : expert_quantized_stream_entry<T, C::kFormat, C::kBits, C::kGroup, 4, false>;
}

const unsigned char* bytes(const void* p) {
  return static_cast<const unsigned char*>(p);
}

template <typename T>
void call(
    const Dense<T>& a, const Dense<T>& b, int tiles, const T* x, T* out, const Pairs& v,
    const ExpertProductParams& params, const StreamMaps& maps) {
  entry(a, tiles)(
      x, a.all.data, a.bias.data, b.all.data, b.bias.data, out, v.sorted.data(), v.items.data(),
      params, maps);
}

template <typename T>
void call(
    const Codes<T>& a, const Codes<T>& b, int tiles, const T* x, T* out, const Pairs& v,
    const ExpertProductParams& params, const QuantizedMaps& maps) {
  entry(a, tiles)(
      x, bytes(a.all.data), bytes(a.scales.data), bytes(a.biases.data), a.bias.data,
      bytes(b.all.data), bytes(b.scales.data), bytes(b.biases.data), b.bias.data, out,
      v.sorted.data(), v.items.data(), params, maps);
}

template <typename T>
void call_linear(
    const Dense<T>& a, const Dense<T>& b, int expert, const T* x, T* out, const LinearParams& p,
    const StreamMaps& maps) {
  const T* bias[2] = {a.bias.data + expert * a.n, b.bias.data + expert * b.n};
  linear_stream_entry<T, 1, false>(
      x, x, x, bias[0], out, x, bias[1], out, x, bias[1], out, nullptr, nullptr, nullptr, nullptr,
      nullptr, x, x, x, x, x, x, p, maps);
}

template <typename T>
void call_linear(
    const Codes<T>& a, const Codes<T>& b, int expert, const T* x, T* out, const LinearParams& p,
    const QuantizedMaps& maps) {
  const T* bias[2] = {a.bias.data + expert * a.n, b.bias.data + expert * b.n};
  const unsigned char* none = nullptr;
  linear_quantized_stream_entry<T, Codes<T>::kFormat, Codes<T>::kBits, Codes<T>::kGroup, 1>(
      x, x, none, none, none, bias[0], out, none, none, none, bias[1], out, none, none, none,
      bias[1], out, nullptr, nullptr, nullptr, nullptr, nullptr, x, x, x, x, x, x, p, maps);
}

// One product of pairs: from rows of the step to places, or (`is_first` is false) from places to
// pairs.
template <typename T, typename Weights, typename Maps>
void test(
    std::mt19937& rng, bool is_first, int num_rows, int top_k, int tiles, int n, int k,
    bool has_bias, const char* what) {
  Pairs pairs(rng, num_rows, top_k, 8 * tiles);
  Weights gate(rng, n, k);
  Weights up(rng, n, k);
  int rows_of_x = is_first ? num_rows : num_rows * top_k;
  int stride = k + 8;
  Aligned<T> x(size_t(rows_of_x) * stride);
  fill(rng, x);
  ExpertProductParams params{};
  auto& product = params.product;
  product.k = k;
  product.x_stride = stride;
  product.num_weights = is_first ? 2 : 1;
  product.is_gated = is_first;
  for (int i = 0; i < product.num_weights; i++) {
    product.n[i] = n;
    product.has_bias[i] = has_bias;
  }
  int rows_of_tile = Weights::kRows / (is_first ? 2 : 1);
  params.num_tiles = (n + rows_of_tile - 1) / rows_of_tile;
  params.top_k = top_k;
  params.is_first = is_first;
  Maps maps{};
  maps.x = map_of(x.data, 2, rows_of_x, k, stride, is_first ? 1 : 8 * tiles, 64);
  add_map(maps, 0, gate, 0, kExperts);
  add_map(maps, 1, up, 0, kExperts);
  std::vector<T> out(size_t(num_rows) * top_k * n, rounded_to<T>(NAN));
  fibers::run_grid(
      params.num_tiles * pairs.num_items(), 1, Weights::kThreads, gate.scratch(tiles), 1,
      [&] { call(gate, up, tiles, x.data, out.data(), pairs, params, maps); });

  for (size_t place = 0; place < pairs.sorted.size(); place++) {
    int pair = pairs.sorted[place];
    int expert = pairs.experts[pair];
    const T* row = x.data + size_t(is_first ? pairs.row_of(pair) : place) * stride;
    LinearParams alone = product;
    alone.num_rows = 1;
    Maps of_expert{};
    of_expert.x = map_of(row, 2, 1, k, stride, 8, 64);
    add_alone(of_expert, 0, gate, expert);
    add_alone(of_expert, 1, up, expert);
    std::vector<T> expected(n);
    fibers::run_grid(params.num_tiles, 1, Weights::kThreads, Weights::alone(1), 1, [&] {
      call_linear(gate, up, expert, row, expected.data(), alone, of_expert);
    });
    compared += n;
    if (std::memcmp(&out[size_t(is_first ? place : pair) * n], expected.data(), 2 * n)) {
      failed++;
      std::printf("%s: other bits, pair %d of expert %d\n", what, pair, expert);
    }
  }
}

template <typename T>
void test() {
  std::mt19937 rng(11);
  using D = Dense<T>;
  using C = Codes<T>;
  for (bool at_once : {false, true}) {
    fibers::copies_at_once = at_once;
    // Rows of x that lie anywhere; more chunks than stages; a tile that is not full.
    test<T, D, StreamMaps>(rng, true, 3, 2, 1, 36, 1056, true, "gates of few rows");
    test<T, D, StreamMaps>(rng, false, 3, 2, 1, 68, 128, true, "downs of few rows");
    // Items that are not full, and several of one expert.
    test<T, D, StreamMaps>(rng, true, 21, 3, 1, 12, 96, false, "gates in items of eight");
    test<T, C, QuantizedMaps>(rng, true, 3, 2, 1, 64, 1408, true, "quantized gates");
    test<T, C, QuantizedMaps>(rng, false, 3, 2, 1, 128, 768, false, "quantized downs");
  }
  fibers::copies_at_once = false;
  test<T, D, StreamMaps>(rng, true, 21, 2, 2, 20, 192, false, "gates in items of 16");
  test<T, D, StreamMaps>(rng, false, 40, 3, 4, 20, 64, false, "downs in items of 32");
  test<T, D, StreamMaps>(rng, true, 61, 4, 8, 20, 96, true, "gates in items of 64");
  test<T, C, QuantizedMaps>(rng, true, 40, 4, 4, 64, 768, false, "quantized gates, items of 32");
  test<T, C, QuantizedMaps>(rng, false, 40, 4, 4, 12, 512, true, "quantized downs, items of 32");
  test<T, C, QuantizedMaps>(rng, true, 3, 2, 1, 20, 2048, true, "quantized gates by spans");
}

// Items of sorted rows, some of whose experts have none. `is_sorted` is false: only in its bounds.
void test_sorted_items(std::mt19937& rng, int num_rows, int num_experts, int rows, bool is_sorted) {
  std::vector<unsigned int> experts(num_rows);
  for (auto& expert : experts) {
    expert = std::min(rng() % num_experts, rng() % num_experts);
  }
  if (is_sorted) {
    std::sort(experts.begin(), experts.end());
  }
  const int most = std::min(num_rows, num_experts) + num_rows / rows;
  constexpr int kGuard = 9;
  std::vector<int> items(3 * most + kGuard, -7);
  SortedItemsParams params{num_rows, num_experts, rows, most};
  fibers::run_grid(1, 1, (num_experts + 32) / 32 * 32, 4 * (num_experts + 1), 1, [&] {
    sorted_items_entry(experts.data(), items.data(), params);
  });
  std::vector<int> expected;
  for (int first = 0; is_sorted && first < num_rows;) {
    int end = first;
    while (end < num_rows && end < first + rows && experts[end] == experts[first]) {
      end++;
    }
    expected.insert(expected.end(), {int(experts[first]), first, end - first});
    first = end;
  }
  bool is_right = std::equal(expected.begin(), expected.end(), items.begin());
  for (int i = int(expected.size()); is_sorted && i < 3 * most; i += 3) {
    is_right = is_right && items[i + 2] == 0;
  }
  for (int i = 0; i < kGuard; i++) {
    is_right = is_right && items[3 * most + i] == -7;
  }
  compared += most;
  if (!is_right) {
    failed++;
    std::printf("wrong items of %d rows and %d experts\n", num_rows, num_experts);
  }
}

void test_sorted_items() {
  std::mt19937 rng(5);
  for (bool is_sorted : {true, false}) {
    test_sorted_items(rng, 1, 1, 64, is_sorted);
    test_sorted_items(rng, 300, 5, 64, is_sorted);
    test_sorted_items(rng, 128, 31, 128, is_sorted);
    test_sorted_items(rng, 70, 200, 16, is_sorted);
  }
}

// Rows of pairs, in the order of a weight's codes.
template <int RUN, int APART>
void test_sorted_rows(std::mt19937& rng) {
  constexpr int kRows = 5, kTopK = 3, kColumns = 320, kStride = 328;
  Aligned<unsigned short> x(kRows * kStride);
  Aligned<unsigned short> out(kRows * kTopK * kColumns);
  for (size_t i = 0; i < x.size; i++) {
    x[i] = rng();
  }
  std::vector<unsigned int> pairs(kRows * kTopK);
  std::iota(pairs.begin(), pairs.end(), 0);
  std::shuffle(pairs.begin(), pairs.end(), rng);
  fibers::run_grid(int(pairs.size()), 1, 32, 0, 1, [&] {
    sorted_rows_entry<RUN, APART>(
        reinterpret_cast<const uint4*>(x.data), pairs.data(), reinterpret_cast<uint4*>(out.data),
        {kColumns / 8, kStride / 8, kTopK});
  });
  for (size_t i = 0; i < pairs.size(); i++) {
    bool is_right = true;
    for (int column = 0; column < kColumns; column++) {
      int place = ordered_column(CodeOrder{RUN, APART}, column);
      is_right = is_right && out[i * kColumns + place] == x[pairs[i] / kTopK * kStride + column];
    }
    compared += kColumns;
    if (!is_right) {
      failed++;
      std::printf("wrong row of pair %u in order %d, %d\n", pairs[i], RUN, APART);
    }
  }
}

void test_sorted_rows() {
  std::mt19937 rng(6);
  test_sorted_rows<32, 1>(rng);
  test_sorted_rows<32, 2>(rng);
  test_sorted_rows<32, 4>(rng);
  test_sorted_rows<64, 1>(rng);
  test_sorted_rows<64, 2>(rng);
  test_sorted_rows<64, 4>(rng);
}

}  // namespace

int main() {
  test<ELEMENT>();
  test_sorted_items();
  test_sorted_rows();
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
