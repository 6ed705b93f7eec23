// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A decode step on an NVIDIA GPU: its launches (device_program.h) captured once as a CUDA graph and
// replayed with one launch a step.
//
// A step is three things in the stream: a kernel that copies the step's inputs to where the graph
// looks for them, the graph, and the launches that write the result, which is a new array each time
// (a caller may keep it).
//
// What is relied on of MLX's encoder (mlx/backend/cuda/device.cpp, 0.32):
//   - it collects what it is given in a graph of its own and launches that on its stream in
//     commit(). So commit() first, and then launches on the same stream, run after all that was
//     encoded before and before all that is encoded later. No edge between nodes is needed;
//   - Event::signal and finalize() commit and then record an event or call the host on that stream,
//     so what waits for the outputs waits for the step;
//   - add_temporary() keeps a buffer until the stream has come past the next commit, and eval()
//   calls
//     it for the inputs: a step's inputs live until they have been copied;
//   - memory from the allocator is in the order of the stream.
// Pools and weights stay where they are as long as nobody has MLX move them (a host that reads an
// array of device memory does), so their addresses are compared in each step.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../dense.h"
#include "../device_program.h"
#include "../gpu.h"
#include "../host_copies.h"
#include "compiled_kernels.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/backend/cuda/utils.h"
#include "step_inputs.h"

namespace mlx_paged {

namespace {

constexpr size_t kMostGraphs = 8;  // of a program on a stream
constexpr uint32_t kFreeSharedMemory = 48 * 1024;
constexpr uint64_t kAlignment = 256;

void check(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // (the next call must not report it again)
    throw std::runtime_error("[device_step] " + what + ": " + cudaGetErrorString(status));
  }
}

// Whether kernels may begin while the one before ends (kernels/dependent_launch.h).
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

// The launches of a step with the addresses of what they name.
class ResolvedLaunches {
 public:
  ResolvedLaunches(std::vector<Launch> launches, std::vector<void*> addresses)
      : launches_(std::move(launches)), addresses_(std::move(addresses)) {}

  size_t size() const { return launches_.size(); }

  // Loads every kernel, which must not happen while launches are captured.
  void prepare() const {
    for (const auto& launch : launches_) {
      const auto& name = launch.kernel.host_name;
      const void* symbol = cuda::find_kernel(name);
      cudaFuncAttributes found;
      check(cudaFuncGetAttributes(&found, symbol), "kernel " + name);
      if (launch.threadgroup_memory > kFreeSharedMemory) {
        check(
            cudaFuncSetAttribute(
                symbol, cudaFuncAttributeMaxDynamicSharedMemorySize,
                int(launch.threadgroup_memory)),
            "shared memory of " + name);
      }
    }
  }

  void set_address(int operand, void* address) { addresses_[operand] = address; }

  void run(size_t begin, size_t end, cudaStream_t stream, bool overlap) {
    for (size_t i = begin; i < end; i++) {
      run(launches_[i], stream, overlap && i > begin);
    }
  }

  // The first launch that names one of these operands.
  size_t first_of(const std::vector<int>& operands) const {
    for (size_t i = 0; i < launches_.size(); i++) {
      for (const auto& binding : launches_[i].buffers) {
        if (std::find(operands.begin(), operands.end(), binding.operand) != operands.end()) {
          return i;
        }
      }
    }
    return launches_.size();
  }

 private:
  void run(Launch& launch, cudaStream_t stream, bool overlap) {
    const Extent& grid = launch.grid;
    if (std::find(grid.begin(), grid.end(), 0) != grid.end()) {
      return;
    }
    const void* symbol = cuda::find_kernel(launch.kernel.host_name);
    std::vector<void*> arguments;
    for (const auto& binding : launch.buffers) {
      arguments.push_back(&addresses_[binding.operand]);
    }
    arguments.push_back(launch.constants.data());
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
    check(cudaLaunchKernelExC(&config, symbol, arguments.data()), launch.kernel.host_name);
  }

  std::vector<Launch> launches_;
  std::vector<void*> addresses_;  // by operand
};

// What a graph was captured for.
struct StepKey {
  std::vector<LaunchList> attention;
  std::vector<const void*> fixed;  // where pools and constants are

  bool operator==(const StepKey& other) const {
    if (fixed != other.fixed || attention.size() != other.attention.size()) {
      return false;
    }
    for (size_t i = 0; i < attention.size(); i++) {
      if (attention[i].launches != other.attention[i].launches ||
          attention[i].workspaces != other.attention[i].workspaces) {
        return false;
      }
    }
    return true;
  }
};

struct CapturedStep {
  StepKey key;
  ResolvedLaunches launches;
  size_t result_begin;              // launches from there on write the result
  mx::array workspace;              // of attention
  cudaGraphExec_t graph = nullptr;  // null: launched one by one

