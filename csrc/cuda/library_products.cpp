// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// MLX has loaded cuBLASLt, so it is looked up in this process. What is used of its interface, which
// is the same in CUDA 12 and 13, is declared here: no package that a build could fetch has its
// header without all of the library.

#include "library_products.h"

#include <dlfcn.h>
#include <library_types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace mlx_paged::cuda {

namespace {

using Handle = struct cublasLtContext*;
using Description = struct cublasLtMatmulDescription*;
using Layout = struct cublasLtMatrixLayoutDescription*;
using Preference = struct cublasLtMatmulPreferenceDescription*;
using Status = int;  // 0: success

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

// cublasComputeType_t, cublasOperation_t, cublasLtEpilogue_t
constexpr int kCompute32F = 68;
constexpr int kTransposed = 1;
constexpr int kEpilogueBias = 4;
// cublasLtMatmulDescAttributes_t
constexpr int kTransA = 3;
constexpr int kEpilogue = 7;
constexpr int kBiasPointer = 8;
// cublasLtMatrixLayoutAttribute_t
constexpr int kBatchCount = 5;
constexpr int kBatchOffset = 6;
// cublasLtMatmulPreferenceAttributes_t
constexpr int kMostWorkspace = 1;
constexpr int kReductions = 3;
constexpr int kLeastAlignment = 5;  // of A, then B, C and D

struct Library {
  Status (*create)(Handle*);
  Status (*describe)(Description*, int compute, int scale_type);
  Status (*set_description)(Description, int attribute, const void*, size_t);
  Status (*lay_out)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t ld);
  Status (*set_layout)(Layout, int attribute, const void*, size_t);
  Status (*prefer)(Preference*);
  Status (*set_preference)(Preference, int attribute, const void*, size_t);
  Status (*forget_preference)(Preference);
  Status (*choose)(
      Handle, Description, Layout a, Layout b, Layout c, Layout d, Preference, int wanted,
      Heuristic*, int* found);
  Status (*multiply)(
      Handle, Description, const void* alpha, const void* a, Layout, const void* b, Layout,
      const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace,
      size_t workspace_bytes, cudaStream_t);
};

// Null where there is none.
const Library* library() {
  static const Library* found = []() -> const Library* {
    const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    handle = handle ? handle : dlopen(name.c_str(), RTLD_NOW);
    if (!handle) {
      return nullptr;
    }
    bool all = true;
    auto look_up = [&](const char* function, auto& pointer) {
      void* symbol = dlsym(handle, function);
      all = all && symbol;
      std::memcpy(&pointer, &symbol, sizeof(symbol));
    };
    static Library functions{};
    look_up("cublasLtCreate", functions.create);
    look_up("cublasLtMatmulDescCreate", functions.describe);
    look_up("cublasLtMatmulDescSetAttribute", functions.set_description);
    look_up("cublasLtMatrixLayoutCreate", functions.lay_out);
    look_up("cublasLtMatrixLayoutSetAttribute", functions.set_layout);
    look_up("cublasLtMatmulPreferenceCreate", functions.prefer);
    look_up("cublasLtMatmulPreferenceSetAttribute", functions.set_preference);
    look_up("cublasLtMatmulPreferenceDestroy", functions.forget_preference);
    look_up("cublasLtMatmulAlgoGetHeuristic", functions.choose);
    look_up("cublasLtMatmul", functions.multiply);
    return all ? &functions : nullptr;
  }();
  return found;
}

void check(Status status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(
        std::string("[cuda] cuBLASLt: ") + what + ": status " + std::to_string(status));
  }
}

// weight @ x.T as the library sees it: matrices by columns, so the weight's rows are the columns of
// A, those of x the columns of B, and D has a column for each row of the result.
struct Shape {
  int device;
  DType dtype;
  int n;
  int k;
  int num_rows;
  int x_stride;
  int count;              // of products of one x at once
  int64_t weight_offset;  // elements, from a weight to the next
  int64_t out_offset;
  bool has_bias;
  uint32_t alignment[4];  // bytes: of weight, x, residual, out

