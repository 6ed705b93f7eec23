// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "device_memory.h"

#include <algorithm>

namespace mlx_paged {

namespace {

constexpr int64_t kArenaAlignment = 256;

}  // namespace

Places place(const std::vector<Lifetime>& lifetimes) {
  struct Placed {
    int64_t begin, end;
    int first, last;
  };
  std::vector<Placed> placed;
  Places places{std::vector<int64_t>(lifetimes.size(), 0)};
  for (size_t i = 0; i < lifetimes.size(); i++) {
    const auto& life = lifetimes[i];
    if (life.last_use < life.first_use) {
      continue;
    }
    int64_t size = (int64_t(life.bytes) + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
    std::vector<Placed> beside;
    for (const auto& p : placed) {
      if (p.first <= life.last_use && life.first_use <= p.last) {
        beside.push_back(p);
      }
    }
    std::sort(beside.begin(), beside.end(), [](const Placed& a, const Placed& c) {
      return a.begin < c.begin;
    });
    int64_t at = 0;
    for (const auto& p : beside) {
      if (at + size <= p.begin) {
        break;
      }
      at = std::max(at, p.end);
    }
    placed.push_back({at, at + size, life.first_use, life.last_use});
    places.offsets[i] = at;
    places.bytes = std::max(places.bytes, uint64_t(at + size));
  }
  return places;
}

}  // namespace mlx_paged