  CapturedStep(StepKey key, ResolvedLaunches launches, size_t result_begin, mx::array workspace)
      : key(std::move(key)),
        launches(std::move(launches)),
        result_begin(result_begin),
        workspace(std::move(workspace)) {}
  CapturedStep(const CapturedStep&) = delete;
  ~CapturedStep() {
    if (graph) {
      cudaGraphExecDestroy(graph);
    }
  }
};

mx::array bytes_of_gpu(uint64_t bytes, mx::Stream stream) {
  mx::array a(workspace_shape(std::max(bytes, kAlignment)), mx::float32, nullptr, {});
  gpu::allocate(a, stream);
  return a;
}

template <typename T = char>
T* address_of(const mx::array& a) {
  return mx::gpu_ptr<T>(const_cast<mx::array&>(a));
}

// A program's memory and graphs on one stream.
class StepRunner : public std::enable_shared_from_this<StepRunner> {
 public:
  StepRunner(const DeviceProgram& program, mx::Stream stream) : program_(program) {
    int64_t bytes = int64_t(program.temporary_bytes());
    for (size_t i = 0; i < program.num_inputs(); i++) {
      input_offsets_.push_back(bytes);
      if (is_copied(i)) {
        bytes += (int64_t(program.input_bytes(i)) + kAlignment - 1) / kAlignment * kAlignment;
        num_copied_++;
      }
    }
    if (num_copied_ > cuda::kMostStepInputs) {
      throw std::runtime_error("[device_step] a step has too many inputs");
    }
    memory_ = bytes_of_gpu(bytes, stream);
    for (size_t i = 0; i < program.operands().size(); i++) {
      if (program.operands()[i].kind == ProgramOperand::Kind::result) {
        result_operands_.push_back(int(i));
      }
    }
  }

  void run(const Arrays& in, mx::array& result, mx::Stream stream) {
    auto& encoder = mx::cu::get_command_encoder(stream);
    // (Of the CUDA runtime that is linked here; MLX has its own.)
    check(cudaSetDevice(encoder.device().cuda_device()), "a device");
    StepKey key{program_.attention(in, Gpu::nvidia), {}};
    for (int i : program_.pools()) {
      key.fixed.push_back(address_of(in[i]));
    }
    for (const auto& constant : program_.constants()) {
      key.fixed.push_back(address_of(constant));
    }
    CapturedStep& step = captured(std::move(key), in, stream);
    encoder.commit();
    cudaStream_t to = encoder.stream();
    copy_inputs(in, to);
    bool overlap = overlaps_kernels();
    if (step.graph) {
      check(cudaGraphLaunch(step.graph, to), "launch of a graph");
    } else {
      step.launches.run(0, step.result_begin, to, overlap);
    }
    for (int operand : result_operands_) {
      step.launches.set_address(operand, address_of(result) + program_.operands()[operand].offset);
    }
    step.launches.run(step.result_begin, step.launches.size(), to, overlap);
    encoder.add_temporary(memory_.value());
    encoder.add_temporary(step.workspace);
    // (A graph must not be destroyed while it runs.)
    encoder.add_completed_handler([self = shared_from_this()] {});
  }

 private:
  bool is_copied(size_t input) const {
    return program_.is_used(int(input)) && !program_.is_pool(int(input));
  }

  CapturedStep& captured(StepKey key, const Arrays& in, mx::Stream stream) {
    for (auto it = steps_.begin(); it != steps_.end(); ++it) {
      if (it->key == key) {
        steps_.splice(steps_.begin(), steps_, it);
        return steps_.front();
      }
    }
    uint64_t bytes = DeviceProgram::workspace_bytes(key.attention);
    bool has_room = !steps_.empty() && steps_.front().workspace.nbytes() >= bytes;
    mx::array workspace = has_room ? steps_.front().workspace : bytes_of_gpu(bytes, stream);
    std::vector<void*> addresses;
    for (const auto& o : program_.operands()) {
      char* begin = nullptr;
      switch (o.kind) {
        case ProgramOperand::Kind::input:
          begin = is_copied(o.index) ? address_of(*memory_) + input_offsets_[o.index]
                                     : address_of(in[o.index]);
          break;
        case ProgramOperand::Kind::constant:
          begin = address_of(program_.constants()[o.index]);
          break;
        case ProgramOperand::Kind::temporary:
          begin = address_of(*memory_);
          break;
        case ProgramOperand::Kind::workspace:
          begin = address_of(workspace);
          break;
        case ProgramOperand::Kind::result:
          break;  // in each run
      }
      addresses.push_back(begin ? begin + o.offset : nullptr);
    }
    ResolvedLaunches launches(program_.launches(key.attention, Gpu::nvidia), std::move(addresses));
    size_t result_begin = launches.first_of(result_operands_);
    launches.prepare();
    steps_.emplace_front(std::move(key), std::move(launches), result_begin, workspace);
    try {
      capture(steps_.front());
    } catch (...) {
      steps_.pop_front();
      throw;
    }
    if (steps_.size() > kMostGraphs) {
      steps_.pop_back();  // (not under way: seven others have been used since)
    }
    return steps_.front();
  }

