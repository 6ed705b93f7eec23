// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx.h"
#include "kernels.h"

namespace mlx_paged::cpu {

namespace {

#ifdef __x86_64__
Kernels with_rounded(const char* simd, Kernels kernels, const RoundedKernels& rounded) {
  kernels.simd = simd;
  kernels.rounded = rounded;
  return kernels;
}
#endif

// Returns the supported builds, best first.
std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> found;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512vnni")) {
      if (__builtin_cpu_supports("avx512bf16")) {
        static const Kernels amx = with_rounded("amx", kAvx512Kernels, kAmxKernels);
        static const Kernels bf16 = with_rounded("avx512bf16", kAvx512Kernels, kAvx512Bf16Kernels);
        // For tests of the kernels for AMX on other processors.
        static const Kernels emulated =
            with_rounded("amx_emulated", kAvx512Kernels, kAmxEmulatedKernels);
        if (amx_refusal().empty()) {
          found.push_back(&amx);
        }
        found.push_back(&bf16);
        found.push_back(&emulated);
      }
      static const Kernels vnni = with_rounded("avx512vnni", kAvx512Kernels, kAvx512VnniKernels);
      found.push_back(&vnni);
    }
    found.push_back(&kAvx512Kernels);
  }
  // The first AVX2 processors also have F16C; __builtin_cpu_supports knows F16C only from GCC 11
  // on.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    found.push_back(&kAvx2Kernels);
  }
#endif
  found.push_back(&kBaselineKernels);
  return found;
}

const Kernels& choose() {
  auto supported = supported_kernels();
  const char* wanted = std::getenv("MLX_PAGED_SIMD");
  if (!wanted) {
    return *supported.front();
  }
  std::string names;
  for (auto* build : supported) {
    if (std::string(build->simd) == wanted) {
      return *build;
    }
    names += (names.empty() ? "" : ", ") + std::string(build->simd);
  }
  std::string message =
      "MLX_PAGED_SIMD must be one of " + names + " on this processor but got " + wanted;
  if (std::string(wanted) == "amx") {
    message += ": " + amx_refusal();
  }
  throw std::invalid_argument(message);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const IntegerKernels* integer_kernels(Activations activations, const WeightView& weights) {
  const auto& rounded = kernels().rounded;
  if (weights.format != WeightFormat::affine || (weights.bits != 4 && weights.bits != 8)) {
    return nullptr;
  }
  if (activations == Activations::int8) {
    return &rounded.int8;
  }
  const auto& wide = weights.bits == 4 ? rounded.wide4 : rounded.wide8;
  const IntegerKernels& found = wide[weights.group_size > kMinIntegerGroup];
  return found.product ? &found : nullptr;
}

const AttentionKernels& attention_kernels(const AttentionArgs& args) {
  const auto& rounded = kernels().rounded;
  const bool is_plain =
      args.keys.format == PoolFormat::plain && args.values.format == PoolFormat::plain;
  if (is_plain && args.dtype == DType::bfloat16 && rounded.bfloat_attention.attend) {
    return rounded.bfloat_attention;
  }
  if (is_plain && args.dtype == DType::float32 && args.activations == Activations::int8 &&
      !paged::changes_logits(args.options) && rounded.rounded_attention.attend) {
    return rounded.rounded_attention;
  }
  return kernels().attention;
}

void multiply_rounded(
    const IntegerKernels& integers, const IntegerProductArgs& args, const float* x, int64_t stride,
    int64_t begin, int64_t end) {
  auto is_uneven = [&](int row) {
    return integers.is_uneven(args.x, row, args.rows, args.weights.k);
  };
  int even = 0;
  while (even < args.rows && is_uneven(even)) {
    even++;
  }
  if (even < args.rows) {
    integers.product(args, begin, end);
  }
  for (int row = 0; row < args.rows;) {
    int last = row;
    while (last < args.rows && is_uneven(last)) {
      last++;
    }
    if (last > row) {
      float* to = args.c + row * args.ldc;
      kernels().product.few_rows(
          {x + row * stride, args.weights, to, last - row, stride, args.ldc}, begin, end);
    }
    row = last + 1;
  }
}

}  // namespace mlx_paged::cpu
