// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// The parts of Apple's SDK that metal-cpp names, and no more.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>

using CFTypeRef = const void*;
using CFStringRef = const struct __CFString*;
using CFIndex = signed long;
using CFTimeInterval = double;
using CFAbsoluteTime = double;
using CGFloat = double;
using CGColorSpaceRef = struct CGColorSpace*;
struct CGPoint {
  double x, y;
};
struct CGSize {
  double width, height;
};
struct CGRect {
  CGPoint origin;
  CGSize size;
};
#define API_AVAILABLE(...)
