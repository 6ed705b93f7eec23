// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

namespace mlx_paged::cpu {

// CBLAS's product of float32 matrices, as MLX itself calls it.
using Sgemm = void (*)(
    int layout, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
    int lda, const float* b, int ldb, float beta, float* c, int ldc);

// The one that is visible in the whole process (blas/forward.cpp, or one the user preloaded); null
// where only MLX has one.
Sgemm find_sgemm();

}  // namespace mlx_paged::cpu
