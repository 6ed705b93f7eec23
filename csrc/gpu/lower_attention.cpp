// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <string>
#include <utility>

#include "lowering.h"
#include "mlx/ops.h"

namespace mlx_paged {

// Norms, rotates and writes the heads of a layer in one step.
void GpuLowering::lower_write_kv(const GraphNode& node) {
  const auto& fused = std::get<QkvWrite>(node.fusion);
  const auto& nodes = graph_.nodes();
  const auto& queries = nodes[fused.attention].inputs[PagedAttention::kQueries];
  View key_pool = view(node.inputs[0]);
  View value_pool = view(node.inputs[1]);
  check_pools(key_pool, value_pool);
  auto dtype = queries.dtype();
  bool is_quantized = format_of(node.inputs[0].dtype()) != PoolFormat::plain;
  require(
      is_quantized || (node.inputs[0].dtype() == dtype && node.inputs[1].dtype() == dtype),
      "pools of another dtype");
  std::optional<ProductStep> products;
  if (!fused.products.empty()) {
    products = fused.loras.empty()
                   ? products_of(fused.products, nodes[fused.products[0]].outputs[0], false)
                   : adapted_products(fused.products, fused.loras, nullptr);
  }
  paged::RopeParams params{};
  params.num_q_heads = queries.shape(1);
  params.num_kv_heads = node.inputs[2].shape(1);
  params.key_dim = node.inputs[2].shape(2);
  params.value_dim = node.inputs[3].shape(2);
  View q = heads_of(fused.queries.from, params.num_q_heads, params.key_dim, "queries");
  View k = heads_of(fused.keys.from, params.num_kv_heads, params.key_dim, "keys");
  View v = heads_of(node.inputs[3], params.num_kv_heads, params.value_dim, "values");
  params.query_stride = int(q.strides[0]);
  params.key_stride = int(k.strides[0]);
  params.value_stride = int(v.strides[0]);
  View slots = dense_view(node.inputs[4], "slots that are not dense");
  require(q.rows() == slots.rows() && k.rows() == slots.rows(), "queries of other rows");
  Launch launch = layer_kernel("rope_write", dtype);
  read(launch, q);
  read(launch, k);
  read(launch, v);
  require(bool(fused.queries.rope) == bool(fused.keys.rope), "rotations of queries or keys alone");
  if (fused.queries.rope) {
    const auto& rope = nodes[*fused.queries.rope];
    const auto& key_rope = nodes[*fused.keys.rope];
    params.traditional = rope.as<Rope>().traditional();
    require(
        rope.inputs[1].id() == key_rope.inputs[1].id() &&
            params.traditional == key_rope.as<Rope>().traditional(),
        "queries and keys that are rotated differently");
    View rotations = dense_view(rope.inputs[1], "rotations that are not dense");
    params.half_dims = rotations.shape[2];
    read(launch, rotations);
  } else {
    read(launch, slots);  // a placeholder
  }
  // Rows for a quantized pool are first written to a temporary pool.
  View keys = is_quantized ? new_buffer(node.inputs[2].shape(), dtype) : key_pool;
  View values = is_quantized ? new_buffer(node.inputs[3].shape(), dtype) : value_pool;
  read(launch, is_quantized ? row_numbers(slots.shape[0]) : slots);
  auto read_norm = [&](const Heads& heads, int& has_norm, float& eps) {
    if (!heads.norm) {
      return read(launch, q);  // a placeholder
    }
    const auto& norm = nodes[*heads.norm];
    has_norm = 1;
    eps = norm.as<RmsNorm>().eps();
    View weight = dense_constant(norm.inputs[1]);
    require(begins_at_chunk(weight), "weights that do not begin at 16 bytes");
    read(launch, weight);
  };
  read_norm(fused.queries, params.has_query_norm, params.query_eps);
  read_norm(fused.keys, params.has_key_norm, params.key_eps);
  write(launch, new_value(queries));
  write(launch, keys, is_quantized ? Access::write : Access::read_write);
  write(launch, values, is_quantized ? Access::write : Access::read_write);
  views_[node.outputs[0].id()] = key_pool;
  views_[node.outputs[1].id()] = value_pool;
  launch.constants = bytes_of(params);
  int heads = params.num_q_heads + 2 * params.num_kv_heads;
  launch.grid = {uint32_t(slots.rows()), div_up(heads, paged::ROPE_SIMD_GROUPS), 1};
  launch.threadgroup = {32 * paged::ROPE_SIMD_GROUPS, 1, 1};
  if (products) {
    products->write = std::move(launch);
    products->head_dim = params.key_dim;
    add_step(std::move(*products));
  } else {
    add_step(std::move(launch));
  }
  if (is_quantized) {
    add_quantizing_write(node, {key_pool, value_pool, keys, values, slots});
  }
}

// Nothing would order two writes of a pool, or a read before a write.
void GpuLowering::check_pools(const View& key_pool, const View& value_pool) const {
  for (const View* pool : {&key_pool, &value_pool}) {
    const Buffer& b = buffer(*pool);
    require(b.kind == StepOperand::Kind::input, "a pool that is not an input");
    require(!b.is_written, "a pool that is written twice");
    require(b.last_use < 0, "a pool that is read before it is written");
  }
}

View GpuLowering::heads_of(const mx::array& a, int heads, int dim, const char* what) {
  auto seen = rows_of_heads(view(a), heads, dim);
  require(seen.has_value(), std::string(what) + " that do not lie side by side");
  return *seen;
}

// `in`: views of the operation's inputs; the pools among them are also its outputs.
void GpuLowering::add_quantizing_write(const GraphNode& node, const std::vector<View>& in) {
  // NVIDIA's variants are selected when the step is launched.
  auto list = node.as<WriteKV>().launches(node.inputs, node.outputs, Gpu::apple);
  add_launches(list, in, {in[0], in[1]});
}

// 0, 1, 2, ...
View GpuLowering::row_numbers(int count) {
  auto& numbers = row_numbers_.try_emplace(count, mx::arange(0, count, mx::int32)).first->second;
  return dense_constant(numbers);
}

void GpuLowering::lower_attention(const GraphNode& node) {
  const auto& in = node.inputs;
  using A = PagedAttention;
  require(in[A::kPositions].ndim() == 1, "rows with bounds");
  require(views_.count(in[A::kQueries].id()) > 0, "queries that nothing has written");
  dense_view(in[A::kQueries], "queries that are not dense");
  GpuExecutable::AttentionKind kind{
      node.as<A>().options(),    {}, in[A::kQueries].shape(), in[A::kKeyPool].shape(),
      in[A::kValuePool].shape(), {}, in[A::kQueries].dtype(), in[A::kKeyPool].dtype(),
      in[A::kValuePool].dtype()};
  AttentionStep step{};
  for (int i = 0; i < int(in.size()); i++) {
    View v = i == A::kPerHead ? dense_constant(in[i]) : view(in[i]);
    require(v.is_dense(), "a plan that is not dense");
    bool of_plan = i >= A::kPositions && i <= A::kMerge;
    const Buffer& b = buffer(v);
    require(
        !of_plan || (b.kind == StepOperand::Kind::input && v.offset == 0 &&
                     v.shape == graph_.inputs()[b.index].shape()),
        "a plan that is not an input");
    kind.inputs.push_back(of_plan ? b.index : -1);
    step.operands.push_back(operand(v));
  }
  if (in.size() > A::kPerHead) {
    kind.per_head = in[A::kPerHead].shape();
  }
  step.out = operand(new_value(node.outputs[0]));
  if (rotates_keys(format_of(in[A::kKeyPool].dtype()))) {
    step.rotated = operand(new_buffer(in[A::kQueries].shape(), in[A::kQueries].dtype()));
  }
  auto& kinds = executable_.kinds_;
  auto found = std::find(kinds.begin(), kinds.end(), kind);
  step.kind = int(found - kinds.begin());
  if (found == kinds.end()) {
    kinds.push_back(std::move(kind));
  }
  if (executable_.workspace_ < 0) {
    executable_.workspace_ = int(executable_.operands_.size());
    executable_.operands_.push_back({StepOperand::Kind::workspace});
  }
  add_step(std::move(step));
}

}  // namespace mlx_paged
