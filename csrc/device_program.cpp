// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_program.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "../metal/kernel_table.h"
#include "cuda/products.h"
#include "cuda/variants.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace mlx_paged {

namespace {

constexpr int kChunkBytes = 16;
constexpr int64_t kAlignment = 256;

[[noreturn]] void refuse(const std::string& reason) {
  throw NoProgram(reason);
}

void require(bool ok, const std::string& reason) {
  if (!ok) {
    refuse(reason);
  }
}

uint32_t ceil_div(int64_t n, int64_t m) {
  return uint32_t((n + m - 1) / m);
}

mx::Strides dense_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = size;
    size *= shape[i];
  }
  return strides;
}

// A value: where it lies in one of the reader's buffers. Offset and strides are in elements.
struct View {
  int buffer;
  int64_t offset = 0;
  mx::Shape shape;
  mx::Strides strides;

  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }

  int64_t row_size() const {
    int64_t size = 1;
    for (size_t i = 1; i < shape.size(); i++) {
      size *= shape[i];
    }
    return size;
  }

  // Whether the elements of a row lie side by side.
  bool has_dense_rows() const {
    int64_t size = 1;
    for (size_t i = shape.size(); i-- > 1;) {
      if (shape[i] != 1 && strides[i] != size) {
        return false;
      }
      size *= shape[i];
    }
    return true;
  }

  int64_t row_stride() const { return rows() == 1 ? row_size() : strides[0]; }
  bool is_dense() const { return has_dense_rows() && row_stride() == row_size(); }
};

// The strides with which `view` can be seen in another shape; none where that needs a copy.
std::optional<mx::Strides> reshaped(const View& view, const mx::Shape& shape) {
  mx::Shape from;  // without axes of 1, and with those that lie side by side as one
  mx::Strides steps;
  for (size_t i = 0; i < view.shape.size(); i++) {
    if (view.shape[i] == 1) {
      continue;
    }
    if (!from.empty() && steps.back() == view.strides[i] * view.shape[i]) {
      from.back() *= view.shape[i];
      steps.back() = view.strides[i];
    } else {
      from.push_back(view.shape[i]);
      steps.push_back(view.strides[i]);
    }
  }
  mx::Strides strides(shape.size());
  size_t axis = from.size();
  int64_t left = 1;  // of from[axis]
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 1) {
      strides[i] = step;
      continue;
    }
    if (left == 1) {
      if (axis == 0) {
        return std::nullopt;
      }
      axis--;
      left = from[axis];
      step = steps[axis];
    }
    if (left % shape[i] != 0) {
      return std::nullopt;
    }
    strides[i] = step;
    step *= shape[i];
    left /= shape[i];
  }
  return strides;
}

// All the outputs of one primitive.
struct GraphNode {
  const mx::Primitive* primitive;
  Arrays inputs;
  Arrays outputs;
  bool is_read = false;  // it is part of some step already

  bool is(const char* name) const { return std::strcmp(primitive->name(), name) == 0; }
  template <typename P>
  const P* as() const {
    return dynamic_cast<const P*>(primitive);
  }
};

}  // namespace

class DeviceProgramReader {
 public:
  using Residual = DeviceProgram::Residual;

  DeviceProgramReader(
      DeviceProgram& program, const Arrays& inputs, const Arrays& outputs, Residual residual)
      : program_(program), inputs_(inputs), outputs_(outputs), residual_(residual) {}

  void read() {
    require(!outputs_.empty(), "it has no outputs");
    add_inputs();
    find_nodes();
    mx::eval(program_.constants_);
    fuse();
    for (size_t i = 0; i < nodes_.size(); i++) {
      if (!nodes_[i].is_read) {
        read_node(i);
      }
    }
    add_outputs();
    place_temporaries();
  }

 private:
  using Id = std::uintptr_t;

  struct Buffer {
    ProgramOperand::Kind kind;
    int index = 0;
    uint64_t bytes = 0;
    mx::Dtype dtype = mx::float32;
    int first_use = std::numeric_limits<int>::max();
    int last_use = -1;
    bool is_written = false;
  };

  // --- The graph ---

  void add_inputs() {
    for (size_t i = 0; i < inputs_.size(); i++) {
      const auto& in = inputs_[i];
      program_.input_shapes_.push_back(in.shape());
      program_.input_dtypes_.push_back(in.dtype());
      int buffer =
          add_buffer({ProgramOperand::Kind::input, int(i), uint64_t(in.nbytes()), in.dtype()});
      views_[in.id()] = {buffer, 0, in.shape(), dense_strides(in.shape())};
      depends_.insert(in.id());
    }
    program_.used_.assign(inputs_.size(), false);
  }

  // Fills nodes_, every one after those that it needs, and the program's constants.
  void find_nodes() {
    struct Visit {
      mx::array array;
      size_t next = 0;
    };
    std::unordered_set<Id> seen;
    for (const auto& output : outputs_) {
      std::vector<Visit> stack{{output}};
      while (!stack.empty()) {
        auto& [array, next] = stack.back();
        if (views_.count(array.id()) || (next == 0 && !seen.insert(array.id()).second)) {
          stack.pop_back();
          continue;
        }
        bool is_leaf = !array.has_primitive() || array.status() != mx::array::Status::unscheduled;
        if (!is_leaf && next < array.inputs().size()) {
          auto input = array.inputs()[next++];
          stack.push_back({input});
          continue;
        }
        if (!is_leaf) {
          add_node(array);
          for (const auto& sibling : array.siblings()) {
            seen.insert(sibling.id());
          }
        }
        stack.pop_back();
      }
    }
    std::unordered_set<Id> kept;
    for (const auto& node : nodes_) {
      for (const auto& in : node.inputs) {
        if (!depends_.count(in.id()) && kept.insert(in.id()).second) {
          program_.constants_.push_back(in);
        }
        users_[in.id()].push_back(int(&node - nodes_.data()));
      }
    }
    for (const auto& output : outputs_) {
      require(depends_.count(output.id()), "an output does not depend on the inputs");
      users_[output.id()].push_back(-1);
    }
  }

