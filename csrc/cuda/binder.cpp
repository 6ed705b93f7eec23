// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Passes launches to MLX's CUDA encoder on NVIDIA GPUs.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "../gpu.h"
#include "compiled_kernels.h"
#include "matrix_maps.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/backend/cuda/utils.h"
#include "variants.h"

namespace mlx_paged::gpu {

namespace {

constexpr uint32_t kFreeSharedMemory = 48 * 1024;  // larger sizes must be requested
void check(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) {
    throw std::runtime_error("[cuda] " + what + ": " + cudaGetErrorString(status));
  }
}

// MLX links its own CUDA runtime, which does not know our symbols; a CUfunction works in both.
CUfunction function_of(const Launch& launch) {
  static std::mutex mutex;
  struct Found {
    CUfunction function;
    uint32_t shared_memory;  // limit set so far
  };
  static std::unordered_map<std::string, Found> functions;
  const auto& name = launch.kernel.host_name;
  std::lock_guard lock(mutex);
  auto found = functions.find(name);
  if (found == functions.end()) {
    const void* symbol = cuda::find_kernel(name, launch.num_arguments());
    cudaFunction_t function;
    check(cudaGetFuncBySymbol(&function, symbol), "cannot load kernel " + name);
    Found made{reinterpret_cast<CUfunction>(function), kFreeSharedMemory};
    found = functions.emplace(name, made).first;
  }
  if (launch.threadgroup_memory > found->second.shared_memory) {
    cuda::allow_shared_memory(cuda::find_kernel(name), name, launch.threadgroup_memory);
    found->second.shared_memory = launch.threadgroup_memory;
  }
  return found->second.function;
}

// Adds an empty child graph before a kernel with clusters, so that MLX does not reuse an executable
// graph with another cluster size. CUDA updates a recorded graph in place but keeps the old cluster
// sizes, and MLX's check for equal graphs treats all kernels alike.
void mark_cluster(mx::cu::CommandEncoder& encoder, uint32_t cluster) {
  static const bool graphs = [] {
    const char* set = std::getenv("MLX_USE_CUDA_GRAPHS");
    return !set || std::atoi(set) != 0;
  }();
  if (graphs) {
    static const cudaGraph_t nothing = [] {
      cudaGraph_t graph;
      cudaGraphNode_t node;
      check(cudaGraphCreate(&graph, 0), "cannot create a graph");
      check(cudaGraphAddEmptyNode(&node, graph, nullptr, 0), "cannot add an empty node");
      return graph;
    }();
    encoder.add_graph_node(nothing, "(C" + std::to_string(cluster) + ")", true);
  }
}

// Returns workspace i of a stream. One buffer serves all operations: its old contents are
// overwritten in the cache rather than written out, and concurrent operations hold one buffer
// instead of many.
mx::array workspace(size_t i, uint64_t bytes, mx::Stream stream) {
  thread_local std::map<std::pair<int, size_t>, mx::array> kept;
  auto found = kept.find({stream.index, i});
  if (found == kept.end() || found->second.nbytes() < bytes) {
    mx::array a(workspace_shape(bytes), mx::float32, nullptr, {});
    allocate(a, stream);
    found = kept.insert_or_assign({stream.index, i}, a).first;
  }
  return found->second;
}

}  // namespace

Gpu kind() {
  return Gpu::nvidia;
}

void prepare(const Pipeline&) {}  // nvcc has compiled every kernel.

void keep(const mx::array& a, mx::Stream stream) {
  mx::cu::get_command_encoder(stream).add_temporary(a);
}

// Registers a kernel that reads a pool as a writer of it. MLX's encoder orders a kernel only after
// earlier writers of its arrays, so this makes later writes wait for the read.
void encode(
    const LaunchList& portable, const Arrays& in, Arrays& out, const std::vector<int>& pools,
    mx::Stream stream) {
  LaunchList list = cuda::with_variants(portable, in, cuda::tma_kernels());
  auto& encoder = mx::cu::get_command_encoder(stream);
  Arrays operands(in);
  operands.insert(operands.end(), out.begin(), out.end());
  size_t num_arrays = operands.size();
  for (size_t i = 0; i < list.workspaces.size(); i++) {
    operands.push_back(workspace(i, list.workspaces[i], stream));
    keep(operands.back(), stream);
  }
  for (const auto& launch : list.launches) {
    Extent grid = cuda::kernel_grid(launch);
    if (std::find(grid.begin(), grid.end(), 0) != grid.end()) {
      continue;  // CUDA rejects an empty grid.
    }
    if (launch.cluster) {
      mark_cluster(encoder, launch.cluster);
    }
    std::vector<char*> addresses(operands.size());
    std::vector<void*> arguments;
    for (const auto& binding : launch.buffers) {
      auto& operand = operands[binding.operand];
      // A pool or workspace will be written again, so its readers are registered as writers.
      bool shared = size_t(binding.operand) >= num_arrays ||
                    std::find(pools.begin(), pools.end(), binding.operand) != pools.end();
      if (binding.access == Access::read && !shared) {
        encoder.set_input_array(operand);
      } else {
        encoder.set_output_array(operand);
      }
      addresses[binding.operand] = mx::gpu_ptr<char>(operand);
      arguments.push_back(&addresses[binding.operand]);
    }
    std::vector<std::byte> constants = launch.constants;
    arguments.push_back(constants.data());
    cuda::EncodedMaps maps;
    if (!launch.maps.empty()) {
      maps = cuda::encode_maps(launch, addresses);
      arguments.push_back(&maps);
    }
    const Extent& threads = launch.threadgroup;
    uint32_t one = launch.cluster ? 1 : 0;
    encoder.add_kernel_node_raw(
        function_of(launch), dim3(grid[0], grid[1], grid[2]),
        dim3(threads[0], threads[1], threads[2]), dim3(launch.cluster, one, one),
        launch.threadgroup_memory, arguments.data());
  }
}

}  // namespace mlx_paged::gpu
