// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011), the generator of mx.random. The CPU's kernels include this file too, with vectors for U,
// so that a seed has the same numbers everywhere.

#pragma once

namespace paged {

template <typename U>
struct RandomPair {
  U first;
  U second;
};

template <int BITS, typename U>
constexpr RandomPair<U> threefry_round(RandomPair<U> x) {
  x.first += x.second;
  x.second = (x.second << BITS | x.second >> (32 - BITS)) ^ x.first;
  return x;
}

template <int A, int B, int C, int D, typename U>
constexpr RandomPair<U> threefry_rounds(RandomPair<U> x, unsigned key_0, unsigned key_1) {
  x = threefry_round<A>(x);
  x = threefry_round<B>(x);
  x = threefry_round<C>(x);
  x = threefry_round<D>(x);
  x.first += key_0;
  x.second += key_1;
  return x;
}

// Random bits of a counter.
template <typename U>
constexpr RandomPair<U> threefry(unsigned key_0, unsigned key_1, RandomPair<U> counter) {
  unsigned key_2 = key_0 ^ key_1 ^ 0x1bd11bdau;
  counter.first += key_0;
  counter.second += key_1;
  counter = threefry_rounds<13, 15, 26, 6>(counter, key_1, key_2 + 1);
  counter = threefry_rounds<17, 29, 16, 24>(counter, key_2, key_0 + 2);
  counter = threefry_rounds<13, 15, 26, 6>(counter, key_0, key_1 + 3);
  counter = threefry_rounds<17, 29, 16, 24>(counter, key_1, key_2 + 4);
  return threefry_rounds<13, 15, 26, 6>(counter, key_2, key_0 + 5);
}

}  // namespace paged
