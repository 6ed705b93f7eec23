// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The part of fmt that MLX's CUDA headers use: they format error messages in templates. No package
// that pip can fetch has fmt itself. Numbers are left out of messages.

#pragma once

#include <string>

namespace fmt {

template <typename... Values>
std::string format(const char* pattern, const Values&...) {
  return pattern;
}

}  // namespace fmt
