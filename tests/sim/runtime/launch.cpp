// metal_sim_launch: checks what is asked for, binds it, runs every threadgroup, reports.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <tuple>

#include "memory.h"
#include "state.h"

namespace sim {
namespace {

std::mutex one_launch;
std::set<std::tuple<std::string, uint32_t, uint32_t>> seen;
std::string faults;
uint32_t num_faults;
bool ended;
constexpr uint32_t kMaxFaults = 20;

}  // namespace

std::string place(uint32_t site) {
  const SimSite& s = sim_sites[site];
  std::string text =
      std::string(s.file) + ":" + std::to_string(s.line) + ":" + std::to_string(s.column);
  if (*s.operation) text += std::string(" (") + s.operation + ")";
  return text + " in " + s.function;
}

std::string thread_name(uint32_t thread, uint32_t run) {
  Dim g = launch.grid.at(launch.order[run - 1]);
  std::string where =
      "(" + std::to_string(g.x) + ", " + std::to_string(g.y) + ", " + std::to_string(g.z) + ")";
  if (thread == ~0u) return where;
  return "thread " + std::to_string(thread) + " (lane " + std::to_string(thread % kLanes) +
         " of SIMD-group " + std::to_string(thread / kLanes) + ") of threadgroup " + where;
}

void fault(const char* kind, uint32_t site, uint32_t other_site, const std::string& text) {
  if (other_site == ~0u) ended = true, other_site = 0;
  if (seen.size() >= kMaxFaults || !seen.insert({kind, site, other_site}).second) return;
  num_faults++;
  faults += std::string(faults.empty() ? "" : "\n\n") + kind + ": " + text;
}

void clear_faults() {
  seen.clear();
  faults.clear();
  num_faults = 0;
  ended = false;
}

bool is_fatal() {
  return ended;
}

namespace {

std::string bind(const MetalSimLaunch& args) {
  for (uint32_t i = 0; i < args.num_buffers; i++) {
    const MetalSimBuffer& b = args.buffers[i];
    if (b.index >= METAL_SIM_MAX_BUFFERS)
      return "buffer index " + std::to_string(b.index) + " must be below 31";
    if (b.access < METAL_SIM_READ || b.access > METAL_SIM_READ_WRITE) {
      return "the access of buffer " + std::to_string(b.index) + " must be 1, 2 or 3 but is " +
             std::to_string(b.access);
    }
    if (b.bytes > 1ull << 37) {
      return "buffer " + std::to_string(b.index) + " must have at most 2^37 bytes but has " +
             std::to_string(b.bytes);
    }
    if (!b.data && b.bytes) return "buffer " + std::to_string(b.index) + " has bytes but no data";
    bind_buffer(b);
  }
  for (uint32_t i = 0; i < args.num_bytes; i++) {
    const MetalSimBytes& b = args.bytes[i];
    if (b.index >= METAL_SIM_MAX_BUFFERS)
      return "bytes index " + std::to_string(b.index) + " must be below 31";
    if (b.bytes > 4096) return "setBytes takes at most 4096 bytes, not " + std::to_string(b.bytes);
    bind_bytes(b);
  }
  launch.constants_defined.assign(sim_num_constants, false);
  for (uint32_t i = 0; i < sim_num_constants; i++)
    memset(sim_constants[i].address, 0, sim_constants[i].bytes);
  for (uint32_t i = 0; i < args.num_constants; i++) {
    const MetalSimConstant& given = args.constants[i];
    for (uint32_t k = 0; k < sim_num_constants; k++) {
      if (sim_constants[k].index != given.index) continue;
      if (sim_constants[k].bytes != given.bytes) {
        return "function constant " + std::to_string(given.index) + " has " +
               std::to_string(sim_constants[k].bytes) + " bytes, not " +
               std::to_string(given.bytes);
      }
      memcpy(sim_constants[k].address, given.data, given.bytes);
      launch.constants_defined[k] = true;
    }
  }
  for (uint32_t i = 0; i < args.num_threadgroup; i++) {
    threadgroup_argument(args.threadgroup[i].index, args.threadgroup[i].bytes);
  }
  if (launch.report->threadgroup_bytes > kMaxThreadgroupBytes) {
    return "threadgroup memory of " + std::to_string(launch.report->threadgroup_bytes) +
           " bytes exceeds 32768";
  }
  return "";
}

std::string prepare_launch(const MetalSimLaunch& args) {
  if (args.abi != METAL_SIM_ABI)
    return "abi must be " + std::to_string(METAL_SIM_ABI) + " but is " + std::to_string(args.abi);
  launch.entry = nullptr;
  for (uint32_t i = 0; i < sim_num_kernels; i++) {
    if (!strcmp(sim_kernels[i].name, args.kernel)) launch.entry = sim_kernels[i].entry;
  }
  if (!launch.entry) return std::string("no kernel is named ") + args.kernel;
  launch.grid = {args.grid[0], args.grid[1], args.grid[2]};
  launch.threads = {args.threads[0], args.threads[1], args.threads[2]};
  uint64_t threads = launch.threads.count(), groups = launch.grid.count();
  if (threads == 0 || threads > kMaxThreads)
    return "a threadgroup must have 1 to 1024 threads but has " + std::to_string(threads);
  if (groups == 0 || groups >= 1u << 22)
    return "the grid must have 1 to 4194303 threadgroups but has " + std::to_string(groups);
  launch.num_threads = uint32_t(threads);
  launch.order.resize(groups);
  std::iota(launch.order.begin(), launch.order.end(), 0);
  for (uint64_t i = groups; i > 1; i--)
    std::swap(launch.order[i - 1], launch.order[random_below(i)]);
  launch.run = 1;
  return bind(args);
}

// Program-scope constants that are made of function constants.
void run_initialisers() {
  group.current = &group.threads[0];
  launch.initialising = true;
  for (uint32_t i = 0; i < sim_num_initialisers; i++) sim_initialisers[i]();
  launch.initialising = false;
}

}  // namespace
}  // namespace sim

