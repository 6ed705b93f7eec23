// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Memory that the GPUs of several ranks share, and the params of peer_sum. Plain C++ that nvcc
// reads too.
//
// Each rank has a buffer that all others map:
//
//   flags    [kPeerBlocks][kMaxPeers] uint32: the last round that each rank signaled
//   regions  [kPeerBlocks][2][kRegionBytes]: a block's data in even and in odd rounds

#pragma once

#include <cstdint>

namespace mlx_paged::cuda {

constexpr int kMaxPeers = 8;
constexpr int kPeerBlocks = 64;  // maximum grid of peer_sum
constexpr int kPeerThreads = 512;
constexpr int kPeerChunkBytes = 16;
constexpr int kRegionBytes = 64 << 10;
constexpr int64_t kFlagBytes = int64_t(kPeerBlocks) * kMaxPeers * sizeof(unsigned int);
constexpr int64_t kPeerBufferBytes = kFlagBytes + int64_t(kPeerBlocks) * 2 * kRegionBytes;
constexpr int64_t kMaxPeerSumBytes = int64_t(kPeerBlocks) * kRegionBytes;

struct PeerSumParams {
  char* buffers[kMaxPeers];  // of each rank, where this process has mapped them
  int rank;
  int num_chunks;  // kPeerChunkBytes each
  int is_divided;  // 1: each rank sums a part and shares it, instead of summing everything
  int patience;    // seconds after which the sum stops waiting for other ranks; 0: no limit
};
static_assert(sizeof(PeerSumParams) == 80, "the same for every compiler");

}  // namespace mlx_paged::cuda
