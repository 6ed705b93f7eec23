// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// CpuExecutable: a step of few rows as one operation on the CPU. Its graph is lowered once per
// number of rows (lowering.h) to phases, which all threads run one after another. So a step has no
// nodes to schedule, threads do not sleep between products, and the projections of one input share
// a phase.
//
// The first axis of every value is the step's rows, or the rows of its logits. An operation is a
// product with weights or experts, attention, or row-wise. MLX runs all others on whole arrays
// between two phases, at their usual cost.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "../graph/step_graph.h"
#include "../graph/view.h"
#include "../primitives.h"
#include "attention_run.h"
#include "integers.h"
#include "lora.h"
#include "product.h"

namespace mlx_paged::cpu {

// Address of each buffer in one run.
using Bases = std::vector<char*>;

struct Buffer {
  enum class Kind { constant, input, result, temporary, node };
  Kind kind;
  int index = 0;         // of an input or result
  char* data = nullptr;  // of a constant
  int64_t row_size = 0;  // elements, of a value that is written row by row
  int64_t bytes = 0;     // of a temporary
  int64_t offset = 0;    // of a temporary in the memory of a run
};

// Processes rows [begin, end).
using RowTask = std::function<void(const Bases& bases, int64_t begin, int64_t end)>;

struct RowPhase {
  int64_t rows;
  std::vector<RowTask> tasks;  // run in this order for each row
};

// Low-rank adapters of a projection's rows. Their first half is a phase of its own, as it reads
// whole rows of x; the second half is added to the projection's columns.
struct Adapters {
  View x;         // [rows, ..., k]
  View adapters;  // [rows] int32
  View a;         // [num_adapters, rank, k]
  View b;         // [num_adapters, rank, n]
  View hidden;    // [rows, rank]
  LoraShape shape;

  LoraRows rows(const Bases& bases) const;
};

struct AdapterPhase {
  struct Piece {
    int adapters;
    int begin, end;  // columns of `hidden`
  };
  std::vector<Adapters> adapters;
  std::vector<Piece> pieces;
};

// x @ weight.T + bias, and the change by adapters.
struct Projection {
  View x;                       // [rows, ..., k]
  std::optional<View> rounded;  // x as integers: [rows, chunks, ...]
  WeightView weight;
  const float* bias = nullptr;               // [n] or null
  const IntegerKernels* integers = nullptr;  // of `rounded`
  std::optional<Adapters> adapters;
};

// A linear layer, with the operations fused into it.
struct Product {
  View out;  // [rows, ..., n]
  Projection main;
  std::optional<Projection> up;  // of a gated layer: out = silu(main) * up
  std::optional<View> added;
};

struct ProductPhase {
  struct Piece {
    int product;
    int begin, end;  // columns
  };
  std::vector<Product> products;
  std::vector<Piece> pieces;
};

// Work of experts. Those of a row are known only in a run, so it is divided into shares then.
struct ExpertTask {
  int num_shares;
  std::function<void(const Bases& bases, int share)> run;
};

struct ExpertPhase {
  struct Piece {
    int task;
    int share;
  };
  std::vector<ExpertTask> tasks;
  std::vector<Piece> pieces;
};

struct AttentionPhase {
  View queries;
  View out;
  int key_pool, value_pool;                        // buffers
  int positions, tables, work_items, merge_items;  // inputs
  const float* per_head;                           // or null
  AttentionOptions options;
  Activations activations;
  DType dtype;
  int num_q_heads;
  PoolLayout keys, values;
};

// An operation that MLX runs.
struct NodePhase {
  struct Input {
    View view;
    mx::Dtype dtype;
    std::optional<mx::array> constant;  // instead of the view
  };
  struct Output {
    int buffer;
    mx::Shape shape;
    mx::Dtype dtype;
  };
  Op op;
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
};

using Phase =
    std::variant<RowPhase, AdapterPhase, ProductPhase, ExpertPhase, AttentionPhase, NodePhase>;

class CpuExecutable : public std::enable_shared_from_this<CpuExecutable> {
 public:
  // Compiles the graph from `inputs`, which have no values, to `outputs`: results in float32, then
  // pools among the inputs, which are written in place. Evaluates everything that does not depend
  // on the inputs. Throws UnsupportedGraph.
  CpuExecutable(const Arrays& inputs, const Arrays& outputs);

  // Throws std::invalid_argument for inputs of other shapes or dtypes.
  void check(const Arrays& inputs) const;

  // Queues a run on a stream, whose thread shares it with the workers. The inputs must be dense;
  // they and the memory of the results must outlive the run.
  void queue(const Arrays& inputs, const std::vector<char*>& results, mx::Stream stream) const;

  // The stream that runs must use, if MLX runs operations.
  std::optional<mx::Stream> stream() const { return stream_; }

  int num_phases() const { return int(phases_.size()); }
  // Primitives that MLX runs because they have no lowering.
  std::vector<std::string> foreign() const;
  const std::vector<mx::Shape>& results() const { return results_; }
  // Inputs that are written in place.
  const std::vector<int>& pools() const { return pools_; }
  bool is_pool(int input) const {
    return std::find(pools_.begin(), pools_.end(), input) != pools_.end();
  }

 private:
  friend class CpuLowering;

  struct Run;

  AttentionArgs attention_args(const AttentionPhase& p, const Bases& bases, const Arrays& in) const;
  Bases bases_of(const Arrays& in, const std::vector<char*>& results, char* memory) const;
  void run(const Bases& bases, const Arrays& in, size_t begin, size_t end) const;
  void queue_node(const NodePhase& node, Run& run, mx::Stream stream) const;
  void clear(const std::vector<char*>& results) const;

  std::vector<Buffer> buffers_;
  std::vector<Phase> phases_;
  int64_t temporary_bytes_ = 0;
  std::vector<mx::Shape> input_shapes_;
  std::vector<mx::Dtype> input_dtypes_;
  std::vector<bool> any_length_;  // inputs that may have another shape: a plan's work, unused ones
  std::vector<int> pools_;
  std::optional<mx::Stream> stream_;
  std::vector<mx::Shape> results_;
  Arrays constants_;  // kept alive
};

}  // namespace mlx_paged::cpu
