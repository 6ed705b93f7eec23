// Sums of rows: a kernel for the simulator's own tests.
#include "row_sum.h"

// grid: (rows), THREADS threads each.
template <typename T, int THREADS>
[[kernel]] void row_sum(
    device const T* in [[buffer(0)]], device float* out [[buffer(1)]],
    constant RowSumParams& params [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[THREADS / 32];
  float sum = 0.0f;
  for (int i = thread_id; i < params.columns; i += THREADS) {
    sum += float(in[ulong(row) * params.columns + i]);
  }
  for (ushort distance = 16; distance > 0; distance /= 2) {
    sum += simd_shuffle_xor(sum, distance);
  }
  if (lane == 0) {
    partial[group] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id == 0) {
    out[row] = sum_of_groups(partial, THREADS / 32) * params.scale;
  }
}

template [[host_name("row_sum_float32")]] [[kernel]] decltype(row_sum<float, 128>)
    row_sum<float, 128>;
template [[host_name("row_sum_float16")]] [[kernel]] decltype(row_sum<half, 64>) row_sum<half, 64>;
