// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "parallel_for.h"
#include "scratch.h"

namespace mlx_paged::cpu {

namespace {

constexpr int kAlign = 16;     // columns: whole vectors and cache lines
constexpr int kMaxRows = 64;   // rows at a time, so that the gathered x stays in cache
constexpr int64_t kFixed = 8;  // rows that take as long as reading the weights

// Computes columns [begin, end) of one expert for `count` of its pairs.
class Block {
 public:
  Block(const ExpertArgs& args, int expert, const int* pairs, int count, int begin, int end)
      : args_(args), expert_(expert), pairs_(pairs), count_(count), begin_(begin), end_(end) {}

  void run() {
    int64_t width = end_ - begin_;
    int k = args_.weights.all.k;
    int64_t gathered = count_ > 1 ? int64_t(count_) * k : 0;
    int64_t product = count_ * width;
    float* scratch = thread_scratch(gathered + (args_.up ? 2 : 1) * product);
    const float* x = x_of(pairs_[0]);
    if (count_ > 1) {
      for (int i = 0; i < count_; i++) {
        std::memcpy(scratch + int64_t(i) * k, x_of(pairs_[i]), k * sizeof(float));
      }
      x = scratch;
    }
    float* out = scratch + gathered;
    multiply(args_.weights, x, out);
    if (args_.up) {
      multiply(*args_.up, x, out + product);
    }
    for (int i = 0; i < count_; i++) {
      float* to = args_.out + int64_t(pairs_[i]) * args_.weights.n() + begin_;
      if (args_.up) {
        SiluMulArgs silu{DType::float32, out + i * width, out + product + i * width, to};
        kernels().layer.silu_mul(silu, 0, width);
      } else {
        std::memcpy(to, out + i * width, width * sizeof(float));
      }
    }
  }

 private:
  const float* x_of(int pair) const {
    return args_.x + pair / args_.per_row * args_.x_row_stride +
           pair % args_.per_row * args_.x_pair_stride;
  }

  void multiply(const ExpertWeights& w, const float* x, float* out) const {
    int64_t width = end_ - begin_;
    int64_t row = int64_t(expert_) * w.n() + begin_;
    kernels().product.few_rows(
        {x, w.all.from_row(row), out, count_, int64_t(w.all.k), width}, 0, width);
    for (int64_t i = 0; w.scales && i < count_ * width; i++) {
      out[i] *= w.scales[expert_];
    }
    for (int i = 0; w.bias && i < count_; i++) {
      for (int64_t j = 0; j < width; j++) {
        out[i * width + j] += w.bias[row + j];
      }
    }
  }

  const ExpertArgs& args_;
  int expert_;
  const int* pairs_;
  int count_;
  int begin_, end_;
};

}  // namespace

void ExpertGroups::assign(const ExpertArgs& args) {
  assign(args.weights.num_experts, args.num_rows, args.per_row, [&](int row, int i) {
    return args.indices[row * args.index_row_stride + i];
  });
}

int expert_shares(const ExpertArgs& args) {
  constexpr int64_t kMinWeights = 1 << 13;
  constexpr int kSharesPerThread = 8;
  int64_t active = std::min(args.num_pairs(), args.weights.num_experts);
  int64_t weights = active * args.weights.n() * args.weights.all.k * (args.up ? 2 : 1);
  return int(std::clamp<int64_t>(weights / kMinWeights, 1, kSharesPerThread * num_threads()));
}

void run_experts(const ExpertArgs& args, const ExpertGroups& groups, int share, int num_shares) {
  int n = args.weights.n();
  if (share == 0) {
    for (int pair : groups.without()) {
      std::fill_n(args.out + int64_t(pair) * n, n, std::nanf(""));
    }
  }
  // Each share takes units of kAlign columns in each group, chosen by their position in the total
  // work.
  int64_t units = (n + kAlign - 1) / kAlign;
  auto unit_work = [](const ExpertGroups::Group& g) { return kFixed + g.end - g.begin; };
  int64_t work = 0;
  for (const auto& g : groups.groups()) {
    work += units * unit_work(g);
  }
  int64_t first = work * share / num_shares;
  int64_t last = work * (share + 1) / num_shares;
  int64_t at = 0;  // start of the group's work
  for (const auto& g : groups.groups()) {
    int64_t unit_cost = unit_work(g);
    auto units_before = [&](int64_t point) {
      return std::clamp<int64_t>((point - at + unit_cost - 1) / unit_cost, 0, units);
    };
    int begin = int(units_before(first) * kAlign);
    int end = std::min(n, int(units_before(last) * kAlign));
    for (int i = g.begin; begin < end && i < g.end; i += kMaxRows) {
      int count = std::min(kMaxRows, g.end - i);
      Block(args, g.expert, groups.pairs().data() + i, count, begin, end).run();
    }
    at += units * unit_cost;
  }
}

void run_experts(const ExpertArgs& args, int share, int num_shares) {
  thread_local ExpertGroups groups;
  groups.assign(args);
  run_experts(args, groups, share, num_shares);
}

}  // namespace mlx_paged::cpu
