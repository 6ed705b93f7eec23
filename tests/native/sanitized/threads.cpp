// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The pool of workers under ThreadSanitizer: tasks read, as plain memory, what those of the phase
// before wrote. Several threads share the pool, as streams do.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../../csrc/cpu/parallel_for.h"

using namespace mlx_paged::cpu;

namespace {

void expect(bool ok, const char* what) {
  if (!ok) {
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
  }
}

// Each task adds up all that the phase before wrote.
void phases_in_turn(int num_phases, int num_tasks) {
  std::vector<int> counts;
  for (int i = 0; i < num_phases; i++) {
    counts.push_back(i % 5 == 3 ? 0 : i % 7 == 6 ? 1 : num_tasks);
  }
  std::vector<std::vector<long>> values(num_phases + 1, std::vector<long>(num_tasks, 1));
  run_phases(counts, [&](int phase, int task) {
    long sum = 0;
    for (long value : values[phase]) {
      sum += value % 1000;
    }
    values[phase + 1][task] = sum + task;
  });
  for (int phase = 0; phase < num_phases; phase++) {
    long sum = 0;
    for (long value : values[phase]) {
      sum += value % 1000;
    }
    for (int task = 0; task < counts[phase]; task++) {
      expect(values[phase + 1][task] == sum + task, "a phase");
    }
  }
}

// Each thread has two neighboring tasks. None can take a third: tasks wait until all threads run
// one.
void neighbors_stay_together() {
  const int threads = num_threads();
  std::vector<std::thread::id> by(2 * threads);
  std::atomic<int> started[2] = {0, 0};
  run_phases({2 * threads}, [&](int, int task) {
    auto& count = started[task % 2];
    count++;
    while (count < threads) {
      std::this_thread::yield();
    }
    by[task] = std::this_thread::get_id();
  });
  for (int i = 0; i < threads; i++) {
    expect(by[2 * i] == by[2 * i + 1], "a thread's tasks");
  }
}

void tasks_at_once(int num_tasks) {
  std::vector<int> done(num_tasks), by(num_threads());
  parallel_for(num_tasks, [&](int task, int thread) {
    if (task % 4 == 3) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // others come and go meanwhile
    }
    done[task]++;
    by[thread]++;  // (a thread's own)
  });
  int total = 0;
  for (int count : by) {
    total += count;
  }
  expect(total == num_tasks, "tasks of all threads");
  for (int count : done) {
    expect(count == 1, "a task runs once");
  }
}

template <typename Run>
void fails(Run run) {
  bool caught = false;
  try {
    run();
  } catch (const std::runtime_error&) {
    caught = true;
  }
  expect(caught, "an exception");
}

void use_all(int rounds) {
  for (int i = 0; i < rounds; i++) {
    phases_in_turn(1 + i % 40, 1 + i % 9);
    tasks_at_once(1 + i % 33);
    if (i % 8 == 0) {
      neighbors_stay_together();
      auto fail_at = [](int at) { at >= 2 ? throw std::runtime_error("task") : void(); };
      fails([&] { parallel_for(5, [&](int task, int) { fail_at(task); }); });
      fails([&] { run_phases({4, 4, 4}, [&](int phase, int) { fail_at(phase); }); });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  expect(num_threads() > 1, "several threads");
  std::vector<std::thread> streams;
  for (int i = 0; i < 3; i++) {
    streams.emplace_back(use_all, rounds);
  }
  for (auto& stream : streams) {
    stream.join();
  }
  std::puts("done");
  std::fflush(stdout);
  std::quick_exit(0);  // (the workers are never joined)
}
