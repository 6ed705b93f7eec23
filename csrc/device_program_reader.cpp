// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_program_reader.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "../metal/kernel_table.h"
#include "cuda/quantised_shape.h"
#include "device_fusions.h"
#include "device_graph.h"
#include "device_memory.h"
#include "device_view.h"
#include "mlx/fast_primitives.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace mlx_paged {

class DeviceProgramReader {
 public:
  using Residual = DeviceProgram::Residual;

  DeviceProgramReader(
      DeviceProgram& program, const Arrays& inputs, const Arrays& outputs, Residual residual)
      : program_(program),
        inputs_(inputs),
        outputs_(outputs),
        graph_(inputs, outputs),
        fusions_(graph_, residual == Residual::in_product),
        is_read_(fusions_.taken) {}

  void read() {
    add_inputs();
    program_.constants_ = graph_.constants();
    mx::eval(program_.constants_);
    for (size_t i = 0; i < nodes().size(); i++) {
      if (!is_read_[i]) {
        read_node(i);
      }
    }
    add_outputs();
    find_multiplied();
    place_temporaries();
  }

 private:
  using Id = DeviceGraph::Id;

  const std::vector<GraphNode>& nodes() const { return graph_.nodes(); }

  struct Buffer {
    ProgramOperand::Kind kind;
    int index = 0;
    uint64_t bytes = 0;
    mx::Dtype dtype = mx::float32;
    int first_use = std::numeric_limits<int>::max();
    int last_use = -1;
    bool is_written = false;
    // Results of norms and gated products: the step that made them, and the steps that multiply
    // whole rows of them.
    std::optional<size_t> made_by = {};
    int64_t row_size = 0;
    std::vector<size_t> read_by = {};
    size_t num_operands = 0;  // of all steps
  };

  void add_inputs() {
    for (size_t i = 0; i < inputs_.size(); i++) {
      const auto& in = inputs_[i];
      program_.input_shapes_.push_back(in.shape());
      program_.input_dtypes_.push_back(in.dtype());
      int buffer =
          add_buffer({ProgramOperand::Kind::input, int(i), uint64_t(in.nbytes()), in.dtype()});
      views_[in.id()] = {buffer, 0, in.shape(), dense_strides(in.shape())};
    }
    program_.used_.assign(inputs_.size(), false);
  }

  // --- Nodes ---

  void read_node(size_t index) {
    const auto& node = nodes()[index];
    is_read_[index] = true;
    if (auto found = fusions_.gated.find(index); found != fusions_.gated.end()) {
      return read_products({found->second.first, found->second.second}, node.outputs[0], true);
    }
    if (auto found = fusions_.added.find(index); found != fusions_.added.end()) {
      return read_products({found->second.first}, node.outputs[0], false, &found->second.second);
    }
    if (auto found = fusions_.norm_of_sum.find(index); found != fusions_.norm_of_sum.end()) {
      return read_norm(nodes()[found->second], &node);
    }
    if (auto found = fusions_.mixtures.find(index); found != fusions_.mixtures.end()) {
      return read_mixture(node, found->second);
    }
    if (graph_.linear_of(node)) {
      return read_linears(index);
    }
    if (node.as<RmsNorm>()) {
      return read_norm(node, nullptr);
    }
    require(!node.as<Rope>(), "a rotation of other than queries and keys");
    if (const auto* rotations = node.as<RopeRotations>()) {
      return read_rotations(node, *rotations);
    }
    if (node.as<SiluMul>()) {
      return read_silu_mul(node);
    }
    if (node.as<WriteKV>()) {
      return read_write_kv(index);
    }
    if (const auto* attention = node.as<PagedAttention>()) {
      return read_attention(node, *attention);
    }
    if (node.as<GreedyTokens>()) {
      return read_greedy(node);
    }
    if (node.is("Gather")) {
      return read_gather(node, static_cast<const mx::Gather&>(*node.primitive));
    }
    if (node.is("Quantize")) {
      return read_dequantize(node, static_cast<const mx::fast::Quantize&>(*node.primitive));
    }
    read_view(node);
  }

  // Every product of the same input that waits for nothing else, up to three at once.
  void read_linears(size_t index) {
    auto linear = graph_.linear_of(nodes()[index]);
    std::vector<size_t> together{index};
    for (size_t other : fusions_.linears_of[DeviceGraph::value_of(linear->x)]) {
      if (together.size() < 3 && other != index && !is_read_[other] &&
          graph_.linear_of(nodes()[other])->codes == linear->codes) {
        together.push_back(other);
      }
    }
    for (size_t i : together) {
      is_read_[i] = true;
    }
    read_products(together, nodes()[index].outputs[0], false);
  }

