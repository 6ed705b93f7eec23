// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "lowering.h"

#include <algorithm>
#include <string>
#include <utility>

#include "../../metal/kernel_table.h"
#include "../cuda/quantized_shape.h"
#include "../graph/memory_plan.h"
#include "../peer_sum.h"
#include "mlx/fast_primitives.h"
#include "mlx/ops.h"
#include "portable_products.h"

namespace mlx_paged {

GpuLowering::GpuLowering(
    GpuExecutable& executable, const Arrays& inputs, const Arrays& outputs,
    GpuExecutable::Residual residual)
    : executable_(executable), graph_(inputs, outputs), is_lowered_(graph_.nodes().size()) {
  bool in_products = residual == GpuExecutable::Residual::in_product;
  fuse_experts(graph_);
  fuse_gate_up(graph_, is_linear);
  if (in_products) {
    fuse_residual(graph_, is_linear);
  }
  fuse_adapters(graph_, is_linear, in_products);
  fuse_add_norm(graph_);
  fuse_qkv_write(graph_, in_products);
}

void GpuLowering::run() {
  add_inputs();
  const auto& nodes = graph_.nodes();
  for (size_t i = 0; i < nodes.size(); i++) {
    is_lowered_[i] = nodes[i].is_absorbed;
    if (auto linear = linear_of(graph_, nodes[i])) {
      linears_of_[value_of(linear->x)].push_back(i);
    }
    if (auto product = adapted_product(graph_, nodes[i]); product && !nodes[i].is_absorbed) {
      lora_of_[*product] = i;
    }
  }
  for (size_t i = 0; i < nodes.size(); i++) {
    if (!is_lowered_[i]) {
      is_lowered_[i] = true;
      lower(nodes[i]);
    }
  }
  add_outputs();
  find_any_size();
  find_multiplied();
  place_temporaries();
  executable_.constants_ = graph_.constants();
}

// --- Nodes

void GpuLowering::lower(const GraphNode& node) {
  if (std::holds_alternative<GateUp>(node.fusion)) {
    return lower_gated(node);
  }
  if (const auto* added = std::get_if<AddedProduct>(&node.fusion)) {
    return add_step(products_of({added->product}, node.outputs[0], false, &added->addend));
  }
  if (std::holds_alternative<AdaptedProducts>(node.fusion)) {
    return lower_adapted(node);
  }
  if (const auto* norm = std::get_if<AddNorm>(&node.fusion)) {
    return lower_norm(graph_.nodes()[norm->norm], &node);
  }
  if (std::holds_alternative<Experts>(node.fusion)) {
    return lower_experts(node);
  }
  if (linear_of(graph_, node)) {
    return lower_linears(graph_.index_of(node));
  }
  switch (node.op) {
    case Op::rms_norm:
      return lower_norm(node, nullptr);
    case Op::rope:
      throw UnsupportedGraph("a rotation of arrays other than queries and keys");
    case Op::rope_rotations:
      return lower_rotations(node);
    case Op::silu_mul:
      return lower_silu_mul(node);
    case Op::write_kv:
      return lower_write_kv(node);
    case Op::paged_attention:
      return lower_attention(node);
    case Op::greedy_tokens:
      return lower_greedy(node);
    case Op::lora:
      return lower_lora(node);
    case Op::all_gather:
    case Op::all_reduce:
      return lower_collective(node);
    case Op::peer_sum:
      return lower_peer_sum(node);
    case Op::gather:
      return lower_gather(node);
    case Op::dequantize:
      return lower_dequantize(node);
    case Op::lookup:
      return lower_lookup(node);
    default:
      return lower_view(node);
  }
}

// `sum`: the addition that the norm absorbs, or null.
void GpuLowering::lower_norm(const GraphNode& node, const GraphNode* sum) {
  const auto& out = node.outputs[0];
  View x = dense_view((sum ? *sum : node).inputs[0], "a norm of rows that are not dense");
  int64_t size = out.shape(-1);
  int64_t chunk = kChunkBytes / int64_t(out.itemsize());
  require(
      size % chunk == 0 && x.offset % chunk == 0 &&
          size / chunk <= paged::NORM_CHUNKS * paged::NORM_THREADS,
      "a norm of rows of this size");
  View weight =
      dense_constant(node.inputs.size() > 1 ? node.inputs[1] : mx::ones({int(size)}, out.dtype()));
  require(begins_at_chunk(weight), "weights that do not begin at 16 bytes");
  paged::NormParams params{int(size / chunk), sum != nullptr, node.as<RmsNorm>().eps()};
  Launch launch = layer_kernel("add_rms_norm", out.dtype());
  read(launch, x);
  if (sum) {
    View added = dense_view(sum->inputs[1], "an addend that is not dense");
    require(added.offset % chunk == 0, "an addend that is not dense");
    read(launch, added);
  } else {
    read(launch, x);  // a placeholder
  }
  read(launch, weight);
  if (sum) {
    write(launch, new_value(sum->outputs[0]));
  } else {
    read(launch, x);  // a placeholder
  }
  View normed = new_value(out);
  write(launch, normed);
  made_now(normed, size);
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(out.size() / size), 1, 1};
  uint32_t threads = std::min<uint32_t>(paged::NORM_THREADS, div_up(params.row_chunks, 32) * 32);
  launch.threadgroup = {threads, 1, 1};
  launch.threadgroup_memory = div_up(threads / 32 * 4, 16) * 16;
  add_step(std::move(launch));
}

