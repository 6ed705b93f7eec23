// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "parallel_for.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace mlx_paged::cpu {

namespace {

// Bytes that processors move between their caches: Apple's lines, or pairs of lines on x86-64.
constexpr size_t kCacheLine = 128;

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

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits a moment for a condition; returns false if it is still not met. Comes before a thread
// sleeps: most waits last microseconds, less than waking it takes.
template <typename Condition>
bool spin_until(const Condition& is_met) {
  constexpr int kSpins = 2000;
  for (int i = 0; i < kSpins; i++) {
    if (is_met()) {
      return true;
    }
    relax();
  }
  return false;
}

// A parallel job. Every thread that may still read it holds a reference, so a worker that wakes
// late finds an exhausted job rather than a freed one.
class Job {
 public:
  virtual ~Job() = default;
  virtual void work(int thread) = 0;

  // Rethrows the first task's exception, if any.
  void rethrow() {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 protected:
  void fail() {
    std::lock_guard lock(error_mutex_);
    error_ = error_ ? error_ : std::current_exception();
  }

 private:
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

// The job of one parallel_for call.
class Tasks : public Job {
 public:
  Tasks(int num_tasks, const std::function<void(int, int)>& task)
      : task_(&task), num_tasks_(num_tasks) {}

  void work(int thread) override {
    for (int i = next_++; i < num_tasks_; i = next_++) {
      try {
        (*task_)(i, thread);
      } catch (...) {
        fail();
      }
      if (++num_done_ == num_tasks_) {
        num_done_.notify_all();
      }
    }
  }

  void wait() {
    if (spin_until([&] { return num_done_ == num_tasks_; })) {
      return;
    }
    for (int n = num_done_; n != num_tasks_; n = num_done_) {
      num_done_.wait(n);
    }
  }

 private:
  const std::function<void(int, int)>* task_;
  int num_tasks_;
  std::atomic<int> next_{0};
  std::atomic<int> num_done_{0};
};

// The job of one run_phases call. A thread takes tasks that follow each other, whose kernels
// prefetch past a task's end, and then those that other threads have left.
class PhasedJob : public Job {
 public:
  PhasedJob(const std::vector<int>& num_tasks, const std::function<void(int, int)>& task)
      : task_(&task),
        num_threads_(num_threads()),
        phases_(num_tasks.size()),
        num_lines_(int(num_tasks.size() + kCountersPerLine - 1) / kCountersPerLine),
        claimed_(size_t(num_threads_) * num_lines_) {
    for (size_t i = 0; i < num_tasks.size(); i++) {
      phases_[i].num_tasks = num_tasks[i];
    }
    current_ = next_with_tasks(0);
  }

  // Returns when all phases are done.
  void work(int thread) override {
    int num_phases = int(phases_.size());
    for (int p = current_.load(std::memory_order_acquire); p < num_phases; p = wait_after(p)) {
      auto& phase = phases_[p];
      for (int i = claim(p, thread); i < phase.num_tasks; i = claim(p, thread)) {
        run(p, i);
        if (++phase.num_done == phase.num_tasks) {
          int next = next_with_tasks(p + 1);
          // This thread goes on with single tasks: handing one over takes as long as a short one.
          for (; next < num_phases && phases_[next].num_tasks == 1;
               next = next_with_tasks(next + 1)) {
            run(next, 0);
          }
          // Sequentially consistent, because notify_all() loads the number of sleepers. With
          // release order, it could read zero before the store becomes visible, and a thread would
          // sleep forever.
          current_.store(next, std::memory_order_seq_cst);
          current_.notify_all();
        }
      }
    }
  }

 private:
  // One cache line each, because all threads count in the running phase.
  struct alignas(kCacheLine) Phase {
    std::atomic<int> num_done{0};
    int num_tasks = 0;
  };

  static constexpr int kCountersPerLine = kCacheLine / sizeof(std::atomic<int>);

  struct alignas(kCacheLine) Counters {
    std::atomic<int> of_phase[kCountersPerLine] = {};
  };

  // Tasks of a phase claimed from a thread's share.
  std::atomic<int>& claimed(int p, int thread) {
    auto& line = claimed_[size_t(thread) * num_lines_ + p / kCountersPerLine];
    return line.of_phase[p % kCountersPerLine];
  }

  // Returns a task that no thread has claimed, or num_tasks.
  int claim(int p, int thread) {
    const int num_tasks = phases_[p].num_tasks;
    for (int other = 0; other < num_threads_; other++) {
      const int share = (thread + other) % num_threads_;
      const int end = first_of(share + 1, num_tasks);
      auto& next = claimed(p, share);
      // Read first, so that a counter stays within its share and a few more.
      if (first_of(share, num_tasks) + next.load(std::memory_order_relaxed) >= end) {
        continue;
      }
      const int i = first_of(share, num_tasks) + next++;
      if (i < end) {
        return i;
      }
    }
    return num_tasks;
  }

  // The first task of a thread's share.
  int first_of(int thread, int num_tasks) const {
    return int(int64_t(num_tasks) * thread / num_threads_);
  }

  void run(int phase, int task) {
    if (failed_.load(std::memory_order_relaxed)) {
      return;
    }
    try {
      (*task_)(phase, task);
    } catch (...) {
      fail();
      failed_ = true;
    }
  }

  int next_with_tasks(int p) const {
    while (p < int(phases_.size()) && phases_[p].num_tasks == 0) {
      p++;
    }
    return p;
  }

  int wait_after(int p) const {
    if (!spin_until([&] { return current_.load(std::memory_order_acquire) != p; })) {
      current_.wait(p, std::memory_order_acquire);
    }
    return current_.load(std::memory_order_acquire);
  }

  const std::function<void(int, int)>* task_;
  int num_threads_;
  std::vector<Phase> phases_;
  int num_lines_;
  // [thread, phase]: threads write to cache lines of their own until they take others' tasks.
  std::vector<Counters> claimed_;
  std::atomic<int> current_{0};  // the running phase
  std::atomic<bool> failed_{false};
};

class Workers {
 public:
  explicit Workers(int count) {
    try {
      for (int i = 1; i <= count; i++) {
        std::thread([this, i] { loop(i); }).detach();
      }
    } catch (const std::system_error&) {
      // No memory for a stack. Threads claim tasks, so fewer of them still run all tasks.
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
      // The next operation of a long step usually follows within microseconds.
      spin_until([&] { return generation_.load(std::memory_order_relaxed) != seen; });
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
  std::atomic<uint64_t> generation_{0};  // written with the mutex held
};

}  // namespace

int num_threads() {
  static const int count = choose_num_threads();
  return count;
}

void limit_threads(int max_threads) {
  thread_limit = std::max(max_threads, 1);
}

namespace {

// Runs a job on the workers and on this thread.
void share(std::shared_ptr<Job> job) {
  // Never destroyed, because its threads may be waiting at process exit.
  static Workers* workers = new Workers(num_threads() - 1);
  workers->post(job);
  job->work(0);
}

// Each stream has its own thread; running one job at a time keeps thread indices unique.
std::mutex& one_job() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

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
  std::lock_guard lock(one_job());
  auto job = std::make_shared<Tasks>(num_tasks, task);
  share(job);
  job->wait();
  job->rethrow();
}

void run_phases(
    const std::vector<int>& num_tasks, const std::function<void(int phase, int task)>& task) {
  if (num_threads() == 1) {
    for (int phase = 0; phase < int(num_tasks.size()); phase++) {
      for (int i = 0; i < num_tasks[phase]; i++) {
        task(phase, i);
      }
    }
    return;
  }
  std::lock_guard lock(one_job());
  auto job = std::make_shared<PhasedJob>(num_tasks, task);
  share(job);
  job->rethrow();
}

}  // namespace mlx_paged::cpu
