// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// The parts of Apple's SDK that metal-cpp names, and no more.
#pragma once

using kern_return_t = unsigned;
using mach_port_t = unsigned;
using task_id_token_t = unsigned;
