// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs CUDA kernels on the CPU: a block is a thread of the system, its threads are fibers that take
// turns, and what a warp or a block does together waits for all of them. A copy to shared memory
// happens as late as the kernel allows, or (`copies_at_once`) as early; both must give the same.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#undef __global__
#undef __device__
#undef __shared__
#undef __grid_constant__
#undef __launch_bounds__
#undef __align__
#define __global__
#define __device__
#define __shared__ __thread
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

namespace fibers {

constexpr int kSharedBytes = 227 * 1024;
constexpr int kMostThreads = 1024;
constexpr int kStackBytes = 96 << 10;
constexpr int kMaxBlocks = 8;  // of a cluster

inline bool copies_at_once = false;

// Whoever waits for the first wrong result sees its line at once.
inline const int prints_lines = std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);

inline void require(bool ok, const char* what) {
  if (!ok) {
    std::printf("not so: %s\n", what);
    std::fflush(stdout);
    std::_Exit(1);
  }
}

struct Copy {
  unsigned int to;
  const void* from;
  int size;
  int bytes;
};

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on: without the system's help, unlike swapcontext
  std::unique_ptr<char[]> stack;
  bool is_begun = false;
  bool done = false;
  std::vector<Copy> open;                // not committed
  std::deque<std::vector<Copy>> groups;  // committed
};

// Waits until `count` have come.
struct Meeting {
  int here = 0;
  int generation = 0;
};

struct Warp {
  Meeting meeting;
  char operands[32][64];
};

struct Cluster {
  explicit Cluster(int size) : size(size), barrier(size) {}
  int size;
  std::barrier<> barrier;
  unsigned char* shared[kMaxBlocks] = {};
};

struct Block {
  std::vector<Fiber> fibers;
  Warp warps[kMostThreads / 32];
  Meeting meeting;
  Meeting in_cluster;
  Meeting of_warps;  // some of the block's
  Cluster* cluster = nullptr;
  unsigned char* shared = nullptr;
  int limit = 0;  // of shared memory
  int current = 0;
  jmp_buf scheduler;
};

inline thread_local Block* block;

inline void yield() {
  if (_setjmp(block->fibers[block->current].place) == 0) {
    _longjmp(block->scheduler, 1);
  }
}

// Until it yields or ends.
inline __attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(block->scheduler) != 0) {
    return;
  }
  if (fiber.is_begun) {
    _longjmp(fiber.place, 1);
  }
  fiber.is_begun = true;
  setcontext(&fiber.context);
}

template <typename Last>
void meet(Meeting& meeting, int count, Last last) {
  int generation = meeting.generation;
  if (++meeting.here == count) {
    last();
    meeting.here = 0;
    meeting.generation++;
    return;
  }
  while (meeting.generation == generation) {
    yield();
  }
}

template <typename Operands, typename Compute>
void together_in_warp(Operands mine, Compute compute) {
  static_assert(sizeof(Operands) <= 64);
  Warp& warp = block->warps[block->current / 32];
  std::memcpy(warp.operands[block->current % 32], &mine, sizeof(mine));
  meet(warp.meeting, 32, [&] {
    Operands all[32];
    for (int i = 0; i < 32; i++) {
      std::memcpy(&all[i], warp.operands[i], sizeof(mine));
    }
    compute(all);
  });
}

template <typename V>
V& shared_at(unsigned int address) {
  require(address % sizeof(V) == 0, "addresses of shared memory are aligned");
  require(int(address + sizeof(V)) <= block->limit, "addresses lie in a block's shared memory");
  return *reinterpret_cast<V*>(block->shared + address);
}

template <typename V>
V& shared_of_rank(unsigned int address, int rank) {
  require(int(address + sizeof(V)) <= block->limit, "addresses lie in a block's shared memory");
  return *reinterpret_cast<V*>(block->cluster->shared[rank] + address);
}

inline void do_copy(const Copy& c) {
  std::memcpy(block->shared + c.to, c.from, c.bytes);
  std::memset(block->shared + c.to + c.bytes, 0, c.size - c.bytes);
}

