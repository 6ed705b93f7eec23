// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The operations as nodes of MLX's graph: inputs, outputs and parameters. ops.cpp and layer_ops.cpp
// check arguments and create the nodes; mlx_paged/ops.py documents them for users. `eval_cpu` is in
// cpu/. On a GPU a KernelNode runs the kernels of metal/ that launch*.cpp selects.
//
// A pool is `[num_blocks, block_size, num_kv_heads, head_dim]`, token-major inside a block. Keys
// and values have separate pools, whose head dims may differ. A slot is `block * block_size +
// offset`. pool_format.h describes quantized pools; writes quantize and reads dequantize.
//
// Ownership. WriteKV and CopyBlocks always work in place: the arrays they return share the buffers
// of the pools passed in, even if those have other owners. So
//   - the handle passed in is consumed; use the returned one;
//   - all reads and writes of a pool use one stream;
//   - a freed block must not be handed out until the last step that could read it has been
//     evaluated.
// Donation would not work: a step in flight holds the buffer, so every overlapped step would copy
// the whole pool. `pool_copies()` counts unavoidable copies (a pool that is not row-contiguous, or
// on a GPU one that is not aligned to 16 bytes in its buffer); the engine's tests hold it at zero.

#pragma once

#include <optional>
#include <vector>

#include "launch.h"
#include "mlx/primitives.h"
#include "weight_format.h"

namespace mlx_paged {

// A node that runs on the CPU. Unless a node says otherwise, GPUs use MLX's own operations instead.
class Node : public mx::Primitive {
 public:
  using Primitive::Primitive;
  void eval_gpu(const Arrays& in, Arrays& out) override;  // throws: pass stream=mx.cpu
  bool is_equivalent(const mx::Primitive&) const override { return true; }  // no parameters
};

// A node that GPUs run too.
class KernelNode : public Node {
 public:
  using Node::Node;

  // In gpu_eval.cpp for every node; no_gpu.cpp throws in builds without a GPU backend.
  void eval_gpu(const Arrays& in, Arrays& out) override;

  // Returns the launches for a GPU. They depend only on the shapes and dtypes of `in` and `out`, on
  // the contents of the inputs in `read_by_host`, and on whether an output took the buffer of
  // `donated`.
  virtual LaunchList launches(const Arrays& in, const Arrays& out, Gpu gpu) const = 0;
  virtual std::vector<int> read_by_host() const { return {}; }

  // Inputs that are pools: `count` of them from `first` on. Written pools are returned as the
  // outputs, in place.
  struct Pools {
    int first;
    int count;
    bool written;
  };
  virtual Pools pools(const Arrays& in) const = 0;

  // The input whose buffer the output takes over if nothing else needs it; -1: none.
  virtual int donated() const { return -1; }

  // With MLX_PAGED_CHECK=1: checks block ids and slots against the pool before a kernel uses them,
  // and throws std::out_of_range (Python: IndexError), which names the row and the id. Their values
  // exist only when the graph runs, and with a wrong one a kernel would access other memory. Every
  // eval calls this first. It waits for the inputs and runs on the evaluating thread, because an
  // exception on a stream's thread makes that stream unusable.
  void check_ids(const Arrays& in);

 private:
  virtual void check(const Arrays& in) const = 0;
};

#define MLX_PAGED_NODE(NAME)                             \
  void eval_cpu(const Arrays& in, Arrays& out) override; \
  const char* name() const override {                    \
    return NAME;                                         \
  }

#define MLX_PAGED_KERNEL_NODE(NAME)                                                 \
  MLX_PAGED_NODE(NAME)                                                              \
  LaunchList launches(const Arrays& in, const Arrays& out, Gpu gpu) const override; \
  void check(const Arrays& in) const override;

// Writes token i's key and value to slot slot_mapping[i]; -1 writes nothing.
// in: key_pool, value_pool, keys [num_tokens, num_kv_heads, key_dim], values (likewise),
// slot_mapping [num_tokens] int32. out: the pools.
class WriteKV : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("write_kv")
  Pools pools(const Arrays&) const override { return {0, 2, true}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {in[0].shape(), in[1].shape()};
  }
};

