// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "peer_sum.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "mlx/distributed/ops.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "validate.h"

namespace mlx_paged {

namespace {

// Above this total size of all ranks' arrays, each rank sums only a part: less to read, but two
// waits. With two ranks there is nothing to save.
constexpr int64_t kDividedBytes = 2 << 20;

struct Peers {
  PeerMemory memory;
  mx::array rounds;
};

// Keyed by the address of MLX's group, which is kept alive so that no other one can reuse it. Never
// destroyed, because CUDA may be torn down before static objects are.
std::map<const void*, std::pair<mx::distributed::Group, Peers>>& peers() {
  static auto* all = new std::map<const void*, std::pair<mx::distributed::Group, Peers>>;
  return *all;
}

std::mutex peers_mutex;

bool is_added(mx::Dtype dtype) {
  return dtype == mx::int32 || is_supported(dtype);
}

bool fits(const mx::array& x) {
  return is_added(x.dtype()) && x.nbytes() > 0 && x.nbytes() % cuda::kPeerChunkBytes == 0 &&
         int64_t(x.nbytes()) <= cuda::kMaxPeerSumBytes;
}

}  // namespace

void PeerSum::eval_cpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[peer_sum] runs on NVIDIA GPUs only");
}

LaunchList PeerSum::launches(const Arrays& in, const Arrays&, Gpu) const {
  const auto& x = in[0];
  const auto ranks = int64_t(memory_.buffers.size());
  cuda::PeerSumParams params{};
  std::copy(memory_.buffers.begin(), memory_.buffers.end(), params.buffers);
  params.rank = memory_.rank;
  params.num_chunks = int(x.nbytes() / cuda::kPeerChunkBytes);
  params.patience = patience_;
  params.is_divided = ranks > 2 && ranks * int64_t(x.nbytes()) > kDividedBytes;
  Launch launch;
  std::string dtype = x.dtype() == mx::int32 ? "int32" : name_of(dtype_of(x.dtype()));
  launch.kernel.host_name = "peer_sum_" + dtype + "_" + std::to_string(ranks);
  launch.buffers = {
      {0, Access::read, uint64_t(x.nbytes())},
      {1, Access::read_write, uint64_t(in[1].nbytes())},
      {2, Access::write, uint64_t(x.nbytes())}};
  launch.constants = bytes_of(params);
  uint32_t blocks = div_up(params.num_chunks, cuda::kPeerThreads);
  launch.grid = {std::min<uint32_t>(blocks, cuda::kPeerBlocks), 1, 1};
  launch.threadgroup = {cuda::kPeerThreads, 1, 1};
  return {{launch}, {}};
}

void use_peer_memory(const mx::distributed::Group& group, PeerMemory memory) {
  Validator v("use_peer_memory");
  int size = group.size();
  v.require(size == 2 || size == 4 || size == 8, "the size of the group", "2, 4 or 8", size);
  v.require(
      int(memory.buffers.size()) == size, "the number of buffers", size, memory.buffers.size());
  v.require(memory.rank == group.rank(), "the rank", group.rank(), memory.rank);
  mx::array rounds = mx::zeros({cuda::kPeerBlocks}, mx::uint32);
  rounds.eval();
  std::lock_guard lock(peers_mutex);
  peers().insert_or_assign(
      group.raw_group().get(), std::pair(group, Peers{std::move(memory), std::move(rounds)}));
}

bool try_peer_memory(const mx::distributed::Group& group) {
  constexpr int kSize = cuda::kPeerBlocks * cuda::kPeerThreads * 4;  // a chunk for each thread
  constexpr int kPatience = 10;
  std::lock_guard lock(peers_mutex);
  const auto& [memory, rounds] = peers().at(group.raw_group().get()).second;
  auto stream = mx::default_stream(mx::Device::gpu);
  auto numbers = mx::arange(kSize, mx::int32, stream);
  auto x = mx::multiply(numbers, mx::array(memory.rank + 1), stream);
  auto node = std::make_shared<PeerSum>(stream, memory, kPatience);
  mx::array sum(x.shape(), x.dtype(), std::move(node), {x, rounds});
  int size = group.size();
  auto expected = mx::multiply(numbers, mx::array(size * (size + 1) / 2), stream);
  return mx::array_equal(sum, expected, stream).item<bool>();
}

void forget_peer_memory(const mx::distributed::Group& group) {
  std::lock_guard lock(peers_mutex);
  peers().erase(group.raw_group().get());
}

mx::array all_sum(const mx::array& x, const mx::distributed::Group& group, mx::StreamOrDevice s) {
  std::unique_lock lock(peers_mutex);
  auto found = peers().find(group.raw_group().get());
  if (found == peers().end() || !fits(x)) {
    lock.unlock();
    return mx::distributed::all_sum(x, group, s);
  }
  const auto& [memory, rounds] = found->second.second;
  auto node = std::make_shared<PeerSum>(mx::to_stream(s), memory);
  return mx::array(x.shape(), x.dtype(), std::move(node), {x, rounds});
}

}  // namespace mlx_paged
