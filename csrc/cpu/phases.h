// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Schedules the operations of a step into phases. Everything that can run without waiting becomes
// one phase.

#pragma once

#include <variant>
#include <vector>

#include "executable.h"

namespace mlx_paged::cpu {

// An operation before it is scheduled.
struct Operation {
  using Work = std::variant<RowTask, Product, ExpertProduct, AttentionPhase, NodePhase>;

  Work work;
  int64_t rows;
  std::vector<int> reads;    // buffers, row i of which only row i reads
  std::vector<int> gathers;  // buffers, any row of which may be read
  std::vector<int> writes;

  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(work);
  }
};

struct Phases {
  std::vector<Phase> phases;
  int64_t temporary_bytes;
};

// `operations` are in the order of their graph. Places the temporaries among `buffers`.
Phases make_phases(const std::vector<Operation>& operations, std::vector<Buffer>& buffers);

}  // namespace mlx_paged::cpu
