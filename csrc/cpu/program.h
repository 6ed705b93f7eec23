// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A step of few rows as one operation on the CPU. The graph that model code builds is read once for
// a number of rows (program_reader.cpp) and turned into phases, which all threads run one after
// another (program.cpp). So a step has no nodes to schedule, no thread sleeps between its products,
// and the projections of one input are one phase.
//
// Values have the step's rows (or the rows of its logits) as their first axis. An operation is a
// product with weights or with those of experts, attention, or works on each row by itself. What is
// none of these is left to MLX, which gets whole arrays between two phases: such an operation costs
// what it costs in a graph, but no other becomes slower by it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "../primitives.h"
#include "attention_run.h"
#include "experts.h"
#include "integers.h"
#include "product.h"

namespace mlx_paged::cpu {

// Why a graph is not run as a program.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where the buffers of a program lie in one run.
using Bases = std::vector<char*>;

// A value: where it lies in one of a program's buffers.
struct View {
  int buffer;
  int64_t offset = 0;   // in elements, as are the strides
  mx::Shape shape;      // [rows, ...]
  mx::Strides strides;  // of each axis

  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_size() const;     // elements of a row
  bool has_dense_rows() const;  // whether the elements of a row lie side by side
  bool is_dense() const;

  template <typename T = float>
  T* row(const Bases& bases, int64_t i) const {
    return reinterpret_cast<T*>(bases[buffer]) + offset + i * strides[0];
  }
};

struct Buffer {
  enum class Kind { constant, input, output, temporary, node };
  Kind kind;
  int index = 0;         // of a program's inputs or outputs
  char* data = nullptr;  // of a constant
  int64_t row_size = 0;  // of a value that rows are written of, in elements
  int64_t bytes = 0;     // of a temporary
  int64_t offset = 0;    // of a temporary in the memory of a run
};

// Works on each row by itself.
using RowTask = std::function<void(const Bases& bases, int64_t begin, int64_t end)>;

struct RowPhase {
  int64_t rows;
  std::vector<RowTask> tasks;  // in this order for each row
};

// x @ weight.T + bias.
struct Projection {
  View x;                       // [rows, ..., k]
  std::optional<View> rounded;  // to integers: [rows, chunks, ...]
  WeightView weight;
  const float* bias = nullptr;               // [n] or null
  const IntegerKernels* integers = nullptr;  // what x is rounded for
};

// A linear layer, with what follows it.
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

// Experts of the step's rows, which are known only when it runs: so it is cut into shares.
struct ExpertProduct {
  View x;           // [rows, ..., k] or [rows, ..., experts of a row, ..., k]
  View indices;     // [rows, ..., experts of a row]
  View out;         // [rows, ..., experts of a row, ..., n]
  ExpertArgs args;  // but for where these lie
};

struct ExpertPhase {
  struct Piece {
    int product;
    int share, num_shares;
  };
  std::vector<ExpertProduct> products;
  std::vector<Piece> pieces;
};

struct AttentionPhase {
  View queries;
  View out;
  int key_pool, value_pool;                        // buffers,
  int positions, tables, work_items, merge_items;  // inputs
  const float* per_head;                           // or null
  AttentionOptions options;
  DType dtype;
  int num_q_heads;
  PoolLayout keys, values;
};

// An operation of MLX's own.
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
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
};

using Phase = std::variant<RowPhase, ProductPhase, ExpertPhase, AttentionPhase, NodePhase>;

class Program : public std::enable_shared_from_this<Program> {
 public:
  // Reads the graph that leads from `inputs`, which have no values yet, to `outputs`: the first is
  // the step's result, the others are pools among the inputs, written in place. What does not
  // depend on the inputs is evaluated. Throws Unsupported.
  Program(const Arrays& inputs, const Arrays& outputs);

  // Throws std::invalid_argument where inputs are not of the shapes and dtypes that were read.
  void check(const Arrays& inputs) const;

  // Queues a run on a stream, whose thread shares it with the workers. The inputs are dense and
  // outlive it, as does the result's memory.
  void queue(const Arrays& inputs, char* result, mx::Stream stream) const;

  // The one on which it must run, where operations of MLX's own have one.
  std::optional<mx::Stream> stream() const { return stream_; }

  int num_phases() const { return int(phases_.size()); }
  int num_nodes() const;  // phases that are operations of MLX's own
  const mx::Shape& result_shape() const { return result_shape_; }
  size_t result_bytes() const;  // float32
  // The inputs that the outputs after the first are (pools, written in place).
  const std::vector<int>& pools() const { return pools_; }
  bool is_pool(int input) const {
    return std::find(pools_.begin(), pools_.end(), input) != pools_.end();
  }

 private:
  friend class ProgramReader;
  friend class ProgramValues;

  struct Run;

  AttentionArgs attention_args(const AttentionPhase& p, const Bases& bases, const Arrays& in) const;
  Bases bases_of(const Arrays& in, char* result, char* memory) const;
  void run(const Bases& bases, const Arrays& in, size_t begin, size_t end) const;
  void queue_node(const NodePhase& node, Run& run, mx::Stream stream) const;

  std::vector<Buffer> buffers_;
  std::vector<Phase> phases_;
  int64_t temporary_bytes_ = 0;
  std::vector<mx::Shape> input_shapes_;
  std::vector<mx::Dtype> input_dtypes_;
  std::vector<bool> any_length_;  // inputs whose shape may change: a plan's work, unused ones
  std::vector<int> pools_;
  std::optional<mx::Stream> stream_;
  mx::Shape result_shape_;
  Arrays constants_;  // kept alive
};

}  // namespace mlx_paged::cpu
