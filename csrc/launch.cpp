// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "launch.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "../metal/kernel_table.h"
#include "primitives.h"

namespace mlx_paged {

namespace {

constexpr uint32_t kThreads = paged::DATA_THREADS;
constexpr int64_t kChunk = 16;  // bytes that a thread moves at once

Binding bind(const Arrays& in, const Arrays& out, int operand) {
  int num_inputs = int(in.size());
  bool input = operand < num_inputs;
  const auto& array = input ? in[operand] : out[operand - num_inputs];
  return {operand, input ? Access::read : Access::write, array.nbytes()};
}

int chunks(const mx::array& a, int64_t elements) {
  return int(elements * a.itemsize() / kChunk);
}

}  // namespace

namespace {

constexpr int kHeadsAtOnce = paged::DATA_THREADS / 32;  // one per SIMD-group

KernelName kernel_of(const char* function, const mx::array& numbers, int max_dims) {
  return quantized_kernel(function, dtype_of(numbers.dtype()), max_dims);
}

LaunchList quantize_launches(const Arrays& in, const Arrays& out) {
  auto keys = layout_of(out[0]), values = layout_of(out[1]);
  paged::QuantizeParams params{};
  params.num_kv_heads = keys.num_kv_heads;
  params.key_dim = keys.head_dim;
  params.value_dim = values.head_dim;
  params.block_shift = std::countr_zero(unsigned(keys.block_size));
  params.key_format = int(keys.format);
  params.value_format = int(values.format);
  params.num_tokens = in[4].shape(0);
  Launch launch;
  launch.kernel = kernel_of("quantize_kv", in[2], std::max(params.key_dim, params.value_dim));
  for (int operand : {2, 3, 4, 5, 6}) {
    launch.buffers.push_back(bind(in, out, operand));
  }
  launch.buffers[3].access = launch.buffers[4].access = Access::read_write;
  launch.constants = bytes_of(params);
  launch.grid = {div_up(2 * int64_t(keys.num_kv_heads), kHeadsAtOnce), uint32_t(in[4].shape(0)), 1};
  launch.threadgroup = {kThreads, 1, 1};
  return {{launch}, {}};
}

// Gathers keys (0) or values (1).
Launch gather_quantized_launch(const Arrays& in, const Arrays& out, int which) {
  auto layout = layout_of(in[which]);
  const auto& dense = out[which];
  paged::GatherQuantizedParams params{};
  params.num_kv_heads = layout.num_kv_heads;
  params.dim = layout.head_dim;
  params.max_context_len = dense.shape(2);
  params.block_shift = std::countr_zero(unsigned(layout.block_size));
  params.max_blocks = in[2].shape(1);
  params.format = int(layout.format);
  params.rotated = which == 0 && rotates_keys(layout.format);
  Launch launch;
  launch.kernel = kernel_of("gather_quantized", dense, params.dim);
  launch.buffers = {
      bind(in, out, which), bind(in, out, 2), bind(in, out, 3), bind(in, out, 4 + which)};
  launch.constants = bytes_of(params);
  launch.grid = {
      div_up(params.max_context_len, kHeadsAtOnce), uint32_t(layout.num_kv_heads),
      uint32_t(dense.shape(0))};
  launch.threadgroup = {kThreads, 1, 1};
  return launch;
}

}  // namespace

Launch rotate_queries_launch(const mx::array& queries, int from, int to) {
  paged::RotateParams params{queries.shape(0) * queries.shape(1), queries.shape(2)};
  Launch launch;
  launch.kernel = kernel_of("rotate_queries", queries, params.dim);
  launch.buffers = {{from, Access::read, queries.nbytes()}, {to, Access::write, queries.nbytes()}};
  launch.constants = bytes_of(params);
  launch.grid = {div_up(params.num_rows, kHeadsAtOnce), 1, 1};
  launch.threadgroup = {kThreads, 1, 1};
  return launch;
}

mx::Shape workspace_shape(uint64_t bytes) {
  constexpr uint64_t kRow = 4096;  // float32 elements
  uint64_t rows = std::max<uint64_t>(1, (bytes + 4 * kRow - 1) / (4 * kRow));
  uint64_t step = std::max<uint64_t>(1, std::bit_floor(rows) / 8);
  return {int((rows + step - 1) / step * step), int(kRow)};
}

LaunchList WriteKV::launches(const Arrays& in, const Arrays& out, Gpu) const {
  int num_tokens = in[4].shape(0);
  if (num_tokens == 0) {
    return {};
  }
  if (format_of(in[0].dtype()) != PoolFormat::plain) {
    return quantize_launches(in, out);
  }
  auto token_chunks = [](const mx::array& pool) {
    return chunks(pool, int64_t(pool.shape(2)) * pool.shape(3));
  };
  paged::WriteParams params{num_tokens, token_chunks(out[0]), token_chunks(out[1])};
  Launch launch;
  launch.kernel = kernel_named("write_kv");
  for (int operand : {2, 3, 4, 5, 6}) {
    launch.buffers.push_back(bind(in, out, operand));
  }
  launch.buffers[3].access = launch.buffers[4].access = Access::read_write;
  launch.constants = bytes_of(params);
  launch.grid = {
      div_up(params.key_chunks + params.value_chunks, kThreads), uint32_t(num_tokens), 1};
  launch.threadgroup = {kThreads, 1, 1};
  return {{launch}, {}};
}

LaunchList CopyBlocks::launches(const Arrays& in, const Arrays& out, Gpu) const {
  constexpr int kLoads = 4;  // per thread
  int num_pairs = in.back().shape(0);
  LaunchList list;
  for (size_t i = 0; i < out.size() && num_pairs > 0; i++) {
    const auto& pool = out[i];
    int64_t block = int64_t(pool.shape(1)) * pool.shape(2) * pool.shape(3);
    paged::CopyParams params{num_pairs, chunks(pool, block)};
    Launch launch;
    launch.kernel = kernel_named("copy_blocks");
    launch.buffers = {bind(in, out, int(out.size())), bind(in, out, int(in.size() + i))};
    launch.buffers[1].access = Access::read_write;
    launch.constants = bytes_of(params);
    launch.grid = {div_up(params.block_chunks, kThreads * kLoads), uint32_t(num_pairs), 1};
    launch.threadgroup = {kThreads, 1, 1};
    list.launches.push_back(launch);
  }
  return list;
}

Launch greedy_launch(int num_rows, int vocab_size, DType dtype) {
  int item_size = dtype == DType::float32 ? 4 : 2;
  int chunks = vocab_size * item_size / int(kChunk);
  paged::GreedyParams params{vocab_size};
  Launch launch;
  launch.kernel = kernel_named(std::string("greedy_tokens_") + name_of(dtype));
  uint64_t rows = num_rows;
  launch.buffers = {
      {0, Access::read, rows * vocab_size * item_size},
      {1, Access::write, rows * 4},
      {2, Access::write, rows * 4},
      {3, Access::write, rows * 4}};
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(num_rows), 1, 1};
  uint32_t threads = std::clamp<uint32_t>(div_up(chunks, 32) * 32, 32, paged::GREEDY_THREADS);
  launch.threadgroup = {threads, 1, 1};
  launch.threadgroup_memory = div_up(threads / 32 * 3 * sizeof(float), 16) * 16;
  return launch;
}