void GpuLowering::lower_rotations(const GraphNode& node) {
  View positions = dense_view(node.inputs[0], "positions that are not dense");
  View inv_freqs = dense_constant(node.inputs[1]);
  require(positions.shape.size() == 1, "positions of several axes");
  const auto& out = node.outputs[0];
  Launch launch = rotations_launch({out.shape(0), out.shape(2), node.as<RopeRotations>().scale()});
  read(launch, positions);
  read(launch, inv_freqs);
  write(launch, new_value(out));
  add_step(std::move(launch));
}

void GpuLowering::lower_silu_mul(const GraphNode& node) {
  const auto& out = node.outputs[0];
  View gate = view(node.inputs[0]);
  View up = view(node.inputs[1]);
  int64_t chunk = kChunkBytes / int64_t(out.itemsize());
  for (const View& v : {gate, up}) {
    require(
        v.has_dense_rows() && v.row_size() % chunk == 0 && v.row_stride() % chunk == 0 &&
            v.offset % chunk == 0,
        "a gate of rows of this size");
  }
  paged::SiluParams params{
      int(gate.row_size() / chunk), int(gate.row_stride() / chunk), int(up.row_stride() / chunk)};
  Launch launch = silu_mul_launch(gate.rows(), params, dtype_of(out.dtype()));
  read(launch, gate);
  read(launch, up);
  write(launch, new_value(out));
  add_step(std::move(launch));
}

void GpuLowering::lower_gather(const GraphNode& node) {
  auto [axes, slices] = node.as<mx::Gather>().state();
  const auto& out = node.outputs[0];
  const auto& in = node.inputs;
  require(
      in.size() == 2 && axes == std::vector<int>{0} && slices[0] == 1 &&
          std::equal(slices.begin() + 1, slices.end(), in[0].shape().begin() + 1),
      "a gather of other than rows");
  require(
      in[1].dtype() == mx::int32 || in[1].dtype() == mx::uint32, "a gather by other than int32");
  View table = view(in[0]);
  View rows = dense_view(in[1], "rows to gather that are not dense");
  require(
      rows.row_size() == 1 && rows.rows() == out.shape(0), "a gather of several rows for a row");
  add_rows_copy(table, rows, new_value(out), out.dtype());
}

// to[i] = from[rows[i]].
void GpuLowering::add_rows_copy(
    const View& from, const View& rows, const View& to, mx::Dtype dtype) {
  int64_t bytes = from.row_size() * int64_t(dtype.size());
  require(
      from.is_dense() && bytes % kChunkBytes == 0 && begins_at_chunk(from),
      "a gather of rows of this size");
  paged::RowParams params{int(bytes / kChunkBytes), int(from.rows())};
  // The kernel copies bits, so it also serves the codes of weights.
  Launch launch = layer_kernel("gather_rows", dtype == mx::uint32 ? mx::float32 : dtype);
  read(launch, from);
  read(launch, rows);
  write(launch, to);
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(to.rows()), div_up(params.row_chunks, paged::DATA_THREADS), 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  add_step(std::move(launch));
}

