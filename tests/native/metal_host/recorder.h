// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for MLX's Metal device and encoder where there is no Metal: they are the classes of
// MLX's headers, whose functions write down what they are asked to do.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace recorder {

struct Buffer {
  uint64_t bytes;
  uint64_t offset;  // in its array
  bool written;
};

struct Call {
  std::string kernel;
  std::string function_constants;  // a digit each, by index
  std::string source;
  bool beside_previous = false;  // no barrier before it: both are in one concurrent context
  std::vector<Buffer> buffers;   // in the order of their indices
  std::vector<std::byte> constants;
  uint64_t constants_index = 0;
  uint64_t threadgroup_memory = 0;
  std::array<uint64_t, 3> grid{};
  std::array<uint64_t, 3> threadgroup{};
};

// Every dispatch so far.
extern std::vector<Call> calls;

}  // namespace recorder