Launch rotations_launch(const paged::RotationParams& params) {
  Launch launch;
  launch.kernel = kernel_named("rope_rotations");
  launch.constants = bytes_of(params);
  launch.grid = {div_up(int64_t(params.num_rows) * params.half_dims, kThreads), 1, 1};
  launch.threadgroup = {kThreads, 1, 1};
  return launch;
}

Launch silu_mul_launch(int64_t num_rows, const paged::SiluParams& params, DType dtype) {
  Launch launch;
  launch.kernel = kernel_named(std::string("silu_mul_") + name_of(dtype));
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(num_rows), div_up(params.row_chunks, kThreads), 1};
  launch.threadgroup = {kThreads, 1, 1};
  return launch;
}

LaunchList GreedyTokens::launches(const Arrays& in, const Arrays&, Gpu) const {
  if (in[0].shape(0) == 0) {
    return {};
  }
  return {{greedy_launch(in[0].shape(0), in[0].shape(1), dtype_of(in[0].dtype()))}, {}};
}

LaunchList DrawTokens::launches(const Arrays& in, const Arrays& out, Gpu) const {
  constexpr uint32_t kSimdGroups = 1 << 14;  // wanted: enough for any GPU, several times
  constexpr uint32_t kMaxParts = 256;        // of a row, for the merge
  const auto& logits = in[0];
  uint32_t num_rows = logits.shape(0);
  int vocab_size = logits.shape(1);
  if (num_rows == 0) {
    return {};
  }
  int chunk = int(kChunk / logits.itemsize());
  int step = 32 * (vocab_size % (2 * chunk) == 0 ? chunk : 1);  // pairs of a SIMD-group
  uint32_t steps = div_up(vocab_size - vocab_size / 2, step);
  uint32_t wanted = std::clamp(kSimdGroups / num_rows, 1u, kMaxParts);
  uint32_t part_steps = div_up(steps, wanted);
  paged::DrawParams params{vocab_size, int(div_up(steps, part_steps)), int(part_steps) * step};
  int parts = int(in.size() + out.size());  // a workspace
  uint64_t bytes = uint64_t(num_rows) * params.num_parts * sizeof(paged::DrawnToken);

  Launch draw;
  draw.kernel = kernel_named(std::string("draw_tokens_") + name_of(dtype_of(logits.dtype())));
  for (int operand = 0; operand < int(in.size()); operand++) {
    draw.buffers.push_back(bind(in, out, operand));
  }
  draw.buffers.push_back({parts, Access::write, bytes});
  draw.constants = bytes_of(params);
  draw.grid = {num_rows, div_up(params.num_parts, paged::DRAW_THREADS / 32), 1};
  draw.threadgroup = {paged::DRAW_THREADS, 1, 1};

  Launch merge;
  merge.kernel = kernel_named("merge_draws");
  merge.buffers = {
      bind(in, out, 1),
      bind(in, out, 3),
      {parts, Access::read, bytes},
      bind(in, out, int(in.size()))};
  merge.constants = bytes_of(params);
  merge.grid = {num_rows, 1, 1};
  merge.threadgroup = {32, 1, 1};
  return {{draw, merge}, {bytes}};
}

