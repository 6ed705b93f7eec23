// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "thread_end.h"

#include <Python.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "mlx/compile_impl.h"

namespace mlx_paged {

namespace {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// The thread that exits the process. Its variables are destroyed, too, when all Python code has
// run.
std::atomic<std::thread::id> exiting_thread;

struct ThreadEnd {
  ~ThreadEnd() {
    while (is_finalizing() && exiting_thread.load() != std::this_thread::get_id()) {
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
};

}  // namespace

void outlast_interpreter() {
  static const int registered = Py_AtExit([] { exiting_thread.store(std::this_thread::get_id()); });
  (void)registered;
  // A thread's variables are destroyed in reverse, so MLX's must exist before ours.
  mlx::core::detail::compile_cache();
  static thread_local ThreadEnd end;
  (void)end;
}

}  // namespace mlx_paged
