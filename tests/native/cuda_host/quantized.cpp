// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernels of linear_quantized.h and linear_quantized_stream.h (csrc/cuda/kernels) on the CPU
// (fibers.h), against float64. Prints a line for each failure, and how many products were compared.

#include <optional>

#include "fibers.h"

#include "kernels/linear_quantized_stream.h"
#include "operands.h"

using namespace mlx_paged::cuda;

namespace {

double e2m1(unsigned code) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return magnitudes[code & 7] * (code & 8 ? -1 : 1);
}

double e4m3(unsigned code) {
  int exponent = code >> 3 & 15;
  int mantissa = code & 7;
  double v = exponent ? (1 + mantissa / 8.0) * std::exp2(exponent - 7) : mantissa / 512.0;
  return code & 128 ? -v : v;
}

template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
struct Weight {
  int n;
  int k;
  Aligned<unsigned int> codes;
  Aligned<unsigned char> scales;
  Aligned<unsigned char> biases;
  Aligned<T> bias;
  std::vector<double> exact;
  std::vector<double> rounded;  // to T: what linear_quantized_stream multiplies

  Weight(std::mt19937& rng, int n, int k)
      : n(n),
        k(k),
        codes(size_t(n) * k / 32 * BITS),
        scales(size_t(n) * k / GROUP * 2),
        biases(size_t(n) * k / GROUP * 2),
        bias(n),
        exact(size_t(n) * k),
        rounded(size_t(n) * k) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < codes.size; i++) {
      codes[i] = rng();
    }
    for (int i = 0; i < n; i++) {
      bias[i] = rounded_to<T>(normal(rng));
      for (int g = 0; g < k / GROUP; g++) {
        size_t at = size_t(i) * (k / GROUP) + g;
        double scale;
        double added = 0;
        if constexpr (FORMAT == CodeFormat::affine) {
          // (bf16 of any size a model may have: weights are scaled to other exponents meanwhile.)
          const double size = kIsHalf<T> ? 1.0 : std::exp2(int(at % 11 * 6) - 40);
          T s = rounded_to<T>(at % 7 ? normal(rng) / 8 * size : 0.0);
          T b = rounded_to<T>(normal(rng));
          std::memcpy(scales.data + 2 * at, &s, 2);
          std::memcpy(biases.data + 2 * at, &b, 2);
          scale = float(s);
          added = float(b);
        } else {
          scales[at] = 120 + rng() % 8;
          scale = std::exp2(scales[at] - 127);
        }
        for (int e = 0; e < GROUP; e++) {
          size_t code_at = (size_t(i) * k + g * GROUP + e) * BITS;
          unsigned code = 0;
          for (int bit = 0; bit < BITS; bit++) {
            code |= (codes[(code_at + bit) / 32] >> (code_at + bit) % 32 & 1) << bit;
          }
          double v = FORMAT == CodeFormat::affine  ? code
                     : FORMAT == CodeFormat::mxfp4 ? e2m1(code)
                                                   : e4m3(code);
          exact[size_t(i) * k + g * GROUP + e] = v * scale + added;
          rounded[size_t(i) * k + g * GROUP + e] = float(rounded_to<T>(v * scale + added));
        }
      }
    }
  }
};

struct Case {
  Kind kind;
  int rows;
  int tiles;
  int cluster;             // blocks of linear_quantized_stream's; 0: linear_quantized
  bool extras;             // biases and a residual
  bool wgmma = false;      // products of four warps
  bool ordered = false;    // x and the results of gates are in the order of codes
  bool in_blocks = false;  // the product's blocks also compute the adapters' units
};

template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
struct Product {
  using W = Weight<T, FORMAT, BITS, GROUP>;
  int k;
  int stride;
  std::vector<std::unique_ptr<W>> weights;
  Aligned<T> x;
  std::unique_ptr<Aligned<T>> ordered_x;
  const T* given_x;
  Aligned<T> residual;
  std::vector<float> rotations;
  std::vector<int> slots;
  Kind kind;
  std::optional<TestAdapters<T>> adapters = {};

