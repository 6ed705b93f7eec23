// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "lowering.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "../dense.h"
#include "expert_lora.h"
#include "experts.h"
#include "kernels.h"
#include "weights.h"

namespace mlx_paged::cpu {

namespace {

bool is_product(const StepGraph&, const GraphNode& node) {
  return node.op == Op::linear || node.op == Op::quantized_linear;
}

// Elements between the vectors of a row's experts; 0 if they share one.
int64_t pair_stride(const View& x, const View& experts, int64_t k) {
  bool shares_rows = x.row_size() == k;
  require(
      x.rows() == experts.rows() && (shares_rows || x.row_size() == experts.row_size() * k),
      "experts of several vectors a row");
  return shares_rows ? 0 : k;
}

}  // namespace

CpuExecutable::CpuExecutable(const Arrays& inputs, const Arrays& outputs) {
  CpuLowering(*this, inputs, outputs).run();
}

CpuLowering::CpuLowering(CpuExecutable& executable, const Arrays& inputs, const Arrays& outputs)
    : executable_(executable), graph_(inputs, outputs) {}

void CpuLowering::run() {
  require(kernels().product.max_rows_float32 > 0, "the instruction set has too few registers");
  fuse_gate_up(graph_, is_product);
  fuse_residual(graph_, is_product);
  fuse_adapters(graph_, is_product, true);
  fuse_lone_adapters(graph_, is_product);
  add_inputs();
  for (const auto& node : graph_.nodes()) {
    if (!node.is_absorbed) {
      lower(node);
    }
  }
  add_results();
  check_inputs();
  auto made = make_phases(operations_, executable_.buffers_);
  executable_.phases_ = std::move(made.phases);
  executable_.temporary_bytes_ = made.temporary_bytes;
  executable_.constants_ = graph_.constants();
}

// --- Nodes

void CpuLowering::lower(const GraphNode& node) {
  size_t num_operations = operations_.size();
  try {
    lower_natively(node);
  } catch (const UnsupportedGraph&) {
    // Absorbed nodes have no value of their own that MLX could read.
    bool is_fused = !std::holds_alternative<std::monostate>(node.fusion);
    if (is_fused || dynamic_cast<const KernelNode*>(node.primitive.get())) {
      throw;
    }
    operations_.resize(num_operations);
    lower_foreign(node);
  }
}

void CpuLowering::lower_natively(const GraphNode& node) {
  const auto* gated = std::get_if<GateUp>(&node.fusion);
  if (gated && graph_.nodes()[gated->gate].op == Op::expert_linear) {
    return lower_experts(node);
  }
  if (gated || std::holds_alternative<AddedProduct>(node.fusion) ||
      std::holds_alternative<AdaptedProducts>(node.fusion)) {
    return lower_product(node);
  }
  switch (node.op) {
    case Op::linear:
    case Op::quantized_linear:
      return lower_product(node);
    case Op::expert_linear:
      return lower_experts(node);
    case Op::expert_lora:
      return lower_expert_lora(node);
    case Op::write_kv:
      return lower_write_kv(node);
    case Op::paged_attention:
      return lower_attention(node);
    default:
      return lower_rows(node);
  }
}

void CpuLowering::lower_foreign(const GraphNode& node) {
  // MLX would return pools behind it as copies.
  require(node.op != Op::depends, "arrays that depend on others by hand");
  NodePhase p{node.op, node.primitive, {}, {}};
  std::vector<int> gathers, writes;
  for (const auto& in : node.inputs) {
    if (graph_.depends(in)) {
      const View& v = view(in);
      p.inputs.push_back({v, in.dtype(), std::nullopt});
      gathers.push_back(v.buffer);
    } else {
      p.inputs.push_back({View{}, in.dtype(), graph_.constant(in)});
    }
  }
  for (const auto& out : node.outputs) {
    require(out.size() > 0, "an operation without results");
    int buffer = add_buffer({.kind = Buffer::Kind::node});
    views_[out.id()] = {buffer, 0, out.shape(), dense_strides(out.shape())};
    p.outputs.push_back({buffer, out.shape(), out.dtype()});
    writes.push_back(buffer);
  }
  require(p.primitive->device() == mx::Device::cpu, "an operation of a GPU");
  auto stream = p.primitive->stream();
  require(!executable_.stream_ || *executable_.stream_ == stream, "operations of several streams");
  executable_.stream_ = stream;
  add(std::move(p), 0, std::move(gathers), std::move(writes));
}

void CpuLowering::lower_write_kv(const GraphNode& node) {
  View slots = view(node.inputs[4]);
  struct Part {
    View rows, pool;
    int64_t bytes;    // per row
    PoolArgs format;  // the pool's address is known only in a run
  };
  std::vector<Part> parts;
  Operation op{RowTask(), slots.rows(), {}, {slots.buffer}, {}};
  for (int i = 0; i < 2; i++) {
    const auto& pool_array = node.inputs[i];
    View pool = view(pool_array);
    require(buffer(pool).kind == Buffer::Kind::input, "a pool that is not an input");
    auto layout = layout_of(pool_array);
    require(
        layout.format != PoolFormat::plain || pool_array.dtype() == mx::float32,
        "pools of 16 bits");
    require(node.inputs[2 + i].dtype() == mx::float32, "keys of other than float32");
    View rows = dense_rows(view(node.inputs[2 + i]));
    (is_aligned(rows) ? op.reads : op.gathers).push_back(rows.buffer);
    bool rotated = i == 0 && rotates_keys(layout.format);
    parts.push_back(
        {rows,
         pool,
         rows.row_size() * int64_t(sizeof(float)),
         {{layout, nullptr}, DType::float32, rotated}});
    op.writes.push_back(pool.buffer);
    views_[node.outputs[i].id()] = pool;
  }
  op.work = RowTask([=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int32_t* slot = slots.row<int32_t>(bases, i);
      if (*slot < 0) {
        continue;
      }
      for (const Part& part : parts) {
        char* pool = bases[part.pool.buffer];
        if (part.format.pool.format == PoolFormat::plain) {
          std::memcpy(pool + *slot * part.bytes, part.rows.row(bases, i), part.bytes);
          continue;
        }
        PoolArgs args = part.format;
        args.pool.data = pool;
        kernels().pool.quantize(args, part.rows.row(bases, i), slot, 0, 1);
      }
    }
  });
  operations_.push_back(std::move(op));
}

