// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "executable.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <unordered_map>

#include "../allocation.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel_for.h"
#include "scratch.h"

namespace mlx_paged::cpu {

namespace {

void add_row(float* out, const float* added, int64_t size) {
  for (int64_t i = 0; i < size; i++) {
    out[i] += added[i];
  }
}

int64_t num_scratch_floats(const Projection& p) {
  return p.integers ? p.integers->num_scratch_floats(int(p.x.rows()), p.weight) : 0;
}

// Computes columns [begin, end) of a product, with bias and adapters. `c`: the address of column
// `begin` of row 0.
void project(
    const Projection& p, const Bases& bases, int begin, int end, float* c, int64_t ldc,
    float* scratch) {
  int64_t rows = p.x.rows();
  int64_t width = end - begin;
  const float* x = p.x.row(bases, 0);
  WeightView weight = p.weight.from_row(begin);
  if (p.adapters) {
    fetch_lora_up(p.adapters->rows(bases), begin, end);
  }
  if (p.integers) {
    const float* rounded = p.rounded->row(bases, 0);
    multiply_rounded(
        *p.integers, {rounded, weight, c, int(rows), ldc, scratch}, x, p.x.strides[0], 0, width);
  } else {
    kernels().product.few_rows({x, weight, c, int(rows), p.x.strides[0], ldc}, 0, width);
  }
  for (int64_t i = 0; p.bias && i < rows; i++) {
    add_row(c + i * ldc, p.bias + begin, width);
  }
  if (p.adapters) {
    lora_up(p.adapters->rows(bases), c, ldc, begin, end);
  }
}

void run_gated(const Product& p, const Bases& bases, int begin, int end) {
  int64_t rows = p.out.rows();
  int64_t width = end - begin;
  int64_t work = std::max(num_scratch_floats(p.main), num_scratch_floats(*p.up));
  float* scratch = thread_scratch(work + 2 * rows * width);
  float* gate = scratch + work;
  float* up = gate + rows * width;
  project(p.main, bases, begin, end, gate, width, scratch);
  project(*p.up, bases, begin, end, up, width, scratch);
  for (int64_t i = 0; i < rows; i++) {
    SiluMulArgs args{DType::float32, gate + i * width, up + i * width, p.out.row(bases, i) + begin};
    kernels().layer.silu_mul(args, 0, width);
  }
}

void run_product(const Product& p, const Bases& bases, int begin, int end) {
  if (p.up) {
    return run_gated(p, bases, begin, end);
  }
  project(
      p.main, bases, begin, end, p.out.row(bases, 0) + begin, p.out.strides[0],
      thread_scratch(num_scratch_floats(p.main)));
  for (int64_t i = 0; p.added && i < p.out.rows(); i++) {
    add_row(p.out.row(bases, i) + begin, p.added->row(bases, i) + begin, end - begin);
  }
}

// Memory of the stream's thread for the values between a step's phases.
char* step_memory(int64_t bytes) {
  thread_local Scratch memory;
  return memory.at_least<char>(bytes);
}

}  // namespace

LoraRows Adapters::rows(const Bases& bases) const {
  auto matrix = [&](const View& v) { return bases[v.buffer] + v.offset * shape.item_size; };
  return {shape,         matrix(a),           matrix(b), adapters.row<int32_t>(bases, 0),
          hidden.rows(), hidden.row(bases, 0)};
}

void CpuExecutable::check(const Arrays& inputs) const {
  auto refuse = [](size_t i, const char* what, const auto& expected, const auto& actual) {
    std::ostringstream message;
    message << "[cpu_executable] the " << what << " of inputs[" << i << "] must be " << expected
            << " but got " << actual;
    throw std::invalid_argument(message.str());
  };
  if (inputs.size() != input_shapes_.size()) {
    throw std::invalid_argument(
        "[cpu_executable] inputs must be " + std::to_string(input_shapes_.size()) +
        " arrays but got " + std::to_string(inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs[i].dtype() != input_dtypes_[i]) {
      refuse(i, "dtype", input_dtypes_[i], inputs[i].dtype());
    }
    if (any_length_[i] ? inputs[i].ndim() != input_shapes_[i].size()
                       : inputs[i].shape() != input_shapes_[i]) {
      refuse(i, "shape", input_shapes_[i], inputs[i].shape());
    }
  }
}

AttentionArgs CpuExecutable::attention_args(
    const AttentionPhase& p, const Bases& bases, const Arrays& in) const {
  AttentionArgs args{};
  args.dtype = p.dtype;
  args.queries = p.queries.row(bases, 0);
  args.keys = {p.keys, bases[p.key_pool]};
  args.values = {p.values, bases[p.value_pool]};
  args.out = p.out.row(bases, 0);
  args.positions = in[p.positions].data<int32_t>();
  args.num_rows = int(p.queries.rows());
  args.block_tables = in[p.tables].data<int32_t>();
  args.work_items = reinterpret_cast<const paged::WorkItem*>(in[p.work_items].data<int32_t>());
  args.merge_items = reinterpret_cast<const paged::MergeItem*>(in[p.merge_items].data<int32_t>());
  args.per_head = p.per_head;
  args.num_q_heads = p.num_q_heads;
  args.num_kv_heads = p.keys.num_kv_heads;
  args.block_size = p.keys.block_size;
  args.max_blocks = in[p.tables].shape(1);
  args.options = p.options;
  args.activations = p.activations;
  return args;
}

// Later operations may use the numbers of a failed run as indices.
void CpuExecutable::clear(const std::vector<char*>& results) const {
  for (size_t i = 0; i < results.size(); i++) {
    size_t size = 1;
    for (int extent : results_[i]) {
      size *= extent;
    }
    std::memset(results[i], 0, size * sizeof(float));
  }
}

std::vector<std::string> CpuExecutable::foreign() const {
  std::vector<std::string> names;
  for (const auto& phase : phases_) {
    if (auto* node = std::get_if<NodePhase>(&phase); node && !is_collective(node->op)) {
      names.push_back(node->primitive->name());
    }
  }
  return names;
}

Bases CpuExecutable::bases_of(
    const Arrays& in, const std::vector<char*>& results, char* memory) const {
  Bases bases;
  for (const Buffer& buffer : buffers_) {
    switch (buffer.kind) {
      case Buffer::Kind::constant:
        bases.push_back(buffer.data);
        break;
      case Buffer::Kind::input:
        bases.push_back(const_cast<char*>(in[buffer.index].data<char>()));
        break;
      case Buffer::Kind::result:
        bases.push_back(results[buffer.index]);
        break;
      case Buffer::Kind::temporary:
        bases.push_back(memory + buffer.offset);
        break;
      case Buffer::Kind::node:
        bases.push_back(nullptr);  // set once the node has run
    }
  }
  return bases;
}

// State of a run in which MLX runs some operations.
struct CpuExecutable::Run {
  Arrays in;
  mx::array memory;  // of the temporaries
  Bases bases;
  std::unordered_map<int, mx::array> values;  // outputs of these operations, by buffer
};

namespace {

// Returns the view of `base` as an array.
mx::array shown(const View& v, mx::Dtype dtype, const mx::array& base, int64_t byte) {
  mx::array a(v.shape, dtype, nullptr, {});
  auto [size, is_row, is_column] = mx::check_contiguity(v.shape, v.strides);
  int64_t span = 1;
  for (size_t i = 0; i < v.shape.size(); i++) {
    span += (v.shape[i] - 1) * v.strides[i];
  }
  a.copy_shared_buffer(
      base, v.strides, {int64_t(size) == span, is_row, is_column}, size_t(span),
      v.offset + byte / int64_t(a.itemsize()));
  return a;
}

}  // namespace

void CpuExecutable::queue_node(const NodePhase& node, Run& run, mx::Stream stream) const {
  Arrays inputs;
  for (const auto& in : node.inputs) {
    if (in.constant) {
      inputs.push_back(*in.constant);
      continue;
    }
    int b = in.view.buffer;
    const Buffer& buffer = buffers_[b];
    switch (buffer.kind) {
      case Buffer::Kind::input:
        inputs.push_back(shown(in.view, in.dtype, run.in[buffer.index], 0));
        break;
      case Buffer::Kind::node:
        inputs.push_back(shown(in.view, in.dtype, run.values.at(b), 0));
        break;
      default:  // results are never read by these operations
        inputs.push_back(shown(in.view, in.dtype, run.memory, buffer.offset));
    }
  }
  Arrays outputs;
  for (const auto& out : node.outputs) {
    // Some primitives look up the stream of their output.
    outputs.emplace_back(out.shape, out.dtype, node.primitive, Arrays{});
  }
  node.primitive->eval_cpu(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream);
  // An output may be a view of its input, whose memory is reused after this phase.
  auto is_temporary = [&](const mx::array& a) {
    return a.buffer().ptr() == run.memory.buffer().ptr();
  };
  for (size_t i = 0; i < outputs.size(); i++) {
    mx::array value = outputs[i];
    if (!value.flags().row_contiguous || is_temporary(value)) {
      value = mx::array(value.shape(), value.dtype(), nullptr, {});
      copy_to_dense(outputs[i], value, encoder);
    }
    run.bases[node.outputs[i].buffer] = value.data<char>();
    run.values.insert_or_assign(node.outputs[i].buffer, value);
  }
  // Keeps the arrays until the operation is done.
  encoder.dispatch([inputs = std::move(inputs), outputs = std::move(outputs)] {});
}

void CpuExecutable::queue(
    const Arrays& in, const std::vector<char*>& results, mx::Stream stream) const {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  auto self = shared_from_this();
  if (!stream_) {
    encoder.dispatch([self, in, results] {
      try {
        char* memory = step_memory(self->temporary_bytes_);
        self->run(self->bases_of(in, results, memory), in, 0, self->phases_.size());
      } catch (...) {
        self->clear(results);
        throw;
      }
    });
    return;
  }
  mx::array memory({int(std::max<int64_t>(temporary_bytes_, 1))}, mx::uint8, nullptr, {});
  allocate(memory);
  auto run = std::make_shared<Run>(Run{in, memory, bases_of(in, results, memory.data<char>()), {}});
  size_t begin = 0;
  for (size_t i = 0; i <= phases_.size(); i++) {
    auto* node = i < phases_.size() ? std::get_if<NodePhase>(&phases_[i]) : nullptr;
    if (!node && i < phases_.size()) {
      continue;
    }
    if (begin < i) {
      encoder.dispatch([self, run, results, begin, i] {
        try {
          self->run(run->bases, run->in, begin, i);
        } catch (...) {
          std::memset(run->memory.data<char>(), 0, run->memory.nbytes());
          self->clear(results);
          throw;
        }
      });
    }
    begin = i + 1;
    if (node) {
      queue_node(*node, *run, stream);
    }
  }
}

void CpuExecutable::run(const Bases& bases, const Arrays& in, size_t begin, size_t end) const {
  // Attention takes two phases of a run: its tasks, then their merges.
  struct Step {
    const Phase* phase;
    AttentionRun* attention = nullptr;
    bool merges = false;
  };
  std::vector<std::unique_ptr<AttentionRun>> attention;
  std::vector<Step> steps;
  std::vector<int> num_tasks;
  int64_t partial_floats = 0;
  for (size_t i = begin; i < end; i++) {
    const Phase& phase = phases_[i];
    if (auto* rows = std::get_if<RowPhase>(&phase)) {
      steps.push_back({&phase});
      num_tasks.push_back(int(std::min<int64_t>(rows->rows, num_threads())));
    } else if (auto* adapters = std::get_if<AdapterPhase>(&phase)) {
      steps.push_back({&phase});
      num_tasks.push_back(int(adapters->pieces.size()));
    } else if (auto* products = std::get_if<ProductPhase>(&phase)) {
      steps.push_back({&phase});
      num_tasks.push_back(int(products->pieces.size()));
    } else if (auto* experts = std::get_if<ExpertPhase>(&phase)) {
      steps.push_back({&phase});
      num_tasks.push_back(int(experts->pieces.size()));
    } else {
      const auto& p = std::get<AttentionPhase>(phase);
      attention.push_back(
          std::make_unique<AttentionRun>(
              attention_args(p, bases, in), in[p.work_items].shape(0), in[p.merge_items].shape(0)));
      auto* run = attention.back().get();
      partial_floats = std::max(partial_floats, run->num_partial_floats());
      steps.push_back({&phase, run, false});
      num_tasks.push_back(run->num_tasks());
      if (run->num_merges()) {
        steps.push_back({&phase, run, true});
        num_tasks.push_back(run->num_merges());
      }
    }
  }
  Scratch partials;
  for (auto& run : attention) {
    run->set_partials(partials.at_least<float>(partial_floats));
  }

  run_phases(num_tasks, [&](int i, int task) {
    const Step& step = steps[i];
    if (step.attention) {
      step.merges ? step.attention->merge(task) : step.attention->attend(task);
    } else if (auto* adapters = std::get_if<AdapterPhase>(step.phase)) {
      const auto& piece = adapters->pieces[task];
      const auto& one = adapters->adapters[piece.adapters];
      lora_down(one.rows(bases), one.x.row(bases, 0), one.x.strides[0], piece.begin, piece.end);
    } else if (auto* products = std::get_if<ProductPhase>(step.phase)) {
      const auto& piece = products->pieces[task];
      run_product(products->products[piece.product], bases, piece.begin, piece.end);
    } else if (auto* experts = std::get_if<ExpertPhase>(step.phase)) {
      const auto& piece = experts->pieces[task];
      experts->tasks[piece.task].run(bases, piece.share);
    } else {
      const auto& rows = std::get<RowPhase>(*step.phase);
      int64_t first = rows.rows * task / num_tasks[i];
      int64_t last = rows.rows * (task + 1) / num_tasks[i];
      for (const auto& work : rows.tasks) {
        work(bases, first, last);
      }
    }
  });
}

}  // namespace mlx_paged::cpu
