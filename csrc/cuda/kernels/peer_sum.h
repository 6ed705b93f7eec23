// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// peer_sum: all-reduce of an array through memory that the ranks' GPUs share (peer_shape.h).
//
// Block b of each rank cooperates with block b of every other rank on the same part of the array,
// in rounds: it writes its region, stores the round's number in every rank's flags, waits until all
// ranks have stored theirs, and reads their regions. The number of a block's rounds stays in device
// memory, so that a captured launch can be replayed.
//
// Regions alternate. A rank rewrites a region two rounds later, when all ranks have signaled the
// round in between, and so have finished reading it. All ranks must launch the same sums in the
// same order.
//
// Every rank adds the same values in the order of ranks, so all ranks get the same bits.

#pragma once

#include "../peer_shape.h"
#include "dependent_launch.h"
#include "system_flags.h"
#include "vector_load.h"

namespace mlx_paged::cuda {

// Adds chunks of T in their order, in fp32, and rounds once.
template <typename T, int RANKS>
__device__ __forceinline__ uint4 sum_of(const uint4 (&chunks)[RANKS], T zero) {
  constexpr int CHUNK = paged::chunk_size<T>();
  float sums[CHUNK];
  paged::unpack(chunks[0], sums, zero);
#pragma unroll
  for (int rank = 1; rank < RANKS; rank++) {
    float values[CHUNK];
    paged::unpack(chunks[rank], values, zero);
#pragma unroll
    for (int e = 0; e < CHUNK; e++) {
      sums[e] += values[e];
    }
  }
  return paged::pack(sums, zero);
}

template <int RANKS>
__device__ __forceinline__ uint4 sum_of(const uint4 (&chunks)[RANKS], int) {
  uint4 sums = chunks[0];
#pragma unroll
  for (int rank = 1; rank < RANKS; rank++) {
    sums.x += chunks[rank].x;
    sums.y += chunks[rank].y;
    sums.z += chunks[rank].z;
    sums.w += chunks[rank].w;
  }
  return sums;
}

// One block's view of the buffers of all ranks.
template <int RANKS>
struct PeerBlock {
  const PeerSumParams& params;
  int block;
  unsigned int round;  // the last one signaled, or the one being written

  __device__ __forceinline__ uint4* region(int rank) const {
    int64_t index = int64_t(block) * 2 + round % 2;
    return reinterpret_cast<uint4*>(params.buffers[rank] + kFlagBytes + index * kRegionBytes);
  }

  __device__ __forceinline__ unsigned int* flag(int of, int from) const {
    return reinterpret_cast<unsigned int*>(params.buffers[of]) + block * kMaxPeers + from;
  }

  // Begins a round and returns this rank's region.
  __device__ __forceinline__ uint4* begin_round() {
    round++;
    return region(params.rank);
  }

  // Signals that this rank's region is complete, and waits for all other ranks.
  __device__ __forceinline__ void exchange() const {
    __syncthreads();
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) {
      show_flag(flag(rank, params.rank), round);
    }
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) {
      wait_for_flag(flag(params.rank, rank), round, params.patience);
    }
    __syncthreads();
  }

  // Writes chunks [begin, end) of the sum of all regions of this round, several loads at a time.
  template <typename T, typename Write>
  __device__ __forceinline__ void sum(int begin, int end, Write write) const {
    constexpr int AT_ONCE = 8 / RANKS;
    const int threads = blockDim.x;
    for (int first = begin + threadIdx.x; first < end; first += threads * AT_ONCE) {
      uint4 chunks[AT_ONCE][RANKS];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        if (const int i = first + n * threads; i < end) {
#pragma unroll
          for (int rank = 0; rank < RANKS; rank++) {
            chunks[n][rank] = region(rank)[i];
          }
        }
      }
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        if (const int i = first + n * threads; i < end) {
          write(i, sum_of(chunks[n], T(0)));
        }
      }
    }
  }
};

// Copies chunks [0, count), several loads at a time.
template <typename Read>
__device__ __forceinline__ void copy_chunks(int count, Read read, uint4* to) {
  constexpr int AT_ONCE = 4;
  const int threads = blockDim.x;
  for (int first = threadIdx.x; first < count; first += threads * AT_ONCE) {
    uint4 chunks[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      if (const int i = first + n * threads; i < count) {
        chunks[n] = read(i);
      }
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      if (const int i = first + n * threads; i < count) {
        to[i] = chunks[n];
      }
    }
  }
}

// rounds: [kPeerBlocks], zeros at first; only this kernel writes it. x and out may be the same.
template <typename T, int RANKS>
__device__ __forceinline__ void peer_sum(
    const uint4* x, unsigned int* rounds, uint4* out, const PeerSumParams& params) {
  PeerBlock<RANKS> peers{params, int(blockIdx.x), rounds[blockIdx.x]};
  const int share = (params.num_chunks + gridDim.x - 1) / gridDim.x;
  const int first = min(int(blockIdx.x) * share, params.num_chunks);
  const int count = min(share, params.num_chunks - first);
  x += first;
  out += first;

  uint4* shown = peers.begin_round();
  copy_chunks(count, [=](int i) { return x[i]; }, shown);
  peers.exchange();
  if (!params.is_divided) {
    peers.template sum<T>(0, count, [=](int i, uint4 chunk) { out[i] = chunk; });
  } else {
    const int part = (count + RANKS - 1) / RANKS;
    const int begin = min(params.rank * part, count);
    const int end = min(begin + part, count);
    const PeerBlock<RANKS> parts = peers;
    uint4* sums = peers.begin_round();
    parts.template sum<T>(begin, end, [=](int i, uint4 chunk) { sums[i] = chunk; });
    peers.exchange();
    copy_chunks(count, [&](int i) { return peers.region(i / part)[i]; }, out);
  }
  if (threadIdx.x == 0) {
    rounds[blockIdx.x] = peers.round;
  }
}

}  // namespace mlx_paged::cuda