void CpuLowering::lower_attention(const GraphNode& node) {
  const auto& in = node.inputs;
  using A = PagedAttention;
  require(in[A::kPositions].ndim() == 1, "rows with bounds");
  require(in[A::kQueries].dtype() == mx::float32, "attention of other than float32");
  View queries = view(in[A::kQueries]);
  if (!queries.is_dense()) {
    queries = copied(queries);
  }
  View keys = view(in[A::kKeyPool]);
  View values = view(in[A::kValuePool]);
  AttentionPhase p{};
  p.queries = queries;
  p.out = new_value(node.outputs[0]);
  p.key_pool = keys.buffer;
  p.value_pool = values.buffer;
  p.positions = input_of(in[A::kPositions]);
  p.tables = input_of_any_length(in[A::kTables]);
  p.work_items = input_of_any_length(in[A::kWork]);
  p.merge_items = input_of_any_length(in[A::kMerge]);
  p.per_head = in.size() > A::kPerHead ? constant(in[A::kPerHead]) : nullptr;
  p.options = node.as<PagedAttention>().options();
  p.activations = node.as<PagedAttention>().activations();
  p.dtype = DType::float32;
  p.num_q_heads = queries.shape[1];
  p.keys = layout_of(in[A::kKeyPool]);
  p.values = layout_of(in[A::kValuePool]);
  int64_t rows = queries.rows();
  int out = p.out.buffer;
  add(std::move(p), rows, {queries.buffer, keys.buffer, values.buffer}, {out});
}

