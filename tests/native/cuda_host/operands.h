// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Shared by the programs that run products on the CPU.

#pragma once

#include <map>
#include <random>
#include <string>
#include <tuple>

#include "code_order.h"
#include "fibers.h"

namespace {

int compared = 0;
int failed = 0;

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, __half>;

template <typename T>
T rounded_to(double v) {
  if constexpr (kIsHalf<T>) {
    return __float2half(float(v));
  } else {
    return __float2bfloat16(float(v));
  }
}

template <typename T>
struct Aligned {
  explicit Aligned(size_t size)
      : data(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64))),
        size(size) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  T& operator[](size_t i) { return data[i]; }
  T* data;
  size_t size;
};

// A matrix as the copy engine is told of it.
CUtensorMap map_of(
    const void* data, int item_bytes, int rows, int columns, int stride, int box_rows,
    int box_columns, bool is_swizzled = true) {
  return {
      static_cast<const unsigned char*>(data),
      item_bytes,
      rows,
      columns,
      stride,
      box_rows,
      box_columns,
      is_swizzled};
}

enum class Kind { plain, gated, heads };

constexpr int kHead = 64;  // dims of a head
#ifdef MANY_ROWS
constexpr int kMostRows = 136;  // of x, more than any block has
#else
constexpr int kMostRows = 64;
#endif

template <typename T>
constexpr double kUnit = kIsHalf<T> ? 0x1p-11 : 0x1p-8;  // of rounding

// Puts rows of `n` results where they would be without an order.
template <typename T>
void move_back(std::vector<T>& out, int n, mlx_paged::cuda::CodeOrder order) {
  std::vector<T> moved = out;
  for (size_t i = 0; i < out.size(); i++) {
    out[i] = moved[i / n * n + mlx_paged::cuda::ordered_column(order, int(i % n))];
  }
}

