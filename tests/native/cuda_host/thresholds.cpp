// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// thresholds.cu (csrc/cuda/kernels) on the CPU (fibers.h) against float64 and a sort. Prints a line
// for each failure, and how many rows were compared.

#include <random>
#include <string>

#include "portable_kernels.h"

#include "thresholds.cu"

namespace {

struct Settings {
  float temperature;
  float floor;
  int top_k;
  float top_p;
};

const Settings kSettings[] = {
    {1.0f, -INFINITY, 0, 0.95f},  {0.7f, -INFINITY, 20, 1.0f},  {0.7f, -INFINITY, 20, 0.95f},
    {1.5f, -3.0f, 700, 0.5f},     {1.0f, -INFINITY, 1, 0.9f},   {1.0f, -0.5f, 0, 1.0f},
    {1.0f, -INFINITY, 0, 1e-30f}, {1.0f, -INFINITY, 900, 1.0f},
};

// The smallest of `scaled` to keep.
float expected(std::vector<float> scaled, const Settings& s) {
  std::sort(scaled.begin(), scaled.end(), std::greater<>());
  size_t size = scaled.size();
  float least = s.floor;
  if (s.top_k > 0 && s.top_k < int(size)) {
    least = std::max(least, scaled[s.top_k - 1]);
  }
  scaled.erase(
      std::find_if(scaled.begin(), scaled.end(), [&](float x) { return x < least; }), scaled.end());
  if (s.top_p >= 1) {
    return least;
  }
  double total = 0;
  for (float x : scaled) {
    total += std::exp(double(x));
  }
  double above = 0;
  for (size_t i = 0; i < scaled.size(); i++) {
    if (i == 0 || scaled[i] < scaled[i - 1]) {
      if (above >= s.top_p * total) {
        break;
      }
      least = scaled[i];
    }
    above += std::exp(double(scaled[i]));
  }
  return least;
}

template <typename T>
void check(const char* dtype, int vocab_size) {
  auto kernel = kernel_named<void (*)(
      const T*, const float*, const float*, const float*, const int*, const float*, float*,
      const paged::ThresholdParams)>(std::string("sampling_thresholds_") + dtype);
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (const Settings& s : kSettings) {
    // A row of its own, whose first logit is aligned.
    auto logits = std::make_unique<uint4[]>(vocab_size * sizeof(T) / 16 + 1);
    T* row = reinterpret_cast<T*>(logits.get());
    float largest = -INFINITY;
    for (int i = 0; i < vocab_size; i++) {
      row[i] = i % 5 == 0 ? T(-INFINITY) : T(2.5f * normal(rng));
      largest = std::max(largest, float(row[i]));
    }
    std::vector<float> scaled;
    for (int i = 0; i < vocab_size; i++) {
      scaled.push_back((float(row[i]) - largest) / s.temperature);
    }
    float found = NAN;
    fibers::run_grid(1, 1, paged::THRESHOLD_THREADS, paged::threshold_scratch(), 1, [&, row] {
      kernel(row, &largest, &s.temperature, &s.floor, &s.top_k, &s.top_p, &found, {vocab_size});
    });
    compared++;
    float wanted = expected(scaled, s);
    if (found != wanted) {
      failed++;
      std::printf(
          "%s, top_k %d, top_p %g: %.9g in place of %.9g\n", dtype, s.top_k, s.top_p, found,
          wanted);
    }
  }
}

}  // namespace

int main() {
  check<float>("float32", 1000);
  check<half>("float16", 999);
  check<__nv_bfloat16>("bfloat16", 9000);
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
