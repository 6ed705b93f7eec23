// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The operations of a step, in the order of their graph, put together into phases: as much as can
// be done without waiting is one phase.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "program.h"

namespace mlx_paged::cpu {

[[noreturn]] inline void refuse(const std::string& reason) {
  throw Unsupported(reason);
}

inline void require(bool ok, const std::string& reason) {
  if (!ok) {
    refuse(reason);
  }
}

// An operation that is not part of a phase yet.
struct Operation {
  enum class Kind { rows, product, experts, attention, node };
  Kind kind = Kind::rows;
  int64_t rows = 0;
  RowTask task;
  std::optional<Product> product;
  std::optional<ExpertProduct> experts;
  std::optional<AttentionPhase> attention;
  std::optional<NodePhase> node;
  std::vector<int> reads;    // buffers
  std::vector<int> gathers;  // buffers of which a row reads other rows
  std::vector<int> writes;
  bool done = false;
};

struct Phases {
  std::vector<Phase> phases;
  int64_t temporary_bytes = 0;
};

// Also gives each temporary of `buffers` its place: those that are not needed at the same time
// share memory.
Phases make_phases(std::vector<Operation>& operations, std::vector<Buffer>& buffers);

}  // namespace mlx_paged::cpu