LaunchList SamplingThresholds::launches(const Arrays& in, const Arrays& out, Gpu) const {
  if (in[0].shape(0) == 0) {
    return {};
  }
  paged::ThresholdParams params{in[0].shape(1)};
  Launch launch;
  launch.kernel =
      kernel_named(std::string("sampling_thresholds_") + name_of(dtype_of(in[0].dtype())));
  for (int operand = 0; operand < 7; operand++) {
    launch.buffers.push_back(bind(in, out, operand));
  }
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(in[0].shape(0)), 1, 1};
  launch.threadgroup = {paged::THRESHOLD_THREADS, 1, 1};
  launch.threadgroup_memory = paged::threshold_scratch();
  return {{launch}, {}};
}

LaunchList GatherKV::launches(const Arrays& in, const Arrays& out, Gpu) const {
  bool quantized = format_of(in[0].dtype()) != PoolFormat::plain;
  LaunchList list;
  for (int i = 0; i < 2; i++) {
    const auto& pool = in[i];
    const auto& dense = out[i];
    if (dense.size() == 0) {
      continue;
    }
    if (quantized) {
      list.launches.push_back(gather_quantized_launch(in, out, i));
      continue;
    }
    paged::GatherParams params{};
    params.num_kv_heads = pool.shape(2);
    params.head_chunks = chunks(pool, pool.shape(3));
    params.max_context_len = dense.shape(2);
    params.block_shift = std::countr_zero(unsigned(pool.shape(1)));
    params.max_blocks = in[2].shape(1);
    Launch launch;
    launch.kernel = kernel_named("gather_kv");
    launch.buffers = {bind(in, out, i), bind(in, out, 2), bind(in, out, 3), bind(in, out, 4 + i)};
    launch.constants = bytes_of(params);
    int64_t head = int64_t(params.max_context_len) * params.head_chunks;
    launch.grid = {div_up(head, kThreads), uint32_t(pool.shape(2)), uint32_t(dense.shape(0))};
    launch.threadgroup = {kThreads, 1, 1};
    list.launches.push_back(launch);
  }
  return list;
}