// `lora`: the node that adds adapters to the product, or null.
Projection CpuLowering::projection_of(const GraphNode& node, const GraphNode* lora) {
  Arrays in = with_weights(node);
  Projection p{};
  size_t bias = 2;
  if (node.op == Op::quantized_linear) {
    const auto& quantized = node.as<QuantizedLinear>();
    p.weight = weights_of(&in[1], quantized.codes());
    p.integers = integer_kernels(quantized.activations(), p.weight);
    bias = p.weight.biases ? 4 : 3;
  } else {
    p.weight = weights_of(&in[1], kDenseWeight);
  }
  p.bias = in.size() > bias ? constant(node.inputs[bias]) : nullptr;
  p.x = dense_rows(view(node.inputs[0]));
  require(p.x.row_size() == p.weight.k, "a product of several vectors a row");
  require(p.x.rows() <= kernels().product.max_rows(p.weight), "more rows than it pays for");
  if (p.integers) {
    p.rounded = as_integers(p.x, p.weight, *p.integers);
  }
  if (lora) {
    p.adapters = adapters_of(*lora, p.x);
  }
  return p;
}

// Adds the operation that makes the first half of a lora.
Adapters CpuLowering::adapters_of(const GraphNode& lora, const View& x) {
  Adapters made{
      x,
      view(lora.inputs[Lora::kAdapters]),
      view(lora.inputs[Lora::kA]),
      view(lora.inputs[Lora::kB]),
      {},
      lora_shape(lora.inputs)};
  require(
      x.row_size() == made.shape.k && x.rows() == made.adapters.rows(),
      "adapters of several vectors");
  require(
      made.a.is_dense() && made.b.is_dense() && made.adapters.is_dense(),
      "adapters that are not dense");
  int rows = int(x.rows()), rank = made.shape.rank;
  made.hidden = {int(executable_.buffers_.size()), 0, {rows, rank}, {rank, 1}};
  add_buffer(
      {.kind = Buffer::Kind::temporary,
       .row_size = rank,
       .bytes = int64_t(rows) * rank * int64_t(sizeof(float))});
  add(made, rows, {x.buffer, made.adapters.buffer, made.a.buffer}, {made.hidden.buffer});
  return made;
}

// Rounds the rows of x once for all products with the same rounding.
View CpuLowering::as_integers(
    const View& x, const WeightView& weight, const IntegerKernels& integers) {
  int rows = int(x.rows());
  int64_t row_bytes = (integers.rounded_bytes(rows, weight.k) + rows - 1) / rows;
  int floats = int((row_bytes + int64_t(sizeof(float)) - 1) / int64_t(sizeof(float)));
  auto [found, is_new] = rounded_.try_emplace(
      {x.buffer, x.offset, x.strides[0], rows, weight.k, weight.bits, integers.chunk_bytes},
      View{int(executable_.buffers_.size()), 0, {rows, floats}, {floats, 1}});
  View to = found->second;
  if (!is_new) {
    return to;
  }
  add_buffer(
      {.kind = Buffer::Kind::temporary,
       .row_size = floats,
       .bytes = int64_t(rows) * floats * int64_t(sizeof(float))});
  add_row_task(
      to, {x}, {},
      [x, to, rows, k = weight.k, bits = weight.bits, round = integers.round](
          const Bases& bases, int64_t begin, int64_t end) {
        round(
            {x.row(bases, 0), x.strides[0], rows, k, bits, to.row(bases, 0)}, int(begin), int(end));
      });
  return to;
}

void CpuLowering::lower_product(const GraphNode& node) {
  const auto& nodes = graph_.nodes();
  const auto* gated = std::get_if<GateUp>(&node.fusion);
  const auto* added = std::get_if<AddedProduct>(&node.fusion);
  const auto* adapted = std::get_if<AdaptedProducts>(&node.fusion);
  std::vector<size_t> products = gated     ? std::vector{gated->gate, gated->up}
                                 : added   ? std::vector{added->product}
                                 : adapted ? adapted->products
                                           : std::vector{graph_.index_of(node)};
  Product p{};
  p.out = new_value(node.outputs[0]);
  std::vector<int> gathers;
  auto project = [&](size_t i) {
    auto made = projection_of(nodes[products[i]], adapted ? &nodes[adapted->loras[i]] : nullptr);
    gathers.push_back(made.x.buffer);
    if (made.rounded) {
      gathers.push_back(made.rounded->buffer);
    }
    if (made.adapters) {
      const auto& with = *made.adapters;
      gathers.insert(gathers.end(), {with.hidden.buffer, with.adapters.buffer, with.b.buffer});
    }
    return made;
  };
  p.main = project(0);
  if (products.size() > 1) {
    p.up = project(1);
    require(
        p.up->weight.n == p.main.weight.n && p.up->weight.k == p.main.weight.k,
        "a gate of another size");
  }
  if (added || (adapted && adapted->addend)) {
    p.added = dense_rows(view(added ? added->addend : *adapted->addend));
    gathers.push_back(p.added->buffer);
  }
  int64_t rows = p.out.rows();
  int out = p.out.buffer;
  add(std::move(p), rows, std::move(gathers), {out});
}

