// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The three CBLAS names that libmlx imports, forwarded to OpenBLAS.
//
// MLX's Linux wheel links the reference BLAS. PyPI's scipy-openblas32 carries OpenBLAS under the
// prefix `scipy_`. Loaded with RTLD_GLOBAL before libmlx, this library answers for the plain names.
// mlx_paged/blas.py opens OpenBLAS with RTLD_GLOBAL first, where the lookups below find it.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace {

template <typename Function>
Function resolve(const char* name) {
  void* address = dlsym(RTLD_DEFAULT, name);
  if (!address) {
    std::fprintf(stderr, "mlx_paged: OpenBLAS has no %s; set MLX_PAGED_BLAS=off\n", name);
    std::abort();
  }
  return reinterpret_cast<Function>(address);
}

}  // namespace

#define MLX_PAGED_FORWARD(NAME, SCALAR, CONST_MATRIX, MATRIX)                                \
  extern "C" __attribute__((visibility("default"))) void NAME(                               \
      int layout, int transpose_a, int transpose_b, int m, int n, int k, SCALAR alpha,       \
      CONST_MATRIX a, int lda, CONST_MATRIX b, int ldb, SCALAR beta, MATRIX c, int ldc) {    \
    static const auto forward = resolve<decltype(&NAME)>("scipy_" #NAME);                    \
    forward(layout, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \
  }

MLX_PAGED_FORWARD(cblas_sgemm, float, const float*, float*)
MLX_PAGED_FORWARD(cblas_dgemm, double, const double*, double*)
MLX_PAGED_FORWARD(cblas_cgemm, const void*, const void*, void*)
