// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Matrix products by cuBLASLt, which MLX has loaded; this looks it up in the process. Declares the
// part of its interface used here, the same in CUDA 12 and 13, because its header is only packaged
// together with the whole library.

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
constexpr int kMaxWorkspace = 1;
constexpr int kReductions = 3;
constexpr int kMinAlignment = 5;  // of A; B, C and D follow

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
      Heuristic*, int* num_found);
  Status (*multiply)(
      Handle, Description, const void* alpha, const void* a, Layout, const void* b, Layout,
      const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace,
      size_t workspace_bytes, cudaStream_t);
};

// Null if cuBLASLt cannot be loaded.
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

// Shape of weight @ x.T in cuBLASLt's column-major terms: rows of the weight are columns of A, rows
// of x are columns of B, and rows of the result are columns of D.
struct Shape {
  int device;
  DType dtype;
  int n;
  int k;
  int num_rows;
  int x_stride;
  int count;              // products of one x in one call
  int64_t weight_offset;  // elements between consecutive weights
  int64_t out_offset;
  bool has_bias;
  uint32_t alignment[4];  // of weight, x, residual and out, in bytes

  auto key() const {
    return std::tuple(
        device, dtype, n, k, num_rows, x_stride, count, weight_offset, out_offset, has_bias,
        alignment[0], alignment[1], alignment[2], alignment[3]);
  }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

// cuBLASLt's plan for one shape of product. Created once and never freed, because CUDA may be torn
// down first.
struct Plan {
  Handle handle;
  Description description;
  Layout weight;
  Layout x;
  Layout out;  // and residual
  Algorithm algorithm;
};

Plan make_plan(const Shape& shape, Handle handle) {
  const Library& l = *library();
  Plan plan{};
  plan.handle = handle;
  check(l.describe(&plan.description, kCompute32F, CUDA_R_32F), "cannot create a product");
  check(
      l.set_description(plan.description, kTransA, &kTransposed, sizeof(kTransposed)),
      "cannot transpose the weight");
  if (shape.has_bias) {
    check(
        l.set_description(plan.description, kEpilogue, &kEpilogueBias, sizeof(kEpilogueBias)),
        "cannot set the bias");
  }
  const int type = shape.dtype == DType::float16 ? CUDA_R_16F : CUDA_R_16BF;
  auto lay_out = [&](Layout& layout, int rows, int columns, int64_t ld, int64_t offset) {
    check(l.lay_out(&layout, type, rows, columns, ld), "cannot describe a matrix");
    if (shape.count > 1) {
      check(
          l.set_layout(layout, kBatchCount, &shape.count, sizeof(int)), "cannot describe a batch");
      check(l.set_layout(layout, kBatchOffset, &offset, sizeof(offset)), "cannot describe a batch");
    }
  };
  lay_out(plan.weight, shape.k, shape.n, shape.k, shape.weight_offset);
  lay_out(plan.x, shape.k, shape.num_rows, shape.x_stride, 0);
  lay_out(plan.out, shape.n, shape.num_rows, shape.n, shape.out_offset);
  Preference preference;
  check(l.prefer(&preference), "cannot create a preference");
  const uint64_t workspace_bytes = kLibraryWorkspaceBytes;
  Status set = l.set_preference(preference, kMaxWorkspace, &workspace_bytes, sizeof(uint64_t));
  // Allow split reductions in float32, in place (1) or by another kernel (2).
  const uint32_t reductions = 1 | 2;
  set = set ? set : l.set_preference(preference, kReductions, &reductions, sizeof(reductions));
  for (int i = 0; i < 4 && set == 0; i++) {
    set = l.set_preference(
        preference, kMinAlignment + i, &shape.alignment[i], sizeof(shape.alignment[i]));
  }
  Heuristic best{};
  int num_found = 0;
  Status chosen = set ? set
                      : l.choose(
                            handle, plan.description, plan.weight, plan.x, plan.out, plan.out,
                            preference, 1, &best, &num_found);
  l.forget_preference(preference);
  check(chosen, "cannot choose an algorithm");
  check(num_found > 0 ? best.status : -1, "found no algorithm");
  plan.algorithm = best.algorithm;
  return plan;
}

std::mutex& mutex() {
  static std::mutex made;
  return made;
}

// Requires the mutex.
const Plan& plan_of(const Shape& shape) {
  static auto* plans = new std::map<Shape, Plan>();
  static auto* handles = new std::map<int, Handle>();
  auto found = plans->find(shape);
  if (found == plans->end()) {
    auto handle = handles->find(shape.device);
    if (handle == handles->end()) {
      Handle made;
      check(library()->create(&made), "cannot start");
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

// Maximum distance in bytes between the matrices of one call. Kernels count elements in 32 bits and
// the copy engine up to 2^40, and host-shared memory can be farther than that from device memory.
constexpr ptrdiff_t kMaxDistance = ptrdiff_t(1) << 31;

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
  // Use one call for both parts if a stride can lead from one to the other.
  bool together = false;
  if (parts.size() == 2 && !params.has_bias) {
    if (parts[1].weight < parts[0].weight) {
      std::swap(parts[0], parts[1]);
    }
    together = parts[0].out < parts[1].out && parts[1].weight - parts[0].weight < kMaxDistance &&
               parts[1].out - parts[0].out < kMaxDistance;
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
    throw std::runtime_error("[cuda] no current device");
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
          "cannot set the bias");
    }
    check(
        library()->multiply(
            plan.handle, plan.description, &one, part.weight, plan.weight, x, plan.x, &beta, addend,
            plan.out, part.out, plan.out, &plan.algorithm,
            addresses[LibraryProductParams::kWorkspace], kLibraryWorkspaceBytes, stream),
        "cannot create a product");
  }
}

}  // namespace mlx_paged::cuda