// Copies block src to block dst in every pool, for each (src, dst). The pairs run in any order, so
// a block must not be a destination twice, or both a destination and a source.
// in: pools..., block_pairs [num_pairs, 2] int32. out: the pools.
class CopyBlocks : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("copy_blocks")
  Pools pools(const Arrays& in) const override { return {0, int(in.size()) - 1, true}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i + 1 < in.size(); i++) {
      shapes.push_back(in[i].shape());
    }
    return shapes;
  }
};

// Gathers dense keys and values of whole sequences; zeros past a context.
// in: key_pool, value_pool, block_tables [num_seqs, max_blocks] int32, context_lens [num_seqs]
// int32. out: keys [num_seqs, num_kv_heads, max_context_len, key_dim], values.
class GatherKV : public KernelNode {
 public:
  GatherKV(mx::Stream stream, int max_context_len)
      : KernelNode(stream), max_context_len_(max_context_len) {}
  MLX_PAGED_KERNEL_NODE("gather_kv")
  Pools pools(const Arrays&) const override { return {0, 2, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    auto dense = [&](const mx::array& pool) {
      return mx::Shape{in[2].shape(0), pool.shape(2), max_context_len_, layout_of(pool).head_dim};
    };
    return {dense(in[0]), dense(in[1])};
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return max_context_len_ == static_cast<const GatherKV&>(other).max_context_len_;
  }

 private:
  int max_context_len_;
};

using paged::AttentionOptions;

// Attention of every query row (one token) over its sequence's blocks. Rows without a work item
// become zeros.
// in: queries [num_rows, num_q_heads, key_dim], key_pool, value_pool, and the arrays of a plan,
// built once per step and shared by all layers: positions of the tokens in their sequences
// [num_rows] int32, or with bounds [3, num_rows]: then also the first and last key that each row
// sees in addition to its causal window; block_tables [num_seqs, max_blocks] int32, work_items
// [num_items, 6] int32, merge_items [num_merges, 4] int32 (columns: metal/kernel_table.h);
// [per_head [n * num_q_heads] float32, one number per query head for each option that needs it].
// out: [num_rows, num_q_heads, value_dim].
class PagedAttention : public KernelNode {
 public:
  enum { kQueries, kKeyPool, kValuePool, kPositions, kTables, kWork, kMerge, kPerHead };  // inputs

  PagedAttention(
      mx::Stream stream, const AttentionOptions& options,
      Activations activations = Activations::float32)
      : KernelNode(stream), options_(options), activations_(activations) {}
  MLX_PAGED_KERNEL_NODE("paged_attention")
  Pools pools(const Arrays&) const override { return {kKeyPool, 2, false}; }
  std::vector<int> read_by_host() const override { return {kWork, kMerge}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[kQueries].shape(0), in[kQueries].shape(1), layout_of(in[kValuePool]).head_dim}};
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const PagedAttention&>(other);
    return options_ == o.options_ && activations_ == o.activations_;
  }
  const AttentionOptions& options() const { return options_; }
  Activations activations() const { return activations_; }

 private:
  AttentionOptions options_;
  Activations activations_;  // on the CPU
};

// --- Around a layer's matrix products, and sampling ---
// These have no gradient. All compute in fp32 and round once. Inputs have a dtype of pools unless
// stated otherwise.

// Cosines and sines of position * scale * inv_freq, once for all layers of a step. Angles are
// float32 products, as in MLX.
// in: positions [num_rows] int32, inv_freqs [half_dims] float32. out: [num_rows, 2, half_dims]
// float32.
class RopeRotations : public Node {
 public:
  RopeRotations(mx::Stream stream, float scale) : Node(stream), scale_(scale) {}
  MLX_PAGED_NODE("rope_rotations")
  void eval_gpu(const Arrays& in, Arrays& out) override;  // with CUDA
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[0].shape(0), 2, in[1].shape(0)}};
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return scale_ == static_cast<const RopeRotations&>(other).scale_;
  }
  float scale() const { return scale_; }

 private:
  float scale_;
};

// Rotates the first 2 * half_dims dims of every head: dim i with dim i + half_dims, or
// (`traditional`) dim 2i with dim 2i + 1.
// in: x [num_rows, num_heads, 1, head_dim] of any strides, rotations. out: like x.
class Rope : public Node {
 public:
  Rope(mx::Stream stream, bool traditional) : Node(stream), traditional_(traditional) {}
  MLX_PAGED_NODE("rope")
  // True if the CUDA backend has a kernel for it.
  static bool served_on_gpu(const mx::array& x, const mx::array& rotations, bool traditional);
  void eval_gpu(const Arrays& in, Arrays& out) override;
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return traditional_ == static_cast<const Rope&>(other).traditional_;
  }
  bool traditional() const { return traditional_; }

 private:
  bool traditional_;
};

