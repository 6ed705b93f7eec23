// Threads of a kernel as fibers: a stack each, switched without the kernel of the operating system.
#pragma once
#include <cstddef>

namespace sim {

constexpr size_t kStackBytes = 256 << 10;  // reserved; pages come when touched

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // lowest address; the page below it is not accessible
  char* top = nullptr;    // where it begins
};

// Stacks for `count` fibers, kept for the life of the process.
void reserve_stacks(Fiber* fibers, unsigned count);
// Makes the fiber begin at `entry`, which must never return.
void prepare(Fiber& fiber, void (*entry)());
// Saves where the caller is in *from and goes on at `to`.
extern "C" void sim_switch(void** from, void* to) asm("sim_switch");

}  // namespace sim