  void add_node(const mx::array& array) {
    const auto& inputs = array.inputs();
    bool depends = std::any_of(inputs.begin(), inputs.end(), [&](const mx::array& in) {
      return depends_.count(in.id()) > 0;
    });
    if (!depends) {
      return;
    }
    GraphNode node{&array.primitive(), inputs, mx::array(array).outputs()};
    for (const auto& out : node.outputs) {
      depends_.insert(out.id());
      producers_[out.id()] = nodes_.size();
    }
    nodes_.push_back(std::move(node));
  }

  size_t uses_of(const mx::array& a) const {
    auto found = users_.find(a.id());
    return found == users_.end() ? 0 : found->second.size();
  }

  const GraphNode* producer_of(const mx::array& a) const {
    auto found = producers_.find(a.id());
    return found == producers_.end() ? nullptr : &nodes_[found->second];
  }

  // Behind operations that only change how a value is seen.
  const GraphNode* source_of(const mx::array& a, std::vector<const GraphNode*>* passed) const {
    const auto* node = producer_of(a);
    while (node && is_view(*node) && !node->is("Split") && !node->is("Slice")) {
      passed->push_back(node);
      node = producer_of(node->inputs[0]);
    }
    return node;
  }

  static bool is_view(const GraphNode& node) {
    static const std::set<std::string> names{"Reshape",    "Flatten",   "Unflatten", "Squeeze",
                                             "ExpandDims", "Transpose", "Slice",     "Split"};
    return names.count(node.primitive->name()) > 0;
  }

  // What is the same for all shapes that a value is seen in.
  static Id value_of(const mx::array& a) {
    static const std::set<std::string> names{
        "Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"};
    auto at = a;
    while (at.has_primitive() && at.status() == mx::array::Status::unscheduled &&
           names.count(at.primitive().name())) {
      at = mx::array(at.inputs()[0]);
    }
    return at.id();
  }

  // --- What becomes one step ---

  // x @ weight.T of one row a row: our own node, or MLX's.
  struct LinearNode {
    mx::array x;
    mx::array weight;  // [n, k]
    std::optional<mx::array> bias;
    bool is_transposed;  // `weight` is [k, n], a view
  };

  std::optional<LinearNode> linear_of(const GraphNode& node) const {
    if (node.as<Linear>()) {
      bool has_bias = node.inputs.size() > 2;
      return LinearNode{
          node.inputs[0], node.inputs[1], has_bias ? std::optional(node.inputs[2]) : std::nullopt,
          false};
    }
    if (node.is("Matmul") && node.inputs[1].ndim() == 2 && !depends_.count(node.inputs[1].id())) {
      return LinearNode{node.inputs[0], node.inputs[1], std::nullopt, true};
    }
    return std::nullopt;
  }

  // The product that makes `a`, if nothing else needs it.
  std::optional<size_t> own_linear(const mx::array& a) const {
    std::vector<const GraphNode*> passed;
    const auto* node = source_of(a, &passed);
    if (!node || !linear_of(*node) || uses_of(a) != 1 || uses_of(node->outputs[0]) != 1) {
      return std::nullopt;
    }
    for (const auto* view : passed) {
      if (uses_of(view->outputs[0]) != 1) {
        return std::nullopt;
      }
    }
    return node - nodes_.data();
  }

  void fuse() {
    for (size_t i = 0; i < nodes_.size(); i++) {
      if (auto linear = linear_of(nodes_[i])) {
        linears_of_[value_of(linear->x)].push_back(i);
      }
    }
    for (size_t i = 0; i < nodes_.size(); i++) {
      const auto& node = nodes_[i];
      if (node.as<SiluMul>()) {
        auto gate = own_linear(node.inputs[0]);
        auto up = own_linear(node.inputs[1]);
        if (gate && up && gate != up &&
            value_of(linear_of(nodes_[*gate])->x) == value_of(linear_of(nodes_[*up])->x) &&
            nodes_[*gate].outputs[0].shape() == nodes_[*up].outputs[0].shape()) {
          nodes_[*gate].is_read = nodes_[*up].is_read = true;
          gated_[i] = {*gate, *up};
        }
      } else if (node.is("Add") && node.inputs[0].shape() == node.inputs[1].shape()) {
        std::optional<size_t> linear;
        int side = 1;
        for (; side >= 0 && !linear; side--) {
          linear = own_linear(node.inputs[side]);
        }
        side++;
        if (residual_ == Residual::in_product && linear && !nodes_[*linear].is_read) {
          nodes_[*linear].is_read = true;
          added_.emplace(i, std::pair(*linear, node.inputs[1 - side]));
          continue;
        }
        for (int user : users_[node.outputs[0].id()]) {
          if (user >= 0 && nodes_[user].as<RmsNorm>() && !normed_.count(user) &&
              nodes_[user].inputs[0].id() == node.outputs[0].id()) {
            normed_[user] = i;
            norm_of_sum_[i] = user;
            break;
          }
        }
      }
    }
  }

  // --- Nodes ---