// x / sqrt(mean(x^2) + eps) * weight over the last axis. in: x[, weight]. out: like x.
class RmsNorm : public Node {
 public:
  RmsNorm(mx::Stream stream, float eps) : Node(stream), eps_(eps) {}
  MLX_PAGED_NODE("rms_norm")
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return eps_ == static_cast<const RmsNorm&>(other).eps_;
  }
  float eps() const { return eps_; }

 private:
  float eps_;
};

// gate * sigmoid(gate) * x. in: gate, x of one shape and dtype. out: like them.
class SiluMul : public Node {
 public:
  using Node::Node;
  MLX_PAGED_NODE("silu_mul")
  // True if the CUDA backend has a kernel for it.
  static bool served_on_gpu(const mx::array& gate);
  void eval_gpu(const Arrays& in, Arrays& out) override;
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
};

// (x - mean) / sqrt(variance + eps) * weight + bias over the last axis.
// in: x[, weight][, bias]. out: like x.
class LayerNorm : public Node {
 public:
  LayerNorm(mx::Stream stream, float eps, bool has_weight)
      : Node(stream), eps_(eps), has_weight_(has_weight) {}
  MLX_PAGED_NODE("layer_norm")
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const LayerNorm&>(other);
    return eps_ == o.eps_ && has_weight_ == o.has_weight_;
  }
  float eps() const { return eps_; }
  bool has_weight() const { return has_weight_; }

 private:
  float eps_;
  bool has_weight_;
};

// in: x. out: like x.
class Gelu : public Node {
 public:
  Gelu(mx::Stream stream, GeluKind kind) : Node(stream), kind_(kind) {}
  MLX_PAGED_NODE("gelu")
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return kind_ == static_cast<const Gelu&>(other).kind_;
  }
  GeluKind kind() const { return kind_; }

 private:
  GeluKind kind_;
};

// gpt-oss's form of SwiGLU: g * sigmoid(alpha * g) * (clip(x, -limit, limit) + 1) with
// g = min(gate, limit). in: gate, x of one shape and dtype. out: like them.
class ClippedSwiglu : public Node {
 public:
  ClippedSwiglu(mx::Stream stream, float alpha, float limit)
      : Node(stream), alpha_(alpha), limit_(limit) {}
  MLX_PAGED_NODE("clipped_swiglu")
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const ClippedSwiglu&>(other);
    return alpha_ == o.alpha_ && limit_ == o.limit_;
  }
  float alpha() const { return alpha_; }
  float limit() const { return limit_; }

 private:
  float alpha_;
  float limit_;
};

// Selects the first maximum of each row.
// in: logits [num_rows, vocab_size]. out: its token, int32; its logit, float32, NaN if the row
// holds one (the token is then arbitrary); and the token for the host, int32, -1 if the logit is
// not finite.
class GreedyTokens : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("greedy_tokens")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[0].shape(0)}, {in[0].shape(0)}, {in[0].shape(0)}};
  }
};

// Draws tokens from softmax(logits / temperature), without tokens whose scaled logit is below the
// row's threshold; see `draw_tokens` of ops.py. A row of temperature 0 keeps its token.
// in: logits [num_rows, vocab_size]; tokens, int32, and largest, float32, of GreedyTokens;
// temperature [num_rows] float32; keys [num_rows, 2] uint32; thresholds [num_rows] float32.
// out: [num_rows] int32.
class DrawTokens : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("draw_tokens")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {{in[0].shape(0)}}; }
};

// Sets logits of forbidden tokens to -inf: those whose bit is 0 in their row's bitmask. NaN and inf
// stay, and other rows do not change. In place if nothing else needs the logits.
// in: logits [num_rows, vocab_size], bitmask [num_masks, ceil(vocab_size / 32)] int32 or uint32,
// lowest bit first, rows [num_masks] int32: distinct rows of logits. out: like logits.
class ApplyTokenBitmask : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("apply_token_bitmask")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  int donated() const override { return 0; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
};