// Looks up rows of a quantized embedding, except with CUDA.
void GpuLowering::lower_lookup(const GraphNode& node) {
  const auto& in = node.inputs;
  const auto& out = node.outputs[0];
  const auto& codes = node.as<Lookup>().codes();
  bool is_affine = codes.format == WeightFormat::affine;
  int64_t k = out.shape(-1);
  require(codes.format != WeightFormat::dense, "a lookup in a dense table");
  if (auto reason = unsupported_weight(codes, k)) {
    throw UnsupportedGraph(*reason);
  }
  require(!is_affine || in[2].dtype() == out.dtype(), "a lookup with scales of another dtype");
  View ids = dense_view(in[0], "rows to look up that are not dense");
  Launch launch;
  launch.kernel = lookup_kernel(dtype_of(out.dtype()), codes);
  read(launch, ids);
  for (size_t i = 1; i <= 3; i++) {  // without biases the scales again
    View table = dense_constant(in[std::min(i, in.size() - 1)]);
    require(begins_at_chunk(table), "weights that do not begin at 16 bytes");
    read(launch, table);
  }
  write(launch, new_value(out));
  paged::LookupParams params{lookup_units(k), in[1].shape(0), group_shift_of(codes)};
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(out.size() / k), div_up(params.row_units, paged::DATA_THREADS), 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  add_step(std::move(launch));
}

// Dequantizes rows of an embedding with CUDA; elsewhere patches build a lookup.
void GpuLowering::lower_dequantize(const GraphNode& node) {
  auto [unused, group_size, bits, mode, is_inverse] = node.as<mx::fast::Quantize>().state();
  const auto& out = node.outputs[0];
  require(
      is_inverse && mode == mx::QuantizationMode::Affine && node.inputs.size() == 3 &&
          (out.dtype() == mx::float16 || out.dtype() == mx::bfloat16) &&
          node.inputs[1].dtype() == out.dtype() && out.shape(-1) % 8 == 0,
      "a quantized embedding in this format");
  cuda::DequantizeParams params{
      int(out.size() / 8), int(out.shape(-1)), int(node.inputs[0].shape(-1)), group_size, bits};
  Launch launch;
  launch.kernel.host_name = std::string("dequantize_rows_") + name_of(dtype_of(out.dtype()));
  for (const auto& in : node.inputs) {
    read(launch, dense_view(in, "codes that are not dense"));
  }
  write(launch, new_value(out));
  launch.constants = bytes_of(params);
  launch.grid = {div_up(params.num_chunks, paged::DATA_THREADS), 1, 1};
  launch.threadgroup = {paged::DATA_THREADS, 1, 1};
  add_step(std::move(launch));
}

void GpuLowering::lower_greedy(const GraphNode& node) {
  View logits = dense_view(node.inputs[0], "logits that are not dense");
  require(logits.offset == 0, "logits that are not dense");
  Launch launch = greedy_launch(logits.shape[0], logits.shape[1], dtype_of(node.inputs[0].dtype()));
  launch.buffers.clear();
  read(launch, logits);
  for (const auto& out : node.outputs) {
    write(launch, new_value(out));
  }
  for_host_.insert(node.outputs[2].id());
  add_step(std::move(launch));
}

void GpuLowering::lower_collective(const GraphNode& node) {
  const auto& in = node.inputs[0];
  const auto& out = node.outputs[0];
  View x = dense_view(in, "a collective of rows that are not dense");
  require(
      buffer(x).kind != StepOperand::Kind::constant && begins_at_chunk(x),
      "a collective of constants");
  int from = operand(x);
  add_step(
      CollectiveStep{
          node.op, node.primitive, from, operand(new_value(out)), in.shape(), out.shape(),
          out.dtype()});
}

void GpuLowering::lower_peer_sum(const GraphNode& node) {
  View x = dense_view(node.inputs[0], "a sum of rows that are not dense");
  require(begins_at_chunk(x), "a sum of rows that do not begin at 16 bytes");
  auto list = node.as<PeerSum>().launches(node.inputs, node.outputs, Gpu::nvidia);
  View rounds = dense_constant(node.inputs[1]);
  add_launches(list, {x, rounds}, {new_value(node.outputs[0])});
}

void GpuLowering::lower_view(const GraphNode& node) {
  require(
      is_view(node.op) || node.op == Op::stop_gradient,
      std::string("the operation ") + node.primitive->name());
  const auto& in = node.inputs[0];
  if (!views_.count(in.id()) && graph_.depends(in)) {
    unresolved_.push_back(&node);
    return;
  }
  if (node.op == Op::stop_gradient) {
    views_[node.outputs[0].id()] = view(in);
    return;
  }
  auto views = views_of(node, view(in));
  require(views.has_value(), "a change of shape that moves data");
  for (size_t i = 0; i < views->size(); i++) {
    views_[node.outputs[i].id()] = (*views)[i];
  }
}

void GpuLowering::resolve_views() {
  auto unresolved = std::exchange(unresolved_, {});
  for (const auto* node : unresolved) {
    lower_view(*node);
  }
}