using namespace sim;

extern "C" {

__attribute__((visibility("default"))) int metal_sim_launch(
    const MetalSimLaunch* args, MetalSimReport* report) {
  std::lock_guard<std::mutex> lock(one_launch);
  memset(report, 0, sizeof *report);
  clear_faults();
  launch.args = args;
  launch.report = report;
  seed_random(args->seed);
  std::string error = prepare_launch(*args);
  if (error.empty()) {
    run_initialisers();
    for (launch.run = 1; launch.run <= launch.order.size(); launch.run++) {
      begin_threadgroup();
      report->threadgroups++;
      report->threads += launch.num_threads;
      if (!run_threadgroup()) break;
    }
  }
  end_launch(*args, *report);
  const std::string& text = error.empty() ? faults : error;
  snprintf(report->faults, sizeof report->faults, "%s", text.c_str());
  report->num_faults = error.empty() ? num_faults : 1;
  return !error.empty() ? METAL_SIM_NOT_LAUNCHED : num_faults ? METAL_SIM_FAULTS : METAL_SIM_OK;
}

uint32_t __sim_constant_defined(uint64_t address) {
  for (uint32_t i = 0; i < sim_num_constants; i++) {
    if (reinterpret_cast<uint64_t>(sim_constants[i].address) == address)
      return launch.constants_defined[i];
  }
  return 0;
}

// In the order of GRID_ATTRIBUTES in kernels.py.
uint32_t __sim_attribute(uint32_t kind, uint32_t axis) {
  uint32_t index = group.current->index;
  Dim in_grid = launch.grid.at(launch.order[launch.run - 1]), in_group = launch.threads.at(index);
  auto pick = [axis](const Dim& d) { return axis == 0 ? d.x : axis == 1 ? d.y : d.z; };
  uint32_t simdgroups = (launch.num_threads + kLanes - 1) / kLanes;
  switch (kind) {
    case 0:
      return pick(in_grid) * pick(launch.threads) + pick(in_group);
    case 1:
      return pick(in_group);
    case 2:
      return index;
    case 3:
      return pick(in_grid);
    case 4:
    case 12:
      return pick(launch.threads);
    case 5:
      return pick(launch.grid);
    case 6:
    case 16:
      return pick(launch.grid) * pick(launch.threads);
    case 7:
      return index % kLanes;
    case 8:
      return index / kLanes;
    case 9:
    case 11:
      return kLanes;
    case 10:
    case 13:
      return simdgroups;
    case 14:
      return index % 4;
    case 15:
      return index / 4;
    default:
      return 0;  // grid_origin
  }
}

// Handlers of -fsanitize=array-bounds and integer-divide-by-zero. Their data begins with a source
// location.
struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
static void checked(const SourcePlace* at, const char* kind, const std::string& what) {
  fault(
      kind, at->line, ~0u,
      what + " at " + at->file + ":" + std::to_string(at->line) + ":" + std::to_string(at->column) +
          " by " + thread_name(group.current->index, launch.run));
  void* unused;
  sim_switch(&unused, group.scheduler);
}
void __ubsan_handle_out_of_bounds(void* data, uint64_t index) {
  checked(
      static_cast<SourcePlace*>(data), "array bounds",
      "index " + std::to_string(int64_t(index)) + " outside of the array");
}
void __ubsan_handle_divrem_overflow(void* data, uint64_t, uint64_t) {
  checked(
      static_cast<SourcePlace*>(data), "division", "division by zero or overflow of a division");
}
void __ubsan_handle_out_of_bounds_abort(void* data, uint64_t index) {
  __ubsan_handle_out_of_bounds(data, index);
}
void __ubsan_handle_divrem_overflow_abort(void* data, uint64_t a, uint64_t b) {
  __ubsan_handle_divrem_overflow(data, a, b);
}

}  // extern "C"
