// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernel of linear_stream.h (csrc/cuda/kernels) on the CPU (fibers.h), against float64. Prints
// a line for each failure, and how many results were compared.

#include <optional>

#include "fibers.h"

#include "kernels/linear_stream.h"
#include "operands.h"

using namespace mlx_paged::cuda;

namespace {

constexpr int kMaxRows = 64;

template <typename T>
struct Product {
  Kind kind;
  std::vector<int> ns;
  int k;
  int stride;
  bool extras;  // biases, and a residual
  CodeOrder out_order{};
  Aligned<T> x;
  Aligned<T> residual;
  std::vector<std::unique_ptr<Aligned<T>>> weights;
  std::vector<std::unique_ptr<Aligned<T>>> biases;
  std::vector<float> rotations;
  std::vector<int> slots;
  std::optional<TestAdapters<T>> adapters = {};

  Product(std::mt19937& rng, Kind kind, std::vector<int> ns, int k, bool extras)
      : kind(kind),
        ns(ns),
        k(k),
        stride(k + 8),
        extras(extras),
        x(size_t(kMaxRows) * (k + 8)),
        residual(size_t(kMaxRows) * ns[0]) {
    std::normal_distribution<double> normal;
    auto fill = [&](Aligned<T>& a) {
      for (size_t i = 0; i < a.size; i++) {
        a[i] = rounded_to<T>(normal(rng));
      }
    };
    fill(x);
    fill(residual);
    for (int n : ns) {
      weights.push_back(std::make_unique<Aligned<T>>(size_t(n) * k));
      biases.push_back(std::make_unique<Aligned<T>>(n));
      fill(*weights.back());
      fill(*biases.back());
    }
    fill_heads(rng, rotations, slots);
  }

  // All outputs' bits, by weight. What no row of x has written is NaN.
  std::vector<std::vector<unsigned short>> run(
      int rows, int tiles, int cluster, bool wgmma = false, bool in_blocks = false) {
    LinearParams p{};
    p.num_rows = rows;
    p.k = k;
    p.x_stride = stride;
    p.num_weights = int(ns.size());
    p.is_gated = kind == Kind::gated;
    p.has_residual = kind != Kind::heads && extras;
    p.head_dim = kind == Kind::heads ? kHead : 0;
    p.out_order = out_order;
    if (adapters) {
      p.adapters = adapters->params(rows, cluster, in_blocks);
    }
    auto a = [&](int target) { return adapters ? adapters->first_matrix(target) : nullptr; };
    auto b = [&](size_t i) {
      return adapters ? adapters->b[std::min(i, ns.size() - 1)]->data : nullptr;
    };
    auto map = [&](const T* data, int rows, int stride, int box_rows) {
      return map_of(data, 2, rows, k, stride, box_rows, kLinearChunk);
    };
    StreamMaps maps{};
    maps.x = map(x.data, rows, stride, 8 * tiles);
    std::vector<std::vector<T>> outs;
    int blocks = 0;
    for (size_t i = 0; i < ns.size(); i++) {
      p.n[i] = ns[i];
      p.has_bias[i] = extras;
      maps.weights[i] = map(weights[i]->data, ns[i], k, kStreamRows / 2);
      outs.emplace_back(size_t(kMaxRows) * ns[i], rounded_to<T>(NAN));
      int tile = kStreamRows / (p.is_gated ? 2 : 1);
      blocks += p.is_gated && i > 0 ? 0 : (ns[i] + tile - 1) / tile;
    }
    auto kernel = wgmma        ? linear_stream_entry<T, kWgmmaTiles, true>
                  : tiles == 1 ? linear_stream_entry<T, 1, false>
                  : tiles == 2 ? linear_stream_entry<T, 2, false>
                  : tiles == 4 ? linear_stream_entry<T, 4, false>
                               : linear_stream_entry<T, 8, false>;
    size_t i[3];
    for (size_t j = 0; j < 3; j++) {
      i[j] = std::min(j, ns.size() - 1);
    }
    int scratch = wgmma ? wgmma_scratch(tiles) : stream_scratch(tiles);
    scratch += in_blocks ? adapter_sum_bytes(kStreamRows / kLinearRows) : 0;
    const int grid = p.adapters.num_blocks + blocks * cluster;
    fibers::run_grid(grid, 1, kStreamThreads, scratch, cluster, [&] {
      kernel(
          x.data, residual.data, weights[i[0]]->data, biases[i[0]]->data, outs[i[0]].data(),
          weights[i[1]]->data, biases[i[1]]->data, outs[i[1]].data(), weights[i[2]]->data,
          biases[i[2]]->data, outs[i[2]].data(), rotations.data(), slots.data(),
          adapters ? adapters->hidden.data() : nullptr,
          adapters ? adapters->adapters.data() : nullptr, adapters ? &adapters->finished : nullptr,
          a(0), a(1), a(2), b(0), b(1), b(2), p, maps);
    });
    if (adapters && adapters->finished != 0) {
      failed++;
      std::printf("a count is left\n");
    }
    if (out_order.run > 0) {
      move_back(outs[0], ns[0], out_order);
    }
    check(rows, outs);
    std::vector<std::vector<unsigned short>> bits;
    for (auto& out : outs) {
      auto& words = bits.emplace_back(out.size());
      std::memcpy(words.data(), out.data(), 2 * out.size());
    }
    return bits;
  }