// --- Values

View GpuLowering::view(const mx::array& a) {
  if (!views_.count(a.id())) {
    resolve_views();
  }
  auto found = views_.find(a.id());
  if (found != views_.end()) {
    return found->second;
  }
  require(!graph_.depends(a), "a value that is used before it is known");
  size_t index = graph_.index_of_constant(a);
  const auto& constant = graph_.constants()[index];
  int made = add_buffer(
      {StepOperand::Kind::constant, int(index),
       uint64_t(constant.buffer_size() - constant.offset()), constant.dtype()});
  return views_[a.id()] = {made, 0, constant.shape(), constant.strides()};
}

View GpuLowering::dense_view(const mx::array& a, const char* reason) {
  View v = view(a);
  require(v.is_dense(), reason);
  return v;
}

View GpuLowering::dense_constant(const mx::array& a) {
  require(!graph_.depends(a), "weights that depend on the inputs");
  return dense_view(a, "weights that are not dense");
}

// Kernels read chunks of 16 bytes.
bool GpuLowering::begins_at_chunk(const View& v) const {
  const Buffer& b = buffer(v);
  int64_t offset = v.offset * int64_t(b.dtype.size());
  if (b.kind == StepOperand::Kind::constant) {
    offset += graph_.constants()[b.index].offset();
  }
  return offset % kChunkBytes == 0;
}

View GpuLowering::new_value(const mx::array& a) {
  require(a.ndim() > 0 && a.size() > 0, "a value without rows");
  return views_[a.id()] = new_buffer(a.shape(), a.dtype());
}

View GpuLowering::new_buffer(const mx::Shape& shape, mx::Dtype dtype) {
  uint64_t bytes = dtype.size();
  for (int extent : shape) {
    bytes *= extent;
  }
  int made = add_buffer({StepOperand::Kind::temporary, 0, bytes, dtype});
  return {made, 0, shape, dense_strides(shape)};
}

int GpuLowering::add_buffer(Buffer buffer) {
  buffers_.push_back(std::move(buffer));
  return int(buffers_.size()) - 1;
}

// Records that the next step makes the value.
void GpuLowering::made_now(const View& v, int64_t row_size) {
  buffer(v).made_by = num_steps();
  buffer(v).row_size = row_size;
}

// Records that the next step multiplies the value, if in whole rows.
void GpuLowering::read_now(const View& v) {
  Buffer& b = buffer(v);
  if (b.made_by && v.row_size() == b.row_size && v.offset % b.row_size == 0 &&
      v.row_stride() % b.row_size == 0) {
    b.read_by.push_back(num_steps());
  }
}

// --- Steps

int GpuLowering::operand(const View& v) {
  Buffer& b = buffer(v);
  if (b.kind == StepOperand::Kind::input) {
    executable_.used_[b.index] = true;
  }
  b.num_operands++;
  b.first_use = std::min(b.first_use, num_steps());
  b.last_use = std::max(b.last_use, num_steps());
  uint64_t offset = uint64_t(v.offset) * b.dtype.size();
  executable_.operands_.push_back({b.kind, b.index, int64_t(offset), b.bytes - offset});
  buffer_of_operand_.resize(executable_.operands_.size(), -1);
  buffer_of_operand_.back() = v.buffer;
  return int(executable_.operands_.size()) - 1;
}

void GpuLowering::read(Launch& launch, const View& v) {
  int o = operand(v);
  launch.buffers.push_back({o, Access::read, executable_.operands_[o].bytes});
}

void GpuLowering::write(Launch& launch, const View& v, Access access) {
  int o = operand(v);
  buffer(v).is_written = true;
  launch.buffers.push_back({o, access, executable_.operands_[o].bytes});
}

Launch GpuLowering::layer_kernel(const char* function, mx::Dtype dtype) const {
  Launch launch;
  launch.kernel = kernel_named(std::string(function) + "_" + name_of(dtype_of(dtype)));
  return launch;
}

// Adds the launches of one operation; its operands are its inputs, outputs and workspaces.
void GpuLowering::add_launches(
    const LaunchList& list, const std::vector<View>& in, const std::vector<View>& out) {
  std::vector<View> operands = in;
  operands.insert(operands.end(), out.begin(), out.end());
  for (uint64_t bytes : list.workspaces) {
    operands.push_back(new_buffer({int(div_up(int64_t(bytes), 4))}, mx::float32));
  }
  for (auto launch : list.launches) {
    for (const auto& binding : std::exchange(launch.buffers, {})) {
      if (binding.access == Access::read) {
        read(launch, operands[binding.operand]);
      } else {
        write(launch, operands[binding.operand], binding.access);
      }
    }
    add_step(std::move(launch));
  }
}