// Compares what a launch wrote with what it had to: the largest error as a share of what is
// allowed. `value(at, w, row)`: of row `at` of x and row `row` of weight w the product and how far
// from it a result may be. `residual`: null for none.
template <typename T, typename Value>
double worst_error(
    Kind kind, int rows, const std::vector<int>& ns, const std::vector<std::vector<T>>& outs,
    const T* residual, const std::vector<float>& rotations, const std::vector<int>& slots,
    Value value) {
  double worst = 0;
  for (int at = 0; at < rows; at++) {
    for (size_t w = 0; w < (kind == Kind::gated ? 1 : ns.size()); w++) {
      for (int row = 0; row < ns[w]; row++) {
        auto [v, allowed] = value(at, w, row);
        int to = at;
        if (kind == Kind::gated) {
          auto [up, up_allowed] = value(at, 1, row);
          double silu = v / (1 + std::exp(-v));
          allowed = std::fabs(up) * 1.2 * allowed + std::fabs(silu) * up_allowed +
                    kUnit<T> * std::fabs(silu * up) * 2 + allowed * up_allowed;
          v = silu * up;
        }
        if (kind == Kind::heads) {
          to = w > 0 ? slots[at] : at;
          if (to < 0) {
            continue;
          }
          if (w < 2) {
            constexpr int kHalf = kHead / 2;
            int i = row % kHead;
            auto [partner, more] = value(at, w, i < kHalf ? row + kHalf : row - kHalf);
            double cosine = rotations[at * kHead + i % kHalf];
            double sine = rotations[at * kHead + kHalf + i % kHalf];
            v = i < kHalf ? v * cosine - partner * sine : v * cosine + partner * sine;
            allowed += more + kUnit<T> * std::fabs(v);
          }
        } else if (residual) {
          v += float(residual[size_t(at) * ns[w] + row]);
          allowed += kUnit<T> * std::fabs(v);
        }
        compared++;
        double error = std::fabs(float(outs[w][size_t(to) * ns[w] + row]) - v) / (allowed + 1e-30);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
    }
  }
  return worst;
}

// Low-rank adapters of a product's weights. Every fourth row has no adapter: its index is -1 or out
// of range. Only the weights in `changed` are adapted.
template <typename T>
struct TestAdapters {
  static constexpr int kCount = 11;
  int rank;
  int k;
  std::vector<int> ns;
  std::vector<bool> changed;
  std::vector<float> hidden;
  std::vector<int> adapters;
  unsigned int finished = 0;
  std::vector<std::unique_ptr<Aligned<T>>> a;  // [kCount, rank, k] for each weight
  std::vector<std::unique_ptr<Aligned<T>>> b;  // [kCount, rank, n]
  struct Projection {
    double sum;
    double terms;  // the sum of the terms' magnitudes
  };
  mutable std::map<std::tuple<int, size_t, int>, Projection> projections;  // of row, weight, rank

  TestAdapters(std::mt19937& rng, int rank, int k, std::vector<int> ns, std::vector<bool> changed)
      : rank(rank), k(k), ns(ns), changed(changed) {
    std::normal_distribution<double> normal;
    for (int i = 0; i < kMostRows; i++) {
      adapters.push_back(i % 4 == 3 ? i % 8 == 3 ? -1 : kCount : (i / 3) % kCount);
    }
    auto random = [&](int n, double scale) {
      auto made = std::make_unique<Aligned<T>>(size_t(kCount) * rank * n);
      for (size_t i = 0; i < made->size; i++) {
        (*made)[i] = rounded_to<T>(normal(rng) * scale);
      }
      return made;
    };
    for (int n : ns) {
      a.push_back(random(k, 1 / std::sqrt(double(k))));
      b.push_back(random(n, 1));
    }
  }

  int target(size_t which) const {
    return changed[which] ? int(std::count(changed.begin(), changed.begin() + which, true)) : -1;
  }

  // The first matrix of a target; the last target's if there are fewer.
  const T* first_matrix(int wanted) const {
    const T* found = nullptr;
    for (size_t i = 0; i < ns.size(); i++) {
      found = changed[i] && target(i) <= wanted ? a[i]->data : found;
    }
    return found;
  }

  // Params of a launch, whose results it will not have written yet. `in_blocks`: its own blocks
  // compute the units, those of the first cluster alone, since clusters run one after another here.
  mlx_paged::cuda::LinearAdapters params(int rows, int cluster, bool in_blocks = false) {
    using namespace mlx_paged::cuda;
    int targets = int(std::count(changed.begin(), changed.end(), true));
    int rank_tiles = (rank + kAdapterRanks - 1) / kAdapterRanks;
    int units = adapter_parts(k) * rank_tiles * targets * adapter_tiles(rows, kCount);
    int workers = in_blocks ? std::min(units, cluster) : 3 * cluster;
    LinearAdapters params{kCount,      rank, targets, units, workers, in_blocks ? 0 : 3 * cluster,
                          {-1, -1, -1}};
    for (size_t i = 0; i < ns.size(); i++) {
      params.target[i] = target(i);
    }
    hidden.assign(size_t(targets) * rows * adapter_parts(k) * rank, NAN);
    return params;
  }

  bool changes(int at, size_t which) const {
    return changed[which] && adapters[at] >= 0 && adapters[at] < kCount;
  }

  // The change of a result, and the sum of its terms' magnitudes. x: row `at`.
  std::pair<double, double> change(const T* x, int at, size_t which, int row) const {
    double sum = 0;
    double terms = 0;
    for (int r = 0; changes(at, which) && r < rank; r++) {
      size_t rank_of_adapter = size_t(adapters[at]) * rank + r;
      auto [found, is_new] = projections.try_emplace({at, which, r});
      auto& projection = found->second;
      for (int i = 0; is_new && i < k; i++) {
        double term = double(float(x[i])) * float((*a[which])[rank_of_adapter * k + i]);
        projection.sum += term;
        projection.terms += std::fabs(term);
      }
      double factor = float((*b[which])[rank_of_adapter * ns[which] + row]);
      sum += projection.sum * factor;
      terms += projection.terms * std::fabs(factor);
    }
    return {sum, terms};
  }
};

// Slots of kMostRows rows, some of them none, and cosines and sines for them.
void fill_heads(std::mt19937& rng, std::vector<float>& rotations, std::vector<int>& slots) {
  std::normal_distribution<double> normal;
  slots.resize(kMostRows);
  rotations.resize(kMostRows * kHead);
  for (int i = 0; i < kMostRows; i++) {
    slots[i] = i % 5 == 3 ? -1 : (i * 7) % kMostRows;
    for (int j = 0; j < kHead / 2; j++) {
      double angle = normal(rng);
      rotations[i * kHead + j] = float(std::cos(angle));
      rotations[i * kHead + kHead / 2 + j] = float(std::sin(angle));
    }
  }
}

}  // namespace
