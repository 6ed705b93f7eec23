// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Launches: the kernels of metal/ that a GPU runs for each operation, with their grids, buffers and
// constants. KernelNode::launches decides them, once and without knowing any GPU framework; a
// backend (gpu.h) hands them to its encoder unchanged.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../metal/kernel_table.h"
#include "kernel_names.h"
#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

enum class Access { read, write, read_write };

// A buffer that a kernel sees. `operand` counts the arrays of the operation: the inputs and then
// the outputs of the primitive (primitives.h), then its workspaces.
struct Binding {
  int operand;
  Access access;
  uint64_t bytes;

  bool operator==(const Binding&) const = default;
};

using Extent = std::array<uint32_t, 3>;

// A matrix in a buffer as NVIDIA's copy engine reads it: in boxes, with zeros for what lies
// outside. Its rows are multiples of 16 bytes apart.
struct MatrixMap {
  int buffer;      // of the launch
  int item_bytes;  // of an element: 1, 2 or 4
  int rows;
  int columns;
  int stride;  // elements from one row to the next
  int box_rows;
  int box_columns;  // 16 to 128 bytes
  // Rows of 128 bytes whose pieces of 16 are exchanged so that those of one column lie in different
  // banks (tile_offset in cuda/kernels/tensor_core.h).
  bool is_swizzled = true;

  bool operator==(const MatrixMap&) const = default;
};

// A kernel compiled for what it is given here.
struct Pipeline {
  KernelName kernel;
  std::vector<uint8_t> function_constants;  // [i] is the bool [[function_constant(i)]]

  bool operator==(const Pipeline&) const = default;
};

// An operation of MLX that all ranks of a group run together, in the place of a kernel.
struct Collective {
  std::shared_ptr<mx::Primitive> primitive;
  mx::Shape in_shape;
  mx::Shape out_shape;
  mx::Dtype dtype;
};

struct Launch : Pipeline {
  std::vector<Binding> buffers;      // buffers[i] is [[buffer(i)]]
  std::vector<std::byte> constants;  // the params struct, at [[buffer(buffers.size())]]
  std::vector<MatrixMap> maps;       // the argument behind it, if there are any; NVIDIA's only
  Extent grid;                       // threadgroups
  Extent threadgroup;                // threads
  uint32_t threadgroup_memory = 0;   // bytes at [[threadgroup(0)]]; 0: the kernel has none
  uint32_t cluster = 0;  // threadgroups along x that see each other's memory; NVIDIA's only
  // It neither reads nor overwrites what the launch before it writes, though they write to other
  // rows of the same buffers: no barrier between them.
  bool beside_previous = false;
  // It does not begin while the launch before it ends, where a GPU could do that; NVIDIA's only.
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

// n / m, rounded up. (Not ceil_div: for constants of metal/, argument-dependent lookup would find
// the one in metal/attention_shape.h.)
constexpr uint32_t div_up(int64_t n, int64_t m) {
  return uint32_t((n + m - 1) / m);
}

// The launches of one operation, to be run in this order.
struct LaunchList {
  std::vector<Launch> launches;
  std::vector<uint64_t> workspaces;  // bytes of each

  bool operator==(const LaunchList&) const = default;
};

// Queries [num_rows, num_heads, dim], rotated as integer keys are, from an operand to another.
Launch rotate_queries_launch(const mx::array& queries, int from, int to);

// Float32s for a workspace of at least `bytes`: at most an eighth and 16 KiB more, so that one that
// grows is not made anew each time. In two dims, as one could not count those of 8 GiB.
mx::Shape workspace_shape(uint64_t bytes);

// The launch of GreedyTokens: operands are the logits and its outputs.
Launch greedy_launch(int num_rows, int vocab_size, DType dtype);

// Without operands, which are positions, frequencies and the rotations.
Launch rotations_launch(const paged::RotationParams& params);

// Without operands, which are gate, up and the result. `params`: of rows in 16 bytes.
Launch silu_mul_launch(int64_t num_rows, const paged::SiluParams& params, DType dtype);

// A dense copy of in[0]; of rank 4, or row-contiguous.
LaunchList copy_strided_launches(const Arrays& in, const Arrays& out);

// The attention kernel that serves an item. The rule, in terms of the rows of its score matrix
// (query rows x query heads of a group):
//   - up to 3 (1 for head dims over 256): paged_decode. The vector units keep up with memory, and
//     nothing is padded to 8;
//   - more: paged_decode_matrix, for decodes of larger groups and for drafts to verify. It reads
//     every key once for as many rows as registers allow (matrix_most_rows in attention_shape.h);
//   - prefill, more than 8 query rows: paged_prefill, in tiles of 32 or 64 rows. Head dims that do
//     not fit its registers (prefill_most_rows) use paged_decode_matrix.
// NVIDIA's limits are those of cuda/portable_shape.h.
enum class AttentionKernel { decode, decode_matrix, prefill };
struct AttentionVariant {
  AttentionKernel kernel;
  int queries;  // its last template argument

  auto operator<=>(const AttentionVariant&) const = default;
};
AttentionVariant attention_variant(Gpu gpu, int query_rows, int group, int key_dim, int item_size);

// A kind of attention layer, in steps with or without bounds.
struct AttentionLayer {
  DType dtype;
  int group;  // query heads of a KV head
  int key_dim;
  int value_dim;
  int features;  // of a step's options (paged::features_of)
  PoolFormat key_format = PoolFormat::plain;
  PoolFormat value_format = PoolFormat::plain;

  bool operator==(const AttentionLayer&) const = default;
};

// Every pipeline that some step may need for such a layer, whatever its rows. None where no kernel
// is made for the head dims.
std::vector<Pipeline> attention_pipelines(Gpu gpu, const AttentionLayer& layer);

// Remembers a kind of layer of which a graph was built.
void note_attention_layer(const AttentionLayer& layer);
void forget_attention_layers();

// Every pipeline that later steps of the layers noted so far may need, and those that move data.
std::vector<Pipeline> pipelines_to_come(Gpu gpu);

}  // namespace mlx_paged