  Product(std::mt19937& rng, Kind kind, std::vector<int> ns, int k)
      : k(k),
        stride(k + 8),
        x(size_t(kMostRows) * (k + 8)),
        residual(size_t(kMostRows) * ns[0]),
        kind(kind) {
    std::normal_distribution<double> normal;
    for (int n : ns) {
      weights.push_back(std::make_unique<W>(rng, n, k));
    }
    for (size_t i = 0; i < x.size; i++) {
      x[i] = rounded_to<T>(i % stride < size_t(k) ? normal(rng) : NAN);
    }
    for (size_t i = 0; i < residual.size; i++) {
      residual[i] = rounded_to<T>(normal(rng));
    }
    fill_heads(rng, rotations, slots);
  }

  static constexpr CodeOrder kOrder = code_order(BITS, GROUP);

  // x as a norm writes it.
  void write_ordered() {
    using Order = InOrder<kOrder.run, kOrder.apart>;
    ordered_x = std::make_unique<Aligned<T>>(x.size);
    std::memcpy(ordered_x->data, x.data, x.size * sizeof(T));
    for (size_t first = 0; first < x.size; first += stride) {
      auto* to = reinterpret_cast<uint4*>(ordered_x->data + first);
      for (int chunk = 0; chunk < k / 8; chunk++) {
        Order::write(to, chunk, reinterpret_cast<const uint4*>(x.data + first)[chunk]);
      }
      for (int i = 0; i < k; i++) {
        const T& found = (*ordered_x)[first + mlx_paged::cuda::ordered_column(kOrder, i)];
        if (std::memcmp(&found, &x[first + i], sizeof(T)) != 0) {
          failed++;
          std::printf("column %d is in another place\n", i);
          return;
        }
      }
    }
  }

