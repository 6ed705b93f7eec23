#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Callee-saved registers on the old stack, then the same from the new one.
#if defined(__x86_64__)
constexpr int kSaved = 6;
asm(R"(
.text
.globl sim_switch
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
constexpr int kSaved = 20;
constexpr int kLinkRegister = 11;
asm(R"(
.text
.globl sim_switch
sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the Metal simulator runs on x86-64 and arm64"
#endif

namespace sim {

void reserve_stacks(Fiber* fibers, unsigned count) {
  constexpr size_t guard = 16 << 10;
  for (unsigned i = 0; i < count; i++) {
    if (fibers[i].stack) continue;
    void* memory = mmap(
        nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      perror("metal simulator: mmap of a stack");
      abort();
    }
    // (Of the first ones, which run the same code: each is two of the 65,530 mappings that Linux
    // lets a process have, and a process has a kernel for each that its tests compile.)
    static unsigned guarded = 0;
    if (guarded++ < 64) mprotect(memory, guard, PROT_NONE);
    fibers[i].stack = static_cast<char*>(memory) + guard;
    // Tops at addresses that differ below the page size, or they all compete for one cache set.
    static size_t stagger = 0;
    fibers[i].top = fibers[i].stack + kStackBytes - (stagger += 704) % 16384;
  }
}

void prepare(Fiber& fiber, void (*entry)()) {
  void** top = reinterpret_cast<void**>(fiber.top);
#if defined(__x86_64__)
  top -= 2;  // 16-byte aligned: the return address, as after a call
  top[0] = reinterpret_cast<void*>(entry);
  top -= kSaved;
  memset(top, 0, kSaved * sizeof(void*));
#else
  top -= kSaved;
  memset(top, 0, kSaved * sizeof(void*));
  top[kLinkRegister] = reinterpret_cast<void*>(entry);
#endif
  fiber.stack_pointer = top;
}

}  // namespace sim