  void capture(CapturedStep& step) {
    static const bool wanted = [] {
      const char* set = std::getenv("MLX_PAGED_STEP_GRAPHS");
      return !set || std::atoi(set) != 0;
    }();
    if (!wanted) {
      return;
    }
    if (!capture_stream_) {
      check(cudaStreamCreateWithFlags(&capture_stream_, cudaStreamNonBlocking), "a stream");
    }
    check(cudaStreamBeginCapture(capture_stream_, cudaStreamCaptureModeThreadLocal), "a capture");
    cudaGraph_t graph = nullptr;
    try {
      step.launches.run(0, step.result_begin, capture_stream_, overlaps_kernels());
    } catch (...) {
      cudaStreamEndCapture(capture_stream_, &graph);
      if (graph) {
        cudaGraphDestroy(graph);
      }
      cudaGetLastError();
      throw;
    }
    check(cudaStreamEndCapture(capture_stream_, &graph), "the end of a capture");
    auto status = cudaGraphInstantiate(&step.graph, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "a graph of a step");
  }

  void copy_inputs(const Arrays& in, cudaStream_t stream) {
    cuda::StepInputs inputs{};
    int count = 0;
    int most_words = 0;
    for (size_t i = 0; i < in.size(); i++) {
      if (is_copied(i) && in[i].nbytes() > 0) {
        int words = int(in[i].nbytes() / 4);
        inputs.inputs[count++] = {
            reinterpret_cast<const int*>(address_of(in[i])),
            reinterpret_cast<int*>(address_of(*memory_) + input_offsets_[i]), words};
        most_words = std::max(most_words, words);
      }
    }
    constexpr int kThreads = 256;
    constexpr int kMostBlocks = 16;
    int blocks = std::clamp((most_words + kThreads - 1) / kThreads, 1, kMostBlocks);
    void* arguments[] = {&inputs};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks, count, 1);
    config.blockDim = dim3(kThreads, 1, 1);
    config.stream = stream;
    check(cudaLaunchKernelExC(&config, cuda::find_kernel("copy_inputs"), arguments), "copy_inputs");
  }

  const DeviceProgram& program_;
  std::vector<int64_t> input_offsets_;  // in memory_
  int num_copied_ = 0;
  std::optional<mx::array> memory_;  // temporaries, then inputs
  std::vector<int> result_operands_;
  std::list<CapturedStep> steps_;          // the one used last first
  cudaStream_t capture_stream_ = nullptr;  // (kept: CUDA may be gone before this is)
};

}  // namespace

void DeviceStep::eval_gpu(const Arrays& inputs, Arrays& out) {
  gpu::allocate(out[0], stream());
  const auto& pools = program_->pools();
  for (size_t i = 0; i < pools.size(); i++) {
    if (!can_alias_pool_on_gpu(inputs[pools[i]])) {
      throw std::runtime_error("[device_step] a pool must be dense");
    }
    out[1 + i].copy_shared_buffer(inputs[pools[i]]);
  }
  Arrays in = inputs;
  for (int i = 0; i < int(in.size()); i++) {
    if (program_->is_used(i) && !program_->is_pool(i)) {
      in[i] = gpu::readable(inputs[i], stream());
    }
  }
  // What the host reads came from the host, which kept a copy.
  for (int i : program_->read_by_host()) {
    bool copied = in[i].data_shared_ptr() != inputs[i].data_shared_ptr();
    if (!find_host_copy(in[i]) && (copied || !is_on_host(inputs[i]))) {
      mx::synchronize(stream());
    }
  }
  auto runner = std::static_pointer_cast<StepRunner>(program_->runner(
      stream().index, [&] { return std::make_shared<StepRunner>(*program_, stream()); }));
  runner->run(in, out[0], stream());
  // The runner uses the program as long as it runs.
  mx::cu::get_command_encoder(stream()).add_completed_handler([program = program_] {});
}

}  // namespace mlx_paged