  // The bits of all outputs.
  std::vector<unsigned short> run(const Case& c, const std::string& name) {
    LinearParams p{};
    const bool has_ordered_x = c.ordered && c.wgmma;
    if (has_ordered_x) {
      write_ordered();
    }
    given_x = has_ordered_x ? ordered_x->data : x.data;
    p.x_is_ordered = has_ordered_x;
    if (c.ordered && kind == Kind::gated) {
      p.out_order = kOrder;
    }
    p.num_rows = c.rows;
    p.k = k;
    p.x_stride = stride;
    p.num_weights = int(weights.size());
    p.is_gated = kind == Kind::gated;
    p.has_residual = kind != Kind::heads && c.extras;
    p.head_dim = kind == Kind::heads ? kHead : 0;
    if (adapters) {
      p.adapters = adapters->params(c.rows, c.cluster, c.in_blocks);
    }
    auto a = [&](int target) { return adapters ? adapters->first_matrix(target) : nullptr; };
    auto b = [&](size_t i) {
      return adapters ? adapters->b[std::min(i, weights.size() - 1)]->data : nullptr;
    };
    std::vector<std::vector<T>> outs;
    for (size_t i = 0; i < weights.size(); i++) {
      p.n[i] = weights[i]->n;
      p.has_bias[i] = c.extras;
      outs.emplace_back(size_t(kMostRows) * weights[i]->n, rounded_to<T>(NAN));
    }
    auto of = [&](size_t i) { return std::min(i, weights.size() - 1); };
    auto codes = [&](size_t i) {
      return reinterpret_cast<const unsigned char*>(weights[of(i)]->codes.data);
    };
    int tile = c.cluster ? kQuantizedStreamRows : kQuantizedRows;
    tile /= p.is_gated ? 2 : 1;
    int blocks = 0;
    for (int i = 0; i < (p.is_gated ? 1 : p.num_weights); i++) {
      blocks += (p.n[i] + tile - 1) / tile;
    }
    auto with_arguments = [&](auto launch) {
      launch(
          given_x, residual.data, codes(0), weights[of(0)]->scales.data,
          weights[of(0)]->biases.data, weights[of(0)]->bias.data, outs[of(0)].data(), codes(1),
          weights[of(1)]->scales.data, weights[of(1)]->biases.data, weights[of(1)]->bias.data,
          outs[of(1)].data(), codes(2), weights[of(2)]->scales.data, weights[of(2)]->biases.data,
          weights[of(2)]->bias.data, outs[of(2)].data(), rotations.data(), slots.data(),
          adapters ? adapters->hidden.data() : nullptr,
          adapters ? adapters->adapters.data() : nullptr, adapters ? &adapters->finished : nullptr,
          a(0), a(1), a(2), b(0), b(1), b(2), p);
    };
    if (c.cluster) {
      auto kernel = c.tiles == 1   ? linear_quantized_stream_entry<T, FORMAT, BITS, GROUP, 1>
                    : c.tiles == 2 ? linear_quantized_stream_entry<T, FORMAT, BITS, GROUP, 2>
                    : c.tiles == 4 ? linear_quantized_stream_entry<T, FORMAT, BITS, GROUP, 4>
                                   : linear_quantized_stream_entry<T, FORMAT, BITS, GROUP, 8>;
      if (c.wgmma) {
        kernel = c.tiles == 4   ? linear_quantized_wgmma_entry<T, FORMAT, BITS, GROUP, 4>
                 : c.tiles == 8 ? linear_quantized_wgmma_entry<T, FORMAT, BITS, GROUP, 8>
                                : linear_quantized_wgmma_entry<T, FORMAT, BITS, GROUP, 16>;
      }
      QuantizedMaps maps = maps_of(c);
      int threads = c.wgmma ? kQuantizedWgmmaThreads : kQuantizedStreamThreads;
      int scratch = quantized_stream_shape(FORMAT, BITS, GROUP, c.tiles, false, c.wgmma).scratch;
      scratch += c.in_blocks ? adapter_sum_bytes(kQuantizedWgmmaThreads / 32) : 0;
      int x = p.adapters.num_blocks + blocks * c.cluster;
      int y = (c.rows + 8 * c.tiles - 1) / (8 * c.tiles);
      fibers::run_grid(x, y, threads, scratch, c.cluster, [&] {
        with_arguments([&](auto... arguments) { kernel(arguments..., maps); });
      });
    } else {
      auto kernel = c.tiles == 1 ? linear_quantized_entry<T, FORMAT, BITS, GROUP, 1>
                                 : linear_quantized_entry<T, FORMAT, BITS, GROUP, 2>;
      int scratch = quantized_rows_shape(FORMAT, BITS, GROUP, c.tiles).scratch;
      int y = (c.rows + 8 * c.tiles - 1) / (8 * c.tiles);
      fibers::run_grid(blocks, y, 32 * kLinearParts, scratch, 1, [&] {
        with_arguments([&](auto... arguments) { kernel(arguments...); });
      });
    }
    if (p.out_order.run > 0) {
      move_back(outs[0], p.n[0], p.out_order);
    }
    check(c, outs, name);
    std::vector<unsigned short> bits;
    for (auto& out : outs) {
      for (T& v : out) {
        unsigned short b;
        std::memcpy(&b, &v, 2);
        bits.push_back(b);
      }
    }
    return bits;
  }

  // As products.cpp describes them.
  QuantizedMaps maps_of(const Case& c) {
    constexpr int kScaleBytes = FORMAT == CodeFormat::affine ? 2 : 1;
    QuantizedMaps maps{};
    maps.x = map_of(given_x, 2, c.rows, k, stride, 8 * c.tiles, 64, true);
    for (size_t i = 0; i < weights.size(); i++) {
      const W& w = *weights[i];
      int box_rows = kQuantizedStreamRows / 2;
      int words = k * BITS / 32;
      maps.weights[i].codes = map_of(
          w.codes.data, 4, w.n, words, words, box_rows, quantized_stream_chunk(BITS) * BITS / 32,
          quantized_stream_swizzles(BITS));
      auto scales = [&](const void* data) {
        return map_of(
            data, kScaleBytes, w.n, k / GROUP, k / GROUP, box_rows, 16 / kScaleBytes, false);
      };
      maps.weights[i].scales = scales(w.scales.data);
      maps.weights[i].biases = scales(w.biases.data);
    }
    return maps;
  }