void CpuLowering::lower_experts(const GraphNode& node) {
  const auto* gated = std::get_if<GateUp>(&node.fusion);
  const auto& expert = gated ? graph_.nodes()[gated->gate] : node;
  auto weights = [&](const GraphNode& n) {
    return weights_of(n.as<ExpertLinear>(), with_weights(n, 2));
  };
  ExpertArgs args;
  args.weights = weights(expert);
  if (gated) {
    args.up = weights(graph_.nodes()[gated->up]);
    require(
        args.up->n() == args.weights.n() && args.up->num_experts == args.weights.num_experts,
        "a gate of another size");
  }
  View x = dense_rows(view(expert.inputs[0]));
  View indices = dense_rows(view(expert.inputs[1]));
  args.num_rows = int(x.rows());
  args.per_row = int(indices.row_size());
  args.x_row_stride = x.strides[0];
  args.x_pair_stride = pair_stride(x, indices, args.weights.all.k);
  args.index_row_stride = indices.strides[0];
  View out = new_value(node.outputs[0]);
  int num_shares = expert_shares(args);
  auto run = [=](const Bases& bases, int share) {
    ExpertArgs of_run = args;
    of_run.x = x.row(bases, 0);
    of_run.indices = indices.row<uint32_t>(bases, 0);
    of_run.out = out.row(bases, 0);
    run_experts(of_run, share, num_shares);
  };
  add(ExpertTask{num_shares, run}, x.rows(), {x.buffer, indices.buffer}, {out.buffer});
}

void CpuLowering::lower_expert_lora(const GraphNode& node) {
  const auto& in = node.inputs;
  auto args = expert_lora_args(in);
  View base = dense_rows(view(in[ExpertLora::kBase]));
  View x = dense_rows(view(in[ExpertLora::kX]));
  View experts = dense_rows(view(in[ExpertLora::kExperts]));
  View adapters = view(in[ExpertLora::kAdapters]);
  View a = view(in[ExpertLora::kA]);
  View b = view(in[ExpertLora::kB]);
  require(
      a.is_dense() && b.is_dense() && adapters.is_dense() && adapters.rows() == x.rows() &&
          base.rows() == x.rows() && base.row_size() == int64_t(args.per_row) * args.shape.n,
      "adapters of experts of several vectors a row");
  args.x_row_stride = x.strides[0];
  args.x_pair_stride = pair_stride(x, experts, args.shape.k);
  args.expert_row_stride = experts.strides[0];
  args.base_row_stride = base.strides[0];
  View out = new_value(node.outputs[0]);
  int num_shares = expert_lora_shares(args);
  auto run = [=](const Bases& bases, int share) {
    auto matrices = [&](const View& v) {
      return bases[v.buffer] + v.offset * args.shape.item_size;
    };
    ExpertLoraArgs of_run = args;
    of_run.a = matrices(a);
    of_run.b = matrices(b);
    of_run.x = x.row(bases, 0);
    of_run.adapters = adapters.row<int32_t>(bases, 0);
    of_run.experts = experts.row<uint32_t>(bases, 0);
    of_run.base = base.row(bases, 0);
    of_run.out = out.row(bases, 0);
    thread_local ExpertGroups groups;
    assign(groups, of_run);
    run_expert_lora(of_run, groups, share, num_shares);
  };
  add(ExpertTask{num_shares, run}, x.rows(),
      {base.buffer, x.buffer, adapters.buffer, experts.buffer, a.buffer, b.buffer}, {out.buffer});
}

