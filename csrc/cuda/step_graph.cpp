// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs a decode step on an NVIDIA GPU: captures its launches (gpu/execution.h) once as a CUDA graph
// and replays them with one launch per step.
//
// Relies on these properties of MLX's encoder (mlx/backend/cuda/device.cpp, 0.32):
//   - It collects work in its own graph and launches that on its stream in commit(). Launches on
//     the same stream after a commit() run after everything encoded before and before everything
//     encoded later, without edges between nodes.
//   - Event::signal and finalize() commit, then record an event or call the host on that stream,
//     so waiting for the outputs waits for the step.
//   - add_temporary() keeps a buffer until the stream has passed the next commit, and eval() calls
//     it for the inputs after eval_gpu(): a step's inputs live until they have been copied. Buffers
//     added before our commit() are not kept, so they are added again.
//   - The allocator's memory is reused in stream order.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../gpu.h"
#include "../gpu/execution.h"
#include "compiled_kernels.h"
#include "library_products.h"
#include "matrix_maps.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/backend/cuda/utils.h"
#include "mlx/distributed/distributed_impl.h"
#include "mlx/distributed/primitives.h"
#include "status.h"
#include "step_inputs.h"
#include "transfer.h"
#include "variants.h"

namespace mlx_paged {

namespace {

constexpr uint64_t kSmallestMemory = 256;  // bytes

// True if kernels can start while the previous one ends (kernels/dependent_launch.h).
bool overlaps_kernels() {
  static const bool wanted = [] {
    const char* set = std::getenv("MLX_PAGED_DEPENDENT_LAUNCH");
    int major = 0;
    int device = 0;
    return (!set || std::atoi(set) != 0) && cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 9;
  }();
  return wanted;
}

// This thread's stream for captures. Never destroyed, because CUDA may be torn down before the
// thread ends.
cudaStream_t capture_stream() {
  thread_local std::map<int, cudaStream_t> streams;
  int device = 0;
  cuda::check(cudaGetDevice(&device), "the device");
  auto& stream = streams[device];
  if (!stream) {
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  }
  return stream;
}

void run_launch(Launch& launch, std::vector<char*>& addresses, cudaStream_t stream, bool overlap) {
  const Extent grid = cuda::kernel_grid(launch);
  if (std::find(grid.begin(), grid.end(), 0) != grid.end()) {
    return;
  }
  if (cuda::is_library_product(launch)) {
    std::vector<char*> buffers;
    for (const auto& binding : launch.buffers) {
      buffers.push_back(addresses[binding.operand]);
    }
    return cuda::run_library_product(launch, buffers, stream);
  }
  const void* symbol = cuda::find_kernel(launch.kernel.host_name);
  std::vector<void*> arguments;
  for (const auto& binding : launch.buffers) {
    arguments.push_back(&addresses[binding.operand]);
  }
  arguments.push_back(launch.constants.data());
  cuda::EncodedMaps maps;
  if (!launch.maps.empty()) {
    maps = cuda::encode_maps(launch, addresses);
    arguments.push_back(&maps);
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid[0], grid[1], grid[2]);
  config.blockDim = dim3(launch.threadgroup[0], launch.threadgroup[1], launch.threadgroup[2]);
  config.dynamicSmemBytes = launch.threadgroup_memory;
  config.stream = stream;
  config.attrs = attributes;
  if (launch.cluster) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = launch.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (overlap) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cuda::check(cudaLaunchKernelExC(&config, symbol, arguments.data()), launch.kernel.host_name);
}

// Calls `run_collective` for collectives.
template <typename RunCollective>
void run_launches(
    PlacedLaunches& placed, size_t begin, size_t end, cudaStream_t stream,
    RunCollective run_collective) {
  bool overlap = overlaps_kernels();
  // A library may have launched something other than a kernel last.
  auto is_kernel = [](const Launch& launch) {
    return !launch.collective && !cuda::is_library_product(launch);
  };
  for (size_t i = begin; i < end; i++) {
    auto& launch = placed.launches[i];
    if (launch.collective) {
      run_collective(launch, placed.addresses);
      continue;
    }
    bool may_overlap = i > begin && !launch.after_previous && is_kernel(placed.launches[i - 1]);
    run_launch(launch, placed.addresses, stream, overlap && may_overlap);
  }
}

class CudaStepDevice : public StepDevice {
 public:
  explicit CudaStepDevice(mx::Stream stream)
      : stream_(stream), encoder_(mx::cu::get_command_encoder(stream)) {
    // Sets the device of the CUDA runtime linked here; MLX has its own runtime.
    cuda::check(cudaSetDevice(encoder_.device().cuda_device()), "a device");
  }

  Gpu kind() const override { return Gpu::nvidia; }

  bool captures() const override { return true; }

  bool captures_collectives() const override { return true; }

  void prepare(const PlacedLaunches& placed) override {
    for (const auto& launch : placed.launches) {
      if (launch.collective || cuda::is_library_product(launch)) {
        continue;
      }
      const auto& name = launch.kernel.host_name;
      const void* symbol = cuda::find_kernel(name, launch.num_arguments());
      cuda::allow_shared_memory(symbol, name, launch.threadgroup_memory);
    }
  }

  mx::array allocate(uint64_t bytes) override {
    mx::array a(workspace_shape(std::max(bytes, kSmallestMemory)), mx::float32, nullptr, {});
    gpu::allocate(a, stream_);
    return a;
  }