  // A product with a row of a weight, and how far a result may be from it.
  std::pair<double, double> value(int at, size_t which, int row) {
    double sum = 0;
    double terms = 0;
    for (int i = 0; i < k; i++) {
      double term =
          double(float(x[size_t(at) * stride + i])) * float((*weights[which])[size_t(row) * k + i]);
      sum += term;
      terms += std::fabs(term);
    }
    if (adapters) {
      auto [change, more] = adapters->change(x.data + size_t(at) * stride, at, which, row);
      sum += change;
      terms += kIsHalf<T> ? more : 8 * more;
    }
    double bias = extras ? float((*biases[which])[row]) : 0;
    double allowed = 2e-6 * terms + kUnit<T> * (std::fabs(sum) + extras * std::fabs(sum + bias));
    return {sum + bias, allowed};
  }

  void check(int rows, const std::vector<std::vector<T>>& outs) {
    double worst = worst_error<T>(
        kind, rows, ns, outs, extras ? residual.data : nullptr, rotations, slots,
        [&](int at, size_t which, int row) { return value(at, which, row); });
    if (worst > 1.1) {
      failed++;
      std::printf("%d rows, %d x %d: error %.3g of what is allowed\n", rows, ns[0], k, worst);
    }
  }
};

template <typename T>
void test() {
  std::mt19937 rng(7);
  using Bits = std::vector<unsigned short>;
  auto same = [&](const Bits& few, const Bits& many, size_t count, const char* what) {
    if (!std::equal(few.begin(), few.begin() + count, many.begin())) {
      failed++;
      std::printf("other bits: %s\n", what);
    }
  };
  // Chunks: fewer than parts; not a multiple of them, the last one half full; more than stages.
  for (int k : {96, 1056, 1600}) {
    Product<T> p(rng, Kind::plain, {37}, k, k == 1056);
    auto alone = p.run(1, 1, 1)[0];
    for (int cluster : {1, 2, 4, 8}) {
      same(alone, p.run(5, 1, cluster)[0], 37, "in clusters");
    }
    auto more = p.run(13, 2, 4)[0];
    same(alone, more, 37, "13 rows");
    same(more, p.run(29, 4, 2)[0], 13 * 37, "29 rows");
    same(more, p.run(61, 8, 1)[0], 13 * 37, "61 rows");
    for (int cluster : {1, 2, 8}) {
      same(more, p.run(61, 8, cluster, true)[0], 13 * 37, "61 rows by four warps");
    }
    fibers::copies_at_once = true;
    same(more, p.run(13, 2, 4)[0], 13 * 37, "copied at once");
    same(more, p.run(13, 2, 1)[0], 13 * 37, "copied at once by one block");
    fibers::copies_at_once = false;
  }
  {
    // A part has more chunks than there are stages.
    Product<T> p(rng, Kind::plain, {20}, 8 * 8 * kLinearChunk, false);
    static_assert(stream_stages(8) < 8);
    auto alone = p.run(2, 1, 8)[0];
    for (bool at_once : {false, true}) {
      fibers::copies_at_once = at_once;
      same(alone, p.run(33, 8, 1, true)[0], 2 * 20, "long parts");
    }
    fibers::copies_at_once = false;
  }
  {
    Product<T> p(rng, Kind::plain, {132, 20, 64}, 256, true);
    auto together = p.run(9, 2, 1);
    p.ns = {132};
    same(together[0], p.run(9, 2, 4)[0], 9 * 132, "beside other weights");
  }
  for (bool extras : {false, true}) {
    Product<T> p(rng, Kind::gated, {76, 76}, 256, extras);
    same(p.run(7, 1, 2)[0], p.run(33, 8, 1)[0], 7 * 76, "gated");
    Product<T> h(rng, Kind::heads, {192, 64, 64}, 256, extras);
    same(h.run(7, 1, 2)[0], h.run(33, 8, 1)[0], 7 * 192, "heads");
    same(p.run(7, 1, 2)[0], p.run(33, 8, 1, true)[0], 7 * 76, "gated, by four warps");
    same(h.run(7, 1, 2)[0], h.run(33, 8, 1, true)[0], 7 * 192, "heads, by four warps");
  }
  {
    Product<T> p(rng, Kind::gated, {128, 128}, 256, true);
    auto in_place = p.run(33, 8, 1)[0];
    p.out_order = {64, 4};
    same(in_place, p.run(33, 8, 1)[0], 33 * 128, "gated, in order");
    same(in_place, p.run(33, 8, 1, true)[0], 33 * 128, "gated, in order, by four warps");
  }
}

// Products with adapters: right, in any company, and without one as if there were none.
template <typename T>
void test_adapters() {
  std::mt19937 rng(9);
  auto same = [&](const auto& few, const auto& many, size_t count, const char* what) {
    if (!std::equal(few.begin(), few.begin() + count, many.begin())) {
      failed++;
      std::printf("other bits: %s\n", what);
    }
  };
  auto check = [&](Kind kind, std::vector<int> ns, std::vector<bool> changed, int rank, int k) {
    Product<T> p(rng, kind, ns, k, true);
    auto plain = p.run(45, 8, 1);
    p.adapters.emplace(rng, rank, k, ns, changed);
    p.run(1, 8, 8);  // more extra blocks than units
    auto few = p.run(7, 1, 2);
    auto many = p.run(45, 8, 1);
    auto wgmma = p.run(45, 8, 8, true);
    auto in_blocks = p.run(29, 4, 8, false, true);
    for (size_t w = 0; w < (kind == Kind::gated ? 1 : ns.size()); w++) {
      same(many[w], wgmma[w], 45 * ns[w], "adapters, by four warps");
      if (kind != Kind::heads || w == 0) {
        same(in_blocks[w], many[w], 29 * ns[w], "adapters, in blocks");
      }
      for (int at = 0; at < 45; at++) {
        int to = kind == Kind::heads && w > 0 ? p.slots[at] : at;
        if (to < 0) {
          continue;
        }
        bool is_changed =
            p.adapters->changes(at, w) || (kind == Kind::gated && p.adapters->changes(at, 1));
        auto of = [&](const auto& out) { return out[w].begin() + size_t(to) * ns[w]; };
        if (at < 7 && !std::equal(of(few), of(few) + ns[w], of(many))) {
          failed++;
          std::printf("other bits: adapters in other company\n");
        }
        if (is_changed == std::equal(of(plain), of(plain) + ns[w], of(many))) {
          failed++;
          std::printf("row %d has the bits of other adapters\n", at);
        }
      }
    }
  };
  check(Kind::plain, {136}, {true}, 24, 256);
  check(Kind::plain, {64, 40, 72}, {true, false, true}, 8, 512);
  check(Kind::gated, {72, 72}, {true, true}, 16, 512);
  check(Kind::heads, {192, 64, 64}, {true, false, true}, 40, 512);
  check(Kind::plain, {64}, {true}, 8, 4352);  // more steps than a warp loads at once
}

}  // namespace

int main() {
  if constexpr (!kIsHalf<ELEMENT>) {
    test_adapters<ELEMENT>();
  }
  test<ELEMENT>();
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
