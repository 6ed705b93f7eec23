// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Serves the three CBLAS functions that libmlx imports with OpenBLAS.
//
// MLX's Linux wheel links the reference BLAS. PyPI's scipy-openblas32 provides OpenBLAS with the
// symbol prefix `scipy_`. This library, loaded with RTLD_GLOBAL before libmlx, provides the plain
// names; mlx_paged/blas.py opens OpenBLAS with RTLD_GLOBAL first, so the lookups below find it.
//
// OpenBLAS runs single-threaded, and our parallel_for splits products into pieces. OpenBLAS's own
// threads synchronize at every product: on a small machine where the host also builds the next
// step, one of them can lose its core for a time slice (8 ms) while the others wait. Our threads
// claim pieces instead, so a preempted thread delays none of the others.
//
// Products of few rows with transposed weights, as in decode, use our own kernel, because OpenBLAS
// packs the weights first.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "../cpu/kernels.h"
#include "../cpu/product_pieces.h"

namespace {

constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;

template <typename Function>
Function resolve(const char* name) {
  void* address = dlsym(RTLD_DEFAULT, name);
  if (!address) {
    std::fprintf(stderr, "mlx_paged: OpenBLAS has no %s; set MLX_PAGED_BLAS=off\n", name);
    std::abort();
  }
  return reinterpret_cast<Function>(address);
}

const char* advance(const void* p, int64_t elements, int64_t element) {
  return static_cast<const char*>(p) + elements * element;
}

// Calls gemm(m, n, a, b, c) for pieces of a row-major product, along the longer side of C.
template <typename Gemm>
void split(
    int transpose_a, int transpose_b, int m, int n, int k, int64_t element, const void* a, int lda,
    const void* b, int ldb, void* c, int ldc, const Gemm& gemm) {
  bool columns = n >= m;
  mlx_paged::cpu::for_product_pieces(
      m, n, k, 8 * element, columns ? n : m, [&](int64_t begin, int64_t end) {
        int size = int(end - begin);
        if (columns) {
          int64_t step = transpose_b == kNoTranspose ? 1 : ldb;
          gemm(
              m, size, a, advance(b, begin * step, element),
              const_cast<char*>(advance(c, begin, element)));
        } else {
          int64_t step = transpose_a == kNoTranspose ? lda : 1;
          gemm(
              size, n, advance(a, begin * step, element), b,
              const_cast<char*>(advance(c, begin * ldc, element)));
        }
      });
}

const mlx_paged::cpu::ProductKernels& product_kernels() {
  // Empty if MLX_PAGED_SIMD is invalid: the extension, which can raise exceptions, reports it.
  static const auto found = [] {
    try {
      return mlx_paged::cpu::kernels().product;
    } catch (const std::exception&) {
      return mlx_paged::cpu::ProductKernels{};
    }
  }();
  return found;
}

// Multiplies a piece of a product with few rows (`m`) and a transposed matrix by our own kernel.
// Returns false if the product is of another kind.
bool multiply_few_rows(
    int transpose_a, int transpose_b, int m, int rows, int columns, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  if (m > product_kernels().max_rows_float32 || transpose_a != kNoTranspose ||
      transpose_b == kNoTranspose || alpha != 1 || beta != 0) {
    return false;
  }
  auto weights = mlx_paged::cpu::WeightView::float32(b, columns, k, ldb);
  product_kernels().few_rows({a, weights, c, rows, lda, ldc}, 0, columns);
  return true;
}

// Only float32 has such a kernel.
template <typename... Arguments>
bool multiply_few_rows(Arguments...) {
  return false;
}

// Runs in dlopen(), after OpenBLAS has been loaded.
[[maybe_unused]] const bool single_threaded = [] {
  resolve<void (*)(int)>("scipy_openblas_set_num_threads")(1);
  return true;
}();

}  // namespace

// See parallel_for.h. This library has its own threads.
extern "C" __attribute__((visibility("default"))) void mlx_paged_limit_threads(int max_threads) {
  mlx_paged::cpu::limit_threads(max_threads);
}

#define MLX_PAGED_FORWARD(NAME, ELEMENT_SIZE, SCALAR, CONST_MATRIX, MATRIX)                      \
  extern "C" __attribute__((visibility("default"))) void NAME(                                   \
      int layout, int transpose_a, int transpose_b, int m, int n, int k, SCALAR alpha,           \
      CONST_MATRIX a, int lda, CONST_MATRIX b, int ldb, SCALAR beta, MATRIX c, int ldc) {        \
    static const auto openblas = resolve<decltype(&NAME)>("scipy_" #NAME);                       \
    if (layout != kRowMajor || m <= 0 || n <= 0) {                                               \
      return openblas(                                                                           \
          layout, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);       \
    }                                                                                            \
    auto gemm = [&](int rows, int columns, const void* a_, const void* b_, void* c_) {           \
      auto a_part = static_cast<CONST_MATRIX>(a_);                                               \
      auto b_part = static_cast<CONST_MATRIX>(b_);                                               \
      auto c_part = static_cast<MATRIX>(c_);                                                     \
      if (!multiply_few_rows(                                                                    \
              transpose_a, transpose_b, m, rows, columns, k, alpha, a_part, lda, b_part, ldb,    \
              beta, c_part, ldc)) {                                                              \
        openblas(                                                                                \
            layout, transpose_a, transpose_b, rows, columns, k, alpha, a_part, lda, b_part, ldb, \
            beta, c_part, ldc);                                                                  \
      }                                                                                          \
    };                                                                                           \
    split(transpose_a, transpose_b, m, n, k, ELEMENT_SIZE, a, lda, b, ldb, c, ldc, gemm);        \
  }

MLX_PAGED_FORWARD(cblas_sgemm, 4, float, const float*, float*)
MLX_PAGED_FORWARD(cblas_dgemm, 8, double, const double*, double*)
MLX_PAGED_FORWARD(cblas_cgemm, 8, const void*, const void*, void*)
