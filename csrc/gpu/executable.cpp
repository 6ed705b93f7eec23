// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "executable.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <sstream>

#include "../../metal/kernel_table.h"
#include "../cuda/products.h"
#include "../cuda/variants.h"
#include "../rejected_kernels.h"
#include "execution.h"
#include "lowering.h"
#include "mlx/utils.h"
#include "portable_products.h"

namespace mlx_paged {

namespace {

cuda::TmaKernels tma_kernels_of(Gpu gpu) {
  return gpu == Gpu::nvidia ? cuda::tma_kernels() : cuda::TmaKernels::none;
}

}  // namespace

GpuExecutable::GpuExecutable(
    const Arrays& inputs, const Arrays& outputs, Gpu gpu, Residual residual) {
  GpuLowering(*this, inputs, outputs, residual).run();
  auto tma = tma_kernels_of(gpu);
  if (workspace_ < 0) {
    workspace_ = int(operands_.size());
    operands_.push_back({StepOperand::Kind::workspace});
  }
  for (const auto& step : steps_) {
    if (const auto* products = std::get_if<ProductStep>(&step)) {
      for (const auto& launch : product_launches(*products, gpu, tma)) {
        if (launch.kernel.host_name == cuda::kLibraryProduct) {
          product_workspace_bytes_ = cuda::kLibraryWorkspaceBytes;
        }
      }
    } else if (const auto* mixture = std::get_if<MixtureStep>(&step)) {
      mixture_launches(*mixture, operands_, gpu, tma);  // throws if unsupported
    }
  }
  if (!rejected_kernels().empty()) {
    for (const auto& name : kernels(gpu)) {
      if (is_rejected(name)) {
        throw UnsupportedGraph("calibration does not allow the kernel " + name);
      }
    }
  }
}

std::set<std::string> GpuExecutable::kernels(Gpu gpu) const {
  std::set<std::string> names;
  for (const auto& launch : launches(std::vector<LaunchList>(kinds_.size()), gpu)) {
    names.insert(launch.kernel.host_name);
  }
  return names;
}

bool GpuExecutable::is_pool(int input) const {
  return std::find(pools_.begin(), pools_.end(), input) != pools_.end();
}

uint64_t GpuExecutable::input_bytes(int input) const {
  uint64_t bytes = input_dtypes_[input].size();
  for (int extent : input_shapes_[input]) {
    bytes *= extent;
  }
  return bytes;
}

std::vector<int> GpuExecutable::read_by_host() const {
  std::set<int> read;
  for (const auto& kind : kinds_) {
    read.insert(kind.inputs[PagedAttention::kWork]);
    read.insert(kind.inputs[PagedAttention::kMerge]);
  }
  return {read.begin(), read.end()};
}

std::shared_ptr<GpuExecution> GpuExecutable::execution(int stream) const {
  constexpr size_t kMaxExecutions = 4;
  auto thread = std::this_thread::get_id();
  std::lock_guard lock(mutex_);
  auto found = std::find_if(executions_.begin(), executions_.end(), [&](const OfThread& e) {
    return e.stream == stream && e.thread == thread;
  });
  if (found != executions_.end()) {
    executions_.splice(executions_.begin(), executions_, found);
  } else {
    auto made = std::make_shared<GpuExecution>(*this, step_memory(stream));
    executions_.push_front({stream, thread, std::move(made)});
    if (executions_.size() > kMaxExecutions) {
      executions_.pop_back();
    }
  }
  return executions_.front().execution;
}

void GpuExecutable::check(const Arrays& inputs) const {
  auto refuse = [](size_t i, const char* what, const auto& expected, const auto& actual) {
    std::ostringstream message;
    message << "[gpu_executable] the " << what << " of inputs[" << i << "] must be " << expected
            << " but got " << actual;
    throw std::invalid_argument(message.str());
  };
  if (inputs.size() != input_shapes_.size()) {
    throw std::invalid_argument(
        "[gpu_executable] inputs must be " + std::to_string(input_shapes_.size()) +
        " arrays but got " + std::to_string(inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs[i].dtype() != input_dtypes_[i]) {
      refuse(i, "dtype", input_dtypes_[i], inputs[i].dtype());
    }
    if (any_size_[i] ? inputs[i].ndim() != input_shapes_[i].size()
                     : inputs[i].shape() != input_shapes_[i]) {
      refuse(i, "shape", input_shapes_[i], inputs[i].shape());
    }
  }
}

namespace {

// Rounds up, so that a growing number stays constant for a while.
int in_strides(int n) {
  int stride = std::max(16, 1 << std::max(0, int(std::bit_width(unsigned(n))) - 3));
  return (n + stride - 1) / stride * stride;
}

template <typename Params>
void set_partials(Launch& launch, int num_partials) {
  Params params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  params.num_partials = num_partials;
  launch.constants = bytes_of(params);
}

}  // namespace

std::vector<LaunchList> GpuExecutable::attention(const Arrays& inputs, Gpu gpu) const {
  std::vector<LaunchList> lists;
  for (const auto& kind : kinds_) {
    auto shaped = [](const mx::Shape& shape, mx::Dtype dtype) {
      return mx::array(shape, dtype, nullptr, {});
    };
    Arrays in{
        shaped(kind.queries, kind.dtype), shaped(kind.key_pool, kind.key_dtype),
        shaped(kind.value_pool, kind.value_dtype)};
    int value_dim = layout_of(in[PagedAttention::kValuePool]).head_dim;
    for (int i = PagedAttention::kPositions; i <= PagedAttention::kMerge; i++) {
      in.push_back(inputs[kind.inputs[i]]);
    }
    if (!kind.per_head.empty()) {
      in.push_back(shaped(kind.per_head, mx::float32));
    }
    mx::Shape out_shape{kind.queries[0], kind.queries[1], value_dim};
    PagedAttention node(mx::default_stream(mx::Device::cpu), kind.options);
    auto list = node.launches(in, {shaped(out_shape, kind.dtype)}, gpu);
    int workspace = int(in.size()) + 1;
    int num_partials = 0;
    for (const auto& launch : list.launches) {
      if (launch.kernel.file == "paged_merge.h") {
        paged::MergeParams params;
        std::memcpy(&params, launch.constants.data(), sizeof(params));
        num_partials = in_strides(params.num_partials);
      }
    }
    if (num_partials > 0) {
      int heads = kind.queries[1];
      uint64_t bytes = uint64_t(num_partials) * heads * (value_dim + 2) * 4;
      list.workspaces[0] = bytes;
      for (auto& launch : list.launches) {
        auto sees_partials = [&](const Binding& b) { return b.operand == workspace; };
        if (std::none_of(launch.buffers.begin(), launch.buffers.end(), sees_partials)) {
          continue;
        }
        bool is_merge = launch.kernel.file == "paged_merge.h";
        is_merge ? set_partials<paged::MergeParams>(launch, num_partials)
                 : set_partials<paged::AttentionParams>(launch, num_partials);
        for (auto& binding : launch.buffers) {
          binding.bytes = binding.operand == workspace ? bytes : binding.bytes;
        }
      }
    }
    if (gpu == Gpu::nvidia) {
      list = cuda::with_variants(std::move(list), in, cuda::tma_kernels());
    }
    lists.push_back(std::move(list));
  }
  return lists;
}

uint64_t GpuExecutable::workspace_bytes(const std::vector<LaunchList>& attention) const {
  uint64_t max_bytes = std::max<uint64_t>(kChunkBytes, product_workspace_bytes_);
  for (const auto& list : attention) {
    for (uint64_t bytes : list.workspaces) {
      max_bytes = std::max(max_bytes, bytes);
    }
  }
  return max_bytes;
}

std::vector<GpuExecutable::Step> GpuExecutable::ordered_steps(cuda::TmaKernels tma) const {
  auto steps = steps_;
  for (const auto& value : multiplied_) {
    std::optional<ColumnOrder> order;
    bool is_common = true;
    for (size_t i : value.read_by) {
      if (const auto* product = std::get_if<ProductStep>(&steps_[i])) {
        auto wanted = cuda::order_of_x(*product, tma);
        is_common = is_common && wanted == order.value_or(wanted);
        order = wanted;
      }
    }
    if (!order || order->run == 0 || !is_common) {
      continue;
    }
    for (size_t i : value.read_by) {
      if (auto* product = std::get_if<ProductStep>(&steps[i])) {
        product->x_is_ordered = true;
      } else {
        cuda::rows_in_order(std::get<Launch>(steps[i]), *order);  // lora_down
      }
    }
    if (auto* launch = std::get_if<Launch>(&steps[value.made_by])) {  // a norm
      cuda::rows_in_order(*launch, *order);
    } else {
      std::get<ProductStep>(steps[value.made_by]).out_order = *order;
    }
  }
  return steps;
}

std::vector<Launch> GpuExecutable::launches(
    const std::vector<LaunchList>& attention, Gpu gpu) const {
  return launches(attention, gpu, tma_kernels_of(gpu));
}

std::vector<Launch> GpuExecutable::launches(
    const std::vector<LaunchList>& attention, Gpu gpu, cuda::TmaKernels tma) const {
  std::vector<Launch> all;
  for (const auto& step : gpu == Gpu::nvidia ? ordered_steps(tma) : steps_) {
    if (const auto* launch = std::get_if<Launch>(&step)) {
      all.push_back(*launch);
      if (gpu == Gpu::nvidia) {
        all.back() = cuda::with_variants({{*launch}, {}}, {}, tma).launches[0];
      }
    } else if (const auto* products = std::get_if<ProductStep>(&step)) {
      for (auto& launch : product_launches(*products, gpu, tma)) {
        all.push_back(std::move(launch));
      }
    } else if (const auto* mixture = std::get_if<MixtureStep>(&step)) {
      for (auto& launch : mixture_launches(*mixture, operands_, gpu, tma)) {
        all.push_back(std::move(launch));
      }
    } else if (const auto* collective = std::get_if<CollectiveStep>(&step)) {
      all.push_back(collective_launch(*collective));
    } else {
      const auto& a = std::get<AttentionStep>(step);
      for (Launch launch : attention[a.kind].launches) {
        for (auto& binding : launch.buffers) {
          int i = binding.operand;
          int num_inputs = int(a.operands.size());
          int after[] = {a.out, workspace_, a.rotated};
          binding.operand = i < num_inputs ? a.operands[i] : after[i - num_inputs];
        }
        all.push_back(std::move(launch));
      }
    }
  }
  return all;
}

std::vector<Launch> GpuExecutable::product_launches(
    const ProductStep& step, Gpu gpu, cuda::TmaKernels tma) const {
  if (gpu == Gpu::nvidia) {
    return cuda::product_launches(step, operands_, workspace_, tma);
  }
  return portable_product_launches(step, operands_);
}

Launch GpuExecutable::collective_launch(const CollectiveStep& step) const {
  Launch launch;
  launch.kernel.host_name = step.primitive->name();
  launch.buffers = {
      {step.in, Access::read, operands_[step.in].bytes},
      {step.out, Access::write, operands_[step.out].bytes}};
  launch.grid = launch.threadgroup = {1, 1, 1};
  launch.collective = std::make_shared<const Collective>(
      Collective{step.op, step.primitive, step.in_shape, step.out_shape, step.dtype});
  return launch;
}

std::vector<Launch> launches_after_products(
    const ProductStep& step, const std::vector<StepOperand>& operands) {
  std::vector<Launch> launches;
  auto bind = [&](Launch& launch, int operand, Access access) {
    launch.buffers.push_back({operand, access, operands[operand].bytes});
  };
  if (step.adapters) {
    launches.push_back(step.adapters->up);
    if (step.out_order.run > 0) {
      cuda::rows_in_order(launches.back(), step.out_order);
    }
  }
  if (step.is_gated) {
    // In place, because each thread overwrites only what it reads itself.
    int item_size = step.dtype == DType::float32 ? 4 : 2;
    int chunks = step.parts[0].n * item_size / kChunkBytes;
    Launch launch = silu_mul_launch(step.num_rows, {chunks, chunks, chunks}, step.dtype);
    bind(launch, step.parts[0].out, Access::read_write);
    bind(launch, step.parts[1].out, Access::read);
    bind(launch, step.parts[0].out, Access::read_write);
    launches.push_back(std::move(launch));
  }
  if (step.write) {
    launches.push_back(*step.write);
  }
  return launches;
}

}  // namespace mlx_paged
