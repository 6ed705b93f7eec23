// A threadgroup: its threads in random order between the points where they wait for each other.
#include <algorithm>
#include <cstring>
#include <map>

#include "memory.h"
#include "state.h"

namespace sim {

Launch launch;
Group group;

namespace {

uint64_t random_state;

[[noreturn]] void switch_for_good(void* to) {
  void* unused;
  sim_switch(&unused, to);
  __builtin_unreachable();
}

Thread* next_ready() {
  if (group.ready.empty()) return nullptr;
  size_t pick = random_below(group.ready.size());
  Thread* thread = &group.threads[group.ready[pick]];
  group.ready[pick] = group.ready.back();
  group.ready.pop_back();
  thread->wait = Wait::kReady;
  return thread;
}

// Goes on with another thread, or with the scheduler when none can run.
void block() {
  Thread* self = group.current;
  Thread* next = next_ready();
  if (next == self) return;
  group.current = next;
  sim_switch(&self->stack_pointer, next ? next->stack_pointer : group.scheduler);
}

void thread_main() {
  launch.entry();
  group.current->wait = Wait::kDone;
  group.done++;
  Thread* next = next_ready();
  group.current = next;
  switch_for_good(next ? next->stack_pointer : group.scheduler);
}

void wake(uint32_t first, uint32_t count) {
  for (uint32_t i = first; i < first + count; i++) group.ready.push_back(i);
}

const char* waiting_for(Wait wait) {
  switch (wait) {
    case Wait::kLanes:
      return "a SIMD-group operation";
    case Wait::kSimdBarrier:
      return "simdgroup_barrier";
    case Wait::kBarrier:
      return "threadgroup_barrier";
    default:
      return "nothing";
  }
}

// Nobody can run and not everybody has returned.
void report_divergence() {
  std::map<std::pair<int, uint32_t>, std::vector<uint32_t>> where;
  for (uint32_t i = 0; i < launch.num_threads; i++) {
    const Thread& t = group.threads[i];
    where[{int(t.wait), t.wait == Wait::kDone ? 0 : t.site}].push_back(i);
  }
  std::string text;
  uint32_t first_site = 0;
  for (auto& [key, threads] : where) {
    Wait wait = Wait(key.first);
    text += "\n    " + std::to_string(threads.size()) + " threads (" + std::to_string(threads[0]);
    if (threads.size() > 1) text += ".." + std::to_string(threads.back());
    text += wait == Wait::kDone
                ? ") have returned"
                : std::string(") wait in ") + waiting_for(wait) + " at " + place(key.second);
    if (wait != Wait::kDone && !first_site) first_site = key.second;
  }
  fault(
      "divergence", first_site, 0,
      "threads that have to meet do not, in threadgroup " + thread_name(~0u, launch.run) + ":" +
          text);
}

[[noreturn]] void diverge(const char* what, uint32_t site, uint32_t other) {
  fatal(
      "divergence", site,
      thread_name(group.current->index, launch.run) + " is at " + place(site) +
          " while others of its " + what + " wait at " + place(other));
}

}  // namespace

void seed_random(uint64_t seed) {
  random_state = seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03;
}

uint64_t random_below(uint64_t bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint64_t((__uint128_t(random_state) * bound) >> 64);
}

bool run_threadgroup() {
  const uint32_t n = launch.num_threads;
  reserve_stacks(group.threads, 0);
  group.epoch[0] = group.epoch[1] = 1;
  group.barrier_arrived = group.done = 0;
  group.ready.clear();
  for (uint32_t i = 0; i < n; i++) {
    Thread& thread = group.threads[i];
    Fiber* fiber = &thread;
    reserve_stacks(fiber, 1);
    prepare(thread, thread_main);
    thread.index = i;
    thread.wait = Wait::kReady;
    group.ready.push_back(i);
  }
  for (uint32_t s = 0; s * kLanes < n; s++) {
    SimdGroup& simdgroup = group.simdgroups[s];
    uint32_t lanes = std::min(kLanes, n - s * kLanes);
    simdgroup.epoch[0] = simdgroup.epoch[1] = 0;
    for (Collective* c : {&simdgroup.whole, &simdgroup.barrier}) {
      c->members = lanes, c->arrived = 0, c->first = s * kLanes;
    }
    for (uint32_t q = 0; q < 8; q++) {
      Collective& quad = simdgroup.quads[q];
      quad.members = lanes > 4 * q ? std::min(4u, lanes - 4 * q) : 0;
      quad.arrived = 0, quad.first = s * kLanes + 4 * q;
    }
  }
  group.current = next_ready();
  sim_switch(&group.scheduler, group.current->stack_pointer);
  if (is_fatal()) return false;
  if (group.done == n) return true;
  report_divergence();
  return false;
}

void fatal(const char* kind, uint32_t site, const std::string& text) {
  fault(kind, site, ~0u, text);
  switch_for_good(group.scheduler);
}

// Takes part in a collective. Returns the values of all, which stay until the next but one.
static const void* meet(
    Collective& c, Wait wait, const char* what, const void* value, uint32_t bytes, uint32_t site,
    bool* last) {
  Thread& self = *group.current;
  if (c.arrived && c.site != site) diverge(what, site, c.site);
  c.site = self.site = site;
  self.wait = wait;
  const void* all = c.slots[c.parity];
  memcpy(c.slots[c.parity][self.index - c.first], value, bytes);
  *last = ++c.arrived == c.members;
  if (*last) {
    c.arrived = 0;
    c.parity ^= 1;
    wake(c.first, c.members);
  }
  return all;
}

}  // namespace sim

