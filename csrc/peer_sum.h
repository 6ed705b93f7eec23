// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Sums over the ranks of a group on one machine, by a kernel that reads the memory of all their
// GPUs (cuda/kernels/peer_sum.h). It is one launch of a step, so a captured step contains its sums.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/peer_shape.h"
#include "mlx/distributed/distributed.h"
#include "primitives.h"

namespace mlx_paged {

// The buffers of a group's ranks (cuda/peer_shape.h).
struct PeerMemory {
  int rank;
  std::vector<char*> buffers;  // of each rank, where this process has mapped them

  bool operator==(const PeerMemory&) const = default;
};

// in: x [...], of floats, and rounds [kPeerBlocks] uint32, which it changes in place. out: the sum
// of all ranks' x, with the same bits on every rank.
class PeerSum : public KernelNode {
 public:
  // patience: see cuda::PeerSumParams.
  PeerSum(mx::Stream stream, PeerMemory memory, int patience = 0)
      : KernelNode(stream), memory_(std::move(memory)), patience_(patience) {}
  void eval_cpu(const Arrays& in, Arrays& out) override;  // throws
  const char* name() const override { return "peer_sum"; }
  LaunchList launches(const Arrays& in, const Arrays& out, Gpu gpu) const override;
  Pools pools(const Arrays&) const override { return {0, 0, false}; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return {in[0].shape()}; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return memory_ == static_cast<const PeerSum&>(other).memory_;
  }

 private:
  void check(const Arrays&) const override {}

  PeerMemory memory_;
  int patience_;
};

// Lets all_sum use the buffers of a group's ranks from now on. They must stay mapped, and all zeros
// at first. Throws std::invalid_argument for a number of ranks that no kernel serves.
void use_peer_memory(const mx::distributed::Group& group, PeerMemory memory);

// Adds up the ranks' numbers in such memory; returns false if the sum is wrong, as where GPUs do
// not see each other's writes. Every rank must call it before its first sum.
bool try_peer_memory(const mx::distributed::Group& group);
// Leaves the sums of a group to MLX again.
void forget_peer_memory(const mx::distributed::Group& group);

// The sum of all ranks' x: a PeerSum if the group has such memory and the sum fits, which is the
// same on every rank, else MLX's own.
mx::array all_sum(
    const mx::array& x, const mx::distributed::Group& group, mx::StreamOrDevice stream);

// --- Memory of this process's GPU (cuda/peer_memory.cpp). All throw std::runtime_error.

// Makes a buffer of zeros, which lives as long as the process, as another rank may still read it.
char* make_peer_buffer();
// Returns what another process needs to map it.
std::string peer_buffer_handle(char* buffer);
// Maps the buffer of another process.
char* open_peer_buffer(const std::string& handle);

}  // namespace mlx_paged
