// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Helpers shared by the primitives' eval_cpu.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "parallel_for.h"

namespace mlx_paged::cpu {

// Minimum bytes per task of for_ranges: for less, one thread finishes before another wakes up.
constexpr int64_t kBytesPerTask = 1 << 16;

template <typename Body>
void for_ranges(int64_t count, int64_t bytes_each, const Body& body) {
  int64_t piece = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(bytes_each, 1));
  int num_tasks = int((count + piece - 1) / piece);
  parallel_for(num_tasks, [&](int task, int) {
    body(task * piece, std::min<int64_t>(count, (task + 1) * piece));
  });
}

// Queues work that writes `out`. Zeros `out` if the work fails: later operations run anyway and may
// use its numbers as indices.
template <typename Work>
void dispatch(
    mlx::core::cpu::CommandEncoder& encoder, std::vector<mlx::core::array>& out, Work work) {
  std::vector<std::pair<char*, size_t>> written;
  for (auto& a : out) {
    written.emplace_back(a.data<char>(), a.nbytes());
  }
  encoder.dispatch([work = std::move(work), written = std::move(written)]() mutable {
    try {
      work();
    } catch (...) {
      for (auto [data, num_bytes] : written) {
        std::memset(data, 0, num_bytes);
      }
      throw;
    }
  });
}

// Queues a vectorized kernel over [0, count), which processes rows or elements [begin, end) per
// call.
template <typename Args>
void dispatch_ranges(
    mlx::core::cpu::CommandEncoder& encoder, std::vector<mlx::core::array>& out,
    void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count,
    int64_t bytes_each) {
  dispatch(encoder, out, [=] {
    for_ranges(count, bytes_each, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
}

}  // namespace mlx_paged::cpu
