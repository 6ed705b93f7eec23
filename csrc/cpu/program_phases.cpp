// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "program_phases.h"

#include <algorithm>

#include "kernels.h"
#include "parallel_for.h"

namespace mlx_paged::cpu {

namespace {

// Pieces of a size that keeps all threads busy to the end.
void cut(ProductPhase& phase) {
  constexpr int64_t kLeastWeights = 1 << 13;
  constexpr int64_t kMostWork = 1 << 19;  // weights times rows
  constexpr int kPiecesPerThread = 8;
  constexpr int kAlign = 16;  // whole vectors and cache lines
  auto column_size = [](const Product& p) { return int64_t(p.main.weight.k) * (p.up ? 2 : 1); };
  int64_t weights = 0;
  int64_t rows = 1;
  for (const Product& p : phase.products) {
    weights += p.main.weight.n * column_size(p);
    rows = std::max(rows, p.out.rows());
  }
  // With few rows a piece is long: kernels prefetch past its end, into another thread's piece.
  int64_t most = std::max(kMostWork / rows, 8 * kLeastWeights);
  int64_t piece = std::clamp(weights / (kPiecesPerThread * num_threads()), kLeastWeights, most);
  for (size_t i = 0; i < phase.products.size(); i++) {
    const Product& p = phase.products[i];
    bool uses_tiles = p.main.integers && p.main.integers->uses_tiles(int(p.out.rows()));
    int64_t align = uses_tiles ? kIntegerTileColumns : kAlign;
    int each = int(std::max<int64_t>(1, piece / column_size(p) / align) * align);
    int n = p.main.weight.n;
    for (int begin = 0; begin < n; begin += each) {
      phase.pieces.push_back({int(i), begin, std::min(n, begin + each)});
    }
  }
}

void cut(ExpertPhase& phase) {
  for (size_t i = 0; i < phase.products.size(); i++) {
    int shares = expert_shares(phase.products[i].args);
    for (int share = 0; share < shares; share++) {
      phase.pieces.push_back({int(i), share, shares});
    }
  }
}

class PhaseMaker {
 public:
  PhaseMaker(std::vector<Operation>& operations, std::vector<Buffer>& buffers)
      : operations_(operations), buffers_(buffers), phase_of_(operations.size()) {}

  Phases make() {
    schedule();
    place_temporaries();
    return std::move(made_);
  }

 private:
  void schedule() {
    std::vector<std::vector<int>> writers(buffers_.size());
    auto& ops = operations_;
    for (size_t i = 0; i < ops.size(); i++) {
      for (int b : ops[i].writes) {
        writers[b].push_back(int(i));
      }
    }
    // True if all that wrote a buffer before operation i in the graph's order is done; `here`: or
    // is part of the phase that is being put together.
    std::vector<char> in_phase(ops.size());
    auto is_ready = [&](size_t i, bool rows) {
      auto written = [&](int b, bool here) {
        return std::all_of(writers[b].begin(), writers[b].end(), [&](int w) {
          return w >= int(i) || ops[w].done || (here && in_phase[w]);
        });
      };
      return std::all_of(
                 ops[i].reads.begin(), ops[i].reads.end(),
                 [&](int b) { return written(b, rows); }) &&
             std::all_of(ops[i].gathers.begin(), ops[i].gathers.end(), [&](int b) {
               return written(b, false);
             });
    };
    size_t num_done = 0;
    auto finish = [&](const std::vector<size_t>& members) {
      for (size_t i : members) {
        ops[i].done = true;
        in_phase[i] = false;
        phase_of_[i] = int(made_.phases.size()) - 1;
      }
      num_done += members.size();
    };
    while (num_done < ops.size()) {
      std::vector<size_t> members;
      int64_t rows = 0;
      for (size_t i = 0; i < ops.size(); i++) {
        if (!ops[i].done && ops[i].kind == Operation::Kind::rows &&
            (rows == 0 || ops[i].rows == rows) && is_ready(i, true)) {
          rows = ops[i].rows;
          in_phase[i] = true;
          members.push_back(i);
        }
      }
      if (!members.empty()) {
        RowPhase phase{rows, {}};
        for (size_t i : members) {
          phase.tasks.push_back(ops[i].task);
        }
        made_.phases.emplace_back(std::move(phase));
        finish(members);
        continue;
      }
      auto add_products = [&](auto phase, Operation::Kind kind, auto product_of) {
        for (size_t i = 0; i < ops.size(); i++) {
          if (!ops[i].done && ops[i].kind == kind && is_ready(i, false)) {
            members.push_back(i);
            phase.products.push_back(product_of(ops[i]));
          }
        }
        if (members.empty()) {
          return false;
        }
        cut(phase);
        made_.phases.emplace_back(std::move(phase));
        finish(members);
        return true;
      };
      if (add_products(
              ProductPhase{}, Operation::Kind::product,
              [](const Operation& op) { return *op.product; }) ||
          add_products(ExpertPhase{}, Operation::Kind::experts, [](const Operation& op) {
            return *op.experts;
          })) {
        continue;
      }
      for (size_t i = 0; i < ops.size() && members.empty(); i++) {
        if (!ops[i].done && is_ready(i, false)) {
          members.push_back(i);
        }
      }
      require(!members.empty(), "operations that wait for each other");
      const Operation& next = ops[members[0]];
      if (next.kind == Operation::Kind::attention) {
        made_.phases.emplace_back(*next.attention);
      } else {
        made_.phases.emplace_back(*next.node);
      }
      finish(members);
    }
  }

  // Temporaries that are not needed at the same time share memory.
  void place_temporaries() {
    struct Life {
      int first = -1, last = -1;
    };
    std::vector<Life> lives(buffers_.size());
    for (size_t i = 0; i < operations_.size(); i++) {
      const auto& op = operations_[i];
      for (auto* buffers : {&op.reads, &op.gathers, &op.writes}) {
        for (int b : *buffers) {
          auto& life = lives[b];
          int phase = phase_of_[i];
          life.first = life.first < 0 ? phase : std::min(life.first, phase);
          life.last = std::max(life.last, phase);
        }
      }
    }
    struct Range {
      int64_t begin, end;
      int last;
    };
    std::vector<int> order;
    for (size_t b = 0; b < buffers_.size(); b++) {
      if (buffers_[b].kind == Buffer::Kind::temporary && lives[b].first >= 0) {
        order.push_back(int(b));
      }
    }
    std::stable_sort(
        order.begin(), order.end(), [&](int a, int b) { return lives[a].first < lives[b].first; });
    std::vector<Range> used;  // by begin
    for (int b : order) {
      std::erase_if(used, [&](const Range& r) { return r.last < lives[b].first; });
      constexpr int64_t kLine = 64;
      int64_t bytes = (buffers_[b].bytes + kLine - 1) / kLine * kLine;
      int64_t at = 0;
      for (const Range& r : used) {
        if (at + bytes <= r.begin) {
          break;
        }
        at = std::max(at, r.end);
      }
      used.insert(
          std::lower_bound(
              used.begin(), used.end(), at, [](const Range& r, int64_t x) { return r.begin < x; }),
          {at, at + bytes, lives[b].last});
      buffers_[b].offset = at;
      made_.temporary_bytes = std::max(made_.temporary_bytes, at + bytes);
    }
  }

  std::vector<Operation>& operations_;
  std::vector<Buffer>& buffers_;
  std::vector<int> phase_of_;  // each operation
  Phases made_;
};

}  // namespace

Phases make_phases(std::vector<Operation>& operations, std::vector<Buffer>& buffers) {
  return PhaseMaker(operations, buffers).make();
}

}  // namespace mlx_paged::cpu
