// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A GPU that is simulated: mlx_paged._sim is the extension whose operations run the kernels of
// metal/ on this machine's CPU (docs/dev/metal-without-a-mac.md). The simulator itself is handed
// over as the address of one C function; the launches are those that a GPU would get.

#pragma once

#include <vector>

#include "../../../csrc/primitives.h"
#include "../runtime/metal_sim.h"

namespace mlx_paged::sim {

using Simulator = int (*)(const MetalSimLaunch*, MetalSimReport*);
void set_simulator(Simulator simulator);

// A launch that was simulated, and the bytes that each of its buffers saw go by.
struct Record {
  Launch launch;
  std::vector<MetalSimTraffic> traffic;
  uint64_t threadgroups;
};

// Those since the last call.
std::vector<Record> take_records();

// Counts of device programs since the process started, and their memory now.
struct StepCounts {
  int steps = 0;
  int captures = 0;
  int replays = 0;
  uint64_t memory_bytes = 0;
};
StepCounts counts_of_steps();

// True if launches are captured, as on NVIDIA's GPUs, or run one after another, as on Apple's.
void capture_steps(bool wanted);

// The next capture throws.
void fail_next_capture();
void fail_next_preparation();

}  // namespace mlx_paged::sim