  auto key() const {
    return std::tuple(
        device, dtype, n, k, num_rows, x_stride, count, weight_offset, out_offset, has_bias,
        alignment[0], alignment[1], alignment[2], alignment[3]);
  }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

// How the library computes one shape of product. Made once, and never given back: CUDA may be gone
// before it could be.
struct Plan {
  Handle handle;
  Description description;
  Layout weight;
  Layout x;
  Layout out;  // and the residual's
  Algorithm algorithm;
};

Plan make_plan(const Shape& shape, Handle handle) {
  const Library& l = *library();
  Plan plan{};
  plan.handle = handle;
  check(l.describe(&plan.description, kCompute32F, CUDA_R_32F), "a product");
  check(
      l.set_description(plan.description, kTransA, &kTransposed, sizeof(kTransposed)),
      "a transposed weight");
  if (shape.has_bias) {
    check(
        l.set_description(plan.description, kEpilogue, &kEpilogueBias, sizeof(kEpilogueBias)),
        "a bias");
  }
  const int type = shape.dtype == DType::float16 ? CUDA_R_16F : CUDA_R_16BF;
  auto lay_out = [&](Layout& layout, int rows, int columns, int64_t ld, int64_t offset) {
    check(l.lay_out(&layout, type, rows, columns, ld), "a matrix");
    if (shape.count > 1) {
      check(l.set_layout(layout, kBatchCount, &shape.count, sizeof(int)), "several matrices");
      check(l.set_layout(layout, kBatchOffset, &offset, sizeof(offset)), "several matrices");
    }
  };
  lay_out(plan.weight, shape.k, shape.n, shape.k, shape.weight_offset);
  lay_out(plan.x, shape.k, shape.num_rows, shape.x_stride, 0);
  lay_out(plan.out, shape.n, shape.num_rows, shape.n, shape.out_offset);
  Preference preference;
  check(l.prefer(&preference), "a preference");
  const uint64_t workspace_bytes = kLibraryWorkspaceBytes;
  Status set = l.set_preference(preference, kMostWorkspace, &workspace_bytes, sizeof(uint64_t));
  // Parts of a sum are added in float32: in place (1), or by another kernel (2).
  const uint32_t reductions = 1 | 2;
  set = set ? set : l.set_preference(preference, kReductions, &reductions, sizeof(reductions));
  for (int i = 0; i < 4 && set == 0; i++) {
    set = l.set_preference(
        preference, kLeastAlignment + i, &shape.alignment[i], sizeof(shape.alignment[i]));
  }
  Heuristic best{};
  int found = 0;
  Status chosen = set ? set
                      : l.choose(
                            handle, plan.description, plan.weight, plan.x, plan.out, plan.out,
                            preference, 1, &best, &found);
  l.forget_preference(preference);
  check(chosen, "the choice of an algorithm");
  check(found > 0 ? best.status : -1, "an algorithm for this product");
  plan.algorithm = best.algorithm;
  return plan;
}

std::mutex& mutex() {
  static std::mutex made;
  return made;
}

// (With the mutex held.)
const Plan& plan_of(const Shape& shape) {
  static auto* plans = new std::map<Shape, Plan>();
  static auto* handles = new std::map<int, Handle>();
  auto found = plans->find(shape);
  if (found == plans->end()) {
    auto handle = handles->find(shape.device);
    if (handle == handles->end()) {
      Handle made;
      check(library()->create(&made), "its start");
      handle = handles->emplace(shape.device, made).first;
    }
    found = plans->emplace(shape, make_plan(shape, handle->second)).first;
  }
  return found->second;
}

uint32_t alignment_of(const char* address) {
  auto bits = reinterpret_cast<uintptr_t>(address) | 256;
  return uint32_t(bits & -bits);
}

// Bytes from one matrix to the next in one call. Kernels count them in 32 bits of elements, or copy
// engines to 2^40; and memory that the host shares is farther than that from the device's own.
constexpr ptrdiff_t kFarthestApart = ptrdiff_t(1) << 31;

struct Matrices {
  const char* weight;
  const char* bias;
  char* out;
};

}  // namespace

bool has_library_products() {
  return library();
}

void run_library_product(
    const Launch& launch, const std::vector<char*>& addresses, cudaStream_t stream) {
  if (!library()) {
    throw std::runtime_error("[cuda] cuBLASLt is not loaded");
  }
  LibraryProductParams params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  const char* x = addresses[LibraryProductParams::kX];
  const char* residual = params.has_residual ? addresses[LibraryProductParams::kResidual] : nullptr;
  std::vector<Matrices> parts;
  for (int i = 0; i < params.count; i++) {
    size_t at = LibraryProductParams::kParts + 3 * i;
    parts.push_back({addresses[at], addresses[at + 1], addresses[at + 2]});
  }
  // One call for all where the library can count from one to the next.
  bool together = false;
  if (parts.size() == 2 && !params.has_bias) {
    if (parts[1].weight < parts[0].weight) {
      std::swap(parts[0], parts[1]);
    }
    together = parts[0].out < parts[1].out && parts[1].weight - parts[0].weight < kFarthestApart &&
               parts[1].out - parts[0].out < kFarthestApart;
  }
  constexpr int kItemSize = 2;
  Shape shape{};
  shape.dtype = params.dtype;
  shape.n = params.n;
  shape.k = params.k;
  shape.num_rows = params.num_rows;
  shape.x_stride = params.x_stride;
  shape.count = together ? 2 : 1;
  shape.has_bias = params.has_bias;
  if (together) {
    shape.weight_offset = (parts[1].weight - parts[0].weight) / kItemSize;
    shape.out_offset = (parts[1].out - parts[0].out) / kItemSize;
  }
  if (cudaGetDevice(&shape.device) != cudaSuccess) {
    throw std::runtime_error("[cuda] there is no device");
  }
  const float one = 1.0f;
  const float beta = residual ? 1.0f : 0.0f;
  std::lock_guard lock(mutex());
  for (size_t i = 0; i < parts.size(); i += shape.count) {
    const auto& part = parts[i];
    const char* addend = residual ? residual : part.out;
    shape.alignment[0] = alignment_of(part.weight);
    shape.alignment[1] = alignment_of(x);
    shape.alignment[2] = alignment_of(addend);
    shape.alignment[3] = alignment_of(part.out);
    for (size_t j = i + 1; j < i + shape.count; j++) {
      shape.alignment[0] = std::min(shape.alignment[0], alignment_of(parts[j].weight));
      shape.alignment[3] = std::min(shape.alignment[3], alignment_of(parts[j].out));
    }
    const Plan& plan = plan_of(shape);
    if (shape.has_bias) {
      check(
          library()->set_description(plan.description, kBiasPointer, &part.bias, sizeof(part.bias)),
          "a bias");
    }
    check(
        library()->multiply(
            plan.handle, plan.description, &one, part.weight, plan.weight, x, plan.x, &beta, addend,
            plan.out, part.out, plan.out, &plan.algorithm,
            addresses[LibraryProductParams::kWorkspace], kLibraryWorkspaceBytes, stream),
        "a product");
  }
}

}  // namespace mlx_paged::cuda
