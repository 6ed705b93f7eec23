// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "exit_deadline.h"

#include <unistd.h>

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace mlx_paged {

namespace {

constexpr auto TICK = std::chrono::milliseconds(50);

// Never destroyed, because its thread outlives the variables of the program.
struct Deadline {
  std::mutex mutex;
  std::string message;
  double seconds_left = 0;
  pid_t pid = 0;  // of the process whose thread runs; a forked child has none

  [[noreturn]] void run() {
    while (true) {
      // Counted, not read from a clock, so that a stopped process loses no time.
      std::this_thread::sleep_for(TICK);
      std::lock_guard lock(mutex);
      seconds_left -= std::chrono::duration<double>(TICK).count();
      if (seconds_left <= 0) {
        [[maybe_unused]] auto written = write(STDERR_FILENO, message.data(), message.size());
        _exit(1);
      }
    }
  }
};

}  // namespace

void exit_unless_extended(double seconds, std::string message) {
  if (!(seconds > 0)) {
    throw std::invalid_argument(
        "seconds: expected a positive number, got " + std::to_string(seconds));
  }
  static auto* deadline = new Deadline;
  std::lock_guard lock(deadline->mutex);
  deadline->seconds_left = seconds;
  deadline->message = std::move(message) + "\n";
  if (deadline->pid != getpid()) {
    std::thread([] { deadline->run(); }).detach();
    deadline->pid = getpid();
  }
}

}  // namespace mlx_paged