// --- Values

const View& CpuLowering::view(const mx::array& a) {
  auto found = views_.find(a.id());
  if (found == views_.end()) {
    require(!graph_.depends(a), "an operation whose input is not known");
    const auto& constant = graph_.constant(a);
    int buffer = add_buffer(
        {.kind = Buffer::Kind::constant, .data = const_cast<char*>(constant.data<char>())});
    found = views_.emplace(a.id(), View{buffer, 0, a.shape(), constant.strides()}).first;
  }
  return found->second;
}

const float* CpuLowering::constant(const mx::array& a) {
  require(!graph_.depends(a), "weights that depend on the inputs");
  require(a.dtype() == mx::float32, "weights of other than float32");
  const View& v = view(a);
  require(v.is_dense(), "weights that are not dense");
  return reinterpret_cast<const float*>(buffer(v).data) + v.offset;
}

Arrays CpuLowering::with_weights(const GraphNode& node, size_t first) {
  Arrays in = node.inputs;
  for (size_t i = first; i < in.size(); i++) {
    in[i] = graph_.constant(in[i]);
    require(is_dense(in[i]), "weights that are not dense");
  }
  return in;
}

View CpuLowering::new_value(const mx::array& a) {
  require(a.dtype() == mx::float32, "a value of other than float32");
  return new_temporary(a);
}

View CpuLowering::new_ids(const mx::array& a) {
  require(a.dtype() == mx::uint32, "numbers of rows of other than uint32");
  return new_temporary(a);
}

View CpuLowering::new_temporary(const mx::array& a) {
  require(a.ndim() > 0 && a.size() > 0, "a value without rows");
  int buffer = add_buffer(
      {.kind = Buffer::Kind::temporary,
       .row_size = int64_t(a.size()) / a.shape(0),
       .bytes = int64_t(a.nbytes())});
  return views_[a.id()] = {buffer, 0, a.shape(), dense_strides(a.shape())};
}

View CpuLowering::copied(const View& from) {
  require(from.shape.size() > 0, "a copy of a scalar");
  InnerAxes axes = inner_axes({&from});
  require(axes.sizes.size() <= 3, "a copy of more than four axes");
  int buffer = add_buffer(
      {.kind = Buffer::Kind::temporary,
       .row_size = from.row_size(),
       .bytes = from.rows() * from.row_size() * int64_t(sizeof(float))});
  View to{buffer, 0, from.shape, dense_strides(from.shape)};
  std::array<int64_t, 3> size{1, 1, 1}, step{};
  std::copy_backward(axes.sizes.begin(), axes.sizes.end(), size.end());
  std::copy_backward(axes.steps[0].begin(), axes.steps[0].end(), step.end());
  add_row_task(to, {from}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const float* src = from.row(bases, i);
      float* dst = to.row(bases, i);
      for (int64_t a = 0; a < size[0]; a++) {
        for (int64_t b = 0; b < size[1]; b++) {
          for (int64_t c = 0; c < size[2]; c++) {
            *dst++ = src[a * step[0] + b * step[1] + c * step[2]];
          }
        }
      }
    }
  });
  return to;
}

int CpuLowering::add_buffer(Buffer buffer) {
  executable_.buffers_.push_back(buffer);
  return int(executable_.buffers_.size()) - 1;
}

bool CpuLowering::is_aligned(const View& v) const {
  int64_t size = buffer(v).row_size;
  int64_t end = v.offset + 1;
  for (size_t i = 1; i < v.shape.size(); i++) {
    end += (v.shape[i] - 1) * v.strides[i];
  }
  return end <= size && (v.rows() == 1 || v.strides[0] == size);
}

