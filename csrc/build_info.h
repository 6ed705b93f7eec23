// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <string>
#include <utility>
#include <vector>

namespace mlx_paged {

std::vector<std::pair<std::string, std::string>> build_info();

}  // namespace mlx_paged
