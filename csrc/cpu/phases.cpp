// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "phases.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "../graph/memory_plan.h"
#include "kernels.h"
#include "parallel_for.h"

namespace mlx_paged::cpu {

namespace {

// Cuts a phase into pieces that keep all threads busy to the end.
void cut(ProductPhase& phase) {
  constexpr int64_t kMinWeights = 1 << 13;
  constexpr int64_t kMaxWork = 1 << 19;  // weights times rows
  constexpr int kPiecesPerThread = 8;
  constexpr int kAlign = 16;  // whole vectors and cache lines
  constexpr int kTiles = 4;   // maximum per piece; a thread prefetches its own next tile
  // Adapters are read in runs of a piece's columns: short ones take twice the time.
  constexpr int64_t kAdapterColumns = 256;
  auto column_size = [](const Product& p) { return int64_t(p.main.weight.k) * (p.up ? 2 : 1); };
  int64_t weights = 0;
  int64_t rows = 1;
  for (const Product& p : phase.products) {
    weights += p.main.weight.n * column_size(p);
    rows = std::max(rows, p.out.rows());
  }
  // With few rows a piece is long: kernels prefetch past its end, into another thread's piece.
  int64_t max_weights = std::max(kMaxWork / rows, 8 * kMinWeights);
  for (size_t i = 0; i < phase.products.size(); i++) {
    const Product& p = phase.products[i];
    bool uses_tiles = p.main.integers && p.main.integers->uses_tiles(int(p.out.rows()));
    int64_t align = uses_tiles ? kIntegerTileColumns : kAlign;
    int64_t max_piece =
        uses_tiles ? std::max(max_weights, kTiles * align * column_size(p)) : max_weights;
    int64_t piece =
        std::clamp(weights / (kPiecesPerThread * num_threads()), kMinWeights, max_piece);
    int n = p.main.weight.n;
    int64_t columns = piece / column_size(p);
    if (p.main.adapters) {
      columns = std::max(columns, std::min<int64_t>(kAdapterColumns, n / num_threads()));
    }
    int piece_columns = int(std::max<int64_t>(1, columns / align) * align);
    for (int begin = 0; begin < n; begin += piece_columns) {
      phase.pieces.push_back({int(i), begin, std::min(n, begin + piece_columns)});
    }
  }
}

void cut(AdapterPhase& phase) {
  for (size_t i = 0; i < phase.adapters.size(); i++) {
    int rank = phase.adapters[i].shape.rank;
    for (int begin = 0; begin < rank; begin += kLoraColumns) {
      phase.pieces.push_back({int(i), begin, std::min(rank, begin + kLoraColumns)});
    }
  }
}

void cut(ExpertPhase& phase) {
  for (size_t i = 0; i < phase.tasks.size(); i++) {
    for (int share = 0; share < phase.tasks[i].num_shares; share++) {
      phase.pieces.push_back({int(i), share});
    }
  }
}

class PhaseScheduler {
 public:
  PhaseScheduler(const std::vector<Operation>& operations, size_t num_buffers)
      : operations_(operations),
        writers_(num_buffers),
        phase_of_(operations.size(), kWaits),
        num_waiting_(operations.size()) {
    for (size_t i = 0; i < operations.size(); i++) {
      for (int b : operations[i].writes) {
        writers_[b].push_back(i);
      }
    }
  }

  std::vector<Phase> phases() {
    while (num_waiting_ > 0) {
      // Adapters first, so that the products of one x, with and without them, share a phase.
      bool is_made = add_rows() || add_all(&AdapterPhase::adapters) ||
                     add_all(&ProductPhase::products) || add_all(&ExpertPhase::tasks) ||
                     add_other();
      require(is_made, "operations that wait for each other");
    }
    return std::move(phases_);
  }

  const std::vector<int>& phase_of() const { return phase_of_; }

 private:
  static constexpr int kWaits = -1;

  int next_phase() const { return int(phases_.size()); }

