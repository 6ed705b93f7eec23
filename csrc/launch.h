// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Launches: the kernels of metal/ that a GPU runs for each operation, with their grids, buffers and
// constants. KernelNode::launches makes these decisions once, independent of any GPU framework, and
// a backend (gpu.h) passes them to its encoder unchanged.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../metal/kernel_table.h"
#include "graph/op.h"
#include "kernel_names.h"
#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

enum class Access { read, write, read_write };

// A buffer that a kernel accesses. `operand` indexes the arrays of the operation: the inputs, then
// the outputs of the primitive (primitives.h), then its workspaces.
struct Binding {
  int operand;
  Access access;
  uint64_t bytes;

  bool operator==(const Binding&) const = default;
};

using Extent = std::array<uint32_t, 3>;

// A matrix in a buffer as NVIDIA's copy engine reads it: in boxes, with zeros outside of the
// matrix. Rows are multiples of 16 bytes apart.
struct MatrixMap {
  int buffer;      // index in the launch
  int item_bytes;  // 1, 2 or 4
  int rows;
  int columns;
  int stride;  // elements between rows
  int box_rows;
  int box_columns;  // 16 to 128 bytes
  // 128-byte rows with their 16-byte pieces permuted, so that pieces of one column lie in different
  // banks (tile_offset in cuda/kernels/tensor_core.h).
  bool is_swizzled = true;

  bool operator==(const MatrixMap&) const = default;
};

// A kernel and the function constants it is compiled with.
struct Pipeline {
  KernelName kernel;
  std::vector<uint8_t> function_constants;  // [i] is the bool [[function_constant(i)]]

  bool operator==(const Pipeline&) const = default;
};

// An operation of MLX that all ranks of a group run together, in the place of a kernel.
struct Collective {
  Op op;  // all_gather or all_reduce
  std::shared_ptr<mx::Primitive> primitive;
  mx::Shape in_shape;
  mx::Shape out_shape;
  mx::Dtype dtype;
};

struct Launch : Pipeline {
  std::vector<Binding> buffers;      // buffers[i] is [[buffer(i)]]
  std::vector<std::byte> constants;  // the params struct, at [[buffer(buffers.size())]]
  std::vector<MatrixMap> maps;       // passed after the constants, if any; NVIDIA only
  Extent grid;                       // threadgroups
  Extent threadgroup;                // threads
  uint32_t threadgroup_memory = 0;   // bytes at [[threadgroup(0)]]; 0: none
  uint32_t cluster = 0;              // threadgroups along x that share their memory; NVIDIA only
  // Needs no barrier after the previous launch: they write different rows of the same buffers, and
  // this one does not read what the previous one writes.
  bool beside_previous = false;
  // Must not start before the previous launch has ended, even if the GPU could; NVIDIA only.
  bool after_previous = false;
  std::shared_ptr<const Collective> collective;  // null: a kernel

  size_t num_arguments() const { return buffers.size() + 1 + !maps.empty(); }

  bool operator==(const Launch&) const = default;
};

template <typename Params>
std::vector<std::byte> bytes_of(const Params& params) {
  auto* bytes = reinterpret_cast<const std::byte*>(&params);
  return {bytes, bytes + sizeof(Params)};
}

// n / m, rounded up. Not named ceil_div: for constants of metal/, argument-dependent lookup would
// find the function in metal/attention_shape.h.
constexpr uint32_t div_up(int64_t n, int64_t m) {
  return uint32_t((n + m - 1) / m);
}

// The launches of one operation, in order of execution.
struct LaunchList {
  std::vector<Launch> launches;
  std::vector<uint64_t> workspaces;  // bytes of each

  bool operator==(const LaunchList&) const = default;
};

// Rotates queries [num_rows, num_heads, dim] from operand `from` to operand `to`, like integer
// keys.
Launch rotate_queries_launch(const mx::array& queries, int from, int to);

// Shape of a float32 workspace of at least `bytes`. Rounds up by at most an eighth plus 16 KiB, so
// that a growing workspace is rarely reallocated. Has two dims because one cannot index 8 GiB.
mx::Shape workspace_shape(uint64_t bytes);