  // Returns the dot product of a row of x and a row of a weight, and the sum of magnitudes.
  std::pair<double, double> dot(const Case& c, size_t which, int at, int row) {
    const auto& numbers = c.cluster ? weights[which]->rounded : weights[which]->exact;
    double sum = 0;
    double terms = 0;
    for (int i = 0; i < k; i++) {
      double term = double(float(x[size_t(at) * stride + i])) * numbers[size_t(row) * k + i];
      sum += term;
      terms += std::fabs(term);
    }
    return {sum, terms};
  }

  void check(const Case& c, const std::vector<std::vector<T>>& outs, const std::string& name) {
    auto value = [&](int at, size_t which, int row) {
      auto [sum, terms] = dot(c, which, at, row);
      if (adapters) {
        auto [change, more] = adapters->change(x.data + size_t(at) * stride, at, which, row);
        sum += change;
        terms += 8 * more;
      }
      double bias = c.extras ? float(weights[which]->bias[row]) : 0;
      double allowed =
          2e-6 * terms + kUnit<T> * (std::fabs(sum) + std::fabs(sum + bias) * c.extras);
      return std::pair(sum + bias, allowed);
    };
    std::vector<int> ns;
    for (const auto& weight : weights) {
      ns.push_back(weight->n);
    }
    double worst = worst_error<T>(
        kind, c.rows, ns, outs, c.extras ? residual.data : nullptr, rotations, slots, value);
    if (worst > 1.1) {
      failed++;
      std::printf("%s: error %.3g of what is allowed\n", name.c_str(), worst);
    }
  }
};

