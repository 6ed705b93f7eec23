// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A decode step on a GPU as one list of launches. The graph that model code builds is read once for
// the shapes of a step; what it does between its matrix products becomes the kernels of
// metal/layer.h, and buffers get their places in memory that stays. So a step has no nodes to
// schedule, half as many kernels, and launches that a GPU can keep and repeat (cuda/step_graph.h).
//
// Every value has the step's rows (or the rows of its logits) as its first axis.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/code_order.h"
#include "primitives.h"

namespace mlx_paged {

namespace cuda {
enum class Streams;  // cuda/products.h
}

class StepRunner;  // step_runner.h

// The widest load of a GPU thread.
constexpr int kChunkBytes = 16;

// Why a graph is not run as a program.
class NoProgram : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Operands that bindings of a program's launches name.
struct ProgramOperand {
  enum class Kind {
    input,      // `index`: of the inputs
    constant,   // of the constants
    temporary,  // in the program's memory
    result,     // of the results
    workspace,  // of attention or a library's product; one at a time
  };
  Kind kind;
  int index = 0;
  int64_t offset = 0;  // bytes from where the array, or the memory, begins
  uint64_t bytes = 0;
};

// Linear layers of one input, side by side: up to three, or (`is_gated`) gate and up of which
// silu(gate) * up is wanted. Operands.
struct ProductStep {
  struct Part {
    int weight;  // [n, k]
    int bias;    // [n]; -1: none
    int out;     // [num_rows, n]; of a gated one the first part's is the result
    int n;
    int scales = -1;  // of a quantised weight
    int biases = -1;
  };
  int x;
  int num_rows;
  int k;
  int x_stride;  // elements from one row of x to the next
  std::vector<Part> parts;
  int residual = -1;  // [num_rows, n] that is added to a single part; -1: none
  bool is_gated = false;
  std::optional<WeightCodes> codes;  // of all parts
  // NVIDIA only, set where a step's launches are made: x is in the order of the codes, and the
  // order that the output needs.
  bool x_is_ordered = false;
  cuda::CodeOrder out_order{};
  // Queries, keys and values: the kernel that rotates and writes them, which products may do too.
  std::optional<Launch> write;
  int head_dim = 0;  // of `write`
  // The write's buffers.
  static constexpr int kRotations = 3;
  static constexpr int kSlots = 4;
  static constexpr int kQueriesOut = 7;  // then the pools of keys and values
  DType dtype;
};

// A mixture of experts of a step's rows: the router's choice, products of each pair with its
// expert's matrices, and their weighted sum (metal/experts.h). Operands.
struct MixtureStep {
  paged::RouteParams route;  // what items are is up to the products' kernels
  int logits;
  int weights;        // [num_rows, top_k]
  int sorted_pairs;   // [num_pairs] int32
  int items;          // [num_pairs, 3] int32, of which as many are used as there are
  ProductStep gated;  // of all experts' gates and ups, weights [num_experts, n, k]; out by place
  ProductStep down;   // x by place, out by pair
  int out;            // [num_rows, n]

  int num_pairs() const { return route.num_rows * route.top_k; }
};

struct AttentionStep {
  std::vector<int> operands;  // of PagedAttention
  int out;
  int rotated = -1;  // queries, where the pool's keys are rotated
  int kind;          // which of the program's attention_kinds
};

class DeviceProgram {
 public:
  // True if what is added to the result of a product is the product's or the next norm's to add.
  enum class Residual { in_product, in_norm };

  // Reads the graph that leads from `inputs`, which have no values yet, to `outputs`: the step's
  // results, and after them pools among the inputs, written in place. What does not
  // depend on the inputs is evaluated. Throws NoProgram, also for products that no kernel of `gpu`
  // serves.
  DeviceProgram(const Arrays& inputs, const Arrays& outputs, Gpu gpu, Residual residual);

  struct Result {
    mx::Shape shape;
    mx::Dtype dtype;
    bool is_for_host;  // tokens that the host reads after the step
  };

  // Layers whose attention is launched alike share a kind.
  struct AttentionKind {
    AttentionOptions options;
    std::vector<int> inputs;  // of the program, for PagedAttention; -1: what each layer has its own
    mx::Shape queries;
    mx::Shape key_pool;
    mx::Shape value_pool;
    mx::Shape per_head;  // empty: none
    mx::Dtype dtype;
    mx::Dtype key_dtype;
    mx::Dtype value_dtype;

    bool operator==(const AttentionKind&) const = default;
  };

