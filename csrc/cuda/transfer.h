// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Transfers between host and GPU through pinned memory.
//
// Arrays that MLX makes from host data, and arrays that the host has read, live in managed memory
// that migrates by page. Page faults cost more than the transfer, and MLX's cache reuses such
// buffers for activations. Pinned memory never migrates and leaves device memory alone.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../transfer.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// Inputs: none. Outputs: one array per part, all in one buffer.
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
  size_t bytes_;                 // in total
};

// Input: x. Output: a copy in pinned memory.
class ToHost : public mx::Primitive {
 public:
  explicit ToHost(mx::Stream stream) : Primitive(stream) {}
  void eval_cpu(const Arrays&, Arrays&) override;
  void eval_gpu(const Arrays&, Arrays&) override;
  const char* name() const override { return "ToHost"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

// Gives `a` pinned memory that kernels can write and the host can read. The caller keeps `a` alive
// until the kernels have run.
void allocate_pinned(mx::array& a);

}  // namespace mlx_paged
