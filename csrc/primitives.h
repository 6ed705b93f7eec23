// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The graph nodes behind ops.h. `eval_cpu` lives in cpu/; `eval_gpu` in the one GPU backend that
// the build chose, or in no_gpu.cpp, which throws by name. Operations between a layer's matrix
// products are the CPU's alone (layer_ops.cpp).

#pragma once

#include <vector>

#include "mlx/primitives.h"
#include "ops.h"

namespace mlx_paged {

#define MLX_PAGED_PRIMITIVE(NAME)                                                 \
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override; \
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override; \
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;   \
  bool is_equivalent(const mx::Primitive& other) const override;                  \
  const char* name() const override {                                             \
    return NAME;                                                                  \
  }

// inputs: key_pool, value_pool, keys, values, slot_mapping. outputs: key_pool, value_pool.
class WriteKV : public mx::Primitive {
 public:
  explicit WriteKV(mx::Stream stream) : Primitive(stream) {}
  MLX_PAGED_PRIMITIVE("WriteKV")
};

// inputs: pools..., block_pairs. outputs: pools...
class CopyBlocks : public mx::Primitive {
 public:
  explicit CopyBlocks(mx::Stream stream) : Primitive(stream) {}
  MLX_PAGED_PRIMITIVE("CopyBlocks")
};

// inputs: key_pool, value_pool, block_tables, context_lens. outputs: keys, values.
class GatherKV : public mx::Primitive {
 public:
  GatherKV(mx::Stream stream, int max_context_len)
      : Primitive(stream), max_context_len_(max_context_len) {}
  MLX_PAGED_PRIMITIVE("GatherKV")

 private:
  int max_context_len_;
};

// inputs: queries, key_pool, value_pool, positions, block_tables, work_items, merge_items[, sinks].
class PagedAttention : public mx::Primitive {
 public:
  PagedAttention(mx::Stream stream, float scale, int window, float softcap)
      : Primitive(stream), scale_(scale), window_(window), softcap_(softcap) {}
  MLX_PAGED_PRIMITIVE("PagedAttention")

 private:
  float scale_;
  int window_;
  float softcap_;
};

// inputs: positions, inv_freqs. output: rotations.
class RopeRotations : public mx::Primitive {
 public:
  RopeRotations(mx::Stream stream, float scale) : Primitive(stream), scale_(scale) {}
  MLX_PAGED_PRIMITIVE("RopeRotations")

 private:
  float scale_;
};

// inputs: x, rotations.
class Rope : public mx::Primitive {
 public:
  Rope(mx::Stream stream, bool traditional) : Primitive(stream), traditional_(traditional) {}
  MLX_PAGED_PRIMITIVE("PagedRope")

 private:
  bool traditional_;
};

// inputs: x[, weight].
class RmsNorm : public mx::Primitive {
 public:
  RmsNorm(mx::Stream stream, float eps) : Primitive(stream), eps_(eps) {}
  MLX_PAGED_PRIMITIVE("PagedRmsNorm")

 private:
  float eps_;
};

// inputs: gate, x.
class SiluMul : public mx::Primitive {
 public:
  explicit SiluMul(mx::Stream stream) : Primitive(stream) {}
  MLX_PAGED_PRIMITIVE("SiluMul")
};

// inputs: logits. outputs: tokens, whether a row holds a NaN.
class GreedyTokens : public mx::Primitive {
 public:
  explicit GreedyTokens(mx::Stream stream) : Primitive(stream) {}
  MLX_PAGED_PRIMITIVE("GreedyTokens")
};

// inputs: logits, floors, top_p.
class NucleusThresholds : public mx::Primitive {
 public:
  explicit NucleusThresholds(mx::Stream stream) : Primitive(stream) {}
  MLX_PAGED_PRIMITIVE("NucleusThresholds")
};

// inputs: x, weight[, bias].
class Linear : public mx::Primitive {
 public:
  explicit Linear(mx::Stream stream) : Primitive(stream) {}
  MLX_PAGED_PRIMITIVE("PagedLinear")
};

#undef MLX_PAGED_PRIMITIVE

// Makes `out` share the pool's buffer, or (a pool that is not row-contiguous) hold a copy of it,
// which is counted. Returns whether a copy is due.
bool alias_pool(const mx::array& pool, mx::array& out);

// Its two halves, for a backend that allocates the copy itself.
bool can_alias_pool(const mx::array& pool);
void count_pool_copy();

}  // namespace mlx_paged
