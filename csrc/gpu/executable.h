// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// GpuExecutable: a decode step on a GPU as one list of launches. Its graph is lowered once per
// shape (lowering.h): operations between matrix products become kernels of metal/layer.h, and
// values get fixed places in memory. So a step has no nodes to schedule, half as many kernels, and
// launches that a GPU can capture and replay (execution.h).
//
// The first axis of every value is the step's rows, or the rows of its logits.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "../graph/step_graph.h"
#include "../primitives.h"
#include "column_order.h"

namespace mlx_paged {

namespace cuda {
enum class TmaKernels;  // cuda/products.h
}

class GpuExecution;  // execution.h

// Widest load of a GPU thread.
constexpr int kChunkBytes = 16;

// An operand of a step's launches.
struct StepOperand {
  enum class Kind {
    input,      // `index` is an input
    constant,   // ... a constant
    temporary,  // in the executable's memory
    result,     // ... a result
    workspace,  // for attention or a library product; one at a time
  };
  Kind kind;
  int index = 0;
  int64_t offset = 0;  // bytes into the array or memory
  uint64_t bytes = 0;
};

// Up to three linear layers of one input, or (`is_gated`) silu(gate) * up of two. The ints are
// indices of operands.
struct ProductStep {
  struct Part {
    int weight;  // [n, k]
    int bias;    // [n]; -1: none
    int out;     // [num_rows, n]; if gated, the first part's is the result
    int n;
    int scales = -1;  // of a quantized weight
    int biases = -1;
    int target = -1;  // of `adapters`; -1: no adapter changes the part
  };
  int x;
  int num_rows;
  int k;
  int x_stride;  // elements between rows of x
  std::vector<Part> parts;
  int residual = -1;  // [num_rows, n], added to a single part; -1: none
  bool is_gated = false;
  std::optional<WeightCodes> codes;  // of all parts
  // NVIDIA only, set when launches are made: x is in code order, and the order that readers of the
  // output expect.
  bool x_is_ordered = false;
  ColumnOrder out_order{};
  // Adapters of the parts: lora_down before the products and lora_up after them, with the gate or
  // residual that follows, unless the products do the work of both. The step itself is then neither
  // gated nor has a residual.
  struct Adapters {
    Launch down;
    Launch up;
    int finished;  // [1] uint32, zero, for products that do their work

    // Buffers of `down`: x, the rows' adapters, then this.
    static constexpr int kDownMatrices = 2;  // of each target
    // Buffers of `up`: each target's base, then these.
    static constexpr int kHidden = paged::LORA_TARGETS;
    static constexpr int kAdapters = kHidden + 1;
    static constexpr int kUpMatrices = kAdapters + 1;  // of each target
    static constexpr int kResidual = kUpMatrices + paged::LORA_TARGETS;
    static constexpr int kResults = kResidual + 1;  // of each target
  };
  std::optional<Adapters> adapters;
  // For queries, keys and values: the kernel that rotates and writes them, unless the products do.
  std::optional<Launch> write;
  int head_dim = 0;  // of `write`
  // The write's buffers.
  static constexpr int kRotations = 3;
  static constexpr int kSlots = 4;
  static constexpr int kQueriesOut = 7;  // then the pools of keys and values
  DType dtype;
};

// A mixture of experts: routing, products of each pair with its expert's matrices, and their
// weighted sum (metal/experts.h). The ints are indices of operands.
struct MixtureStep {
  paged::RouteParams route;  // without items, which depend on the product kernels
  int logits;
  int weights;       // [num_rows, top_k]
  int sorted_pairs;  // [num_pairs] int32
  int items;         // [num_pairs, 3] int32, the last ones unused
  // Gates and ups of all experts, weights [num_experts, n, k]; out in sorted order.
  ProductStep gated;
  ProductStep down;   // x in sorted order, out by pair
  int out;            // [num_rows, n]
  int gathered = -1;  // rows of x in sorted order, [num_pairs, k]; only where kernels may need it

  int num_pairs() const { return route.num_rows * route.top_k; }
};

struct AttentionStep {
  std::vector<int> operands;  // of PagedAttention
  int out;
  int rotated = -1;  // queries, if the pool's keys are rotated
  int kind;          // index of the AttentionKind
};

// An operation of all ranks of a group.
struct CollectiveStep {
  Op op;
  std::shared_ptr<mx::Primitive> primitive;
  int in;  // operands, dense
  int out;
  mx::Shape in_shape;
  mx::Shape out_shape;
  mx::Dtype dtype;
};

class GpuExecutable {
 public:
  // Place where a residual is added after a product.
  enum class Residual { in_product, in_norm };

  // Compiles the graph from `inputs`, which have no values, to `outputs`: results, then pools among
  // the inputs, which are written in place. Evaluates everything that does not depend on the
  // inputs. Throws UnsupportedGraph, also for products that no kernel of `gpu` serves.
  GpuExecutable(const Arrays& inputs, const Arrays& outputs, Gpu gpu, Residual residual);

  struct Result {
    mx::Shape shape;
    mx::Dtype dtype;
    bool is_for_host;  // tokens that the host reads after the step
  };

