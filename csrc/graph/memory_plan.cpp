// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "memory_plan.h"

#include <algorithm>
#include <numeric>

namespace mlx_paged {

MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes) {
  constexpr int64_t kAlignment = 256;
  struct Range {
    int64_t begin, end;
    int last_use;
  };
  std::vector<size_t> order;
  for (size_t i = 0; i < lifetimes.size(); i++) {
    if (lifetimes[i].last_use >= lifetimes[i].first_use) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return lifetimes[a].first_use < lifetimes[b].first_use;
  });
  MemoryPlan plan{std::vector<int64_t>(lifetimes.size(), 0)};
  std::vector<Range> used;  // by begin
  for (size_t i : order) {
    const auto& life = lifetimes[i];
    std::erase_if(used, [&](const Range& r) { return r.last_use < life.first_use; });
    int64_t size = (life.bytes + kAlignment - 1) / kAlignment * kAlignment;
    int64_t at = 0;
    auto next = used.begin();
    for (; next != used.end() && at + size > next->begin; ++next) {
      at = next->end;
    }
    used.insert(next, {at, at + size, life.last_use});
    plan.offsets[i] = at;
    plan.bytes = std::max(plan.bytes, at + size);
  }
  return plan;
}

}  // namespace mlx_paged
