// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Numbers between host and GPU through pinned memory.
//
// An array that MLX makes of the host's numbers lies in memory that migrates by page, and so does
// one that the host has read. Both faults cost more than the numbers, and MLX's cache hands
// such buffers out again as activations. Pinned memory never moves, and device memory stays device
// memory.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../transfer.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// inputs: none. outputs: one array for each part, in one buffer.
class Upload : public mx::Primitive {
 public:
  Upload(
      mx::Stream stream, std::shared_ptr<std::byte> staged, std::vector<size_t> offsets,
      size_t bytes)
      : Primitive(stream),
        staged_(std::move(staged)),
        offsets_(std::move(offsets)),
        bytes_(bytes) {}
  void eval_cpu(const Arrays&, Arrays&) override;
  void eval_gpu(const Arrays&, Arrays&) override;
  const char* name() const override { return "Upload"; }

 private:
  std::shared_ptr<std::byte> staged_;
  std::vector<size_t> offsets_;  // of each output, in bytes
  size_t bytes_;                 // of all
};

// inputs: x. output: the same in pinned memory.
class ToHost : public mx::Primitive {
 public:
  explicit ToHost(mx::Stream stream) : Primitive(stream) {}
  void eval_cpu(const Arrays&, Arrays&) override;
  void eval_gpu(const Arrays&, Arrays&) override;
  const char* name() const override { return "ToHost"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

// Gives `a` pinned memory, which kernels can write and the host reads once they have. Whoever
// launches them keeps `a` until then.
void allocate_pinned(mx::array& a);

}  // namespace mlx_paged