// The launch of GreedyTokens. Operands: the logits, then its outputs.
Launch greedy_launch(int num_rows, int vocab_size, DType dtype);

// Launch without bindings; its operands are positions, frequencies and the rotations.
Launch rotations_launch(const paged::RotationParams& params);

// Launch without bindings; its operands are gate, up and the result. `params` counts 16-byte
// chunks.
Launch silu_mul_launch(int64_t num_rows, const paged::SiluParams& params, DType dtype);

// Params of lora.h for targets with matrices of the shape of `a` and results of these columns.
paged::LoraParams lora_params(const mx::array& a, int num_rows, const std::vector<int>& columns);
// Size of the float32 array between lora_down and lora_up.
int lora_hidden_size(const paged::LoraParams& params, int num_targets);
// Launches without bindings; with fewer than LORA_TARGETS targets, the others are placeholders. The
// operands of lora_down are x, adapters, each target's `a`, and the hidden values; those of lora_up
// each target's base, the hidden values, adapters, each target's `b`, a residual, and each target's
// result.
Launch lora_down_launch(const paged::LoraParams& params, int num_targets, mx::Dtype dtype);
Launch lora_up_launch(const paged::LoraParams& params, int num_targets, mx::Dtype dtype);

// Copies in[0] to a dense array of rank 4, or to a row-contiguous one.
LaunchList copy_strided_launches(const Arrays& in, const Arrays& out);

// Selects the attention kernel for an item, by the rows of its score matrix (query rows x query
// heads per group):
//   - up to 3 (1 for head dims over 256): paged_decode. The vector units keep up with memory, and
//     nothing is padded to 8.
//   - more: paged_decode_matrix, for decodes of larger groups and for drafts. It reads every key
//     once for as many rows as registers allow (matrix_max_rows in attention_shape.h).
//   - prefill, more than 8 query rows: paged_prefill, in tiles of 32 or 64 rows. Head dims that
//     exceed its registers (prefill_max_rows) use paged_decode_matrix. tensor_prefill takes its
//     place where tensor kernels are allowed (rejected_kernels.h), in 16 bits.
// NVIDIA's limits are in cuda/portable_shape.h.
enum class AttentionKernel { decode, decode_matrix, prefill, tensor_prefill };
struct AttentionVariant {
  AttentionKernel kernel;
  int queries;  // the last template argument

  auto operator<=>(const AttentionVariant&) const = default;
};
AttentionVariant attention_variant(Gpu gpu, int query_rows, int group, int key_dim, int item_size);

// Properties of an attention layer that determine its pipelines.
struct AttentionLayer {
  DType dtype;
  int group;  // query heads per KV head
  int key_dim;
  int value_dim;
  int features;  // options of a step (paged::features_of)
  PoolFormat key_format = PoolFormat::plain;
  PoolFormat value_format = PoolFormat::plain;

  bool operator==(const AttentionLayer&) const = default;
};

// The layer of a call of paged_attention, given bits of paged::features_of.
AttentionLayer layer_of(
    const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool, int features);

// Returns the kernel that serves items of this many rows, by host name; empty if calibration
// rejected every one, or none supports the head dims.
std::string attention_kernel_for(Gpu gpu, const AttentionLayer& layer, int query_rows);

// Maximum rows of a sequence that one item may serve with the bits that each has in an item of its
// own; 1: none but the first.
int max_shared_rows(Gpu gpu, const AttentionLayer& layer, int block_size);

// Returns every pipeline that a step of any size can need for such a layer. Empty if no kernel
// supports the head dims.
std::vector<Pipeline> attention_pipelines(Gpu gpu, const AttentionLayer& layer);

// Records a kind of layer when its graph is built.
void note_attention_layer(const AttentionLayer& layer);
std::vector<AttentionLayer> attention_layers();
void forget_attention_layers();

// Returns every pipeline that later steps of the recorded layers can need, and those that move
// data.
std::vector<Pipeline> pipelines_to_come(Gpu gpu);

}  // namespace mlx_paged