  // Layers whose attention has the same launches share a kind.
  struct AttentionKind {
    AttentionOptions options;
    std::vector<int> inputs;  // the executable's, as PagedAttention's; -1: each layer has its own
    mx::Shape queries;
    mx::Shape key_pool;
    mx::Shape value_pool;
    mx::Shape per_head;  // empty: none
    mx::Dtype dtype;
    mx::Dtype key_dtype;
    mx::Dtype value_dtype;

    bool operator==(const AttentionKind&) const = default;
  };

  // Returns the launches of a step's attention, by kind; all other launches are the same in every
  // step. Rounds up numbers that grow every few tokens.
  std::vector<LaunchList> attention(const Arrays& inputs, Gpu gpu) const;

  // Returns a step's launches, given those of its attention. Bindings index operands().
  std::vector<Launch> launches(const std::vector<LaunchList>& attention, Gpu gpu) const;
  // The same for GPUs with the given stream kernels.
  std::vector<Launch> launches(
      const std::vector<LaunchList>& attention, Gpu gpu, cuda::TmaKernels tma) const;

  // Returns the host names of its kernels, without those of attention.
  std::set<std::string> kernels(Gpu gpu) const;

  // Throws std::invalid_argument for inputs of other shapes or dtypes. Those of `has_any_size` may
  // have another size.
  void check(const Arrays& inputs) const;

  const std::vector<StepOperand>& operands() const { return operands_; }
  const Arrays& constants() const { return constants_; }
  uint64_t temporary_bytes() const { return temporary_bytes_; }
  uint64_t workspace_bytes(const std::vector<LaunchList>& attention) const;
  const std::vector<Result>& results() const { return results_; }
  // Inputs that are written in place.
  const std::vector<int>& pools() const { return pools_; }
  // True if a kernel reads the input. Some arrays of a plan are unused.
  bool is_used(int input) const { return used_[input]; }
  bool is_pool(int input) const;
  size_t num_inputs() const { return input_shapes_.size(); }
  uint64_t input_bytes(int input) const;  // when it was compiled
  // True for inputs that only attention reads: a plan's block tables, work and merges. Unused
  // inputs have any size, too.
  bool has_any_size(int input) const { return any_size_[input]; }
  // Inputs whose contents determine the launches of attention.
  std::vector<int> read_by_host() const;

  // Returns the calling thread's execution on a stream. Keeps only the latest few, because threads
  // end.
  std::shared_ptr<GpuExecution> execution(int stream) const;

 private:
  friend class GpuLowering;
  using Step = std::variant<Launch, ProductStep, MixtureStep, AttentionStep, CollectiveStep>;

  // A result of a norm or of gated products that only products and their adapters read.
  struct Multiplied {
    size_t made_by;  // steps
    std::vector<size_t> read_by;
  };

  std::vector<Launch> product_launches(
      const ProductStep& step, Gpu gpu, cuda::TmaKernels tma) const;
  Launch collective_launch(const CollectiveStep& step) const;
  // Returns the steps, with values in the column order that their readers expect.
  std::vector<Step> ordered_steps(cuda::TmaKernels tma) const;

  std::vector<StepOperand> operands_;
  std::vector<Step> steps_;
  std::vector<Multiplied> multiplied_;
  std::vector<AttentionKind> kinds_;
  Arrays constants_;
  uint64_t temporary_bytes_ = 0;
  int workspace_ = -1;  // index of an operand
  uint64_t product_workspace_bytes_ = 0;
  std::vector<mx::Shape> input_shapes_;
  std::vector<mx::Dtype> input_dtypes_;
  std::vector<bool> used_;
  std::vector<bool> any_size_;
  std::vector<int> pools_;
  std::vector<Result> results_;
  struct OfThread {
    int stream;
    std::thread::id thread;
    std::shared_ptr<GpuExecution> execution;
  };
  mutable std::list<OfThread> executions_;  // most recent first
  mutable std::mutex mutex_;                // guards executions_
};

// in: the inputs of the executable. out: its results, then its pools in place, or none of the
// pools, because MLX's time is quadratic in the number of outputs.
class GpuStep : public mx::Primitive {
 public:
  GpuStep(mx::Stream stream, std::shared_ptr<const GpuExecutable> executable)
      : Primitive(stream), executable_(std::move(executable)) {}

  void eval_cpu(const Arrays& in, Arrays& out) override;  // throws, or simulates
  void eval_gpu(const Arrays& in, Arrays& out) override;  // eval_step.cpp
  const char* name() const override { return "gpu_step"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return executable_ == static_cast<const GpuStep&>(other).executable_;
  }
  const GpuExecutable& executable() const { return *executable_; }

 private:
  std::shared_ptr<const GpuExecutable> executable_;
};

// Launches of a mixture of experts. Throws UnsupportedGraph if no kernel of `gpu` serves its
// products.
std::vector<Launch> mixture_launches(
    const MixtureStep& step, const std::vector<StepOperand>& operands, Gpu gpu,
    cuda::TmaKernels tma);

// Launches that follow plain products: lora_up, silu(gate) * up, or the rotation and write of
// heads.
std::vector<Launch> launches_after_products(
    const ProductStep& step, const std::vector<StepOperand>& operands);

}  // namespace mlx_paged
