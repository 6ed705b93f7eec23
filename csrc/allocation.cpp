// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "allocation.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "mlx/memory.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"

namespace mlx_paged {

namespace {

constexpr size_t kAlignment = 64;

#ifdef MLX_PAGED_BUILD_TESTS
std::atomic<int64_t> num_allocations{0};
std::atomic<int64_t> failing{-1};

bool is_failing() {
  return num_allocations++ == failing;
}
#else
constexpr bool is_failing() {
  return false;
}
#endif

std::atomic<bool> is_bound{false};

// Bytes that MLX's CPU allocator counts as active and did not get; taken back at the next occasion.
std::atomic<size_t> miscounted{0};

// Has MLX's CPU allocator count fewer active bytes. It subtracts the size that a freed buffer's
// header names. Two sizes that wrap around to `num_bytes` are both larger than any cache, so that
// neither buffer is kept for reuse: they have no memory but for their headers.
void correct_count() {
  constexpr size_t kHalf = size_t{1} << (8 * sizeof(size_t) - 1);
  size_t num_bytes = miscounted.exchange(0);
  if (num_bytes == 0) {
    return;
  }
  auto* first = static_cast<size_t*>(std::malloc(sizeof(size_t)));
  auto* second = static_cast<size_t*>(std::malloc(sizeof(size_t)));
  if (!first || !second) {
    std::free(first);
    std::free(second);
    miscounted += num_bytes;
    return;
  }
  *first = kHalf;
  *second = kHalf + num_bytes;
  mx::allocator::Allocator& mlx = mx::allocator::allocator();
  mlx.free(mx::allocator::Buffer(first));
  mlx.free(mx::allocator::Buffer(second));
}

// The error of a stream, taken from it; empty if it has none.
std::string take_error(mx::Stream stream) {
  try {
    mx::scheduler::check_error(stream);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// Waits until a CPU stream has done what is queued. Returns its error and takes it from the stream:
// MLX refuses work from the main thread while there is one.
std::string drain(mx::Stream stream) {
  std::string error;
  for (bool is_queued = false; !is_queued;) {
    if (std::string found = take_error(stream); error.empty()) {
      error = std::move(found);
    }
    auto done = std::make_shared<std::promise<void>>();
    auto is_done = done->get_future();
    try {
      mx::scheduler::enqueue(stream, [done] { done->set_value(); });
      is_queued = true;
    } catch (const std::exception& found) {  // an error that has come since
      if (error.empty()) {
        error = found.what();
      }
      continue;
    }
    is_done.wait();
  }
  if (std::string found = take_error(stream); error.empty()) {
    error = std::move(found);
  }
  return error;
}

std::vector<mx::Stream> cpu_streams() {
  std::vector<mx::Stream> streams;
  for (const auto& stream : mx::get_streams()) {
    if (stream.device == mx::Device::cpu) {
      streams.push_back(stream);
    }
  }
  return streams;
}

// MLX counts a task before it queues it. The main thread, which may not queue while a stream has an
// error, leaves tasks counted that never come, and evaluations that wait for their end hang. Idle
// streams have none under way. A task that another thread queues meanwhile may be taken for one of
// these, so the least of a few counts is used; a count that is too low only lets MLX run ahead
// further.
void correct_num_tasks(const std::vector<mx::Stream>& streams) {
  if (streams.empty() || mx::is_available(mx::Device::gpu)) {
    return;  // a GPU's tasks are counted, too
  }
  int num_lost = mx::scheduler::n_active_tasks();
  for (int i = 0; i < 2 && num_lost > 0; ++i) {
    for (const auto& stream : streams) {
      std::string error = drain(stream);
      if (!error.empty()) {
        mx::scheduler::enqueue(stream, [error] { throw std::runtime_error(error); });
        return;  // at the next occasion
      }
    }
    num_lost = std::min(num_lost, mx::scheduler::n_active_tasks());
  }
  for (; num_lost > 0; --num_lost) {
    mx::scheduler::notify_task_completion(streams.front());
  }
}

// Waits until the CPU's streams have done what is queued, frees what is cached and corrects what
// MLX counts. What is queued holds memory, and must not outlive the arrays of an evaluation that is
// given up. A stream's own thread, which is none of Python's, cannot wait for itself: it corrects
// the count of bytes only.
void make_room() {
  correct_count();
  if (!PyGILState_GetThisThreadState()) {
    return;
  }
  std::optional<nb::gil_scoped_release> released;
  if (PyGILState_Check()) {
    released.emplace();
  }
  std::vector<mx::Stream> streams = cpu_streams();
  // MLX raises and forgets the errors of streams when it frees its cache; they belong to who waits
  // for the arrays.
  std::vector<std::pair<mx::Stream, std::string>> errors;
  for (const auto& stream : streams) {
    if (std::string error = drain(stream); !error.empty()) {
      errors.emplace_back(stream, std::move(error));
    }
  }
  mx::clear_cache();
  correct_num_tasks(streams);
  for (const auto& [stream, message] : errors) {
    mx::scheduler::enqueue(stream, [text = message] { throw std::runtime_error(text); });
  }
}

// Calls `allocate`, which returns whether it got memory, until it has; throws OutOfMemory if it has
// not even when nothing is cached or under way.
template <typename Allocate>
void retry(size_t num_bytes, const Allocate& allocate) {
  bool fails = is_failing();
  if (!fails && allocate()) {
    return;
  }
  make_room();
  if (!fails && allocate()) {
    return;
  }
  correct_count();
  throw OutOfMemory(num_bytes);
}

// After MLX's allocator has returned a null pointer. (A GPU's throws before it counts.)
void note_refusal([[maybe_unused]] size_t num_bytes) {
#ifdef __linux__
  if (!mx::is_available(mx::Device::gpu)) {
    miscounted += num_bytes;
  }
#endif
}

class CheckedAllocator : public mx::allocator::Allocator {
 public:
  explicit CheckedAllocator(mx::allocator::Allocator& mlx) : mlx_(mlx) {}

  mx::allocator::Buffer malloc(size_t size) override {
    mx::allocator::Buffer buffer(nullptr);
    retry(size, [&] {
      buffer = mlx_.malloc(size);
      if (buffer.ptr()) {
        return true;
      }
      note_refusal(size);
      return false;
    });
    return buffer;
  }
  void free(mx::allocator::Buffer buffer) override { mlx_.free(buffer); }
  size_t size(mx::allocator::Buffer buffer) const override { return mlx_.size(buffer); }
  mx::allocator::Buffer make_buffer(void* ptr, size_t size) override {
    return mlx_.make_buffer(ptr, size);
  }
  void release(mx::allocator::Buffer buffer) override { mlx_.release(buffer); }

 private:
  mx::allocator::Allocator& mlx_;
};

CheckedAllocator& checked() {
  // Never destroyed: arrays are freed until the process has ended.
  static auto* allocator = new CheckedAllocator(mx::allocator::allocator());
  return *allocator;
}

}  // namespace

OutOfMemory::OutOfMemory(size_t num_bytes, const char* operation, const char* purpose)
    : num_bytes_(num_bytes) {
  std::snprintf(
      message_, sizeof(message_), "[%s] cannot allocate %zu bytes%s", operation, num_bytes,
      purpose);
}

mx::allocator::Allocator& checked_allocator() {
  is_bound = true;
  return checked();
}

mx::allocator::Data allocate(size_t num_bytes) {
  if (is_bound) {
    return mx::allocator::malloc(num_bytes);
  }
  std::unique_ptr<mx::allocator::Data> data;
  retry(num_bytes, [&] {
    data = std::make_unique<mx::allocator::Data>(mx::allocator::malloc(num_bytes));
    if (data->buffer().ptr() || num_bytes == 0) {
      return true;
    }
    (void)data.release();  // (MLX would keep its null pointer for reuse)
    note_refusal(num_bytes);
    return false;
  });
  return std::move(*data);
}

void allocate(mx::array& a) {
  a.set_data(allocate(a.nbytes()));
}

Scratch::~Scratch() {
  std::free(memory_);
}

void Scratch::grow(size_t num_bytes) {
  std::free(memory_);
  memory_ = nullptr;
  num_bytes_ = 0;
  size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  retry(num_bytes, [&] {
    memory_ = std::aligned_alloc(kAlignment, rounded);
    return memory_ != nullptr;
  });
  num_bytes_ = rounded;
}

void bind_allocation(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const OutOfMemory& error) {
      nb::object type = nb::module_::import_("mlx_paged.errors").attr("OutOfMemoryError");
      PyErr_SetObject(type.ptr(), type(error.what(), error.num_bytes()).ptr());
    }
  });

  m.def(
      "allocator_function",
      [] {
        checked_allocator();
        return reinterpret_cast<uintptr_t>(&checked_allocator);
      },
      "Address of what MLX's `allocator()` has to become, so that a lack of memory raises.");

  m.def(
      "make_room", &make_room,
      "Waits for the CPU's streams and frees what MLX has cached. Errors of streams stay theirs.");

#ifdef MLX_PAGED_BUILD_TESTS
  m.def(
      "_fail_allocation",
      [](int64_t index) {
        num_allocations = 0;
        failing = index;
      },
      "index"_a, "Has an allocation from here on fail, by its index; -1: none.");
  m.def(
      "_num_allocations", [] { return num_allocations.load(); },
      "Allocations since `_fail_allocation`.");
  m.def(
      "_num_active_tasks", [] { return mx::scheduler::n_active_tasks(); },
      "Tasks that MLX counts as under way, on all streams.");
#endif
}

}  // namespace mlx_paged
