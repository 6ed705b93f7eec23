// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The kernel of peer_sum.h (csrc/cuda/kernels) on the CPU (fibers.h): each rank is a thread that
// runs the same sums, against sums in float in the order of ranks. Prints a line for each failure,
// and how many results were compared.

#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "portable_kernels.h"

#undef gridDim
inline thread_local int num_blocks;  // of the grid that runs
using Thread = std::thread;          // which is a word of Metal's language
#define gridDim make_uint3(num_blocks, 1, 1)

#include <metal_stdlib>

#include "kernels/peer_sum.h"

namespace {

using namespace mlx_paged::cuda;

constexpr int kThreads = 32;
constexpr int kMaxGrid = 5;

struct Call {
  int num_chunks;
  int grid;
  bool is_divided;
};

template <typename T, int RANKS>
struct Ranks {
  static constexpr int kWidth = 16 / int(sizeof(T));

  std::array<std::unique_ptr<char, void (*)(void*)>, RANKS> buffers = make_buffers();
  std::vector<Call> calls;
  std::vector<std::vector<T>> parts[RANKS];  // by call
  std::atomic<int> wrong = 0;

  static auto make_buffers() {
    auto make = [](auto... i) {
      return std::array{
          ((void)i, std::unique_ptr<char, void (*)(void*)>(
                        static_cast<char*>(std::calloc(1, kPeerBufferBytes)), std::free))...};
    };
    return std::apply(make, std::array<int, RANKS>{});
  }

  explicit Ranks(int num_calls) {
    std::mt19937 rng(RANKS);
    std::normal_distribution<float> normal;
    for (int i = 0; i < num_calls; i++) {
      int grid = 1 + int(rng() % kMaxGrid);
      calls.push_back({1 + int(rng() % 200), grid, rng() % 2 == 0});
      for (auto& of_rank : parts) {
        of_rank.emplace_back(calls.back().num_chunks * kWidth);
        for (T& value : of_rank.back()) {
          value = T(normal(rng) * (1 + rng() % 1000));
        }
      }
    }
  }

  // Rounds begin where their number wraps around soon.
  void run_rank(int rank) {
    constexpr unsigned int kFirst = 0xfffffff8;
    unsigned int rounds[kPeerBlocks];
    std::fill_n(rounds, kPeerBlocks, kFirst);
    PeerSumParams params{};
    for (int r = 0; r < RANKS; r++) {
      params.buffers[r] = buffers[r].get();
    }
    params.rank = rank;
    for (size_t i = 0; i < calls.size(); i++) {
      params.num_chunks = calls[i].num_chunks;
      params.is_divided = calls[i].is_divided;
      // In the place of its input now and then, as the kernel allows.
      std::vector<T> x = parts[rank][i], out(x.size());
      std::memset(out.data(), 0xff, out.size() * sizeof(T));
      T* to = i % 3 == 0 ? x.data() : out.data();
      fibers::run_grid(calls[i].grid, 1, kThreads, 64, 1, [&] {
        num_blocks = calls[i].grid;
        peer_sum<T, RANKS>(
            reinterpret_cast<const uint4*>(x.data()), rounds, reinterpret_cast<uint4*>(to), params);
      });
      compare(i, rank, to);
    }
  }

  void compare(size_t call, int rank, const T* found) {
    for (size_t i = 0; i < parts[0][call].size(); i++) {
      using Sum = std::conditional_t<std::is_same_v<T, int>, int, float>;
      Sum sum(parts[0][call][i]);
      for (int r = 1; r < RANKS; r++) {
        sum += Sum(parts[r][call][i]);
      }
      T expected(sum);
      if (std::memcmp(&found[i], &expected, sizeof(T)) != 0 && wrong++ == 0) {
        std::printf(
            "%d ranks: rank %d has %g at %d of call %d in place of %g\n", RANKS, rank,
            float(found[i]), int(i), int(call), float(expected));
      }
    }
  }

  void check() {
    for (auto& buffer : buffers) {
      auto* flags = reinterpret_cast<unsigned int*>(buffer.get());
      std::fill_n(flags, kPeerBlocks * kMaxPeers, 0xfffffff8);
    }
    std::vector<Thread> ranks;
    for (int rank = 0; rank < RANKS; rank++) {
      ranks.emplace_back([this, rank] { run_rank(rank); });
    }
    for (auto& rank : ranks) {
      rank.join();
    }
    for (const auto& part : parts[0]) {
      compared += RANKS * int(part.size());
    }
    failed += wrong;
  }
};

template <typename T, int... RANKS>
void check(int num_calls) {
  (std::make_unique<Ranks<T, RANKS>>(num_calls * 4 / (RANKS < 4 ? 4 : RANKS))->check(), ...);
}

}  // namespace

int main() {
  // (To compile a kernel takes longer than to run it.)
  check<__nv_bfloat16, 2, 4, 8>(60);
  check<half, 2>(20);
  check<float, 4>(20);
  check<int, 8>(20);
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
