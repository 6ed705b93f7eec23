// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Schedules a step's operations into phases. Everything that can run without waiting shares a
// phase.

#pragma once

#include <variant>
#include <vector>

#include "executable.h"

namespace mlx_paged::cpu {

// An operation before it is scheduled.
struct Operation {
  using Work = std::variant<RowTask, Adapters, Product, ExpertTask, AttentionPhase, NodePhase>;

  Work work;
  int64_t rows;
  std::vector<int> reads;    // buffers whose row i is read by row i only
  std::vector<int> gathers;  // buffers whose rows can all be read
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

// `operations` must be in graph order. Places the temporaries among `buffers`.
Phases make_phases(const std::vector<Operation>& operations, std::vector<Buffer>& buffers);

}  // namespace mlx_paged::cpu
