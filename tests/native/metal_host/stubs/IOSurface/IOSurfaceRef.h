// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// What metal-cpp names of Apple's SDK, no more.
#pragma once

using IOSurfaceRef = struct __IOSurface*;
