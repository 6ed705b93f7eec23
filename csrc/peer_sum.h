// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// All-reduce over the ranks of one machine, by a kernel that reads the memory of all their GPUs
// (cuda/kernels/peer_sum.h). Each is one launch, so captured steps include their all-reduces.

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
  std::vector<char*> buffers;  // [rank]: address in this process

  bool operator==(const PeerMemory&) const = default;
};

// in: x [...], floating-point or int32; rounds [kPeerBlocks] uint32, updated in place.
// out: the sum of all ranks' x, with the same bits on every rank.
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
    const auto& sum = static_cast<const PeerSum&>(other);
    return memory_ == sum.memory_ && patience_ == sum.patience_;
  }

 private:
  void check(const Arrays&) const override {}

  PeerMemory memory_;
  int patience_;
};

// From now on, all_sum uses the buffers of a group's ranks, which must be zero and stay mapped.
// Throws std::invalid_argument if no kernel supports the number of ranks.
void use_peer_memory(const mx::distributed::Group& group, PeerMemory memory);

// Sums the rank numbers through the buffers. Returns false if the result is wrong, as on machines
// where GPUs do not see each other's writes. Every rank must call it before its first sum.
bool try_peer_memory(const mx::distributed::Group& group);
// Returns a group to MLX's sums.
void forget_peer_memory(const mx::distributed::Group& group);

// Sums all ranks' x: with a PeerSum if the group has buffers and x fits (the same on every rank),
// otherwise with MLX.
mx::array all_sum(
    const mx::array& x, const mx::distributed::Group& group, mx::StreamOrDevice stream);

// --- Memory of this process's GPU (cuda/peer_memory.cpp). All throw std::runtime_error.

// Allocates a buffer of zeros. Never freed, because another rank may still read it.
char* make_peer_buffer();
// Returns the handle with which another process can map a buffer.
std::string peer_buffer_handle(char* buffer);
// Maps another process's buffer.
char* open_peer_buffer(const std::string& handle);

}  // namespace mlx_paged
