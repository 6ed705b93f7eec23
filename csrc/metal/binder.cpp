// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Passes launches to MLX's Metal encoder on Apple GPUs.

#include "binder.h"

#include <optional>
#include <string>
#include <utility>

#include "../allocation.h"
#include "../gpu.h"
#include "../kernel_source.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/utils.h"

namespace mlx_paged::gpu {

namespace {

MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const Pipeline& wanted) {
  const KernelName& kernel = wanted.kernel;
  auto compiled_here = [&] {
    return device.get_library("mlx_paged_" + kernel.host_name, [&kernel] {
      return kernel_source(kernel, kernel_folder());
    });
  };
#ifdef MLX_PAGED_METALLIB
  // The library is for every Mac, and kernels for tensor units need the Metal of a new macOS.
  static const std::filesystem::path path = kernel_folder() / "mlx_paged.metallib";
  auto* library = kernel.file.starts_with("tensor_")
                      ? compiled_here()
                      : device.get_library("mlx_paged", path.string());
#else
  auto* library = compiled_here();
#endif
  if (wanted.function_constants.empty()) {
    return device.get_kernel(kernel.host_name, library);
  }
  std::string name = kernel.host_name;
  mx::metal::MTLFCList constants;
  for (size_t i = 0; i < wanted.function_constants.size(); i++) {
    constants.push_back({&wanted.function_constants[i], MTL::DataType::DataTypeBool, i});
    name += wanted.function_constants[i] ? "_1" : "_0";
  }
  return device.get_kernel(kernel.host_name, library, name, constants);
}

MTL::Size size(const Extent& extent) {
  return MTL::Size(extent[0], extent[1], extent[2]);
}

}  // namespace

Gpu kind() {
  return Gpu::apple;
}

void prepare(const Pipeline& wanted) {
  pipeline(mx::metal::device(mx::Device::gpu), wanted);
}

void allocate(mx::array& a, mx::Stream) {
  mlx_paged::allocate(a);
}

void keep(const mx::array& a, mx::Stream stream) {
  mx::metal::get_command_encoder(stream).add_temporary(a);
}

void allocate_for_host(mx::array& a, mx::Stream stream) {
  allocate(a, stream);  // the CPU sees the same memory
}

// Encodes launches. Metal's encoder orders reads and writes of a buffer. Within a ConcurrentContext
// MLX adds no barriers, which suits launches that write different rows of one buffer.
void encode_launches(
    const std::vector<Launch>& launches, size_t begin, size_t end, std::vector<Location>& locations,
    mx::Stream stream) {
  auto& device = mx::metal::device(stream.device);
  auto& encoder = mx::metal::get_command_encoder(stream);
  std::optional<mx::metal::CommandEncoder::ConcurrentContext> beside;
  for (size_t i = begin; i < end; i++) {
    const auto& launch = launches[i];
    if (!launch.beside_previous) {
      beside.reset();
    }
    if (!beside && i + 1 < end && launches[i + 1].beside_previous) {
      beside.emplace(encoder);
    }
    auto* kernel = pipeline(device, launch);
    encoder.set_compute_pipeline_state(kernel);
    int index = 0;
    for (const auto& binding : launch.buffers) {
      auto& location = locations[binding.operand];
      if (binding.access == Access::read) {
        encoder.set_input_array(location.array, index, location.offset);
      } else {
        encoder.set_output_array(location.array, index, location.offset);  // also an input
      }
      index++;
    }
    encoder.set_bytes(launch.constants.data(), int(launch.constants.size()), index);
    if (launch.threadgroup_memory > 0) {
      encoder.set_threadgroup_memory_length(launch.threadgroup_memory, 0);
    }
    auto threads = size(launch.threadgroup);
    mx::check_kernel_threadgroup_size(kernel, threads, launch.kernel.host_name);
    encoder.dispatch_threadgroups(size(launch.grid), threads);
  }
}

void encode(
    const LaunchList& list, const Arrays& in, Arrays& out, const std::vector<int>&,
    mx::Stream stream) {
  std::vector<Location> locations;
  for (const Arrays* arrays : {&in, const_cast<const Arrays*>(&out)}) {
    for (const auto& a : *arrays) {
      locations.push_back({a, 0});
    }
  }
  for (uint64_t bytes : list.workspaces) {
    mx::array workspace(workspace_shape(bytes), mx::float32, nullptr, {});
    allocate(workspace, stream);
    keep(workspace, stream);
    locations.push_back({std::move(workspace), 0});
  }
  encode_launches(list.launches, 0, list.launches.size(), locations, stream);
}

}  // namespace mlx_paged::gpu
