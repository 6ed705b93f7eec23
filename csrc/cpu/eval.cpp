// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// CPU evaluation of primitives that move keys and values, or rows, or edit logits: each allocates
// or aliases its outputs, then queues work on the stream.

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../../metal/kernel_table.h"
#include "../allocation.h"
#include "../gpu.h"
#include "../gpu/executable.h"
#include "../primitives.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "lora.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

using cpu::for_ranges;
using cpu::Pool;

namespace {

bool is_quantized(const mx::array& pool) {
  return format_of(pool.dtype()) != PoolFormat::plain;
}

cpu::PoolArgs pool_args(mx::array& pool, mx::Dtype dtype, bool holds_keys) {
  auto layout = layout_of(pool);
  return {{layout, pool.data<char>()}, dtype_of(dtype), holds_keys && rotates_keys(layout.format)};
}

// Bytes of one token's keys or values.
int64_t count_bytes(const mx::array& rows) {
  return int64_t(rows.shape(1)) * rows.shape(2) * rows.itemsize();
}

}  // namespace

void WriteKV::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 2, encoder);
  check_ids(in);
  for (int i = 0; i < 2; i++) {
    cpu::alias_or_copy_pool(in[i], out[i], encoder);
  }
  if (is_quantized(out[0])) {
    encoder.dispatch([key_pool = pool_args(out[0], in[2].dtype(), true),
                      value_pool = pool_args(out[1], in[3].dtype(), false),
                      keys = in[2].data<void>(), values = in[3].data<void>(),
                      slots = in[4].data<int32_t>(), count = in[4].shape(0),
                      token_bytes = count_bytes(in[2]) + count_bytes(in[3])] {
      const auto& quantize = cpu::kernels().pool.quantize;
      for_ranges(count, token_bytes, [&](int64_t begin, int64_t end) {
        quantize(key_pool, keys, slots, begin, end);
        quantize(value_pool, values, slots, begin, end);
      });
    });
    return;
  }
  encoder.dispatch([key_pool = Pool(out[0]), value_pool = Pool(out[1]), keys = in[2].data<char>(),
                    values = in[3].data<char>(), slots = in[4].data<int32_t>(),
                    count = in[4].shape(0)] {
    auto write = [&](const Pool& pool, const char* rows, int64_t i) {
      std::memcpy(pool.slot(slots[i]), rows + i * pool.token_bytes, pool.token_bytes);
    };
    for_ranges(
        count, key_pool.token_bytes + value_pool.token_bytes, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            if (slots[i] >= 0) {
              write(key_pool, keys, i);
              write(value_pool, values, i);
            }
          }
        });
  });
}

void CopyBlocks::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, inputs.size() - 1, encoder);
  check_ids(in);
  std::vector<Pool> pools;
  int64_t bytes = 0;
  for (size_t i = 0; i < out.size(); i++) {
    cpu::alias_or_copy_pool(in[i], out[i], encoder);
    pools.emplace_back(out[i]);
    bytes += pools.back().block_bytes();
  }
  encoder.dispatch([pools = std::move(pools), bytes, pairs = in.back().data<int32_t>(),
                    count = in.back().shape(0)] {
    for_ranges(count, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        for (const Pool& pool : pools) {
          std::memcpy(pool.block(pairs[2 * i + 1]), pool.block(pairs[2 * i]), pool.block_bytes());
        }
      }
    });
  });
}

