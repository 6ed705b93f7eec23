// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

namespace mlx_paged::cpu {

// CBLAS's float32 matrix product, with the arguments that MLX passes.
using Sgemm = void (*)(
    int layout, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
    int lda, const float* b, int ldb, float beta, float* c, int ldc);

// Returns the sgemm visible process-wide (blas/forward.cpp, or one that the user preloaded), or
// null if only MLX has one.
Sgemm find_sgemm();

}  // namespace mlx_paged::cpu