  // True if everything that writes the buffer before operation i, in graph order, has run in an
  // earlier phase, or (`here`) in the phase being built.
  bool is_written(int buffer, size_t i, bool here) const {
    return std::all_of(writers_[buffer].begin(), writers_[buffer].end(), [&](size_t writer) {
      int phase = phase_of_[writer];
      return writer >= i || (phase != kWaits && (here || phase < next_phase()));
    });
  }

  bool is_ready(size_t i) const {
    const auto& op = operations_[i];
    // Row tasks of one phase run one after another for each row.
    bool is_by_row = op.is<RowTask>();
    return phase_of_[i] == kWaits &&
           std::all_of(
               op.reads.begin(), op.reads.end(),
               [&](int b) { return is_written(b, i, is_by_row); }) &&
           std::all_of(op.gathers.begin(), op.gathers.end(), [&](int b) {
             return is_written(b, i, false);
           });
  }

  void take(size_t i) {
    phase_of_[i] = next_phase();
    num_waiting_--;
  }

  bool add_rows() {
    RowPhase phase{0, {}};
    for (size_t i = 0; i < operations_.size(); i++) {
      const auto& op = operations_[i];
      if (op.is<RowTask>() && (phase.tasks.empty() || op.rows == phase.rows) && is_ready(i)) {
        phase.rows = op.rows;
        phase.tasks.push_back(std::get<RowTask>(op.work));
        take(i);
      }
    }
    return add(std::move(phase), !phase.tasks.empty());
  }

  // Adds a phase of all operations of one kind that are ready. `member`: where it keeps them.
  template <typename Work, typename P>
  bool add_all(std::vector<Work> P::* member) {
    P phase;
    for (size_t i = 0; i < operations_.size(); i++) {
      if (operations_[i].is<Work>() && is_ready(i)) {
        (phase.*member).push_back(std::get<Work>(operations_[i].work));
        take(i);
      }
    }
    cut(phase);
    return add(std::move(phase), !(phase.*member).empty());
  }

  bool add_other() {
    for (size_t i = 0; i < operations_.size(); i++) {
      if (!is_ready(i)) {
        continue;
      }
      take(i);
      const auto& work = operations_[i].work;
      if (const auto* attention = std::get_if<AttentionPhase>(&work)) {
        return add(*attention, true);
      }
      return add(std::get<NodePhase>(work), true);
    }
    return false;
  }

  bool add(Phase phase, bool is_filled) {
    if (is_filled) {
      phases_.push_back(std::move(phase));
    }
    return is_filled;
  }

  const std::vector<Operation>& operations_;
  std::vector<std::vector<size_t>> writers_;  // by buffer
  std::vector<int> phase_of_;                 // by operation
  size_t num_waiting_;
  std::vector<Phase> phases_;
};

int64_t place_temporaries(
    const std::vector<Operation>& operations, const std::vector<int>& phase_of,
    std::vector<Buffer>& buffers) {
  std::vector<Lifetime> lifetimes;
  for (const Buffer& b : buffers) {
    lifetimes.push_back({b.bytes, std::numeric_limits<int>::max(), -1});
  }
  for (size_t i = 0; i < operations.size(); i++) {
    const auto& op = operations[i];
    for (auto* used : {&op.reads, &op.gathers, &op.writes}) {
      for (int b : *used) {
        if (buffers[b].kind == Buffer::Kind::temporary) {
          lifetimes[b].first_use = std::min(lifetimes[b].first_use, phase_of[i]);
          lifetimes[b].last_use = std::max(lifetimes[b].last_use, phase_of[i]);
        }
      }
    }
  }
  auto plan = plan_memory(lifetimes);
  for (size_t b = 0; b < buffers.size(); b++) {
    buffers[b].offset = plan.offsets[b];
  }
  return plan.bytes;
}

}  // namespace

Phases make_phases(const std::vector<Operation>& operations, std::vector<Buffer>& buffers) {
  PhaseScheduler scheduler(operations, buffers.size());
  auto phases = scheduler.phases();
  return {std::move(phases), place_temporaries(operations, scheduler.phase_of(), buffers)};
}

}  // namespace mlx_paged::cpu