void GatherKV::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 2, encoder);
  check_ids(in);
  auto key_pool = cpu::dense_pool(in[0], encoder);
  auto value_pool = cpu::dense_pool(in[1], encoder);
  for (auto& o : out) {
    allocate(o);
  }
  cpu::dispatch(
      encoder, out,
      [pools = std::array{Pool(key_pool), Pool(value_pool)},
       views =
           std::array{
               pool_args(key_pool, out[0].dtype(), true),
               pool_args(value_pool, out[1].dtype(), false)},
       quantized = is_quantized(key_pool),
       row_bytes =
           std::array{
               int64_t(out[0].shape(3)) * out[0].itemsize(),
               int64_t(out[1].shape(3)) * out[1].itemsize()},
       dst = std::array{out[0].data<char>(), out[1].data<char>()}, tables = in[2].data<int32_t>(),
       context_lens = in[3].data<int32_t>(), num_seqs = in[2].shape(0), max_blocks = in[2].shape(1),
       max_len = max_context_len_] {
        int block_size = pools[0].block_size;
        // Iterate token by token, like the pool, so that it is read in order. Each head's rows are
        // written in order too.
        constexpr int kTokensPerTask = 256;
        int pieces = (max_len + kTokensPerTask - 1) / kTokensPerTask;
        cpu::parallel_for(num_seqs * pieces, [&](int task, int) {
          int seq = task / pieces;
          int begin = task % pieces * kTokensPerTask;
          int end = std::min(begin + kTokensPerTask, max_len);
          const int32_t* table = tables + int64_t(seq) * max_blocks;
          int len = std::min(context_lens[seq], max_len);
          for (size_t p = 0; p < pools.size(); p++) {
            const Pool& pool = pools[p];
            int64_t head_bytes = row_bytes[p];
            int64_t head_stride = max_len * head_bytes;
            char* rows = dst[p] + int64_t(seq) * pool.num_kv_heads * head_stride;
            for (int t = begin; t < std::min(end, len); t++) {
              int64_t slot = int64_t(table[t / block_size]) * block_size + t % block_size;
              const char* src = pool.slot(slot);
              for (int head = 0; head < pool.num_kv_heads; head++) {
                char* row = rows + head * head_stride + t * head_bytes;
                if (quantized) {
                  cpu::kernels().pool.dequantize(views[p], slot, head, row);
                } else {
                  std::memcpy(row, src + head * head_bytes, head_bytes);
                }
              }
            }
            int empty = std::max(begin, len);
            for (int head = 0; empty < end && head < pool.num_kv_heads; head++) {
              std::memset(
                  rows + head * head_stride + empty * head_bytes, 0, (end - empty) * head_bytes);
            }
          }
        });
      });
}

bool SeparateProduct::runs_on(mx::Stream stream) {
  return stream.device == mx::Device::gpu && gpu::kind() == Gpu::apple;
}

void SeparateProduct::eval_cpu(const Arrays&, Arrays&) {
  throw std::logic_error("[separate_product] runs on GPUs only");
}

void ApplyTokenBitmask::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  bool in_place = can_donate(inputs[0]);
  auto in = cpu::dense_inputs(inputs, 1, encoder);
  check_ids(in);
  if (in_place) {
    out[0].copy_shared_buffer(in[0]);
  } else if (!in[0].flags().row_contiguous) {
    cpu::copy_to_dense(in[0], out[0], encoder);
    in_place = true;
  } else {
    allocate(out[0]);
  }
  cpu::BitmaskArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.logits = in_place ? out[0].data<void>() : in[0].data<void>();
  args.bitmask = in[1].data<uint32_t>();
  args.out = out[0].data<void>();
  args.size = in[0].shape(1);
  cpu::dispatch(
      encoder, out,
      [args, in_place, rows = in[2].data<int32_t>(), num_masks = in[1].shape(0),
       num_rows = in[0].shape(0), row_bytes = int64_t(out[0].itemsize()) * args.size]() mutable {
        std::vector<cpu::MaskedRow> work;
        if (in_place) {
          for (int i = 0; i < num_masks; i++) {
            work.push_back({rows[i], i});
          }
        } else {
          for (int row = 0; row < num_rows; row++) {
            work.push_back({row, -1});
          }
          for (int i = 0; i < num_masks; i++) {
            work[rows[i]].mask = i;
          }
        }
        args.rows = work.data();
        for_ranges(int64_t(work.size()), row_bytes, [&](int64_t begin, int64_t end) {
          cpu::kernels().layer.bitmask(args, begin, end);
        });
      });
}