inline void start_copy(unsigned int to, const void* from, int size, int bytes) {
  require(to % size == 0, "copies go to multiples of their size");
  require(reinterpret_cast<size_t>(from) % size == 0, "copies come from multiples of their size");
  require(int(to) + size <= block->limit, "copies go to a block's shared memory");
  Copy c{to, from, size, bytes};
  if (copies_at_once) {
    do_copy(c);
  } else {
    block->fibers[block->current].open.push_back(c);
  }
}

inline void commit_copies() {
  Fiber& f = block->fibers[block->current];
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}

inline void wait_for_copies(int pending) {
  Fiber& f = block->fibers[block->current];
  while (int(f.groups.size()) > pending) {
    for (const Copy& c : f.groups.front()) {
      do_copy(c);
    }
    f.groups.pop_front();
  }
}

inline void cluster_barrier() {
  meet(block->in_cluster, int(block->fibers.size()), [] {
    block->cluster->barrier.arrive_and_wait();
  });
}

}  // namespace fibers

namespace mlx_paged::cuda {

__thread unsigned char shared[fibers::kSharedBytes] __attribute__((aligned(128)));

}  // namespace mlx_paged::cuda

struct Position {
  int x, y, z;
};
inline thread_local Position threadIdx_;
inline thread_local Position blockIdx_;
inline Position gridDim_;
#define threadIdx threadIdx_
#define blockDim make_uint3(fibers::block->fibers.size(), 1, 1)
#define blockIdx blockIdx_
#define gridDim gridDim_

inline void __syncwarp() {
  fibers::together_in_warp(0, [](int*) {});
}

inline void __syncthreads() {
  fibers::meet(fibers::block->meeting, int(fibers::block->fibers.size()), [] {});
}

// Returns the v of lane `from` of the warp.
template <typename T>
T __shfl_sync(unsigned int, T v, int from) {
  struct Operand {
    T value;
    int from;
    T* to;
  };
  T to;
  fibers::together_in_warp(Operand{v, from, &to}, [](Operand* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      *lanes[lane].to = lanes[lanes[lane].from].value;
    }
  });
  return to;
}

template <typename T>
T __shfl_xor_sync(unsigned int lanes, T v, int mask) {
  return __shfl_sync(lanes, v, fibers::block->current % 32 ^ mask);
}

template <typename T>
T __shfl_up_sync(unsigned int lanes, T v, int apart) {
  int lane = fibers::block->current % 32;
  return __shfl_sync(lanes, v, lane >= apart ? lane - apart : lane);
}

inline unsigned int __reduce_or_sync(unsigned int, unsigned int v) {
  struct Operand {
    unsigned int from;
    unsigned int* to;
  };
  unsigned int to;
  fibers::together_in_warp(Operand{v, &to}, [](Operand* lanes) {
    unsigned int all = 0;
    for (int lane = 0; lane < 32; lane++) {
      all |= lanes[lane].from;
    }
    for (int lane = 0; lane < 32; lane++) {
      *lanes[lane].to = all;
    }
  });
  return to;
}

inline unsigned int __reduce_max_sync(unsigned int, unsigned int v) {
  struct Operand {
    unsigned int from;
    unsigned int* to;
  };
  unsigned int to;
  fibers::together_in_warp(Operand{v, &to}, [](Operand* lanes) {
    unsigned int most = 0;
    for (int lane = 0; lane < 32; lane++) {
      most = max(most, lanes[lane].from);
    }
    for (int lane = 0; lane < 32; lane++) {
      *lanes[lane].to = most;
    }
  });
  return to;
}

inline unsigned int __ballot_sync(unsigned int mask, bool v) {
  return __reduce_or_sync(mask, unsigned(v) << fibers::block->current % 32);
}