  // How a step's attention is launched: all that may differ between steps of one program. Numbers
  // that grow with every few tokens are rounded up.
  std::vector<LaunchList> attention(const Arrays& inputs, Gpu gpu) const;

  // A step's launches, for what `attention` returned. Bindings name operands().
  std::vector<Launch> launches(const std::vector<LaunchList>& attention, Gpu gpu) const;
  // Those for NVIDIA's GPUs that have such kernels.
  std::vector<Launch> launches(
      const std::vector<LaunchList>& attention, Gpu gpu, cuda::Streams streams) const;

  // Throws std::invalid_argument where inputs are not of the shapes and dtypes that were read.
  void check(const Arrays& inputs) const;

  const std::vector<ProgramOperand>& operands() const { return operands_; }
  const Arrays& constants() const { return constants_; }
  uint64_t temporary_bytes() const { return temporary_bytes_; }
  uint64_t workspace_bytes(const std::vector<LaunchList>& attention) const;
  const std::vector<Result>& results() const { return results_; }
  // The inputs that the outputs after the results are (pools, written in place).
  const std::vector<int>& pools() const { return pools_; }
  // True if kernels see an input. (Of a plan they do not see all.)
  bool is_used(int input) const { return used_[input]; }
  bool is_pool(int input) const;
  size_t num_inputs() const { return input_shapes_.size(); }
  uint64_t input_bytes(int input) const;
  // Inputs whose contents decide how attention is launched.
  std::vector<int> read_by_host() const;

  // The runner of this program on a stream, for the calling thread. Few are kept: threads end.
  std::shared_ptr<StepRunner> runner(int stream) const;

 private:
  friend class DeviceProgramReader;
  using Step = std::variant<Launch, ProductStep, MixtureStep, AttentionStep>;

  // A value that a norm or gated products make and products multiply, and nothing else reads.
  struct Multiplied {
    size_t made_by;  // steps
    std::vector<size_t> read_by;
  };

  std::vector<Launch> product_launches(
      const ProductStep& step, Gpu gpu, cuda::Streams streams) const;
  // The steps as NVIDIA's GPUs run them: values are written in the order that their readers want.
  std::vector<Step> ordered_steps(cuda::Streams streams) const;

  std::vector<ProgramOperand> operands_;
  std::vector<Step> steps_;
  std::vector<Multiplied> multiplied_;
  std::vector<AttentionKind> kinds_;
  Arrays constants_;
  uint64_t temporary_bytes_ = 0;
  int workspace_ = -1;  // an operand
  uint64_t product_workspace_bytes_ = 0;
  std::vector<mx::Shape> input_shapes_;
  std::vector<mx::Dtype> input_dtypes_;
  std::vector<bool> used_;
  std::vector<int> pools_;
  std::vector<Result> results_;
  struct Runner {
    int stream;
    std::thread::id thread;
    std::shared_ptr<StepRunner> runner;
  };
  mutable std::list<Runner> runners_;  // the one used last first
  mutable std::mutex mutex_;           // of runners_
};

// in: the inputs that were read. out: the results, and the pools in place or none of them: MLX
// spends the square of an operation's outputs on it.
class DeviceStep : public mx::Primitive {
 public:
  DeviceStep(mx::Stream stream, std::shared_ptr<const DeviceProgram> program)
      : Primitive(stream), program_(std::move(program)) {}

  void eval_cpu(const Arrays& in, Arrays& out) override;  // throws, or simulates
  void eval_gpu(const Arrays& in, Arrays& out) override;  // cuda/step_graph.cpp
  const char* name() const override { return "device_step"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return program_ == static_cast<const DeviceStep&>(other).program_;
  }
  const DeviceProgram& program() const { return *program_; }

 private:
  std::shared_ptr<const DeviceProgram> program_;
};

// The launches of one product where MLX has none of its own to take: portable, or NVIDIA's
// (cuda/products.h).
std::vector<Launch> portable_product_launches(
    const ProductStep& step, const std::vector<ProgramOperand>& operands);

// Those of a mixture of experts. Throws NoProgram where no kernel of `gpu` serves its products.
std::vector<Launch> mixture_launches(
    const MixtureStep& step, const std::vector<ProgramOperand>& operands, Gpu gpu,
    cuda::Streams streams);

// Launches that remain where a step's products have only been multiplied: silu(gate) * up, or the
// rotation and write of heads.
std::vector<Launch> launches_after_products(
    const ProductStep& step, const std::vector<ProgramOperand>& operands);

}  // namespace mlx_paged
