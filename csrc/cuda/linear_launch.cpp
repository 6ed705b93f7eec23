// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linear layers of few rows: which of them have a kernel, which one, and over which grid.

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>

#include "../dense.h"
#include "../gpu.h"
#include "../primitives.h"
#include "compiled_kernels.h"
#include "linear_shape.h"

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

std::string cluster_kernel(DType dtype, int tiles) {
  std::ostringstream name;
  name << "linear_cluster_" << name_of(dtype) << "_" << tiles;
  return name.str();
}

// Whether thread blocks can form clusters: sm_90 and later, if this build has code for it.
bool has_clusters() {
  static const bool has = [] {
    // Of the code that the driver chose for this device, compiled or PTX.
    cudaFuncAttributes found;
    auto symbol = find_kernel(cluster_kernel(DType::float16, tiles_of(kLinearMostRows)));
    return cudaFuncGetAttributes(&found, symbol) == cudaSuccess && found.ptxVersion >= 90;
  }();
  return has;
}

// For operands x, weight and `bias` (any of them, if there is none) and the result `output`. (Their
// sizes, which CUDA's encoder ignores, are left out.)
Launch linear_launch(const LinearParams& params, DType dtype, int bias, int output) {
  int tiles = tiles_of(params.num_rows);
  Launch launch;
  if (params.num_rows >= kClusterFewestRows && has_clusters()) {
    auto [warps, stages] = cluster_shape(tiles);
    int rows = cluster_rows(warps);
    launch.kernel.host_name = cluster_kernel(dtype, tiles);
    launch.threadgroup_memory = cluster_scratch(tiles, warps, stages);
    launch.cluster = kLinearParts;
    launch.grid = {uint32_t((params.n + rows - 1) / rows * kLinearParts), 1, 1};
    launch.threadgroup = {32 * uint32_t(warps), 1, 1};
  } else {
    tiles = std::min(tiles, kLinearBlockRows / 8);
    // Rows of x are read again for every group of rows of the weight; larger groups are fewer
    // blocks.
    int groups = tiles >= kManyTiles && params.n % (2 * kLinearRows) == 0 ? 2 : 1;
    int rows = groups * kLinearRows;
    launch.kernel.host_name = std::string("linear_") + name_of(dtype) + "_" +
                              std::to_string(tiles) + "_" + std::to_string(groups);
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

}  // namespace

}  // namespace mlx_paged::cuda

namespace mlx_paged {

// Few rows, whose product is a read of the weight.
bool Linear::served_on_gpu(
    const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias) {
  auto dtype = x.dtype();
  int n = weight.shape(0);
  int k = weight.shape(1);
  return (dtype == mx::float16 || dtype == mx::bfloat16) && weight.dtype() == dtype &&
         x.ndim() <= 4 && n > 0 && n % cuda::kLinearRows == 0 && k > 0 &&
         k % cuda::kLinearStep == 0 && x.size() > 0 &&
         x.size() <= size_t(cuda::kLinearMostRows) * k && is_dense(weight) &&
         weight.offset() % 16 == 0 && (!bias || (bias->dtype() == dtype && is_dense(*bias)));
}

void Linear::eval_gpu(const Arrays& in, Arrays& out) {
  gpu::allocate(out[0], stream());
  auto inputs = in;
  inputs[0] = gpu::readable(in[0], stream());
  const auto& weight = in[1];
  bool has_bias = in.size() > 2;
  int num_rows = int(in[0].size() / weight.shape(1));
  cuda::LinearParams params{num_rows, weight.shape(0), weight.shape(1), has_bias};
  // A kernel without bias does not read it, but its argument must still be a buffer.
  auto launch =
      cuda::linear_launch(params, dtype_of(in[0].dtype()), has_bias ? 2 : 1, int(in.size()));
  gpu::encode({{launch}, {}}, inputs, out, {}, stream());
}

}  // namespace mlx_paged
