// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the primitives' eval_cpu have in common.

#pragma once

#include <algorithm>
#include <cstdint>

#include "data_type.h"
#include "mlx/dtype.h"
#include "parallel_for.h"

namespace mlx_paged::cpu {

inline DataType data_type(mlx::core::Dtype dtype) {
  if (dtype == mlx::core::float32) {
    return DataType::float32;
  }
  return dtype == mlx::core::float16 ? DataType::float16 : DataType::bfloat16;
}

// Runs body(begin, end) over [0, count), in pieces of about this many bytes: below them one thread
// is done before another has woken up.
constexpr int64_t kBytesPerTask = 1 << 16;

template <typename Body>
void for_ranges(int64_t count, int64_t bytes_each, const Body& body) {
  int64_t piece = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(bytes_each, 1));
  int num_tasks = int((count + piece - 1) / piece);
  parallel_for(num_tasks, [&](int task, int) {
    body(task * piece, std::min<int64_t>(count, (task + 1) * piece));
  });
}

}  // namespace mlx_paged::cpu