namespace {

// Returns the penalized logit of a token that was generated `count` times. factors: the repetition,
// presence and frequency penalties.
float penalized(float logit, int count, const float* factors) {
  logit = logit > 0 ? logit / factors[0] : logit * factors[0];
  volatile float by_count = factors[2] * float(count);  // not fused with the subtraction
  return logit - by_count - (count > 0 ? factors[1] : 0.0f);
}

void edit_row(
    const paged::EditedRow& edited, const float* factors, const paged::LogitEntry* entries,
    const float* values, const int32_t* newest, float* logits) {
  int last = edited.source < 0 ? -1 : newest[edited.source];
  for (int i = edited.begin; i < edited.middle; i++) {
    if (entries[i].after_or_count < 0 || entries[i].after_or_count == last) {
      logits[entries[i].token] += values[i];
    }
  }
  bool has_newest = last < 0;
  for (int i = edited.middle; i < edited.end; i++) {
    auto [token, count] = entries[i];
    bool again = token == last;
    has_newest |= again;
    logits[token] = penalized(logits[token], count + again, factors);
  }
  if (!has_newest) {
    logits[last] = penalized(logits[last], 1, factors);
  }
}

}  // namespace

void EditLogits::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  bool in_place = can_donate(inputs[0]);
  auto in = cpu::dense_inputs(inputs, 1, encoder);
  check_ids(in);
  if (in_place) {
    out[0].copy_shared_buffer(in[0]);
  } else {
    cpu::copy_to_dense(in[0], out[0], encoder);
  }
  cpu::dispatch(
      encoder, out,
      [rows = in[1].data<paged::EditedRow>(), factors = in[2].data<float>(),
       entries = in[3].data<paged::LogitEntry>(), values = in[4].data<float>(),
       newest = in[5].data<int32_t>(), logits = out[0].data<float>(), num_rows = in[1].shape(0),
       vocab_size = int64_t(in[0].shape(1))] {
        for (int i = 0; i < num_rows; i++) {
          edit_row(
              rows[i], factors + 3 * i, entries, values, newest, logits + rows[i].row * vocab_size);
        }
      });
}

void TakeRows::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  check_ids(in);
  allocate(out[0]);
  int64_t row_bytes = in[0].shape(2) * int64_t(in[0].itemsize());
  cpu::dispatch(
      encoder, out,
      [a = in[0].data<char>(), ids = in[1].data<uint32_t>(), to = out[0].data<char>(),
       num_rows = int64_t(in[0].shape(1)), num_ids = int64_t(in[1].shape(1)),
       count = int64_t(in[1].size()), row_bytes] {
        for_ranges(count, row_bytes, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            int64_t row = i / num_ids * num_rows + ids[i];
            std::memcpy(to + i * row_bytes, a + row * row_bytes, size_t(row_bytes));
          }
        });
      });
}

void GreedyTokens::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  for (auto& o : out) {
    allocate(o);
  }
  cpu::GreedyArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.logits = in[0].data<void>();
  args.tokens = out[0].data<int32_t>();
  args.largest = out[1].data<float>();
  args.reported = out[2].data<int32_t>();
  args.size = in[0].shape(1);
  int64_t num_rows = in[0].shape(0);
  int64_t row_bytes = args.size * int64_t(in[0].itemsize());
  cpu::dispatch_ranges(encoder, out, cpu::kernels().layer.greedy, args, num_rows, row_bytes);
}

void DrawTokens::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  cpu::DrawArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.logits = in[0].data<void>();
  args.tokens = in[1].data<int32_t>();
  args.largest = in[2].data<float>();
  args.temperature = in[3].data<float>();
  args.keys = in[4].data<uint32_t>();
  args.thresholds = in[5].data<float>();
  args.drawn = out[0].data<int32_t>();
  args.size = in[0].shape(1);
  constexpr int64_t kBytesLikeOneLogit = 16;  // as slow as its random numbers
  cpu::dispatch(encoder, out, [args, num_rows = in[0].shape(0)]() mutable {
    std::copy_n(args.tokens, num_rows, args.drawn);
    std::vector<int32_t> rows;
    for (int row = 0; row < num_rows; row++) {
      if (args.temperature[row] > 0) {
        rows.push_back(row);
      }
    }
    args.rows = rows.data();
    for_ranges(
        int64_t(rows.size()), kBytesLikeOneLogit * args.size,
        [&](int64_t begin, int64_t end) { cpu::kernels().layer.draw(args, begin, end); });
  });
}

