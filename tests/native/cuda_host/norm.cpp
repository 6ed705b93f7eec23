// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The norms of layer.cu (csrc/cuda/kernels) on the CPU (fibers.h): those that write rows in the
// order of codes against the one that writes them in place, and that against float64. Prints a line
// for each failure, and how many results were compared.

#include <random>
#include <string>

#include "portable_kernels.h"

#include "layer.cu"

namespace {

using namespace mlx_paged::cuda;

template <typename T>
struct Norm {
  static constexpr int kRows = 3;
  static constexpr int kThreads = 96;  // of which each has a chunk or two
  static constexpr int kSize = 1024;
  static_assert(kSize / 8 > kThreads && kSize / 8 <= 2 * kThreads);

  alignas(16) T x[kRows * kSize];
  alignas(16) T residual[kRows * kSize];
  alignas(16) T weight[kSize];
  alignas(16) T sum[kRows * kSize];
  alignas(16) T out[kRows * kSize];

  Norm() {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    for (T* array : {x, residual}) {
      for (int i = 0; i < kRows * kSize; i++) {
        array[i] = T(normal(rng));
      }
    }
    for (T& w : weight) {
      w = T(normal(rng));
    }
  }

  std::vector<T> run(const std::string& name, bool has_residual) {
    auto kernel =
        kernel_named<void (*)(const T*, const T*, const T*, T*, T*, const paged::NormParams)>(name);
    std::fill(std::begin(out), std::end(out), T(NAN));
    fibers::run_grid(kRows, 1, kThreads, 64, 1, [&] {
      kernel(x, residual, weight, sum, out, {kSize / 8, has_residual, 1e-5f});
    });
    return {std::begin(out), std::end(out)};
  }

  void check(const char* dtype, bool has_residual) {
    std::string name = std::string("add_rms_norm_") + dtype;
    auto in_place = run(name, has_residual);
    for (int row = 0; row < kRows; row++) {
      double squares = 0;
      auto value = [&](int i) {
        size_t at = size_t(row) * kSize + i;
        return double(float(has_residual ? T(float(x[at]) + float(residual[at])) : x[at]));
      };
      for (int i = 0; i < kSize; i++) {
        squares += value(i) * value(i);
      }
      double factor = 1 / std::sqrt(squares / kSize + 1e-5);
      for (int i = 0; i < kSize; i++) {
        double expected = value(i) * factor * float(weight[i]);
        double error = std::fabs(float(in_place[size_t(row) * kSize + i]) - expected);
        compared++;
        if (!(error <= 0x1.01p-8 * std::fabs(expected) + 1e-6)) {
          failed++;
          std::printf("%s: %g in place of %g\n", name.c_str(), error, expected);
        }
      }
    }
    for (int run_of : {32, 64}) {
      for (int apart : {1, 2, 4}) {
        auto of_order = name + "_ordered_" + std::to_string(run_of) + "_" + std::to_string(apart);
        auto found = run(of_order, has_residual);
        for (int i = 0; i < kRows * kSize; i++) {
          int to = i / kSize * kSize + mlx_paged::cuda::ordered_column({run_of, apart}, i % kSize);
          compared++;
          if (std::memcmp(&found[to], &in_place[i], sizeof(T)) != 0) {
            failed++;
            std::printf("%s: other bits of column %d\n", of_order.c_str(), i);
            return;
          }
        }
      }
    }
  }
};

}  // namespace

int main() {
  for (bool has_residual : {false, true}) {
    std::make_unique<Norm<half>>()->check("float16", has_residual);
    std::make_unique<Norm<__nv_bfloat16>>()->check("bfloat16", has_residual);
  }
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