LaunchList ApplyTokenBitmask::launches(const Arrays& in, const Arrays& out, Gpu) const {
  constexpr int kLoads = 4;  // per thread
  const auto& logits = in[0];
  bool in_place = out[0].data_shared_ptr() == logits.data_shared_ptr();
  paged::BitmaskParams params{};
  params.vocab_size = logits.shape(1);
  params.num_masks = in[1].shape(0);
  params.num_words = in[1].shape(1);
  params.in_place = in_place;
  switch (dtype_of(logits.dtype())) {
    case DType::float32:
      params.forbidden = std::bit_cast<int>(-std::numeric_limits<float>::infinity());
      break;
    case DType::float16:
      params.forbidden = 0xfc00;
      break;
    case DType::bfloat16:
      params.forbidden = 0xff80;
      break;
  }
  Launch launch;
  launch.kernel = kernel_named("apply_token_bitmask_" + std::to_string(8 * logits.itemsize()));
  // In place, the kernel reads through `out`, but the argument must still be a buffer.
  launch.buffers = {
      bind(in, out, in_place ? 1 : 0), bind(in, out, 1), bind(in, out, 2), bind(in, out, 3)};
  launch.buffers[3].access = in_place ? Access::read_write : Access::write;
  launch.constants = bytes_of(params);
  int num_rows = in_place ? params.num_masks : logits.shape(0);
  launch.grid = {div_up(params.vocab_size, kThreads * kLoads), uint32_t(num_rows), 1};
  launch.threadgroup = {kThreads, 1, 1};
  launch.threadgroup_memory = 16;
  return {{launch}, {}};
}

LaunchList EditLogits::launches(const Arrays& in, const Arrays& out, Gpu) const {
  const auto& logits = in[0];
  LaunchList list;
  if (out[0].data_shared_ptr() != logits.data_shared_ptr()) {
    paged::StridedParams params{};
    params.shape_2 = logits.shape(0);
    params.shape_3 = logits.shape(1);
    params.stride_2 = logits.shape(1);
    params.stride_3 = 1;
    Launch copy;
    copy.kernel = kernel_named("copy_strided_32");
    copy.buffers = {bind(in, out, 0), bind(in, out, 6)};
    copy.constants = bytes_of(params);
    copy.grid = {div_up(int64_t(logits.size()), kThreads), 1, 1};
    copy.threadgroup = {kThreads, 1, 1};
    list.launches.push_back(copy);
  }
  paged::EditParams params{logits.shape(1)};
  Launch edit;
  edit.kernel = kernel_named("edit_logits");
  for (int operand = 1; operand < 7; operand++) {
    edit.buffers.push_back(bind(in, out, operand));
  }
  edit.buffers.back().access = Access::read_write;
  edit.constants = bytes_of(params);
  edit.grid = {uint32_t(in[1].shape(0)), 1, 1};
  edit.threadgroup = {kThreads, 1, 1};
  edit.threadgroup_memory = 16;
  list.launches.push_back(edit);
  return list;
}

LaunchList TakeRows::launches(const Arrays& in, const Arrays& out, Gpu) const {
  if (out[0].size() == 0) {
    return {};
  }
  paged::TakeParams params{};
  params.num_rows = in[0].shape(1);
  params.num_ids = in[1].shape(1);
  params.width = in[0].shape(2);
  params.size = int(uint32_t(out[0].size()));
  Launch launch;
  launch.kernel = kernel_named("take_rows_" + std::to_string(8 * in[0].itemsize()));
  launch.buffers = {bind(in, out, 0), bind(in, out, 1), bind(in, out, 2)};
  launch.constants = bytes_of(params);
  launch.grid = {div_up(int64_t(out[0].size()), kThreads), 1, 1};
  launch.threadgroup = {kThreads, 1, 1};
  return {{launch}, {}};
}

LaunchList copy_strided_launches(const Arrays& in, const Arrays& out) {
  const auto& a = in[0];
  paged::StridedParams params{};
  Extent rows = {1, 1, 1};
  if (a.flags().row_contiguous) {
    params.shape_2 = 1;
    params.shape_3 = int(a.size());
    params.stride_3 = 1;
  } else {
    params.shape_2 = a.shape(2);
    params.shape_3 = a.shape(3);
    params.stride_0 = a.strides(0);
    params.stride_1 = a.strides(1);
    params.stride_2 = a.strides(2);
    params.stride_3 = a.strides(3);
    rows = {1, uint32_t(a.shape(1)), uint32_t(a.shape(0))};
  }
  Launch launch;
  launch.kernel = kernel_named("copy_strided_" + std::to_string(8 * a.itemsize()));
  // Bytes from the input's first element on; how many it spans depends on its strides.
  launch.buffers = {{0, Access::read, a.buffer_size() - a.offset()}, bind(in, out, 1)};
  launch.constants = bytes_of(params);
  launch.grid = {div_up(int64_t(params.shape_2) * params.shape_3, kThreads), rows[1], rows[2]};
  launch.threadgroup = {kThreads, 1, 1};
  return {{launch}, {}};
}

}  // namespace mlx_paged