InnerAxes inner_axes(const std::vector<const View*>& views) {
  InnerAxes axes;
  axes.steps.resize(views.size());
  const mx::Shape& shape = views[0]->shape;
  for (size_t i = 1; i < shape.size(); i++) {
    if (shape[i] == 1) {
      continue;
    }
    bool joins = !axes.sizes.empty();
    for (size_t v = 0; v < views.size(); v++) {
      joins = joins && axes.steps[v].back() == views[v]->strides[i] * shape[i];
    }
    if (joins) {
      axes.sizes.back() *= shape[i];
    } else {
      axes.sizes.push_back(shape[i]);
    }
    for (size_t v = 0; v < views.size(); v++) {
      if (joins) {
        axes.steps[v].back() = views[v]->strides[i];
      } else {
        axes.steps[v].push_back(views[v]->strides[i]);
      }
    }
  }
  return axes;
}

void CpuLowering::add(
    Operation::Work work, int64_t rows, std::vector<int> gathers, std::vector<int> writes) {
  operations_.push_back({std::move(work), rows, {}, std::move(gathers), std::move(writes)});
}

void CpuLowering::add_row_task(
    const View& to, const std::vector<View>& reads, std::vector<int> gathers, RowTask task) {
  Operation op{std::move(task), to.rows(), {}, std::move(gathers), {to.buffer}};
  for (const View& v : reads) {
    (is_aligned(v) ? op.reads : op.gathers).push_back(v.buffer);
  }
  operations_.push_back(std::move(op));
}

// --- Inputs and outputs

void CpuLowering::add_inputs() {
  for (const auto& in : graph_.inputs()) {
    int index = int(executable_.input_shapes_.size());
    executable_.input_shapes_.push_back(in.shape());
    executable_.input_dtypes_.push_back(in.dtype());
    executable_.any_length_.push_back(graph_.uses_of(in) == 0);
    int buffer = add_buffer({.kind = Buffer::Kind::input, .index = index});
    views_[in.id()] = {buffer, 0, in.shape(), dense_strides(in.shape())};
  }
}

int CpuLowering::input_of(const mx::array& a) const {
  auto found = views_.find(a.id());
  require(
      found != views_.end() && buffer(found->second).kind == Buffer::Kind::input &&
          found->second.offset == 0 && found->second.is_dense(),
      "a plan that is not an input");
  return buffer(found->second).index;
}

int CpuLowering::input_of_any_length(const mx::array& a) {
  int i = input_of(a);
  executable_.any_length_[i] = true;
  return i;
}

bool CpuLowering::is_read_by_mlx(const View& v) const {
  return std::any_of(operations_.begin(), operations_.end(), [&](const Operation& op) {
    return op.is<NodePhase>() && std::count(op.gathers.begin(), op.gathers.end(), v.buffer);
  });
}

void CpuLowering::add_results() {
  for (const auto& output : graph_.outputs()) {
    View v = view(output);
    bool is_input = buffer(v).kind == Buffer::Kind::input;
    if (is_input && !executable_.results_.empty()) {
      require(v.offset == 0, "an output that is not a pool of the inputs");
      executable_.pools_.push_back(buffer(v).index);
      continue;
    }
    require(executable_.pools_.empty(), "a result after pools");
    require(output.dtype() == mx::float32, "a result of other than float32");
    bool is_whole = v.is_dense() && v.offset == 0 && buffer(v).kind == Buffer::Kind::temporary &&
                    buffer(v).bytes == int64_t(output.nbytes());
    if (!is_whole || is_read_by_mlx(v)) {
      v = copied(v);
    }
    auto& result = executable_.buffers_[v.buffer];
    result.kind = Buffer::Kind::result;
    result.index = int(executable_.results_.size());
    executable_.results_.push_back(output.shape());
  }
}

// A plan's work can have another length in the next step, and a pool is written once per step.
void CpuLowering::check_inputs() const {
  std::vector<int> writes(executable_.buffers_.size());
  for (const auto& op : operations_) {
    for (auto* buffers : {&op.reads, &op.gathers}) {
      for (int b : *buffers) {
        const Buffer& from = executable_.buffers_[b];
        require(
            from.kind != Buffer::Kind::input || !executable_.any_length_[from.index],
            "a plan that is used for more than attention");
      }
    }
    for (int b : op.writes) {
      require(++writes[b] == 1, "a pool that is written twice");
    }
  }
}

}  // namespace mlx_paged::cpu