  void read_node(size_t index) {
    auto& node = nodes_[index];
    node.is_read = true;
    if (auto found = gated_.find(index); found != gated_.end()) {
      return read_products({found->second.first, found->second.second}, node.outputs[0], true);
    }
    if (auto found = added_.find(index); found != added_.end()) {
      return read_products({found->second.first}, node.outputs[0], false, &found->second.second);
    }
    if (norm_of_sum_.count(index)) {
      nodes_[norm_of_sum_[index]].is_read = true;
      return read_norm(nodes_[norm_of_sum_[index]], &node);
    }
    if (linear_of(node)) {
      return read_linears(index);
    }
    if (node.as<RmsNorm>()) {
      // The norms of heads belong to what rotates and writes them.
      std::optional<size_t> writer = writer_of_head(node);
      return writer ? void(nodes_[index].is_read = true) : read_norm(node, nullptr);
    }
    if (node.as<Rope>()) {
      require(writer_of_head(node).has_value(), "a rotation of other than queries and keys");
      return;
    }
    if (const auto* rotations = node.as<RopeRotations>()) {
      return read_rotations(node, *rotations);
    }
    if (node.as<SiluMul>()) {
      return read_silu_mul(node);
    }
    if (node.as<WriteKV>()) {
      return read_write_kv(node);
    }
    if (const auto* attention = node.as<PagedAttention>()) {
      return read_attention(node, *attention);
    }
    if (node.is("Gather")) {
      return read_gather(node, static_cast<const mx::Gather&>(*node.primitive));
    }
    read_view(node);
  }

  // Every product of the same input that waits for nothing else, up to three at once.
  void read_linears(size_t index) {
    auto linear = linear_of(nodes_[index]);
    std::vector<size_t> together{index};
    for (size_t other : linears_of_[value_of(linear->x)]) {
      if (together.size() < 3 && other != index && !nodes_[other].is_read) {
        together.push_back(other);
      }
    }
    for (size_t i : together) {
      nodes_[i].is_read = true;
    }
    read_products(together, nodes_[index].outputs[0], false);
  }

  void read_products(
      const std::vector<size_t>& nodes, const mx::array& result, bool is_gated,
      const mx::array* residual = nullptr) {
    auto first = *linear_of(nodes_[nodes[0]]);
    View x = view(first.x);
    auto dtype = first.x.dtype();
    int64_t k = first.x.shape(-1);
    int item_size = int(dtype.size());
    require(x.row_size() == k && x.has_dense_rows(), "a product of several vectors a row");
    require(
        k * item_size % kChunkBytes == 0 && x.row_stride() * item_size % kChunkBytes == 0 &&
            x.offset * item_size % kChunkBytes == 0,
        "a product of rows that are not multiples of 16 bytes");
    ProductStep step{};
    step.x = operand(x);
    step.num_rows = int(x.rows());
    step.k = int(k);
    step.x_stride = int(x.row_stride());
    step.is_gated = is_gated;
    step.dtype = dtype_of(dtype);
    for (size_t i : nodes) {
      auto linear = *linear_of(nodes_[i]);
      View weight = view(linear.weight);
      if (linear.is_transposed) {
        std::swap(weight.shape[0], weight.shape[1]);
        std::swap(weight.strides[0], weight.strides[1]);
      }
      require(linear.weight.dtype() == dtype, "weights of another dtype");
      require(weight.is_dense(), "weights that are not dense");
      require(
          weight.offset * item_size % kChunkBytes == 0, "weights that do not begin at 16 bytes");
      ProductStep::Part part{};
      part.weight = operand(weight);
      part.bias = -1;
      if (linear.bias) {
        require(linear.bias->dtype() == dtype, "a bias of another dtype");
        part.bias = operand(dense_constant(*linear.bias));
      }
      part.n = weight.shape[0];
      bool is_result = is_gated || residual;
      part.out = operand(new_value(is_result && i == nodes[0] ? result : nodes_[i].outputs[0]));
      step.parts.push_back(part);
    }
    if (residual) {
      View added = view(*residual);
      require(added.is_dense(), "an addend that is not dense");
      step.residual = operand(added);
    }
    add_step(step);
  }