// --- Inputs, outputs and memory

void GpuLowering::add_inputs() {
  for (const auto& in : graph_.inputs()) {
    int index = int(executable_.input_shapes_.size());
    executable_.input_shapes_.push_back(in.shape());
    executable_.input_dtypes_.push_back(in.dtype());
    int made = add_buffer({StepOperand::Kind::input, index, uint64_t(in.nbytes()), in.dtype()});
    views_[in.id()] = {made, 0, in.shape(), dense_strides(in.shape())};
  }
  executable_.used_.assign(graph_.inputs().size(), false);
}

void GpuLowering::find_any_size() {
  std::vector<size_t> num_reads(executable_.input_shapes_.size());  // as a plan's work
  for (const auto& step : executable_.steps_) {
    if (const auto* attention = std::get_if<AttentionStep>(&step)) {
      using A = PagedAttention;
      for (int i : {int(A::kTables), int(A::kWork), int(A::kMerge)}) {
        num_reads[executable_.operands_[attention->operands[i]].index]++;
      }
    }
  }
  executable_.any_size_.assign(num_reads.size(), false);
  for (const auto& b : buffers_) {
    if (b.kind == StepOperand::Kind::input) {
      executable_.any_size_[b.index] = b.num_operands == num_reads[b.index];
    }
  }
}

void GpuLowering::add_outputs() {
  for (const auto& output : graph_.outputs()) {
    View v = view(output);
    if (buffer(v).kind == StepOperand::Kind::input) {
      require(v.offset == 0, "an output that is not a pool of the inputs");
      executable_.pools_.push_back(buffer(v).index);
      continue;
    }
    require(executable_.pools_.empty(), "a result after pools");
    add_result(output);
  }
  require(!executable_.results_.empty(), "no result");
}

void GpuLowering::add_result(const mx::array& output) {
  View v = view(output);
  if (buffer(v).kind == StepOperand::Kind::temporary && is_tap(buffer(v))) {
    // Launches from the first one that writes a result on are not captured, so a tap is copied at
    // the end.
    View copy = new_buffer(output.shape(), output.dtype());
    add_rows_copy(v, row_numbers(int(v.rows())), copy, output.dtype());
    v = copy;
  }
  Buffer& b = buffer(v);
  require(
      v.is_dense() && b.kind == StepOperand::Kind::temporary && v.offset == 0 &&
          b.bytes == output.nbytes(),
      "a result that is part of another value");
  b.kind = StepOperand::Kind::result;
  b.index = int(executable_.results_.size());
  executable_.results_.push_back(
      {output.shape(), output.dtype(), for_host_.count(output.id()) > 0});
}

// True for a value in the middle of a step that other steps and products read.
bool GpuLowering::is_tap(const Buffer& b) const {
  const auto& steps = executable_.steps_;
  return b.last_use > b.first_use &&
         std::any_of(steps.begin() + b.first_use + 1, steps.end(), [](const auto& step) {
           return !std::holds_alternative<Launch>(step);
         });
}

void GpuLowering::find_multiplied() {
  for (const auto& b : buffers_) {
    // Another operand would mean another reader.
    if (b.kind == StepOperand::Kind::temporary && !b.read_by.empty() &&
        b.num_operands == 1 + b.read_by.size()) {
      executable_.multiplied_.push_back({*b.made_by, b.read_by});
    }
  }
}

void GpuLowering::place_temporaries() {
  std::vector<Lifetime> lifetimes;
  for (const auto& b : buffers_) {
    bool is_placed = b.kind == StepOperand::Kind::temporary;
    lifetimes.push_back({int64_t(b.bytes), b.first_use, is_placed ? b.last_use : -1});
  }
  auto plan = plan_memory(lifetimes);
  executable_.temporary_bytes_ = plan.bytes;
  for (size_t i = 0; i < buffer_of_operand_.size(); i++) {
    if (buffer_of_operand_[i] < 0) {
      continue;
    }
    auto& o = executable_.operands_[i];
    const auto& b = buffers_[buffer_of_operand_[i]];
    o.kind = b.kind;
    o.index = b.index;
    if (o.kind == StepOperand::Kind::temporary) {
      o.offset += plan.offsets[buffer_of_operand_[i]];
    }
  }
}

}  // namespace mlx_paged
