// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "active_wait.h"

#include <sys/resource.h>

namespace mlx_paged {

namespace {

using Clock = std::chrono::steady_clock;

// Gap after which this thread counts as preempted by another. Threads that run only briefly, such
// as the GPU driver's, are no reason to sleep.
constexpr std::chrono::microseconds kTurn{500};

// Number of times this thread was preempted. Without such a count every call returns a new number,
// so that any long gap counts as preemption.
long times_preempted() {
#ifdef RUSAGE_THREAD
  rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
#else
  static thread_local long calls = 0;
  return calls++;
#endif
}

// Yields the core to its other hardware thread for a microsecond or two.
void pause() {
  for (int i = 0; i < 32; i++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }
}

}  // namespace

bool wait_actively(const mx::array& a, std::chrono::nanoseconds limit) {
  const long before = times_preempted();
  auto last = Clock::now();
  const auto end = last + limit;
  while (a.status() != mx::array::Status::unscheduled && !a.is_available() && last < end) {
    pause();
    auto now = Clock::now();
    // A virtual machine or a lock in the driver can also cause a gap.
    if (now - last > kTurn && times_preempted() != before) {
      return false;
    }
    last = now;
  }
  return true;
}

}  // namespace mlx_paged