  void read_norm(const GraphNode& node, const GraphNode* sum) {
    const auto& norm = *node.as<RmsNorm>();
    const auto& out = node.outputs[0];
    View x = sum ? view(sum->inputs[0]) : view(node.inputs[0]);
    int64_t size = out.shape(-1);
    int64_t chunk = kChunkBytes / int64_t(out.itemsize());
    require(x.is_dense(), "a norm of rows that are not dense");
    require(
        size % chunk == 0 && x.offset % chunk == 0 &&
            size / chunk <= paged::NORM_CHUNKS * paged::NORM_THREADS,
        "a norm of rows of this size");
    View weight = node.inputs.size() > 1 ? dense_constant(node.inputs[1])
                                         : dense_constant(mx::ones({int(size)}, out.dtype()));
    paged::NormParams params{int(size / chunk), sum != nullptr, norm.eps()};
    Launch launch = layer_kernel("add_rms_norm", out.dtype());
    read(launch, x);
    if (sum) {
      View added = view(sum->inputs[1]);
      require(added.is_dense() && added.offset % chunk == 0, "an addend that is not dense");
      read(launch, added);
    } else {
      read(launch, x);  // (not read)
    }
    read(launch, weight);
    if (sum) {
      write(launch, new_value(sum->outputs[0]));
    } else {
      read(launch, x);  // (not written)
    }
    write(launch, new_value(out));
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(out.size() / size), 1, 1};
    uint32_t threads =
        std::min<uint32_t>(paged::NORM_THREADS, ceil_div(params.row_chunks, 32) * 32);
    launch.threadgroup = {threads, 1, 1};
    launch.threadgroup_memory = ceil_div(threads / 32 * 4, 16) * 16;
    add_step(launch);
  }

  void read_rotations(const GraphNode& node, const RopeRotations& rotations) {
    View positions = view(node.inputs[0]);
    View inv_freqs = dense_constant(node.inputs[1]);
    require(positions.is_dense() && positions.shape.size() == 1, "positions of several axes");
    const auto& out = node.outputs[0];
    paged::RotationParams params{out.shape(0), out.shape(2), rotations.scale()};
    Launch launch;
    launch.kernel = kernel_named("rope_rotations");
    read(launch, positions);
    read(launch, inv_freqs);
    write(launch, new_value(out));
    launch.constants = bytes_of(params);
    launch.grid = {
        ceil_div(int64_t(params.num_rows) * params.half_dims, paged::DATA_THREADS), 1, 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    add_step(launch);
  }

  void read_silu_mul(const GraphNode& node) {
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
    Launch launch = layer_kernel("silu_mul", out.dtype());
    read(launch, gate);
    read(launch, up);
    write(launch, new_value(out));
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(gate.rows()), ceil_div(params.row_chunks, paged::DATA_THREADS), 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    add_step(launch);
  }

  void read_gather(const GraphNode& node, const mx::Gather& gather) {
    auto [axes, slices] = gather.state();
    const auto& out = node.outputs[0];
    require(
        node.inputs.size() == 2 && axes == std::vector<int>{0} && slices[0] == 1 &&
            std::equal(slices.begin() + 1, slices.end(), node.inputs[0].shape().begin() + 1),
        "a gather of other than rows");
    View table = view(node.inputs[0]);
    View rows = view(node.inputs[1]);
    auto type = node.inputs[1].dtype();
    require(type == mx::int32 || type == mx::uint32, "a gather by other than int32");
    int64_t bytes = table.row_size() * int64_t(out.itemsize());
    require(
        table.is_dense() && bytes % kChunkBytes == 0 &&
            table.offset * int64_t(out.itemsize()) % kChunkBytes == 0,
        "a gather of rows of this size");
    require(
        rows.is_dense() && rows.row_size() == 1 && rows.rows() == out.shape(0),
        "a gather of several rows for a row");
    paged::RowParams params{int(bytes / kChunkBytes), int(table.rows())};
    Launch launch = layer_kernel("gather_rows", out.dtype());
    read(launch, table);
    read(launch, rows);
    write(launch, new_value(out));
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(out.shape(0)), ceil_div(params.row_chunks, paged::DATA_THREADS), 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    add_step(launch);
  }

  // --- Heads: normed, rotated and written at once ---

  // Where queries or keys come from, before they are normed and rotated.
  struct Heads {
    mx::array from;  // [rows, heads, 1, dim] or [rows, heads, dim]
    const GraphNode* rope = nullptr;
    const GraphNode* norm = nullptr;
  };

  Heads heads_of(const mx::array& a) const {
    Heads heads{a};
    std::vector<const GraphNode*> passed;
    const auto* node = source_of(heads.from, &passed);
    if (node && node->as<Rope>()) {
      heads.rope = node;
      heads.from = node->inputs[0];
      node = source_of(heads.from, &passed);
    }
    if (node && node->as<RmsNorm>() && node->inputs.size() > 1 &&
        node->outputs[0].shape(-1) == a.shape(-1)) {
      heads.norm = node;
      heads.from = node->inputs[0];
    }
    return heads;
  }

  // The attention that reads what a node has written.
  const GraphNode* attention_after(const GraphNode& write) const {
    for (int user : users_.at(write.outputs[0].id())) {
      if (user >= 0 && nodes_[user].as<PagedAttention>()) {
        return &nodes_[user];
      }
    }
    return nullptr;
  }

  // Which write takes in a norm or a rotation of heads.
  std::optional<size_t> writer_of_head(const GraphNode& node) const {
    for (size_t i = 0; i < nodes_.size(); i++) {
      if (!nodes_[i].as<WriteKV>() || nodes_[i].is_read) {
        continue;
      }
      Heads keys = heads_of(nodes_[i].inputs[2]);
      if (keys.rope == &node || keys.norm == &node) {
        return i;
      }
      if (const auto* attention = attention_after(nodes_[i])) {
        Heads queries = heads_of(attention->inputs[PagedAttention::kQueries]);
        if (queries.rope == &node || queries.norm == &node) {
          return i;
        }
      }
    }
    return std::nullopt;
  }

  // A row's heads side by side.
  View rows_of_heads(const mx::array& a, int heads, int dim, const char* what) {
    View v = view(a);
    mx::Shape shape{int(v.rows()), heads, dim};
    // (From [rows, 1, heads, dim] to [rows, heads, 1, dim] nothing moves.)
    mx::Shape axes;
    mx::Strides strides;
    for (size_t i = 0; i < v.shape.size(); i++) {
      if (v.shape[i] != 1 || i == 0) {
        axes.push_back(v.shape[i]);
        strides.push_back(v.strides[i]);
      }
    }
    auto seen = reshaped({v.buffer, v.offset, axes, strides}, shape);
    require(
        seen && ((*seen)[2] == 1 || dim == 1) && (heads == 1 || (*seen)[1] == dim),
        std::string(what) + " that do not lie side by side");
    return {v.buffer, v.offset, shape, *seen};
  }

  void read_write_kv(const GraphNode& node) {
    const auto* attention = attention_after(node);
    require(attention, "a write that no attention follows");
    const auto& queries = attention->inputs[PagedAttention::kQueries];
    View key_pool = view(node.inputs[0]);
    View value_pool = view(node.inputs[1]);
    for (const View* pool : {&key_pool, &value_pool}) {
      require(
          buffers_[pool->buffer].kind == ProgramOperand::Kind::input, "a pool that is no input");
      require(!buffers_[pool->buffer].is_written, "a pool that is written twice");
    }
    Heads from_queries = heads_of(queries);
    Heads from_keys = heads_of(node.inputs[2]);
    const auto* rope = from_queries.rope;
    require(bool(rope) == bool(from_keys.rope), "rotations of queries or keys alone");
    for (const Heads* heads : {&from_queries, &from_keys}) {
      for (const auto* part : {heads->rope, heads->norm}) {
        require(!part || uses_of(part->outputs[0]) == 1, "heads that are used twice");
      }
    }
    auto dtype = queries.dtype();
    require(
        node.inputs[0].dtype() == dtype && node.inputs[1].dtype() == dtype,
        "pools of another dtype");
    paged::RopeParams params{};
    params.num_q_heads = queries.shape(1);
    params.num_kv_heads = key_pool.shape[2];
    params.key_dim = key_pool.shape[3];
    params.value_dim = value_pool.shape[3];
    View q = rows_of_heads(from_queries.from, params.num_q_heads, params.key_dim, "queries");
    View k = rows_of_heads(from_keys.from, params.num_kv_heads, params.key_dim, "keys");
    View v = rows_of_heads(node.inputs[3], params.num_kv_heads, params.value_dim, "values");
    params.query_stride = int(q.strides[0]);
    params.key_stride = int(k.strides[0]);
    params.value_stride = int(v.strides[0]);
    View slots = view(node.inputs[4]);
    require(slots.is_dense(), "slots that are not dense");
    require(q.rows() == slots.rows() && k.rows() == slots.rows(), "queries of other rows");
    Launch launch = layer_kernel("rope_write", dtype);
    read(launch, q);
    read(launch, k);
    read(launch, v);
    if (rope) {
      const auto* key_rope = from_keys.rope;
      require(
          rope->inputs[1].id() == key_rope->inputs[1].id() &&
              rope->as<Rope>()->traditional() == key_rope->as<Rope>()->traditional(),
          "queries and keys that are rotated differently");
      View rotations = view(rope->inputs[1]);
      require(rotations.is_dense(), "rotations that are not dense");
      params.half_dims = rotations.shape[2];
      params.traditional = rope->as<Rope>()->traditional();
      read(launch, rotations);
    } else {
      read(launch, slots);  // (not read)
    }
    read(launch, slots);
    auto weight_of = [&](const Heads& heads, int& has_norm, float& eps) {
      if (heads.norm) {
        has_norm = 1;
        eps = heads.norm->as<RmsNorm>()->eps();
        read(launch, dense_constant(heads.norm->inputs[1]));
      } else {
        read(launch, q);  // (not read)
      }
    };
    weight_of(from_queries, params.has_query_norm, params.query_eps);
    weight_of(from_keys, params.has_key_norm, params.key_eps);
    View rotated = new_value(queries);
    write(launch, rotated);
    write(launch, key_pool, Access::read_write);
    write(launch, value_pool, Access::read_write);
    for (int i = 0; i < 2; i++) {
      views_[node.outputs[i].id()] = i ? value_pool : key_pool;
    }
    launch.constants = bytes_of(params);
    int heads = params.num_q_heads + 2 * params.num_kv_heads;
    launch.grid = {uint32_t(slots.rows()), ceil_div(heads, paged::ROPE_SIMD_GROUPS), 1};
    launch.threadgroup = {32 * paged::ROPE_SIMD_GROUPS, 1, 1};
    add_step(launch);
  }

  void read_attention(const GraphNode& node, const PagedAttention& attention) {
    const auto& in = node.inputs;
    using A = PagedAttention;
    require(in[A::kPositions].ndim() == 1, "rows with bounds");
    require(views_.count(in[A::kQueries].id()) > 0, "queries that nothing has written");
    View queries = view(in[A::kQueries]);
    require(queries.is_dense(), "queries that are not dense");
    DeviceProgram::AttentionKind kind{
        attention.options(),       {}, in[A::kQueries].shape(), in[A::kKeyPool].shape(),
        in[A::kValuePool].shape(), {}, in[A::kQueries].dtype()};
    AttentionStep step{};
    for (int i = 0; i < int(in.size()); i++) {
      View v = i == A::kSinks ? dense_constant(in[i]) : view(in[i]);
      require(v.is_dense(), "a plan that is not dense");
      bool of_plan = i >= A::kPositions && i <= A::kMerge;
      const Buffer& buffer = buffers_[v.buffer];
      if (of_plan) {
        require(
            buffer.kind == ProgramOperand::Kind::input && v.offset == 0 &&
                v.shape == inputs_[buffer.index].shape(),
            "a plan that is not an input");
      }
      kind.inputs.push_back(of_plan ? buffer.index : -1);
      step.operands.push_back(operand(v));
    }
    if (in.size() > A::kSinks) {
      kind.sinks = in[A::kSinks].shape();
    }
    step.out = operand(new_value(node.outputs[0]));
    auto& kinds = program_.kinds_;
    auto found = std::find(kinds.begin(), kinds.end(), kind);
    step.kind = int(found - kinds.begin());
    if (found == kinds.end()) {
      kinds.push_back(kind);
    }
    if (program_.workspace_ < 0) {
      program_.workspace_ = int(program_.operands_.size());
      program_.operands_.push_back({ProgramOperand::Kind::workspace});
    }
    add_step(step);
  }

  // --- Views ---

  void read_view(const GraphNode& node) {
    // Of what another step takes in; its own result is seen when it has been read.
    if (is_view(node) && !views_.count(node.inputs[0].id()) &&
        depends_.count(node.inputs[0].id())) {
      pending_.push_back(&node);
      return;
    }
    const auto& out = node.outputs[0];
    if (node.is("Transpose")) {
      View in = view(node.inputs[0]);
      View seen = in;
      auto axes = static_cast<const mx::Transpose&>(*node.primitive).state();
      for (size_t i = 0; i < axes.size(); i++) {
        seen.shape[i] = in.shape[axes[i]];
        seen.strides[i] = in.strides[axes[i]];
      }
      views_[out.id()] = seen;
      return;
    }
    if (node.is("Slice")) {
      View seen = view(node.inputs[0]);
      auto [begin, end, step] = static_cast<const mx::Slice&>(*node.primitive).state();
      for (size_t i = 0; i < begin.size(); i++) {
        require(step[i] > 0, "a slice with a negative step");
        seen.offset += begin[i] * seen.strides[i];
        seen.strides[i] *= step[i];
      }
      seen.shape = out.shape();
      views_[out.id()] = seen;
      return;
    }
    if (node.is("Split")) {
      View in = view(node.inputs[0]);
      auto [indices, axis] = static_cast<const mx::Split&>(*node.primitive).state();
      int64_t begin = 0;
      for (const auto& part : node.outputs) {
        View seen = in;
        seen.offset += begin * in.strides[axis];
        seen.shape = part.shape();
        views_[part.id()] = seen;
        begin += part.shape(axis);
      }
      return;
    }
    require(is_view(node), std::string("the operation ") + node.primitive->name());
    View in = view(node.inputs[0]);
    auto strides = reshaped(in, out.shape());
    require(strides.has_value(), "a change of shape that moves data");
    views_[out.id()] = {in.buffer, in.offset, out.shape(), *strides};
  }

  // Views of what has become known.
  void read_pending() {
    auto pending = std::exchange(pending_, {});
    for (const auto* node : pending) {
      read_view(*node);
    }
  }

  // --- Values ---

  View view(const mx::array& a) {
    if (!views_.count(a.id())) {
      read_pending();
    }
    auto found = views_.find(a.id());
    if (found == views_.end()) {
      require(!depends_.count(a.id()), "a value that is used before it is known");
      for (size_t i = 0; i < program_.constants_.size(); i++) {
        const auto& constant = program_.constants_[i];
        if (constant.id() == a.id()) {
          return views_[a.id()] = constant_view(int(i));
        }
      }
      refuse("a constant that was not found");
    }
    return found->second;
  }

  View constant_view(int i) {
    const auto& a = program_.constants_[i];
    int buffer = add_buffer(
        {ProgramOperand::Kind::constant, i, uint64_t(a.buffer_size() - a.offset()), a.dtype()});
    return {buffer, 0, a.shape(), a.strides()};
  }

  View dense_constant(const mx::array& a) {
    require(!depends_.count(a.id()), "weights that depend on the inputs");
    bool is_known = std::any_of(
        program_.constants_.begin(), program_.constants_.end(),
        [&](const mx::array& c) { return c.id() == a.id(); });
    if (!is_known) {
      auto made = a;
      made.eval();
      program_.constants_.push_back(made);
    }
    View v = view(a);
    require(v.is_dense(), "weights that are not dense");
    return v;
  }

  View new_value(const mx::array& a) {
    require(a.ndim() > 0 && a.size() > 0, "a value without rows");
    int buffer = add_buffer({ProgramOperand::Kind::temporary, 0, uint64_t(a.nbytes()), a.dtype()});
    View v{buffer, 0, a.shape(), dense_strides(a.shape())};
    views_[a.id()] = v;
    return v;
  }

  int add_buffer(Buffer buffer) {
    buffers_.push_back(buffer);
    return int(buffers_.size()) - 1;
  }

  // --- Steps ---

  int operand(const View& v) {
    Buffer& b = buffers_[v.buffer];
    if (b.kind == ProgramOperand::Kind::input) {
      program_.used_[b.index] = true;
    }
    int now = int(program_.steps_.size());
    b.first_use = std::min(b.first_use, now);
    b.last_use = std::max(b.last_use, now);
    uint64_t offset = uint64_t(v.offset) * b.dtype.size();
    ProgramOperand made{b.kind, b.index, int64_t(offset), b.bytes - offset};
    program_.operands_.push_back(made);
    buffer_of_operand_.resize(program_.operands_.size(), -1);
    buffer_of_operand_.back() = v.buffer;
    return int(program_.operands_.size()) - 1;
  }

  void read(Launch& launch, const View& v) {
    int o = operand(v);
    launch.buffers.push_back({o, Access::read, program_.operands_[o].bytes});
  }

  void write(Launch& launch, const View& v, Access access = Access::write) {
    int o = operand(v);
    buffers_[v.buffer].is_written = true;
    launch.buffers.push_back({o, access, program_.operands_[o].bytes});
  }

  Launch layer_kernel(const char* function, mx::Dtype dtype) {
    Launch launch;
    launch.kernel = kernel_named(std::string(function) + "_" + name_of(dtype_of(dtype)));
    return launch;
  }

  template <typename S>
  void add_step(S step) {
    program_.steps_.push_back(std::move(step));
  }

  void add_outputs() {
    View result = view(outputs_[0]);
    Buffer& made = buffers_[result.buffer];
    require(
        result.is_dense() && made.kind == ProgramOperand::Kind::temporary && result.offset == 0 &&
            made.bytes == outputs_[0].nbytes(),
        "a result that is part of another value");
    made.kind = ProgramOperand::Kind::result;
    program_.result_shape_ = outputs_[0].shape();
    program_.result_dtype_ = outputs_[0].dtype();
    for (size_t i = 1; i < outputs_.size(); i++) {
      View pool = view(outputs_[i]);
      const Buffer& b = buffers_[pool.buffer];
      require(
          b.kind == ProgramOperand::Kind::input && pool.offset == 0,
          "an output that is no pool of the inputs");
      program_.pools_.push_back(b.index);
    }
  }

  // Those that are not needed at the same time share memory.
  void place_temporaries() {
    struct Placed {
      int64_t begin, end;
      int first, last;
    };
    std::vector<Placed> placed;
    std::vector<int64_t> offsets(buffers_.size(), 0);
    for (size_t i = 0; i < buffers_.size(); i++) {
      const Buffer& b = buffers_[i];
      if (b.kind != ProgramOperand::Kind::temporary || b.last_use < 0) {
        continue;
      }
      int64_t size = (int64_t(b.bytes) + kAlignment - 1) / kAlignment * kAlignment;
      std::vector<Placed> beside;
      for (const auto& p : placed) {
        if (p.first <= b.last_use && b.first_use <= p.last) {
          beside.push_back(p);
        }
      }
      std::sort(beside.begin(), beside.end(), [](const Placed& a, const Placed& c) {
        return a.begin < c.begin;
      });
      int64_t at = 0;
      for (const auto& p : beside) {
        if (at + size <= p.begin) {
          break;
        }
        at = std::max(at, p.end);
      }
      placed.push_back({at, at + size, b.first_use, b.last_use});
      offsets[i] = at;
      program_.temporary_bytes_ = std::max<uint64_t>(program_.temporary_bytes_, at + size);
    }
    buffer_of_operand_.resize(program_.operands_.size(), -1);
    for (size_t i = 0; i < program_.operands_.size(); i++) {
      if (buffer_of_operand_[i] < 0) {
        continue;
      }
      auto& o = program_.operands_[i];
      o.kind = buffers_[buffer_of_operand_[i]].kind;
      if (o.kind == ProgramOperand::Kind::temporary) {
        o.offset += offsets[buffer_of_operand_[i]];
      }
    }
  }

  DeviceProgram& program_;
  const Arrays& inputs_;
  const Arrays& outputs_;
  Residual residual_;
  std::vector<GraphNode> nodes_;
  std::vector<Buffer> buffers_;
  std::vector<int> buffer_of_operand_;
  std::vector<const GraphNode*> pending_;
  std::unordered_map<Id, View> views_;
  std::unordered_set<Id> depends_;  // arrays that depend on the inputs
  std::unordered_map<Id, size_t> producers_;
  std::unordered_map<Id, std::vector<int>> users_;          // nodes; -1: an output
  std::unordered_map<Id, std::vector<size_t>> linears_of_;  // by the value that they multiply
  std::map<size_t, std::pair<size_t, size_t>> gated_;
  std::map<size_t, std::pair<size_t, mx::array>> added_;
  std::map<size_t, size_t> normed_;       // norm -> the sum that it takes in
  std::map<size_t, size_t> norm_of_sum_;  // and the other way round
};

