// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "../gpu.h"
#include "../graph/op.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged::gpu {

namespace {

// Allocates device memory through an MLX primitive: a masked scatter with an empty mask allocates
// its output and launches nothing. allocator::malloc would return managed memory, which migrates by
// page, and MLX's library does not export its device allocator.
class Allocation {
 public:
  explicit Allocation(mx::Stream stream) {
    mx::array empty({0}, mx::float32, nullptr, {});
    mx::array mask({0}, mx::bool_, nullptr, {});
    auto result = mx::masked_scatter(empty, mask, empty, stream);
    for (auto a = result; a.has_primitive(); a = a.inputs()[0]) {
      if (op_of(a) == Op::masked_scatter) {
        primitive_ = a.primitive_ptr();
        inputs_ = {empty, mask, empty};
        return;
      }
    }
    throw std::runtime_error("[cuda] mx.masked_scatter is not a single primitive in this MLX");
  }

  void run(mx::array& a) const {
    std::vector<mx::array> outputs{a};
    primitive_->eval_gpu(inputs_, outputs);
  }

 private:
  std::shared_ptr<mx::Primitive> primitive_;
  std::vector<mx::array> inputs_;
};

}  // namespace

void allocate(mx::array& a, mx::Stream stream) {
  thread_local std::unordered_map<int, Allocation> allocations;
  auto found = allocations.find(stream.index);
  if (found == allocations.end()) {
    found = allocations.emplace(stream.index, Allocation(stream)).first;
  }
  found->second.run(a);
}

}  // namespace mlx_paged::gpu
