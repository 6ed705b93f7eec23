// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// MLX_PAGED_SIM=1: the primitives run the GPU kernels of metal/ on this machine's CPU, in the
// simulator that the test suite brings along (docs/metal-without-a-mac.md). It is handed over as
// the address of one C function; the launches are those that a GPU would get.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../launch.h"
#include "metal_sim.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged::sim {

// Whether MLX_PAGED_SIM is 1.
bool enabled();

using Simulator = int (*)(const MetalSimLaunch*, MetalSimReport*);
void set_simulator(Simulator simulator);

using Builder =
    std::function<LaunchList(const std::vector<mx::array>& in, const std::vector<mx::array>& out)>;

// Waits for the inputs and runs the launches that `build` makes for a primitive, whose outputs have
// their memory already. It runs on the evaluating thread, so that a fault is an exception there:
// std::runtime_error with the simulator's report.
void run(
    const Builder& build, const std::vector<mx::array>& in, std::vector<mx::array>& out,
    mx::Stream stream);

// A launch that was simulated, and the bytes that each of its buffers saw go by.
struct Record {
  Launch launch;
  std::vector<MetalSimTraffic> traffic;
  uint64_t threadgroups;
};

// Those since the last call.
std::vector<Record> take_records();

}  // namespace mlx_paged::sim
