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

// Bytes that MLX's CPU allocator counts as active although their allocation failed. correct_count()
// subtracts them later.
std::atomic<size_t> miscounted{0};

// Lowers MLX's count of active bytes. Its CPU allocator subtracts the size in a freed buffer's
// header, so this frees two header-only buffers whose sizes wrap around to `num_bytes`. Both sizes
// exceed any cache limit, so neither buffer is kept for reuse.
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

// Takes the pending error of a stream; empty if there is none.
std::string take_error(mx::Stream stream) {
  try {
    mx::scheduler::check_error(stream);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// Waits until a CPU stream has finished its queued work. Returns its error and clears it, because
// MLX rejects work from the main thread while a stream has an error.
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
    } catch (const std::exception& found) {  // an error that came up since
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

// Corrects MLX's count of active tasks. MLX counts a task before it queues it, but the main thread
// may not queue while a stream has an error: such tasks stay counted, and evaluations that wait for
// them hang. All tasks counted while the streams are idle are lost ones. Another thread can queue a
// task meanwhile, so this uses the minimum of several counts; a count that is too low only lets MLX
// run further ahead.
void correct_num_tasks(const std::vector<mx::Stream>& streams) {
  if (streams.empty() || mx::is_available(mx::Device::gpu)) {
    return;  // the count includes the GPU's tasks
  }
  int num_lost = mx::scheduler::n_active_tasks();
  for (int i = 0; i < 2 && num_lost > 0; ++i) {
    for (const auto& stream : streams) {
      std::string error = drain(stream);
      if (!error.empty()) {
        mx::scheduler::enqueue(stream, [error] { throw std::runtime_error(error); });
        return;  // corrected next time
      }
    }
    num_lost = std::min(num_lost, mx::scheduler::n_active_tasks());
  }
  for (; num_lost > 0; --num_lost) {
    mx::scheduler::notify_task_completion(streams.front());
  }
}

// Waits for the queued work of the CPU streams, frees MLX's cache and corrects MLX's counters.
// Queued work holds memory and must not outlive the arrays of an abandoned evaluation. A stream's
// own thread, which Python did not create, cannot wait for itself and only corrects the byte count.
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
  // MLX raises and discards stream errors when it frees its cache, so this keeps them for the
  // threads that wait for the arrays.
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

// Calls `allocate` until it returns true. Throws OutOfMemory if it fails even after everything
// cached and queued has been released.
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

// Records that MLX's allocator returned null. A GPU allocator throws before it counts.
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
  // Never destroyed, because arrays are freed until the process ends.
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
    (void)data.release();  // otherwise MLX would cache its null pointer
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
      "Address of the replacement for MLX's `allocator()`, which raises when memory runs out.");

  m.def(
      "make_room", &make_room,
      "Waits for the CPU's streams and frees MLX's cache. Streams keep their errors.");

#ifdef MLX_PAGED_BUILD_TESTS
  m.def(
      "_fail_allocation",
      [](int64_t index) {
        num_allocations = 0;
        failing = index;
      },
      "index"_a, "Makes the allocation with this index, counted from now on, fail; -1: none.");
  m.def(
      "_num_allocations", [] { return num_allocations.load(); },
      "Allocations since `_fail_allocation`.");
  m.def(
      "_num_active_tasks", [] { return mx::scheduler::n_active_tasks(); },
      "Tasks that MLX counts as active, on all streams.");
#endif
}

}  // namespace mlx_paged
