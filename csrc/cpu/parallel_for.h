// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <functional>
#include <vector>

namespace mlx_paged::cpu {

// Number of threads that parallel_for uses: the processors available to this process, up to the
// limit, or MLX_PAGED_NUM_THREADS if set.
int num_threads();

// Limits the number of threads unless MLX_PAGED_NUM_THREADS is set. Call it before their first use.
void limit_threads(int max_threads);

// Calls task(i, thread) once for every i in [0, num_tasks) on up to num_threads() threads,
// including the caller's; `thread` is in [0, num_threads()). Tasks are claimed in order, so put the
// longest first. Returns when all are done; rethrows the first exception.
void parallel_for(int num_tasks, const std::function<void(int task, int thread)>& task);

// Calls task(phase, i) once for every i in [0, num_tasks[phase]); a phase starts when the previous
// one is done. Threads stay awake between phases. A thread that is late or preempted delays the
// others by at most the task it has started. After an exception no other task starts.
void run_phases(
    const std::vector<int>& num_tasks, const std::function<void(int phase, int task)>& task);

}  // namespace mlx_paged::cpu