DeviceProgram::DeviceProgram(
    const Arrays& inputs, const Arrays& outputs, Gpu gpu, Residual residual) {
  DeviceProgramReader(*this, inputs, outputs, residual).read();
  for (const auto& step : steps_) {
    if (const auto* products = std::get_if<ProductStep>(&step)) {
      product_launches(*products, gpu);
    }
  }
}

bool DeviceProgram::is_pool(int input) const {
  return std::find(pools_.begin(), pools_.end(), input) != pools_.end();
}

uint64_t DeviceProgram::input_bytes(int input) const {
  uint64_t bytes = input_dtypes_[input].size();
  for (int extent : input_shapes_[input]) {
    bytes *= extent;
  }
  return bytes;
}

std::vector<int> DeviceProgram::read_by_host() const {
  std::set<int> read;
  for (const auto& kind : kinds_) {
    read.insert(kind.inputs[PagedAttention::kWork]);
    read.insert(kind.inputs[PagedAttention::kMerge]);
  }
  return {read.begin(), read.end()};
}

std::shared_ptr<void> DeviceProgram::runner(
    int stream, const std::function<std::shared_ptr<void>()>& make) const {
  std::lock_guard lock(mutex_);
  auto& found = runners_[{stream, std::this_thread::get_id()}];
  if (!found) {
    found = make();
  }
  return found;
}

