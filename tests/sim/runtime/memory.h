// Memory as kernels see it: buffers far apart from each other, threadgroup variables, and for
// memory that is written a record of who touched it last.
#pragma once
#include <cstdint>
#include <string>

#include "metal_sim.h"

namespace sim {

// Copies a buffer in (or poisons it); returns the address that kernels see. Equal `data` is one
// region.
uint64_t bind_buffer(const MetalSimBuffer& buffer);
uint64_t bind_bytes(const MetalSimBytes& bytes);
uint64_t threadgroup_argument(uint32_t index, uint64_t bytes);
void begin_threadgroup();  // poisons threadgroup memory
// Copies written buffers back and fills the report's traffic.
void end_launch(const MetalSimLaunch& args, MetalSimReport& report);
// Address that kernels see of what is bound at an index; 0 if nothing is.
uint64_t buffer_address(uint32_t index);

}  // namespace sim
