// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The adapters of lora.cu (csrc/cuda/kernels) on the CPU (fibers.h): those that read or write rows
// in the order of codes against those that do so in place, and these against float64. Prints a line
// for each failure, and how many results were compared.

#include <random>
#include <string>

#include "portable_kernels.h"

#include "lora.cu"

namespace {

using namespace mlx_paged::cuda;

// Two targets of five rows, of which the fourth has no adapter.
template <typename T>
struct Adapters {
  static constexpr int kRows = 5;
  static constexpr int kRank = 12;
  static constexpr int kSize = 2304;  // two parts
  static constexpr int kParts = 2;
  static constexpr int kHidden = 2 * kRows * kParts * kRank;
  static constexpr int kNumAdapters = 2;

  using Matrix = std::vector<T>;
  std::mt19937 rng{7};
  Matrix x = random(kRows, kSize);
  Matrix bases[2] = {random(kRows, kSize), random(kRows, kSize)};
  Matrix a[2] = {random(kNumAdapters * kRank, kSize), random(kNumAdapters * kRank, kSize)};
  Matrix b[2] = {random(kNumAdapters * kRank, kSize), random(kNumAdapters * kRank, kSize)};
  const int adapters[kRows] = {1, 0, 1, -1, 0};
  const paged::LoraParams params{kRows, kNumAdapters, kRank, kSize, kParts,
                                 kSize, kSize,        0,     true,  false};

  Matrix random(int rows, int columns) {
    std::normal_distribution<float> normal;
    Matrix values(size_t(rows) * columns);
    for (T& value : values) {
      value = T(normal(rng) / std::sqrt(float(kSize)));
    }
    return values;
  }

  std::vector<float> down(const std::string& name, const Matrix& rows) {
    auto kernel = kernel_named<void (*)(
        const T*, const int*, const T*, const T*, const T*, float*, const paged::LoraParams)>(name);
    std::vector<float> hidden(kHidden, NAN);
    for (grid_z = 0; grid_z < 2; grid_z++) {
      int groups = kParts * ((kRank + paged::LORA_COLUMNS - 1) / paged::LORA_COLUMNS);
      fibers::run_grid(groups, 2, paged::LORA_DOWN_THREADS, 64, 1, [&] {
        kernel(rows.data(), adapters, a[0].data(), a[1].data(), a[1].data(), hidden.data(), params);
      });
    }
    return hidden;
  }

  Matrix up(const std::string& name, const std::vector<float>& hidden) {
    auto kernel = kernel_named<void (*)(
        const T*, const T*, const T*, const float*, const int*, const T*, const T*, const T*,
        const T*, T*, T*, T*, const paged::LoraParams)>(name);
    Matrix out(kRows * kSize, T(NAN));
    grid_z = 0;
    int groups = kSize / 8 / paged::LORA_UP_THREADS + 1;
    fibers::run_grid(groups, 2, paged::LORA_UP_THREADS, 64, 1, [&] {
      kernel(
          bases[0].data(), bases[1].data(), bases[1].data(), hidden.data(), adapters, b[0].data(),
          b[1].data(), b[1].data(), nullptr, out.data(), nullptr, nullptr, params);
    });
    return out;
  }

  double expected(int row, int column) const {
    double values[2];
    for (int t = 0; t < 2; t++) {
      values[t] = float(bases[t][row * kSize + column]);
      for (int r = 0; adapters[row] >= 0 && r < kRank; r++) {
        size_t of_adapter = (size_t(adapters[row]) * kRank + r) * kSize;
        double sum = 0;
        for (int i = 0; i < kSize; i++) {
          sum += double(float(x[row * kSize + i])) * float(a[t][of_adapter + i]);
        }
        values[t] += sum * float(b[t][of_adapter + column]);
      }
    }
    return values[1] * values[0] / (1 + std::exp(-values[0]));
  }

  void check(const std::string& dtype) {
    auto hidden = down("lora_down_" + dtype, x);
    auto out = up("lora_up_" + dtype, hidden);
    for (int row = 0; row < kRows; row++) {
      for (int column = 0; column < kSize; column += 97) {
        double right = expected(row, column);
        double error = std::fabs(float(out[row * kSize + column]) - right);
        compared++;
        if (!(error <= 0x1p-6 * std::fabs(right) + 1e-6)) {
          failed++;
          std::printf("%s: %g from %g\n", dtype.c_str(), error, right);
        }
      }
    }
    for (int run : {32, 64}) {
      for (int apart : {1, 2, 4}) {
        auto place = [&](int i) {
          return i / kSize * kSize + ordered_column({run, apart}, i % kSize);
        };
        std::string order = dtype + "_ordered_" + std::to_string(run) + "_" + std::to_string(apart);
        Matrix ordered_x(x.size());
        for (int i = 0; i < int(x.size()); i++) {
          ordered_x[place(i)] = x[i];
        }
        auto same = down("lora_down_" + order, ordered_x);
        auto ordered = up("lora_up_" + order, hidden);
        bool is_same = std::memcmp(same.data(), hidden.data(), kHidden * sizeof(float)) == 0;
        for (int i = 0; i < int(out.size()); i++) {
          is_same = is_same && std::memcmp(&ordered[place(i)], &out[i], sizeof(T)) == 0;
        }
        compared += kHidden + int(out.size());
        if (!is_same) {
          failed++;
          std::printf("%s: other bits\n", order.c_str());
        }
      }
    }
  }
};

}  // namespace

int main() {
  std::make_unique<Adapters<half>>()->check("float16");
  std::make_unique<Adapters<__nv_bfloat16>>()->check("bfloat16");
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