  void read_products(
      const std::vector<size_t>& products, const mx::array& result, bool is_gated,
      const mx::array* residual = nullptr) {
    add_step(products_of(products, result, is_gated, residual));
  }

  ProductStep products_of(
      const std::vector<size_t>& products, const mx::array& result, bool is_gated,
      const mx::array* residual) {
    auto first = *graph_.linear_of(nodes()[products[0]]);
    View x = view(first.x);
    ProductStep step = product_of(x, first, int(x.rows()));
    step.is_gated = is_gated;
    if (Buffer& b = buffers_[x.buffer]; has_whole_rows(x, b)) {
      b.read_by.push_back(program_.steps_.size());
    }
    for (size_t i : products) {
      auto part = product_part(*graph_.linear_of(nodes()[i]), first.x.dtype());
      bool is_result = is_gated || residual;
      View out = new_value(is_result && i == products[0] ? result : nodes()[i].outputs[0]);
      part.out = operand(out);
      step.parts.push_back(part);
      if (is_gated && i == products[0]) {
        is_made(out, part.n);
      }
    }
    if (residual) {
      View added = view(*residual);
      require(added.is_dense(), "an addend that is not dense");
      step.residual = operand(added);
    }
    return step;
  }

  // Without its parts.
  ProductStep product_of(const View& x, const LinearNode& first, int num_rows) {
    int64_t k = first.x.shape(-1);
    int64_t item_size = int64_t(first.x.itemsize());
    require(x.row_size() == k && x.has_dense_rows(), "a product of several vectors a row");
    require(
        k * item_size % kChunkBytes == 0 && x.row_stride() * item_size % kChunkBytes == 0 &&
            x.offset * item_size % kChunkBytes == 0,
        "a product of rows that are not multiples of 16 bytes");
    ProductStep step{};
    step.x = operand(x);
    step.num_rows = num_rows;
    step.k = int(k);
    step.x_stride = int(x.row_stride());
    step.dtype = dtype_of(first.x.dtype());
    step.codes = first.codes;
    return step;
  }

  // Without a place for its result.
  ProductStep::Part product_part(const LinearNode& linear, mx::Dtype dtype) {
    View weight = view(linear.weight);
    if (linear.is_transposed) {
      std::swap(weight.shape[0], weight.shape[1]);
      std::swap(weight.strides[0], weight.strides[1]);
    }
    require(linear.codes || linear.weight.dtype() == dtype, "weights of another dtype");
    require(weight.is_dense(), "weights that are not dense");
    require(begins_at_chunk(weight), "weights that do not begin at 16 bytes");
    ProductStep::Part part{};
    part.weight = operand(weight);
    part.bias = -1;
    part.n = weight.shape[weight.shape.size() - 2];
    for (auto [from, to] :
         {std::pair(&linear.scales, &part.scales), {&linear.biases, &part.biases}}) {
      if (*from) {
        require(
            (*from)->dtype() == dtype || (*from)->dtype() == mx::uint8, "scales of another dtype");
        View scales = dense_constant(**from);
        require(begins_at_chunk(scales), "scales that do not begin at 16 bytes");
        *to = operand(scales);
      }
    }
    if (linear.bias) {
      require(linear.bias->dtype() == dtype, "a bias of another dtype");
      part.bias = operand(dense_constant(*linear.bias));
    }
    return part;
  }

  // --- Mixtures of experts ---

  void read_mixture(const GraphNode& sum, const Mixture& mixture) {
    const auto& out = sum.outputs[0];
    auto dtype = out.dtype();
    MixtureStep step{};
    step.route = mixture.route;
    auto [rows, experts, top_k] =
        std::tuple(mixture.route.num_rows, mixture.route.num_experts, mixture.route.top_k);
    require(
        experts <= 32 * paged::ROUTE_CHUNKS && top_k <= 32 &&
            rows * top_k <= paged::ROUTE_MOST_PAIRS,
        "a mixture of so many experts or rows");
    require(mixture.logits.dtype() == dtype, "a router of another dtype");
    View logits = view(mixture.logits);
    require(logits.is_dense(), "logits of experts that are not dense");
    step.logits = operand(logits);
    step.weights = operand(new_buffer({rows, top_k}, dtype));
    step.sorted_pairs = operand(new_buffer({rows * top_k}, mx::int32));
    step.items = operand(new_buffer({rows * top_k, 3}, mx::int32));
    const auto& given = nodes()[mixture.gate].inputs[0];
    require(given.dtype() == dtype, "experts of another dtype");
    View x = view(given);
    require(x.rows() == rows, "experts of other rows");
    View gated{};
    step.gated = experts_of({mixture.gate, mixture.up}, x, step.num_pairs(), &gated);
    View down{};
    step.down = experts_of({mixture.down}, gated, step.num_pairs(), &down);
    require(
        down.shape[1] * dtype.size() % kChunkBytes == 0 &&
            int64_t(out.size()) == int64_t(rows) * down.shape[1],
        "experts with results of this size");
    step.out = operand(new_value(out));
    add_step(std::move(step));
  }