void DeviceProgram::check(const Arrays& inputs) const {
  auto refuse = [](size_t i, const char* what, const auto& expected, const auto& actual) {
    std::ostringstream message;
    message << "[device_program] the " << what << " of inputs[" << i << "] must be " << expected
            << " but got " << actual;
    throw std::invalid_argument(message.str());
  };
  if (inputs.size() != input_shapes_.size()) {
    throw std::invalid_argument(
        "[device_program] inputs must be " + std::to_string(input_shapes_.size()) +
        " arrays but got " + std::to_string(inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs[i].dtype() != input_dtypes_[i]) {
      refuse(i, "dtype", input_dtypes_[i], inputs[i].dtype());
    }
    if (inputs[i].shape() != input_shapes_[i]) {
      refuse(i, "shape", input_shapes_[i], inputs[i].shape());
    }
  }
}

namespace {

// So that a number that grows now and then is the same for a while.
int in_strides(int n) {
  int stride = std::max(16, 1 << std::max(0, int(std::bit_width(unsigned(n))) - 3));
  return (n + stride - 1) / stride * stride;
}

template <typename Params>
void set_partials(Launch& launch, int num_partials) {
  Params params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  params.num_partials = num_partials;
  launch.constants = bytes_of(params);
}

}  // namespace

std::vector<LaunchList> DeviceProgram::attention(const Arrays& inputs, Gpu gpu) const {
  std::vector<LaunchList> lists;
  for (const auto& kind : kinds_) {
    auto shaped = [](const mx::Shape& shape, mx::Dtype dtype) {
      return mx::array(shape, dtype, nullptr, {});
    };
    Arrays in{
        shaped(kind.queries, kind.dtype), shaped(kind.key_pool, kind.dtype),
        shaped(kind.value_pool, kind.dtype)};
    for (int i = PagedAttention::kPositions; i <= PagedAttention::kMerge; i++) {
      in.push_back(inputs[kind.inputs[i]]);
    }
    if (!kind.sinks.empty()) {
      in.push_back(shaped(kind.sinks, mx::float32));
    }
    mx::Shape out_shape{kind.queries[0], kind.queries[1], kind.value_pool[3]};
    PagedAttention node(mx::default_stream(mx::Device::cpu), kind.options);
    auto list = node.launches(in, {shaped(out_shape, kind.dtype)}, gpu);
    int workspace = int(in.size()) + 1;
    int num_partials = 0;
    for (const auto& launch : list.launches) {
      if (launch.kernel.file == "paged_merge.h") {
        paged::MergeParams params;
        std::memcpy(&params, launch.constants.data(), sizeof(params));
        num_partials = in_strides(params.num_partials);
      }
    }
    if (num_partials > 0) {
      int heads = kind.queries[1];
      uint64_t bytes = uint64_t(num_partials) * heads * (kind.value_pool[3] + 2) * 4;
      list.workspaces = {bytes};
      for (auto& launch : list.launches) {
        bool is_merge = launch.kernel.file == "paged_merge.h";
        if (launch.kernel.file == "data.h") {
          continue;  // zeros
        }
        is_merge ? set_partials<paged::MergeParams>(launch, num_partials)
                 : set_partials<paged::AttentionParams>(launch, num_partials);
        for (auto& binding : launch.buffers) {
          binding.bytes = binding.operand == workspace ? bytes : binding.bytes;
        }
      }
    }
    if (gpu == Gpu::nvidia) {
      list = cuda::with_variants(std::move(list), in);
    }
    lists.push_back(std::move(list));
  }
  return lists;
}

uint64_t DeviceProgram::workspace_bytes(const std::vector<LaunchList>& attention) {
  uint64_t most = kChunkBytes;
  for (const auto& list : attention) {
    for (uint64_t bytes : list.workspaces) {
      most = std::max(most, bytes);
    }
  }
  return most;
}

std::vector<Launch> DeviceProgram::launches(
    const std::vector<LaunchList>& attention, Gpu gpu) const {
  std::vector<Launch> all;
  for (const auto& step : steps_) {
    if (const auto* launch = std::get_if<Launch>(&step)) {
      all.push_back(*launch);
    } else if (const auto* products = std::get_if<ProductStep>(&step)) {
      for (auto& launch : product_launches(*products, gpu)) {
        all.push_back(std::move(launch));
      }
    } else {
      const auto& a = std::get<AttentionStep>(step);
      for (Launch launch : attention[a.kind].launches) {
        for (auto& binding : launch.buffers) {
          int i = binding.operand;
          int num_inputs = int(a.operands.size());
          binding.operand = i < num_inputs ? a.operands[i] : i == num_inputs ? a.out : workspace_;
        }
        all.push_back(std::move(launch));
      }
    }
  }
  return all;
}

std::vector<Launch> DeviceProgram::product_launches(const ProductStep& step, Gpu gpu) const {
  if (gpu == Gpu::nvidia) {
    return {cuda::product_launch(step, operands_)};
  }
  return portable_product_launches(step, operands_);
}

std::vector<Launch> portable_product_launches(
    const ProductStep& step, const std::vector<ProgramOperand>& operands) {
  std::vector<Launch> launches;
  auto bind = [&](Launch& launch, int operand, Access access) {
    launch.buffers.push_back({operand, access, operands[operand].bytes});
  };
  for (size_t i = 0; i < step.parts.size(); i++) {
    const auto& part = step.parts[i];
    paged::ProductParams params{step.num_rows, part.n,         step.k,
                                step.x_stride, part.bias >= 0, step.residual >= 0};
    Launch launch;
    launch.kernel = kernel_named(std::string("product_rows_") + name_of(step.dtype));
    bind(launch, step.x, Access::read);
    bind(launch, part.weight, Access::read);
    bind(launch, part.bias >= 0 ? part.bias : part.weight, Access::read);
    bind(launch, step.residual >= 0 ? step.residual : step.x, Access::read);
    bind(launch, part.out, Access::write);
    launch.constants = bytes_of(params);
    launch.grid = {
        ceil_div(part.n, paged::PRODUCT_SIMD_GROUPS), ceil_div(step.num_rows, paged::PRODUCT_ROWS),
        1};
    launch.threadgroup = {32 * paged::PRODUCT_SIMD_GROUPS, 1, 1};
    launch.beside_previous = i > 0;
    launches.push_back(std::move(launch));
  }
  if (step.is_gated) {
    // In place: a thread reads what it writes.
    int item_size = step.dtype == DType::float32 ? 4 : 2;
    int chunks = step.parts[0].n * item_size / kChunkBytes;
    paged::SiluParams params{chunks, chunks, chunks};
    Launch launch;
    launch.kernel = kernel_named(std::string("silu_mul_") + name_of(step.dtype));
    bind(launch, step.parts[0].out, Access::read_write);
    bind(launch, step.parts[1].out, Access::read);
    bind(launch, step.parts[0].out, Access::read_write);
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(step.num_rows), ceil_div(chunks, paged::DATA_THREADS), 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    launches.push_back(std::move(launch));
  }
  return launches;
}

}  // namespace mlx_paged