void SamplingThresholds::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  cpu::ThresholdArgs args{};
  args.dtype = dtype_of(in[0].dtype());
  args.logits = in[0].data<void>();
  args.largest = in[1].data<float>();
  args.temperature = in[2].data<float>();
  args.floors = in[3].data<float>();
  args.top_k = in[4].data<int32_t>();
  args.top_p = in[5].data<float>();
  args.thresholds = out[0].data<float>();
  args.size = in[0].shape(1);
  constexpr int64_t kBytesLikeOneLogit = 64;  // as slow as three passes over a logit
  cpu::dispatch_ranges(
      encoder, out, cpu::kernels().layer.thresholds, args, in[0].shape(0),
      args.size * kBytesLikeOneLogit);
}

namespace {

// `size` numbers of 16 bits in float32, and back.
void widen(const mx::array& a, int64_t begin, int64_t size, float* out) {
  cpu::WeightView row;
  row.data = a.data<char>() + begin * int64_t(a.itemsize());
  row.n = 1;
  row.k = int(size);
  row.dtype = dtype_of(a.dtype());
  row.bits = int(a.itemsize()) * 8;
  row.row_bytes = size * int64_t(a.itemsize());
  cpu::kernels().product.unpack(row, 0, 1, out);
}

void round_to(mx::array& a, int64_t begin, int64_t size, const float* values) {
  if (a.dtype() == mx::bfloat16) {
    std::copy_n(values, size, a.data<mx::bfloat16_t>() + begin);
  } else {
    std::copy_n(values, size, a.data<mx::float16_t>() + begin);
  }
}

}  // namespace

// Rows of a lora whose results fit the cache between its two halves.
constexpr int64_t kRowsAtOnce = 64;

void Lora::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  auto shape = cpu::lora_shape(in);
  bool is_float32 = in[kBase].dtype() == mx::float32;
  auto add_rows = [=, out = mx::array::unsafe_weak_copy(out[0])](
                      int64_t begin, int64_t end, std::vector<float>& memory) mutable {
    int64_t n = shape.n, k = shape.k, num_rows = end - begin;
    memory.resize(num_rows * (shape.rank + (is_float32 ? 0 : n + k)));
    cpu::LoraRows rows{
        shape,    in[kA].data<char>(), in[kB].data<char>(), in[kAdapters].data<int32_t>() + begin,
        num_rows, memory.data()};
    if (is_float32) {
      float* to = out.data<float>() + begin * n;
      std::copy_n(in[kBase].data<float>() + begin * n, num_rows * n, to);
      cpu::lora_down(rows, in[kX].data<float>() + begin * k, k, 0, shape.rank);
      cpu::lora_up(rows, to, n, 0, shape.n);
      return;
    }
    float* x = memory.data() + num_rows * shape.rank;
    float* sums = x + num_rows * k;
    widen(in[kX], begin * k, num_rows * k, x);
    widen(in[kBase], begin * n, num_rows * n, sums);
    cpu::lora_down(rows, x, k, 0, shape.rank);
    cpu::lora_up(rows, sums, n, 0, shape.n);
    round_to(out, begin * n, num_rows * n, sums);
  };
  int64_t num_rows = in[kAdapters].size();
  cpu::dispatch(encoder, out, [=] {
    cpu::for_ranges(num_rows, shape.n * int64_t(sizeof(float)), [&](int64_t begin, int64_t end) {
      auto add = add_rows;
      std::vector<float> memory;
      for (int64_t i = begin; i < end; i += kRowsAtOnce) {
        add(i, std::min(end, i + kRowsAtOnce), memory);
      }
    });
  });
}

void GpuStep::eval_cpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[gpu_step] must run on a GPU");
}

}  // namespace mlx_paged
