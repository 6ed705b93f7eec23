// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <functional>
#include <vector>

namespace mlx_paged::cpu {

// Threads that parallel_for may use: the processors this process may run on up to the limit, or
// MLX_PAGED_NUM_THREADS if that is set.
int num_threads();

// No more than this many, unless MLX_PAGED_NUM_THREADS is set. Call it before their first use.
void limit_threads(int most);

// Calls task(i, thread) for every i in [0, num_tasks), each once, on up to num_threads() threads of
// which the caller is one; `thread` is in [0, num_threads()). Tasks are handed out in order, one at
// a time, so put the longest first. Returns when all are done; rethrows the first exception.
void parallel_for(int num_tasks, const std::function<void(int task, int thread)>& task);

// Calls task(phase, i) for every i in [0, num_tasks[phase]), each once; a phase begins when the one
// before it is done. Threads stay awake in between, and one that comes late, or is not given a
// processor, keeps the others waiting for no more than the task that it has begun. After an
// exception no other task begins.
void run_phases(
    const std::vector<int>& num_tasks, const std::function<void(int phase, int task)>& task);

}  // namespace mlx_paged::cpu