  // Products with the matrices of experts. `result`: where the first one's is, [num_pairs, n].
  ProductStep experts_of(
      const std::vector<size_t>& products, const View& x, int num_pairs, View* result) {
    auto first = DeviceGraph::expert_of(nodes()[products[0]]);
    ProductStep step = product_of(x, first, num_pairs);
    step.is_gated = products.size() == 2;
    for (size_t i : products) {
      auto expert = DeviceGraph::expert_of(nodes()[i]);
      require(expert.codes == first.codes, "gates in another format");
      auto part = product_part(expert, first.x.dtype());
      View out = new_buffer({num_pairs, part.n}, first.x.dtype());
      part.out = operand(out);
      if (step.parts.empty()) {
        *result = out;
      }
      require(part.n == result->shape[1], "gates of another size");
      step.parts.push_back(part);
    }
    return step;
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
    require(begins_at_chunk(weight), "weights that do not begin at 16 bytes");
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
    View normed = new_value(out);
    write(launch, normed);
    is_made(normed, size);
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(out.size() / size), 1, 1};
    uint32_t threads = std::min<uint32_t>(paged::NORM_THREADS, div_up(params.row_chunks, 32) * 32);
    launch.threadgroup = {threads, 1, 1};
    launch.threadgroup_memory = div_up(threads / 32 * 4, 16) * 16;
    add_step(launch);
  }

  void read_rotations(const GraphNode& node, const RopeRotations& rotations) {
    View positions = view(node.inputs[0]);
    View inv_freqs = dense_constant(node.inputs[1]);
    require(positions.is_dense() && positions.shape.size() == 1, "positions of several axes");
    const auto& out = node.outputs[0];
    Launch launch = rotations_launch({out.shape(0), out.shape(2), rotations.scale()});
    read(launch, positions);
    read(launch, inv_freqs);
    write(launch, new_value(out));
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
    Launch launch = silu_mul_launch(gate.rows(), params, dtype_of(out.dtype()));
    read(launch, gate);
    read(launch, up);
    write(launch, new_value(out));
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
        table.is_dense() && bytes % kChunkBytes == 0 && begins_at_chunk(table),
        "a gather of rows of this size");
    require(
        rows.is_dense() && rows.row_size() == 1 && rows.rows() == out.shape(0),
        "a gather of several rows for a row");
    paged::RowParams params{int(bytes / kChunkBytes), int(table.rows())};
    // (It copies: codes of weights too.)
    Launch launch =
        layer_kernel("gather_rows", out.dtype() == mx::uint32 ? mx::float32 : out.dtype());
    read(launch, table);
    read(launch, rows);
    write(launch, new_value(out));
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(out.shape(0)), div_up(params.row_chunks, paged::DATA_THREADS), 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    add_step(launch);
  }

  // Rows of a quantised embedding, with CUDA: elsewhere MLX has no such node.
  void read_dequantize(const GraphNode& node, const mx::fast::Quantize& quantize) {
    auto [unused, group_size, bits, mode, is_inverse] = quantize.state();
    const auto& out = node.outputs[0];
    require(
        is_inverse && mode == mx::QuantizationMode::Affine && node.inputs.size() == 3 &&
            (out.dtype() == mx::float16 || out.dtype() == mx::bfloat16) &&
            node.inputs[1].dtype() == out.dtype() && out.shape(-1) % 8 == 0,
        "a quantised embedding in this format");
    cuda::DequantiseParams params{
        int(out.size() / 8), int(out.shape(-1)), int(node.inputs[0].shape(-1)), group_size, bits};
    Launch launch;
    launch.kernel.host_name = std::string("dequantise_rows_") + name_of(dtype_of(out.dtype()));
    for (const auto& in : node.inputs) {
      View v = view(in);
      require(v.is_dense(), "codes that are not dense");
      read(launch, v);
    }
    write(launch, new_value(out));
    launch.constants = bytes_of(params);
    launch.grid = {div_up(params.num_chunks, paged::DATA_THREADS), 1, 1};
    launch.threadgroup = {paged::DATA_THREADS, 1, 1};
    add_step(launch);
  }

  void read_greedy(const GraphNode& node) {
    View logits = view(node.inputs[0]);
    require(logits.is_dense() && logits.offset == 0, "logits that are not dense");
    Launch launch =
        greedy_launch(logits.shape[0], logits.shape[1], dtype_of(node.inputs[0].dtype()));
    launch.buffers.clear();
    read(launch, logits);
    for (const auto& out : node.outputs) {
      write(launch, new_value(out));
    }
    for_host_.insert(node.outputs[2].id());
    add_step(launch);
  }

  // --- Heads: normed, rotated and written at once ---

  View heads_side_by_side(const mx::array& a, int heads, int dim, const char* what) {
    auto seen = rows_of_heads(view(a), heads, dim);
    require(seen.has_value(), std::string(what) + " that do not lie side by side");
    return *seen;
  }

  void read_write_kv(size_t index) {
    const auto& node = nodes()[index];
    const auto* attention = graph_.attention_after(node);
    require(attention, "a write that no attention follows");
    const auto& queries = attention->inputs[PagedAttention::kQueries];
    View key_pool = view(node.inputs[0]);
    View value_pool = view(node.inputs[1]);
    for (const View* pool : {&key_pool, &value_pool}) {
      require(
          buffers_[pool->buffer].kind == ProgramOperand::Kind::input, "a pool that is no input");
      require(!buffers_[pool->buffer].is_written, "a pool that is written twice");
      // (Nothing else would order the two.)
      require(buffers_[pool->buffer].last_use < 0, "a pool that is read before it is written");
    }
    Heads from_queries = graph_.heads_of(queries);
    Heads from_keys = graph_.heads_of(node.inputs[2]);
    const auto* rope = from_queries.rope;
    require(bool(rope) == bool(from_keys.rope), "rotations of queries or keys alone");
    for (const Heads* heads : {&from_queries, &from_keys}) {
      for (const auto* part : {heads->rope, heads->norm}) {
        require(!part || graph_.uses_of(part->outputs[0]) == 1, "heads that are used twice");
      }
    }
    auto dtype = queries.dtype();
    bool is_quantised = format_of(node.inputs[0].dtype()) != PoolFormat::plain;
    require(
        is_quantised || (node.inputs[0].dtype() == dtype && node.inputs[1].dtype() == dtype),
        "pools of another dtype");
    std::optional<ProductStep> step;
    if (auto found = fusions_.written_products.find(index);
        found != fusions_.written_products.end()) {
      const auto& result = nodes()[found->second[0]].outputs[0];
      step = products_of(found->second, result, false, nullptr);
    }
    paged::RopeParams params{};
    params.num_q_heads = queries.shape(1);
    params.num_kv_heads = node.inputs[2].shape(1);
    params.key_dim = node.inputs[2].shape(2);
    params.value_dim = node.inputs[3].shape(2);
    View q = heads_side_by_side(from_queries.from, params.num_q_heads, params.key_dim, "queries");
    View k = heads_side_by_side(from_keys.from, params.num_kv_heads, params.key_dim, "keys");
    View v = heads_side_by_side(node.inputs[3], params.num_kv_heads, params.value_dim, "values");
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
    // Rows for a quantised pool are first written to a pool of the row's own.
    View keys = is_quantised ? new_buffer(node.inputs[2].shape(), dtype) : key_pool;
    View values = is_quantised ? new_buffer(node.inputs[3].shape(), dtype) : value_pool;
    read(launch, is_quantised ? row_numbers(slots.shape[0]) : slots);
    auto weight_of = [&](const Heads& heads, int& has_norm, float& eps) {
      if (heads.norm) {
        has_norm = 1;
        eps = heads.norm->as<RmsNorm>()->eps();
        View weight = dense_constant(heads.norm->inputs[1]);
        require(begins_at_chunk(weight), "weights that do not begin at 16 bytes");
        read(launch, weight);
      } else {
        read(launch, q);  // (not read)
      }
    };
    weight_of(from_queries, params.has_query_norm, params.query_eps);
    weight_of(from_keys, params.has_key_norm, params.key_eps);
    View rotated = new_value(queries);
    write(launch, rotated);
    write(launch, keys, is_quantised ? Access::write : Access::read_write);
    write(launch, values, is_quantised ? Access::write : Access::read_write);
    for (int i = 0; i < 2; i++) {
      views_[node.outputs[i].id()] = i ? value_pool : key_pool;
    }
    launch.constants = bytes_of(params);
    int heads = params.num_q_heads + 2 * params.num_kv_heads;
    launch.grid = {uint32_t(slots.rows()), div_up(heads, paged::ROPE_SIMD_GROUPS), 1};
    launch.threadgroup = {32 * paged::ROPE_SIMD_GROUPS, 1, 1};
    if (step) {
      step->write = std::move(launch);
      step->head_dim = params.key_dim;
      add_step(std::move(*step));
    } else {
      add_step(launch);
    }
    if (is_quantised) {
      add_quantising_write(node, {key_pool, value_pool, keys, values, slots});
    }
  }

  // Views of the operation's inputs.
  void add_quantising_write(const GraphNode& node, const std::vector<View>& in) {
    auto list = node.as<WriteKV>()->launches(node.inputs, node.outputs, Gpu::apple);
    for (auto& made : list.launches) {  // (whose variants are chosen when they are launched)
      auto bindings = std::exchange(made.buffers, {});
      for (const auto& binding : bindings) {
        if (binding.access == Access::read) {
          read(made, in[binding.operand]);
        } else {
          write(made, in[binding.operand - in.size()], binding.access);
        }
      }
      add_step(std::move(made));
    }
  }

  // 0, 1, 2, ...
  View row_numbers(int count) {
    auto& made = row_numbers_.try_emplace(count, mx::arange(0, count, mx::int32)).first->second;
    return dense_constant(made);
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
        in[A::kValuePool].shape(), {}, in[A::kQueries].dtype(), in[A::kKeyPool].dtype(),
        in[A::kValuePool].dtype()};
    AttentionStep step{};
    for (int i = 0; i < int(in.size()); i++) {
      View v = i == A::kPerHead ? dense_constant(in[i]) : view(in[i]);
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
    if (in.size() > A::kPerHead) {
      kind.per_head = in[A::kPerHead].shape();
    }
    step.out = operand(new_value(node.outputs[0]));
    if (rotates_keys(format_of(in[A::kKeyPool].dtype()))) {
      step.rotated = operand(new_buffer(in[A::kQueries].shape(), in[A::kQueries].dtype()));
    }
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
    // A view of a value that another step fuses; it is resolved once that step has been read.
    if (DeviceGraph::is_view(node) && !views_.count(node.inputs[0].id()) &&
        graph_.depends(node.inputs[0])) {
      pending_.push_back(&node);
      return;
    }
    const auto& out = node.outputs[0];
    if (node.is("Transpose")) {
      auto axes = static_cast<const mx::Transpose&>(*node.primitive).state();
      views_[out.id()] = transposed(view(node.inputs[0]), axes);
      return;
    }
    if (node.is("Slice")) {
      auto [begin, end, steps] = static_cast<const mx::Slice&>(*node.primitive).state();
      auto seen = sliced(view(node.inputs[0]), begin, steps, out.shape());
      require(seen.has_value(), "a slice with a negative step");
      views_[out.id()] = *seen;
      return;
    }
    if (node.is("Split")) {
      View in = view(node.inputs[0]);
      auto [indices, axis] = static_cast<const mx::Split&>(*node.primitive).state();
      int64_t begin = 0;
      for (const auto& part : node.outputs) {
        views_[part.id()] = part_of(in, axis, begin, part.shape());
        begin += part.shape(axis);
      }
      return;
    }
    require(DeviceGraph::is_view(node), std::string("the operation ") + node.primitive->name());
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
      require(!graph_.depends(a), "a value that is used before it is known");
      for (size_t i = 0; i < program_.constants_.size(); i++) {
        const auto& constant = program_.constants_[i];
        if (constant.id() == a.id()) {
          return views_[a.id()] = constant_view(int(i));
        }
      }
      refuse_graph("a constant that was not found");
    }
    return found->second;
  }

  View constant_view(int i) {
    const auto& a = program_.constants_[i];
    int buffer = add_buffer(
        {ProgramOperand::Kind::constant, i, uint64_t(a.buffer_size() - a.offset()), a.dtype()});
    return {buffer, 0, a.shape(), a.strides()};
  }

  // Kernels read chunks of 16 bytes.
  bool begins_at_chunk(const View& v) const {
    const Buffer& b = buffers_[v.buffer];
    int64_t offset = v.offset * int64_t(b.dtype.size());
    if (b.kind == ProgramOperand::Kind::constant) {
      offset += program_.constants_[b.index].offset();
    }
    return offset % kChunkBytes == 0;
  }

  View dense_constant(const mx::array& a) {
    require(!graph_.depends(a), "weights that depend on the inputs");
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
    return views_[a.id()] = new_buffer(a.shape(), a.dtype());
  }

  View new_buffer(const mx::Shape& shape, mx::Dtype dtype) {
    uint64_t bytes = dtype.size();
    for (int extent : shape) {
      bytes *= extent;
    }
    int buffer = add_buffer({ProgramOperand::Kind::temporary, 0, bytes, dtype});
    return {buffer, 0, shape, dense_strides(shape)};
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
    b.num_operands++;
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
    program_.steps_.emplace_back(std::in_place_type<S>, std::move(step));
  }

  void add_outputs() {
    for (const auto& output : outputs_) {
      View v = view(output);
      Buffer& b = buffers_[v.buffer];
      if (b.kind == ProgramOperand::Kind::input) {
        require(v.offset == 0, "an output that is no pool of the inputs");
        program_.pools_.push_back(b.index);
        continue;
      }
      require(
          v.is_dense() && b.kind == ProgramOperand::Kind::temporary && v.offset == 0 &&
              b.bytes == output.nbytes(),
          "a result that is part of another value");
      require(program_.pools_.empty(), "a result after pools");
      b.kind = ProgramOperand::Kind::result;
      b.index = int(program_.results_.size());
      program_.results_.push_back(
          {output.shape(), output.dtype(), for_host_.count(output.id()) > 0});
    }
    require(!program_.results_.empty(), "no result");
  }

  // By the step that is being read, in rows of so many elements.
  void is_made(const View& v, int64_t row_size) {
    buffers_[v.buffer].made_by = program_.steps_.size();
    buffers_[v.buffer].row_size = row_size;
  }

  static bool has_whole_rows(const View& v, const Buffer& b) {
    return b.made_by && v.row_size() == b.row_size && v.offset % b.row_size == 0 &&
           v.row_stride() % b.row_size == 0;
  }

  void find_multiplied() {
    for (const auto& b : buffers_) {
      // (An operand more, and something else sees it.)
      if (b.kind == ProgramOperand::Kind::temporary && !b.read_by.empty() &&
          b.num_operands == 1 + b.read_by.size()) {
        program_.multiplied_.push_back({*b.made_by, b.read_by});
      }
    }
  }

  void place_temporaries() {
    std::vector<Lifetime> lifetimes;
    for (const auto& b : buffers_) {
      bool is_placed = b.kind == ProgramOperand::Kind::temporary && b.last_use >= 0;
      lifetimes.push_back({b.bytes, b.first_use, is_placed ? b.last_use : -1});
    }
    auto places = place(lifetimes);
    program_.temporary_bytes_ = places.bytes;
    for (size_t i = 0; i < program_.operands_.size(); i++) {
      if (buffer_of_operand_[i] < 0) {
        continue;
      }
      auto& o = program_.operands_[i];
      o.kind = buffers_[buffer_of_operand_[i]].kind;
      o.index = buffers_[buffer_of_operand_[i]].index;
      if (o.kind == ProgramOperand::Kind::temporary) {
        o.offset += places.offsets[buffer_of_operand_[i]];
      }
    }
  }

  DeviceProgram& program_;
  const Arrays& inputs_;
  const Arrays& outputs_;
  DeviceGraph graph_;
  DeviceFusions fusions_;
  std::vector<bool> is_read_;  // nodes that are part of some step already
  std::vector<Buffer> buffers_;
  std::vector<int> buffer_of_operand_;
  std::vector<const GraphNode*> pending_;
  std::unordered_map<Id, View> views_;
  std::unordered_set<Id> for_host_;  // results
  std::map<int, mx::array> row_numbers_;
};

void read_program(
    DeviceProgram& program, const Arrays& inputs, const Arrays& outputs,
    DeviceProgram::Residual residual) {
  require(!outputs.empty(), "it has no outputs");
  DeviceProgramReader(program, inputs, outputs, residual).read();
}

}  // namespace mlx_paged
