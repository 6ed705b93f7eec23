// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <string>

#include "primitives.h"

namespace mlx_paged {

// Computes x @ a.T in float32 for every row, then base + hidden @ b.
LaunchList Lora::launches(const Arrays& in, const Arrays& out, Gpu) const {
  const auto& a = in[kA];
  int rank = a.shape(1);
  int num_rows = int(in[kAdapters].size());
  paged::LoraParams params{a.shape(0), rank, a.shape(2), in[kB].shape(2)};
  int hidden = int(in.size() + out.size());
  uint64_t hidden_bytes = uint64_t(num_rows) * rank * sizeof(float);
  auto kernel = [&](const char* function, int columns_per_group, int columns) {
    Launch launch;
    launch.kernel = kernel_named(std::string(function) + name_of(dtype_of(a.dtype())));
    launch.constants = bytes_of(params);
    launch.grid = {div_up(columns, columns_per_group), uint32_t(num_rows), 1};
    launch.threadgroup = {paged::LORA_THREADS, 1, 1};
    return launch;
  };
  auto read = [&](Launch& launch, int operand) {
    launch.buffers.push_back({operand, Access::read, in[operand].nbytes()});
  };
  Launch down = kernel("lora_down_", paged::LORA_THREADS / 32, rank);
  read(down, kX);
  read(down, kAdapters);
  read(down, kA);
  down.buffers.push_back({hidden, Access::write, hidden_bytes});
  Launch up = kernel("lora_up_", paged::LORA_THREADS, params.n);
  read(up, kBase);
  up.buffers.push_back({hidden, Access::read, hidden_bytes});
  read(up, kAdapters);
  read(up, kB);
  up.buffers.push_back({int(in.size()), Access::write, out[0].nbytes()});
  return {{std::move(down), std::move(up)}, {hidden_bytes}};
}

void Lora::check(const Arrays&) const {}

}  // namespace mlx_paged
