// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The subset of fmt that MLX's CUDA headers use to format error messages. fmt itself is in no
// package that pip can fetch. Messages keep their placeholders instead of numbers.

#pragma once

#include <string>

namespace fmt {

template <typename... Values>
std::string format(const char* pattern, const Values&...) {
  return pattern;
}

}  // namespace fmt