using namespace sim;

extern "C" {

const void* __sim_gather(
    const void* value, uint32_t bytes, uint32_t width, uint32_t matrix, uint32_t site) {
  uint32_t index = group.current->index;
  SimdGroup& simdgroup = group.simdgroups[index / kLanes];
  Collective& c = width == 4 ? simdgroup.quads[index % kLanes / 4] : simdgroup.whole;
  bool last;
  const void* all =
      meet(c, Wait::kLanes, width == 4 ? "quad" : "SIMD-group", value, bytes, site, &last);
  if (last) ++(matrix ? launch.report->matrix_ops : launch.report->simd_ops);
  block();
  return all;
}

void __sim_simdgroup_barrier(uint32_t flags, uint32_t site) {
  SimdGroup& simdgroup = group.simdgroups[group.current->index / kLanes];
  bool last;
  meet(simdgroup.barrier, Wait::kSimdBarrier, "SIMD-group", "", 0, site, &last);
  if (last) {
    launch.report->simdgroup_barriers++;
    if (flags & 1) simdgroup.epoch[kDevice]++;
    if (flags & 2) simdgroup.epoch[kThreadgroup]++;
  }
  block();
}

void __sim_barrier(uint32_t flags, uint32_t site) {
  Thread& self = *group.current;
  if (group.barrier_arrived && group.barrier_site != site) {
    diverge("threadgroup", site, group.barrier_site);
  }
  group.barrier_site = self.site = site;
  self.wait = Wait::kBarrier;
  if (++group.barrier_arrived == launch.num_threads) {
    group.barrier_arrived = 0;
    launch.report->barriers++;
    for (Memory memory : {kDevice, kThreadgroup}) {
      if (!(flags & (memory == kDevice ? 1 : 2))) continue;
      group.epoch[memory]++;
      for (SimdGroup& s : group.simdgroups) s.epoch[memory] = 0;
    }
    wake(0, launch.num_threads);
  }
  block();
}

uint32_t __sim_lane() {
  return group.current->index % kLanes;
}

uint32_t __sim_active(uint32_t width) {
  uint32_t index = group.current->index;
  SimdGroup& simdgroup = group.simdgroups[index / kLanes];
  return width == 4 ? simdgroup.quads[index % kLanes / 4].members : simdgroup.whole.members;
}

void __sim_bad_lane(int32_t lane, uint32_t site) {
  fatal(
      "shuffle", site,
      thread_name(group.current->index, launch.run) + " reads lane " + std::to_string(lane) +
          ", which does not exist, at " + place(site));
}

}  // extern "C"
