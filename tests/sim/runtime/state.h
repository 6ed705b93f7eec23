// Shared state of the simulator: tables of the compiled kernels, the launch in progress.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"
#include "metal_sim.h"
#include "tables.h"

namespace sim {

constexpr uint32_t kLanes = 32, kMaxThreads = 1024, kMaxThreadgroupBytes = 32768;

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t(x) * y * z; }
  Dim at(uint64_t i) const { return {uint32_t(i % x), uint32_t(i / x % y), uint32_t(i / x / y)}; }
};

// The memory that a barrier orders; the index of epochs.
enum Memory { kDevice = 0, kThreadgroup = 1 };

// A collective: a SIMD-group's, or a quad's.
struct Collective {
  uint32_t members = 0, arrived = 0, site = 0, first = 0;
  uint32_t parity = 0;  // a lane may reach the next operation before others have read this one
  alignas(64) char slots[2][kLanes][64];
};
struct SimdGroup {
  uint32_t epoch[2] = {0, 0};
  Collective whole, barrier, quads[8];
};

enum class Wait : uint8_t { kReady, kLanes, kSimdBarrier, kBarrier, kDone };
struct Thread : Fiber {
  uint32_t index = 0, site = 0;
  Wait wait = Wait::kReady;
};

// One launch; there is one at a time.
struct Launch {
  const MetalSimLaunch* args = nullptr;
  MetalSimReport* report = nullptr;
  void (*entry)() = nullptr;
  Dim grid, threads;
  uint32_t num_threads = 0;
  std::vector<uint32_t> order;  // of the threadgroups
  uint32_t run = 0;             // place in that order, from 1
  std::vector<bool> constants_defined;
  bool initialising = false;  // program-scope constants
};
extern Launch launch;

// The threadgroup that runs.
struct Group {
  Thread threads[kMaxThreads];
  SimdGroup simdgroups[kMaxThreads / kLanes];
  uint32_t epoch[2] = {0, 0};
  uint32_t barrier_arrived = 0, barrier_site = 0;
  std::vector<uint32_t> ready;
  uint32_t done = 0;
  Thread* current = nullptr;
  void* scheduler = nullptr;  // its stack pointer while a thread runs
};
extern Group group;

// Runs one threadgroup. False after a fault that ends the launch.
bool run_threadgroup();
uint64_t random_below(uint64_t bound);
void seed_random(uint64_t seed);

// --- Faults
// -----------------------------------------------------------------------------------------
std::string place(uint32_t site);
std::string thread_name(uint32_t thread, uint32_t run);
// Reported once for a kind at a pair of lines.
void fault(const char* kind, uint32_t site, uint32_t other_site, const std::string& text);
// Also ends the launch; called from a thread.
[[noreturn]] void fatal(const char* kind, uint32_t site, const std::string& text);
void clear_faults();
bool is_fatal();

}  // namespace sim