// Adds values to single logits, then penalizes tokens; see `edit_logits` of ops.py. In place if
// nothing else needs the logits.
// in: logits [num_rows, vocab_size] float32; rows [num_edited, 5] int32, each an EditedRow of
// metal/kernel_table.h; factors [num_edited, 3] float32; entries [num_entries, 2] int32, each a
// LogitEntry; values [num_entries] float32; newest [num_newest] int32. out: like logits.
class EditLogits : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("edit_logits")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  int donated() const override { return 0; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
};

// out[batch, i] = a[batch, ids[batch, i]].
// in: a [num_batches, num_rows, width] of 16 or 32 bits, ids [num_batches, num_ids] int32 or
// uint32. out: [num_batches, num_ids, width].
class TakeRows : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("take_rows")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[1].shape(0), in[1].shape(1), in[0].shape(2)}};
  }
};

// The smallest logit of each row to keep for min-p, then top-k, then top-p of what these left, as
// (logit - largest) / temperature in float32. Equal logits are kept or dropped together.
// in: logits [num_rows, vocab_size]; for each row its largest logit, temperature, floor (log of
// min-p), top_k int32 (all logits if not in (0, vocab_size)) and top_p (all if at least 1), float32
// unless it says otherwise. out: [num_rows] float32; the floor in a row with a NaN.
class SamplingThresholds : public KernelNode {
 public:
  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("sampling_thresholds")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {{in[0].shape(0)}}; }
};

// x @ weight.T + bias. On the CPU: float32 rows and a weight of any dtype, as one graph node
// instead of MLX's five. With CUDA: 16 bits and up to 64 rows, in one kernel.
// in: x [..., k], weight [n, k][, bias [n]]. out: [..., n].
class Linear : public Node {
 public:
  Linear(mx::Stream s, Activations activations, int by_rows)
      : Node(s), activations_(activations), by_rows_(by_rows) {}
  MLX_PAGED_NODE("linear")
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const Linear&>(other);
    return activations_ == o.activations_ && by_rows_ == o.by_rows_;
  }
  // Both are in cuda/linear_launch.cpp; no_cuda.cpp returns false and uses Node's.
  static bool served_on_gpu(
      const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias);
  void eval_gpu(const Arrays& in, Arrays& out) override;
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(0);
    return {shape};
  }

 private:
  Activations activations_;  // on the CPU
  int by_rows_;  // on the CPU: leading rows for which no BLAS is used, whose sums depend on their
                 // number
};

// The same with a weight from mx.quantize: float32 rows on the CPU; 16 bits and up to 64 rows with
// CUDA.
// in: x [..., k], weight [n, k * bits / 32] uint32, scales [n, k / group_size][, biases like
// scales, if the format has them][, bias [n]]. out: [..., n] with the dtype of x; so have bias, and
// on GPUs scales and biases that are not bytes.
class QuantizedLinear : public Node {
 public:
  QuantizedLinear(mx::Stream s, WeightCodes codes, Activations activations, int by_rows)
      : Node(s), codes_(codes), activations_(activations), by_rows_(by_rows) {}
  MLX_PAGED_NODE("quantized_linear")
  Activations activations() const { return activations_; }
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const QuantizedLinear&>(other);
    return codes_ == o.codes_ && activations_ == o.activations_ && by_rows_ == o.by_rows_;
  }
  const WeightCodes& codes() const { return codes_; }
  bool has_biases() const { return codes_.format == WeightFormat::affine; }
  // In cuda/linear_launch.cpp; elsewhere in no_cuda.cpp, for programs only. in: as above.
  // for_program: the node will not run by itself, but become part of an executable; builds without
  // a GPU have those for tests.
  static bool served_on_gpu(const Arrays& in, const WeightCodes& codes, bool for_program);
  void eval_gpu(const Arrays& in, Arrays& out) override;
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(0);
    return {shape};
  }
  // Gradients of x and bias: models are trained and mapped over on top of quantized layers.
  Arrays vjp(
      const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
      const Arrays& outputs) override;
  std::pair<Arrays, std::vector<int>> vmap(
      const Arrays& inputs, const std::vector<int>& axes) override;

 private:
  WeightCodes codes_;
  Activations activations_;  // on the CPU
  int by_rows_;              // on the CPU; see Linear
};