// Returns the lanes with the same v.
inline unsigned int __match_any_sync(unsigned int, int v) {
  struct Operand {
    int value;
    unsigned int* to;
  };
  unsigned int to;
  fibers::together_in_warp(Operand{v, &to}, [](Operand* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      unsigned int same = 0;
      for (int other = 0; other < 32; other++) {
        same |= unsigned(lanes[other].value == lanes[lane].value) << other;
      }
      *lanes[lane].to = same;
    }
  });
  return to;
}

// In shared memory, since threads of a block take turns.
inline unsigned int atomicAdd(unsigned int* at, unsigned int value) {
  unsigned int before = *at;
  *at += value;
  return before;
}

inline bool __any_sync(unsigned int mask, bool v) {
  return __reduce_or_sync(mask, v) != 0;
}

inline bool __all_sync(unsigned int mask, bool v) {
  return !__any_sync(mask, !v);
}

inline int __popc(unsigned int v) {
  return __builtin_popcount(v);
}

template <typename T>
T __ldcg(const T* from) {
  return *from;
}

inline int __ffs(int v) {
  return __builtin_ffs(v);
}

inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int which) {
  unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned int out = 0;
  for (int i = 0; i < 4; i++) {
    out |= static_cast<unsigned int>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return out;
}

inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int by) {
  unsigned long long both = low | static_cast<unsigned long long>(high) << 32;
  return static_cast<unsigned int>(both >> (by & 31));
}

// (Products and sums of 16 bits are exact in double.)
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  auto one = [](__half a, __half b, __half c) {
    return __float2half(float(double(float(a)) * float(b) + float(c)));
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}

inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  auto one = [](__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16(float(double(float(a)) * float(b) + float(c)));
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}

inline unsigned int __float_as_uint(float f) {
  unsigned int v;
  std::memcpy(&v, &f, 4);
  return v;
}

inline float __uint_as_float(unsigned int v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}

namespace fibers {

inline void start(unsigned int low, unsigned int high) {
  auto* body =
      reinterpret_cast<std::function<void()>*>(low | static_cast<unsigned long long>(high) << 32);
  (*body)();
  block->fibers[block->current].done = true;
  yield();
}

// One block, in an order of its threads that changes from turn to turn.
inline void run_block(
    int x, int y, int threads, int scratch, Cluster* cluster, std::function<void()> body) {
  Block b;
  block = &b;
  b.fibers.resize(threads);
  b.cluster = cluster;
  b.shared = mlx_paged::cuda::shared;
  b.limit = scratch;
  std::memset(b.shared, 0xff, kSharedBytes);  // NaN
  cluster->shared[x % cluster->size] = b.shared;
  cluster->barrier.arrive_and_wait();
  for (auto& f : b.fibers) {
    f.stack.reset(new char[kStackBytes]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = nullptr;
    auto address = reinterpret_cast<unsigned long long>(&body);
    makecontext(
        &f.context, reinterpret_cast<void (*)()>(start), 2, static_cast<unsigned int>(address),
        static_cast<unsigned int>(address >> 32));
  }
  blockIdx = {x, y, 0};
  unsigned int step = 1;
  for (int left = threads; left > 0;) {
    do {
      step = step * 5 % 8191;
    } while (std::gcd(step, unsigned(threads)) != 1);
    for (int i = 0; i < threads; i++) {
      b.current = int(i * step % threads);
      Fiber& f = b.fibers[b.current];
      if (f.done) {
        continue;
      }
      threadIdx = {b.current, 0, 0};
      resume(f);
      left -= f.done;
    }
  }
}

inline void run_grid(
    int x, int y, int threads, int scratch, int cluster_blocks, std::function<void()> body) {
  gridDim = {x, y, 1};
  for (int j = 0; j < y; j++) {
    for (int i = 0; i < x; i += cluster_blocks) {
      Cluster cluster(cluster_blocks);
      std::vector<std::thread> blocks;
      for (int rank = 0; rank < cluster_blocks; rank++) {
        blocks.emplace_back(
            [=, &cluster] { run_block(i + rank, j, threads, scratch, &cluster, body); });
      }
      for (auto& t : blocks) {
        t.join();
      }
    }
  }
}

}  // namespace fibers