  char* address_of(const mx::array& a) override {
    return mx::gpu_ptr<char>(const_cast<mx::array&>(a));
  }

  // Requires that all launches have run once: kernels must not be loaded during a capture, and
  // neither may a library initialize its first product, or NCCL connect its channels.
  std::shared_ptr<void> capture(PlacedLaunches& launches, size_t begin, size_t end) override {
    static const bool wanted = [] {
      const char* set = std::getenv("MLX_PAGED_STEP_GRAPHS");
      return !set || std::atoi(set) != 0;
    }();
    if (!wanted || begin == end) {
      return nullptr;
    }
    auto first = launches.launches.begin() + begin, last = launches.launches.begin() + end;
    bool has_collectives =
        std::any_of(first, last, [](const Launch& launch) { return bool(launch.collective); });
    // MLX runs collectives on its own stream.
    cudaStream_t stream = has_collectives ? cudaStream_t(encoder_.stream()) : capture_stream();
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "a capture");
    cudaGraph_t graph = nullptr;
    try {
      run(launches, begin, end, stream);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph) {
        cudaGraphDestroy(graph);
      }
      cudaGetLastError();
      throw;
    }
    cuda::check(cudaStreamEndCapture(stream, &graph), "the end of a capture");
    cudaGraphExec_t made = nullptr;
    auto status = cudaGraphInstantiate(&made, graph, 0);
    cudaGraphDestroy(graph);
    cuda::check(status, "a graph of a step");
    return {made, [](void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }};
  }

  void begin() override { encoder_.commit(); }

  void copy(const std::vector<StepCopy>& copies) override {
    constexpr int kThreads = 256;
    constexpr int kMaxBlocks = 16;
    for (size_t first = 0; first < copies.size(); first += cuda::kMaxStepInputs) {
      size_t count = std::min<size_t>(copies.size() - first, cuda::kMaxStepInputs);
      cuda::StepInputs inputs{};
      int max_words = 0;
      for (size_t i = 0; i < count; i++) {
        const auto& [from, to, bytes] = copies[first + i];
        int words = int(bytes / 4);
        inputs.inputs[i] = {reinterpret_cast<const int*>(from), reinterpret_cast<int*>(to), words};
        max_words = std::max(max_words, words);
      }
      void* arguments[] = {&inputs};
      cudaLaunchConfig_t config = {};
      int blocks = std::clamp((max_words + kThreads - 1) / kThreads, 1, kMaxBlocks);
      config.gridDim = dim3(blocks, count, 1);
      config.blockDim = dim3(kThreads, 1, 1);
      config.stream = encoder_.stream();
      cuda::check(
          cudaLaunchKernelExC(&config, cuda::find_kernel("copy_inputs"), arguments), "copy_inputs");
    }
  }

  void replay(void* captured) override {
    cuda::check(
        cudaGraphLaunch(static_cast<cudaGraphExec_t>(captured), encoder_.stream()),
        "launch of a graph");
  }

  void run(PlacedLaunches& launches, size_t begin, size_t end) override {
    run(launches, begin, end, encoder_.stream());
  }

  void keep(const mx::array& a) override { encoder_.add_temporary(a); }

  // Handlers run on a thread of MLX's that may call CUDA.
  void keep(std::shared_ptr<const void> what) override {
    encoder_.add_completed_handler([what = std::move(what)] {});
  }

 private:
  void run(PlacedLaunches& launches, size_t begin, size_t end, cudaStream_t stream) {
    run_launches(launches, begin, end, stream, [&](const Launch& launch, const auto& addresses) {
      run_collective(launch, addresses);
    });
  }

  // Runs NCCL's kernel on MLX's stream. The primitive itself would add it to MLX's graph, which MLX
  // updates and launches for each collective: some 140 us of the host's time.
  void run_collective(const Launch& launch, const std::vector<char*>& addresses) {
    namespace distributed = mx::distributed;
    const auto& collective = *launch.collective;
    int device = encoder_.device().cuda_device();
    mx::cu::CudaBuffer buffers[2];
    auto array_at = [&](int i, const mx::Shape& shape) {
      const auto& binding = launch.buffers[i];
      buffers[i] = {addresses[binding.operand], size_t(binding.bytes), device};
      mx::allocator::Data data(mx::allocator::Buffer(&buffers[i]), [](mx::allocator::Buffer) {});
      return mx::array(std::move(data), shape, collective.dtype);
    };
    auto in = array_at(0, collective.in_shape);
    auto out = array_at(1, collective.out_shape);
    auto& node = static_cast<const distributed::DistPrimitive&>(*collective.primitive);
    auto& group = *node.group().raw_group();
    if (collective.op == Op::all_gather) {
      group.all_gather(in, out, stream_);
    } else {
      group.all_sum(in, out, stream_);
    }
  }

  mx::Stream stream_;
  mx::cu::CommandEncoder& encoder_;
};

}  // namespace

std::unique_ptr<StepDevice> gpu::step_device(mx::Stream stream) {
  return std::make_unique<CudaStepDevice>(stream);
}

void gpu::allocate_for_host(mx::array& a, mx::Stream) {
  allocate_pinned(a);
}

// The same build also serves the CPU, where no GPU is present.
int gpu::max_step_rows() {
  if (!has_transfers()) {
    return 0;
  }
  return cuda::has_library_products() ? cuda::kLibraryMaxRows : cuda::kLinearMaxRows;
}

}  // namespace mlx_paged