// A Linear or QuantizedLinear by a kernel of metal/ on an Apple GPU, outside of executables
// (gpu/separate_products.h). in: as those, with scales and biases of the dtype of x unless they are
// bytes. out: likewise.
class SeparateProduct : public KernelNode {
 public:
  SeparateProduct(mx::Stream s, std::optional<WeightCodes> codes, int tile_rows)
      : KernelNode(s), codes_(codes), tile_rows_(tile_rows) {}
  MLX_PAGED_KERNEL_NODE("separate_product")
  // True on a stream of an Apple GPU. Where a simulated GPU takes the CPU's place: on any.
  static bool runs_on(mx::Stream stream);
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const SeparateProduct&>(other);
    return codes_ == o.codes_ && tile_rows_ == o.tile_rows_;
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    auto shape = in[0].shape();
    shape.back() = in[1].shape(0);
    return {shape};
  }

 private:
  std::optional<WeightCodes> codes_;  // nothing: a dense weight
  int tile_rows_;                     // rows of x per threadgroup, which name the kernel
};

// Rows of an embedding's weight. Ids out of range are not read; their rows are NaN. On the CPU in
// float32; otherwise the node only occurs in a graph that becomes an executable.
// in: ids int32 or uint32, weight and, if quantized, scales and biases, as for linear layers. out:
// [..., k] float32, or of the dtype of scales that are no bytes.
class Lookup : public Node {
 public:
  Lookup(mx::Stream s, WeightCodes codes) : Node(s), codes_(codes) {}
  MLX_PAGED_NODE("lookup")
  bool is_equivalent(const mx::Primitive& other) const override {
    return codes_ == static_cast<const Lookup&>(other).codes_;
  }
  const WeightCodes& codes() const { return codes_; }

 private:
  WeightCodes codes_;  // can be dense
};

// Each row times the matrix of its expert: mlx-lm's `SwitchLinear`, with a weight of any format
// that linear layers support. On the CPU in float32; a row with an invalid expert is NaN. Otherwise
// the node only occurs in a graph that becomes an executable, and does not run itself.
// in: x [..., 1 or rows, 1, k], indices [..., rows] uint32, weight [num_experts, n, k] and, if
// quantized, scales and biases; [bias [num_experts, n] like x]. out: [..., rows, 1, n] like x.
class ExpertLinear : public Node {
 public:
  ExpertLinear(mx::Stream s, WeightCodes format, bool has_bias)
      : Node(s), format_(format), has_bias_(has_bias) {}
  MLX_PAGED_NODE("expert_linear")
  const WeightCodes& format() const { return format_; }  // also of dense weights
  std::optional<WeightCodes> codes() const {             // nothing for dense weights
    return format_.format == WeightFormat::dense ? std::nullopt : std::optional(format_);
  }
  bool has_bias() const { return has_bias_; }
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const ExpertLinear&>(other);
    return format_ == o.format_ && has_bias_ == o.has_bias_;
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    auto shape = in[1].shape();
    shape.insert(shape.end(), {1, in[2].shape(1)});
    return {shape};
  }

 private:
  WeightCodes format_;
  bool has_bias_;
};

// The same for many rows that are sorted by expert, with quantized weights: 16 bits with CUDA.
// in: x [rows, k], experts [rows] uint32, weight [num_experts, n, k * bits / 32], scales, biases if
// the format has them, and [bias [num_experts, n] like x], all dense. out: [rows, n] like x.
class SortedExpertLinear : public Node {
 public:
  static constexpr int kWeights = 2;  // index of the first

  SortedExpertLinear(mx::Stream s, WeightCodes codes, bool has_bias)
      : Node(s), codes_(codes), has_bias_(has_bias) {}
  MLX_PAGED_NODE("sorted_expert_linear")
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const SortedExpertLinear&>(other);
    return codes_ == o.codes_ && has_bias_ == o.has_bias_;
  }
  // Both are in cuda/linear_launch.cpp; no_cuda.cpp returns false and uses Node's.
  static bool served_on_gpu(const Arrays& in, const WeightCodes& codes, bool has_bias);
  void eval_gpu(const Arrays& in, Arrays& out) override;
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[0].shape(0), in[2].shape(1)}};
  }

 private:
  WeightCodes codes_;
  bool has_bias_;
};

