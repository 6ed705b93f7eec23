// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "linear_launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>

#include "../kernel_names.h"
#include "kernel_table.h"
#include "linear_cluster_table.h"

namespace mlx_paged::cuda {

namespace {

constexpr int kManyTiles = 4;  // of x

// How linear_cluster is instantiated for some tiles of x.
struct ClusterShape {
  int warps;
  int stages;
};

ClusterShape cluster_shape(int tiles) {
#define SHAPE(unused, tiles, warps, stages) {tiles, {warps, stages}},
  static const std::map<int, ClusterShape> shapes{PAGED_FOR_EACH_LINEAR_CLUSTER(SHAPE, unused)};
  return shapes.at(tiles);
}

int tiles_of(int num_rows) {
  int tiles = 1;
  while (8 * tiles < num_rows) {
    tiles *= 2;
  }
  return tiles;
}

std::string cluster_kernel(const std::string& dtype, int tiles) {
  std::ostringstream name;
  name << "linear_cluster_" << dtype << "_" << tiles;
  return name.str();
}

}  // namespace

bool has_clusters() {
  static const bool has = [] {
    // Of the code that the driver chose for this device, be it compiled or PTX.
    cudaFuncAttributes found;
    auto symbol = find_kernel(cluster_kernel("float16", tiles_of(kLinearMostRows)));
    return cudaFuncGetAttributes(&found, symbol) == cudaSuccess && found.ptxVersion >= 90;
  }();
  return has;
}

Launch linear_launch(const LinearParams& params, mx::Dtype dtype, int bias, int output) {
  auto type = dtype_name(dtype);
  int tiles = tiles_of(params.num_rows);
  Launch launch;
  if (params.num_rows >= kClusterFewestRows && has_clusters()) {
    auto [warps, stages] = cluster_shape(tiles);
    int rows = cluster_rows(warps);
    launch.kernel.host_name = cluster_kernel(type, tiles);
    launch.threadgroup_memory = cluster_scratch(tiles, warps, stages);
    launch.cluster = kLinearParts;
    launch.grid = {uint32_t((params.n + rows - 1) / rows * kLinearParts), 1, 1};
    launch.threadgroup = {32 * uint32_t(warps), 1, 1};
  } else {
    tiles = std::min(tiles, kLinearBlockRows / 8);
    // Rows of x are read anew for every group of rows of the weight; larger groups are fewer
    // blocks.
    int groups = tiles >= kManyTiles && params.n % (2 * kLinearRows) == 0 ? 2 : 1;
    int rows = groups * kLinearRows;
    launch.kernel.host_name =
        "linear_" + type + "_" + std::to_string(tiles) + "_" + std::to_string(groups);
    launch.threadgroup_memory = kLinearParts * tiles * 8 * (rows + 1) * sizeof(float);
    launch.grid = {
        uint32_t(params.n / rows), uint32_t((params.num_rows + 8 * tiles - 1) / (8 * tiles)), 1};
    launch.threadgroup = {32 * kLinearParts, 1, 1};
  }
  for (int operand : {0, 1, bias}) {
    launch.buffers.push_back({operand, Access::read, 0});
  }
  launch.buffers.push_back({output, Access::write, 0});
  launch.constants = bytes_of(params);
  return launch;
}

}  // namespace mlx_paged::cuda
