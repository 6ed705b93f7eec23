// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <string>

#include "primitives.h"

namespace mlx_paged {

namespace {

int chunk_of(mx::Dtype dtype) {
  return 16 / int(dtype.size());
}

Launch lora_kernel(const char* function, const paged::LoraParams& params, mx::Dtype dtype) {
  Launch launch;
  launch.kernel = kernel_named(std::string(function) + name_of(dtype_of(dtype)));
  launch.constants = bytes_of(params);
  return launch;
}

}  // namespace

paged::LoraParams lora_params(const mx::array& a, int num_rows, const std::vector<int>& columns) {
  paged::LoraParams params{};
  params.num_rows = num_rows;
  params.num_adapters = a.shape(0);
  params.rank = a.shape(1);
  params.k = a.shape(2);
  params.num_parts = int(div_up(params.k / chunk_of(a.dtype()), paged::LORA_DOWN_THREADS));
  params.n_0 = columns[0];
  params.n_1 = columns.size() > 1 ? columns[1] : 0;
  params.n_2 = columns.size() > 2 ? columns[2] : 0;
  return params;
}

int lora_hidden_size(const paged::LoraParams& params, int num_targets) {
  return num_targets * params.num_rows * params.num_parts * params.rank;
}

Launch lora_down_launch(const paged::LoraParams& params, int num_targets, mx::Dtype dtype) {
  Launch launch = lora_kernel("lora_down_", params, dtype);
  uint32_t groups = params.num_parts * div_up(params.rank, paged::LORA_COLUMNS);
  launch.grid = {groups, div_up(params.num_rows, paged::LORA_ROWS), uint32_t(num_targets)};
  uint32_t threads = 32 * div_up(params.k / chunk_of(dtype), 32);
  threads = std::min<uint32_t>(threads, paged::LORA_DOWN_THREADS);
  launch.threadgroup = {threads, 1, 1};
  launch.threadgroup_memory = threads * sizeof(float);
  return launch;
}

Launch lora_up_launch(const paged::LoraParams& params, int num_targets, mx::Dtype dtype) {
  Launch launch = lora_kernel("lora_up_", params, dtype);
  int columns = std::max({params.n_0, params.n_1, params.n_2});
  int columns_per_group = paged::LORA_UP_THREADS * chunk_of(dtype);
  uint32_t targets = params.is_gated ? 1 : num_targets;
  launch.grid = {
      div_up(columns, columns_per_group), div_up(params.num_rows, paged::LORA_ROWS), targets};
  launch.threadgroup = {paged::LORA_UP_THREADS, 1, 1};
  uint32_t rank = div_up(params.rank, paged::LORA_STEP) * paged::LORA_STEP;
  uint32_t staged = (params.is_gated ? 2 : 1) * paged::LORA_ROWS * rank;
  launch.threadgroup_memory = staged * sizeof(float);
  return launch;
}

// Computes x @ a.T in float32 for every row, then base + hidden @ b.
LaunchList Lora::launches(const Arrays& in, const Arrays& out, Gpu) const {
  auto dtype = in[kA].dtype();
  auto params = lora_params(in[kA], int(in[kAdapters].size()), {in[kB].shape(2)});
  int hidden = int(in.size() + out.size());
  uint64_t hidden_bytes = lora_hidden_size(params, 1) * sizeof(float);
  auto read = [&](Launch& launch, int operand, int times = 1) {
    launch.buffers.insert(
        launch.buffers.end(), times, {operand, Access::read, in[operand].nbytes()});
  };
  Launch down = lora_down_launch(params, 1, dtype);
  read(down, kX);
  read(down, kAdapters);
  read(down, kA, paged::LORA_TARGETS);
  down.buffers.push_back({hidden, Access::write, hidden_bytes});
  Launch up = lora_up_launch(params, 1, dtype);
  read(up, kBase, paged::LORA_TARGETS);
  up.buffers.push_back({hidden, Access::read, hidden_bytes});
  read(up, kAdapters);
  read(up, kB, paged::LORA_TARGETS);
  read(up, kBase);  // a placeholder
  up.buffers.insert(
      up.buffers.end(), paged::LORA_TARGETS, {int(in.size()), Access::write, out[0].nbytes()});
  return {{std::move(down), std::move(up)}, {hidden_bytes}};
}

void Lora::check(const Arrays&) const {}

}  // namespace mlx_paged
