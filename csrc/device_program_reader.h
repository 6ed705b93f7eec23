// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Makes a device program of a graph: which nodes become one launch, and in which order.

#pragma once

#include "device_program.h"

namespace mlx_paged {

// Fills `program`. Throws NoProgram.
void read_program(
    DeviceProgram& program, const Arrays& inputs, const Arrays& outputs,
    DeviceProgram::Residual residual);

}  // namespace mlx_paged