// (silu(x @ gate.T) * (x @ up.T)) @ down.T for each row and each of its experts: mlx-lm's
// `SwitchGLU`, with quantized weights. 16 bits with CUDA.
// in: x [rows, k], pairs [rows * top_k] uint32 sorted by expert, their experts likewise; then the
// arrays of gate, up and down like those of SortedExpertLinear. out: [rows * top_k, n] like x, pair
// i being of row i / top_k.
class ExpertGlu : public Node {
 public:
  static constexpr int kPairs = 1;
  static constexpr int kExperts = 2;
  static constexpr int kWeights = 3;  // index of the first

  struct Formats {
    WeightCodes gate;  // and of up
    WeightCodes down;
    bool has_bias;  // gate and up
    bool down_has_bias;

    bool operator==(const Formats&) const = default;
  };

  ExpertGlu(mx::Stream s, Formats formats) : Node(s), formats_(formats) {}
  MLX_PAGED_NODE("expert_glu")
  bool is_equivalent(const mx::Primitive& other) const override {
    return formats_ == static_cast<const ExpertGlu&>(other).formats_;
  }
  // Both are in cuda/linear_launch.cpp; no_cuda.cpp returns false and uses Node's.
  static bool served_on_gpu(const Arrays& in, const Formats& formats);
  void eval_gpu(const Arrays& in, Arrays& out) override;
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    int arrays_of_down =
        2 + (formats_.down.format == WeightFormat::affine) + formats_.down_has_bias;
    return {{in[kPairs].shape(0), in[in.size() - arrays_of_down].shape(1)}};
  }

 private:
  Formats formats_;
};

// base + (x @ a[adapter].T) @ b[adapter]: low-rank adapters, one per row. A row whose adapter is
// out of range keeps its base. Adapters of a smaller rank are padded with zeros.
// in: base [num_rows, ..., n], x [num_rows, ..., k], adapters [num_rows] int32, a [num_adapters,
// rank, k], b [num_adapters, rank, n], scaled. On a GPU all have one dtype; on the CPU base and x
// are float32. out: like base.
class Lora : public KernelNode {
 public:
  enum { kBase, kX, kAdapters, kA, kB };  // inputs

  using KernelNode::KernelNode;
  MLX_PAGED_KERNEL_NODE("lora")
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[kBase].shape()}; }
};

// base + (x @ a[adapter, expert].T) @ b[adapter, expert] for each row's experts: Lora for the
// products of ExpertLinear, on the CPU in float32. Rows of an adapter, and pairs of an expert, that
// are out of range keep their base.
// in: base [..., top_k, 1, n], x [..., 1 or top_k, 1, k], adapters [num_rows] int32, experts [...,
// top_k] uint32, a [num_adapters, num_experts, rank, k], b [num_adapters, num_experts, rank, n].
// out: like base.
class ExpertLora : public Node {
 public:
  enum { kBase, kX, kAdapters, kExperts, kA, kB };  // inputs

  using Node::Node;
  MLX_PAGED_NODE("expert_lora")
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[kBase].shape()}; }
};

#undef MLX_PAGED_NODE
#undef MLX_PAGED_KERNEL_NODE

// --- Pools ---

// Allocates a pool without touching it: memory is used from the first write on, so a large pool
// costs nothing until it is needed. Its contents are undefined. On Linux it requests huge pages,
// because decode visits memory in an order that is slow with small pages. Throws std::bad_alloc.
mx::array allocate_pool(const std::vector<int>& shape, mx::Dtype dtype);

// Whole-pool copies made since the process started.
int64_t pool_copies();
void count_pool_copy();

// True if MLX_PAGED_CHECK=1: operations check ids when they run. Disables executables, which do
// not.
bool check_enabled();

// True if an output of this size may take over the buffer of `in`, which nothing else needs then. A
// small array must not keep a large buffer alive.
bool can_donate(const mx::array& in);

// True if an output can share the pool's buffer; otherwise it needs a counted copy.
bool can_alias_pool(const mx::array& pool);

// The same for GPUs, whose kernels access 16 bytes at a time. Buffers are aligned to 16 bytes, but
// an array can start anywhere in its buffer.
bool can_alias_pool_on_gpu(const mx::array& pool);

// True if GPU kernels can read an array other than a pool; otherwise it needs a dense copy.
bool can_read_on_gpu(const mx::array& a);

}  // namespace mlx_paged