// With `all`, also gated products, heads and adapters, and more numbers of rows.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
void test(bool all) {
  constexpr const char* kFormats[] = {"affine", "mxfp4", "mxfp8"};
  std::string name = std::string(kFormats[int(FORMAT)]) + " of " + std::to_string(BITS) +
                     " bits, groups of " + std::to_string(GROUP);
  std::mt19937 rng(BITS * 1000 + GROUP);
  auto same = [&](const std::vector<unsigned short>& few, const std::vector<unsigned short>& many,
                  size_t count, const std::string& what) {
    if (!std::equal(few.begin(), few.begin() + count, many.begin())) {
      failed++;
      std::printf("%s: other bits in other company\n", what.c_str());
    }
  };
  // An odd number of groups, of more than one turn for some parts; and of fewer chunks than parts.
  int odd = 1100 / GROUP * GROUP;
  while (odd * BITS % 128 != 0) {
    odd += GROUP;
  }
  {
    Product<T, FORMAT, BITS, GROUP> p(rng, Kind::plain, {37}, odd);
    auto few = p.run({Kind::plain, 5, 1, 0, true}, name + ", 5 rows");
    same(few, p.run({Kind::plain, 13, 2, 0, true}, name + ", 13 rows"), 5 * 37, name);
  }
  {
    // Blocks of a cluster that begin within a span of scales, and two without any columns.
    int k = GROUP == 128 ? 1024 : 512;
    int blocks = GROUP == 128 ? 2 : 4;
    Product<T, FORMAT, BITS, GROUP> p(rng, Kind::plain, {37}, 3 * k);
    auto few = p.run({Kind::plain, 5, 1, 8, true}, name + ", 5 rows, clusters of 8");
    auto more = p.run({Kind::plain, 13, 2, 8, true}, name + ", 13 rows, clusters of 8");
    same(few, more, 5 * 37, name);
    auto many = p.run({Kind::plain, 29, 4, 8, true, true}, name + ", 29 rows together");
    same(more, many, 13 * 37, name + ", together");
    auto ordered = p.run({Kind::plain, 29, 4, 8, true, true, true}, name + ", 29 rows in order");
    same(many, ordered, 29 * 37, name + ", in order");
    if (all) {
      same(more, p.run({Kind::plain, 29, 4, 8, true}, name + ", 29 rows"), 13 * 37, name);
      auto most = p.run({Kind::plain, 61, 8, 8, true}, name + ", 61 rows");
      same(more, most, 13 * 37, name);
      same(
          most, p.run({Kind::plain, 61, 8, 8, true, true}, name + ", 61 rows together"), 61 * 37,
          name + ", 61 rows together");
      same(
          most, p.run({Kind::plain, 61, 8, 8, true, true, true}, name + ", 61 rows in order"),
          61 * 37, name + ", 61 rows in order");
      p.run({Kind::plain, 7, 1, blocks, false}, name + ", other clusters");
      p.run({Kind::plain, 29, 4, 1, false}, name + ", no clusters");
    }
  }
  {
    // There are more turns than stages: each stage is used again.
    constexpr int kMostStages = 4;
    constexpr int kChunk = GROUP > 64 ? 256 : 128;
    static_assert(quantized_rows_shape(FORMAT, BITS, GROUP, 1).stages <= kMostStages);
    int k = (kMostStages * kLinearParts + 1) * kChunk;
    Product<T, FORMAT, BITS, GROUP> p(rng, Kind::plain, {18}, k);
    Product<T, FORMAT, BITS, GROUP> stream(rng, Kind::plain, {18}, 3072);
    static_assert(quantized_stream_shape(FORMAT, BITS, GROUP, 1).stages <= 12);
    auto late = p.run({Kind::plain, 2, 1, 0, false}, name + ", long");
    auto late_stream = stream.run({Kind::plain, 9, 2, 1, false}, name + ", long stream");
    auto late_of_two = stream.run({Kind::plain, 2, 1, 2, false}, name + ", long stream of two");
    auto together = stream.run({Kind::plain, 20, 4, 1, false, true}, name + ", long, together");
    same(late_stream, together, 9 * 18, name + ", long, together");
    Case in_order = {Kind::plain, 20, 4, 1, false, true, true};
    std::string long_in_order = name + ", long, in order";
    same(together, stream.run(in_order, long_in_order), 20 * 18, long_in_order);
    fibers::copies_at_once = true;
    std::string at_once = name + ", long, at once";
    same(p.run({Kind::plain, 2, 1, 0, false}, at_once), late, 2 * 18, at_once);
    same(stream.run({Kind::plain, 9, 2, 1, false}, at_once), late_stream, 9 * 18, at_once);
    same(stream.run({Kind::plain, 2, 1, 2, false}, at_once), late_of_two, 2 * 18, at_once);
    same(stream.run({Kind::plain, 20, 4, 1, false, true}, at_once), together, 20 * 18, at_once);
    same(stream.run(in_order, at_once), together, 20 * 18, at_once);
    fibers::copies_at_once = false;
  }
  {
    Product<T, FORMAT, BITS, GROUP> p(rng, Kind::plain, {132, 20}, BITS % 4 ? 256 : 3 * 128);
    p.run({Kind::plain, 3, 1, 0, false}, name + ", two weights");
    Product<T, FORMAT, BITS, GROUP> q(rng, Kind::plain, {132, 20}, 1024);
    q.run({Kind::plain, 9, 2, 2, false}, name + ", two weights, clusters");
  }
  if (all) {
    for (bool extras : {false, true}) {
      Product<T, FORMAT, BITS, GROUP> p(rng, Kind::gated, {76, 76}, 512);
      p.run({Kind::gated, 7, 1, 0, extras}, name + ", gated");
      same(
          p.run({Kind::gated, 7, 1, 2, extras}, name + ", gated, few"),
          p.run({Kind::gated, 17, 4, 2, extras}, name + ", gated, clusters"), 7 * 76,
          name + ", gated");
      Product<T, FORMAT, BITS, GROUP> h(rng, Kind::heads, {192, 64, 64}, 512);
      h.run({Kind::heads, 7, 1, 0, extras}, name + ", heads");
      h.run({Kind::heads, 17, 4, 2, extras}, name + ", heads, clusters");
      h.run({Kind::heads, 61, 8, 2, extras}, name + ", heads, many");
      h.run({Kind::heads, 61, 8, 2, extras, true}, name + ", heads, together");
      p.run({Kind::gated, 17, 4, 2, extras, true}, name + ", gated, together");
      h.run({Kind::heads, 61, 8, 2, extras, true, true}, name + ", heads, in order");
      Product<T, FORMAT, BITS, GROUP> a(rng, Kind::gated, {72, 72}, 512);
      a.adapters.emplace(rng, 24, 512, std::vector{72, 72}, std::vector{true, true});
      same(
          a.run({Kind::gated, 7, 1, 2, extras}, name + ", gated, adapters"),
          a.run({Kind::gated, 17, 4, 2, extras, true}, name + ", gated, adapters, together"),
          7 * 72, name + ", gated, adapters");
      h.adapters.emplace(rng, 16, 512, std::vector{192, 64, 64}, std::vector{true, false, true});
      h.run({Kind::heads, 61, 8, 2, extras, true, true}, name + ", heads, adapters");
      // All units in the first cluster, since clusters run one after another here.
      Product<T, FORMAT, BITS, GROUP> w(rng, Kind::plain, {136}, 1024);
      w.adapters.emplace(rng, 32, 1024, std::vector{136}, std::vector{true});
      for (bool ordered : {false, true}) {
        Case alone{Kind::plain, 29, 4, 8, extras, true, ordered};
        Case in_blocks = alone;
        in_blocks.in_blocks = true;
        same(
            w.run(alone, name + ", adapters"), w.run(in_blocks, name + ", adapters in blocks"),
            29 * 136, name + ", adapters in blocks");
      }
    }
  }
  {
    // All outputs of an ordered product are those of the unordered one, in another place.
    constexpr int kWide = 128;
    Product<T, FORMAT, BITS, GROUP> p(rng, Kind::gated, {kWide, kWide}, 1024);
    for (size_t i = 0; i < p.x.size; i++) {
      p.x[i] = rounded_to<T>(float(p.x[i]) / 64);  // so that float16 can hold the results
    }
    std::string gates = name + ", gates in order";
    for (const Case& c :
         {Case{Kind::gated, 19, 4, 2, true, true}, Case{Kind::gated, 9, 2, 2, true},
          Case{Kind::gated, 7, 1, 0, true}}) {
      Case in_order = c;
      in_order.ordered = true;
      same(p.run(c, gates), p.run(in_order, gates), c.rows * kWide, gates);
    }
  }
}

