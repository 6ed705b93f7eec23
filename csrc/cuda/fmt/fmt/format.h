// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What MLX's CUDA headers want of fmt: they include it, and put messages of errors together with it
// in templates. fmt itself is in no package that pip could fetch. Numbers are left out of messages.

#pragma once

#include <string>

namespace fmt {

template <typename... Values>
std::string format(const char* pattern, const Values&...) {
  return pattern;
}

}  // namespace fmt
