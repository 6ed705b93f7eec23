// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs a step on an Apple GPU: encodes its launches one after another in MLX's encoder, without MLX
// nodes. Metal has no graphs, so nothing is captured.

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../metal/kernel_table.h"
#include "../gpu.h"
#include "binder.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"

namespace mlx_paged {

namespace {

class MetalStepDevice : public StepDevice {
 public:
  explicit MetalStepDevice(mx::Stream stream) : stream_(stream) {}

  Gpu kind() const override { return Gpu::apple; }

  bool captures() const override { return false; }

  bool captures_collectives() const override { return false; }

  void prepare(const PlacedLaunches&) override {}

  mx::array allocate(uint64_t bytes) override {
    mx::array a(workspace_shape(bytes), mx::float32, nullptr, {});
    gpu::allocate(a, stream_);
    return a;
  }

  // The encoder takes arrays, so this records the arrays of addresses.
  char* address_of(const mx::array& a) override {
    auto* begin = const_cast<char*>(a.data<char>());
    known_.push_back({begin, a});
    is_sorted_ = false;
    return begin;
  }

  std::shared_ptr<void> capture(PlacedLaunches&, size_t, size_t) override { return nullptr; }
  void begin() override {}
  void copy(const std::vector<StepCopy>&) override {}
  void replay(void*) override {}

  void run(PlacedLaunches& placed, size_t begin, size_t end) override {
    // MLX's groups of Macs exchange data on the CPU, but a step stays on the GPU.
    for (size_t i = begin; i < end; i++) {
      if (const auto& launch = placed.launches[i]; launch.collective) {
        throw std::runtime_error("[gpu_step] Metal has no " + launch.kernel.host_name);
      }
    }
    auto locations = locations_of(placed.addresses);
    gpu::encode_launches(placed.launches, begin, end, locations, stream_);
  }

  void keep(const mx::array& a) override { gpu::keep(a, stream_); }

  void keep(std::shared_ptr<const void> what) override {
    mx::metal::get_command_encoder(stream_).get_command_buffer()->addCompletedHandler(
        [what = std::move(what)](MTL::CommandBuffer*) {});
  }

 private:
  struct Known {
    char* begin;
    mx::array array;
  };

  std::vector<gpu::Location> locations_of(const std::vector<char*>& addresses) {
    if (!std::exchange(is_sorted_, true)) {
      std::stable_sort(known_.begin(), known_.end(), [](const Known& a, const Known& b) {
        return a.begin < b.begin;
      });
    }
    std::vector<gpu::Location> locations;
    locations.reserve(addresses.size());
    for (char* address : addresses) {
      // The last array that starts at or before the address. Unused operands have no array.
      auto after = std::upper_bound(
          known_.begin(), known_.end(), address,
          [](const char* a, const Known& known) { return a < known.begin; });
      const auto& known = after == known_.begin() ? *after : *(after - 1);
      locations.push_back({known.array, address ? address - known.begin : 0});
    }
    return locations;
  }

  mx::Stream stream_;
  std::vector<Known> known_;
  bool is_sorted_ = false;
};

}  // namespace

std::unique_ptr<StepDevice> gpu::step_device(mx::Stream stream) {
  return std::make_unique<MetalStepDevice>(stream);
}

// The number of rows that reads each weight once.
int gpu::max_step_rows() {
  return mx::default_device() == mx::Device::gpu ? paged::PRODUCT_ROWS : 0;
}

}  // namespace mlx_paged
