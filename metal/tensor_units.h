// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Tensors for matmul2d of Metal Performance Primitives, which runs on the tensor units of GPUs from
// the M5 on. The kernels of tensor_*.h need Metal 4 (C++17) and macOS 26.2; where MLX compiles them
// and calibration proves them they replace others (docs/metal-kernels.md). They do not depend on
// which lane holds which element of a cooperative tensor.

#pragma once

#if __METAL_VERSION__ < 400 || !defined(__HAVE_TENSOR__)
#error "kernels for tensor units need Metal 4"
#endif

#include <metal_stdlib>
#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

using namespace metal;

namespace paged {

template <typename T>
using TileMatrix = tensor<threadgroup T, dextents<int, 2>, tensor_inline>;

// Rows are `pitch` elements apart.
template <typename T>
METAL_FUNC TileMatrix<T> tile_matrix(threadgroup T* first, int rows, int columns, int pitch) {
  return TileMatrix<T>(first, dextents<int, 2>(columns, rows), array<int, 2>{1, pitch});
}

}  // namespace paged
