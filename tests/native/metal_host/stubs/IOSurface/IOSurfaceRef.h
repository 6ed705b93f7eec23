// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// The parts of Apple's SDK that metal-cpp names, and no more.
#pragma once

using IOSurfaceRef = struct __IOSurface*;
