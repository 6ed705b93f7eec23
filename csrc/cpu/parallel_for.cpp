// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "parallel_for.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace mlx_paged::cpu {

namespace {

std::atomic<int> thread_limit{256};

int detect_num_processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int choose_num_threads() {
  if (const char* text = std::getenv("MLX_PAGED_NUM_THREADS")) {
    return std::clamp(std::atoi(text), 1, 256);
  }
  return std::min(detect_num_processors(), thread_limit.load());
}

// One parallel_for in progress. Held by every thread that may still read it, so that a worker
// that wakes late finds an exhausted job and not a freed one.
struct Job {
  const std::function<void(int, int)>* task;
  int num_tasks;
  std::atomic<int> next{0};
  std::atomic<int> num_done{0};
  std::mutex mutex;
  std::condition_variable all_done;
  std::exception_ptr error;

  void work(int thread) {
    for (int i = next++; i < num_tasks; i = next++) {
      try {
        (*task)(i, thread);
      } catch (...) {
        std::lock_guard lock(mutex);
        error = error ? error : std::current_exception();
      }
      if (++num_done == num_tasks) {
        std::lock_guard lock(mutex);
        all_done.notify_all();
      }
    }
  }
};

class Workers {
 public:
  explicit Workers(int count) {
    for (int i = 1; i <= count; i++) {
      std::thread([this, i] { loop(i); }).detach();
    }
  }

  void post(std::shared_ptr<Job> job) {
    {
      std::lock_guard lock(mutex_);
      job_ = std::move(job);
      generation_++;
    }
    wake_.notify_all();
  }

 private:
  void loop(int thread) {
    uint64_t seen = 0;
    while (true) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        job = job_;
      }
      job->work(thread);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Job> job_;
  uint64_t generation_ = 0;
};

}  // namespace

int num_threads() {
  static const int count = choose_num_threads();
  return count;
}

void limit_threads(int most) {
  thread_limit = std::max(most, 1);
}

void parallel_for(int num_tasks, const std::function<void(int, int)>& task) {
  if (num_tasks == 1 || num_threads() == 1) {
    for (int i = 0; i < num_tasks; i++) {
      task(i, 0);
    }
    return;
  }
  if (num_tasks <= 0) {
    return;
  }
  // Never destroyed: its threads may be waiting when the process exits.
  static Workers* workers = new Workers(num_threads() - 1);
  // Each stream has a thread of its own; one job at a time keeps thread indices unique.
  static std::mutex one_job;
  std::lock_guard lock(one_job);

  auto job = std::make_shared<Job>();
  job->task = &task;
  job->num_tasks = num_tasks;
  workers->post(job);
  job->work(0);
  std::unique_lock wait(job->mutex);
  job->all_done.wait(wait, [&] { return job->num_done == num_tasks; });
  if (job->error) {
    std::rethrow_exception(job->error);
  }
}

}  // namespace mlx_paged::cpu