// Rows that are divided among blocks have the bits that they have in one block.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP>
void test_many_rows() {
  constexpr int kRows = 130;
  std::mt19937 rng(BITS);
  const std::vector<Case> forms{
      {Kind::plain, kRows, 8, 1, true},
      {Kind::plain, kRows, 8, 1, true, true},
      {Kind::plain, kRows, 16, 1, true, true},
      {Kind::plain, kRows, 16, 1, true, true, true}};
  auto test = [&](Kind kind, const std::vector<int>& ns, int k, int cluster, const char* name) {
    Product<T, FORMAT, BITS, GROUP> p(rng, kind, ns, k);
    for (size_t i = 0; i < p.x.size; i++) {
      p.x[i] = rounded_to<T>(float(p.x[i]) / 64);  // so that float16 can hold the results
    }
    auto few = p.run({kind, 61, 8, cluster, true}, name);
    for (Case c : forms) {
      c.kind = kind;
      c.cluster = cluster;
      std::string of = std::string(name) + ", tiles " + std::to_string(c.tiles) +
                       (c.wgmma ? ", together" : "") + (c.ordered ? ", in order" : "");
      auto many = p.run(c, of);
      // Slots of heads are those of another row.
      size_t outputs = size_t(61) * ns[0];
      if (!std::equal(few.begin(), few.begin() + outputs, many.begin())) {
        failed++;
        std::printf("%s: other bits in other company\n", of.c_str());
      }
    }
  };
  test(Kind::plain, {37}, 1536, 8, "plain");
  test(Kind::gated, {128, 128}, 512, 2, "gated");
  test(Kind::heads, {64, 64, 64}, 1536, 1, "heads");  // more turns than stages
}

}  // namespace

int main() {
#ifdef MANY_ROWS
  test_many_rows<ELEMENT, CodeFormat::affine, CODE_BITS, 64>();
#else
  test<ELEMENT, CodeFormat::CODE_FORMAT, CODE_BITS, CODE_GROUP>(CODE_BITS == 4 && CODE_GROUP == 64);
#endif
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
