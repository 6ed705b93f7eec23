// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// CPU evaluation of linear layers, embeddings and experts, for every weight format.

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../allocation.h"
#include "../primitives.h"
#include "blas.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/backend/cpu/encoder.h"
#include "product_pieces.h"
#include "rounded_rows.h"
#include "scratch.h"
#include "weights.h"

namespace mlx_paged {

cpu::Sgemm cpu::find_sgemm() {
  static const auto sgemm = reinterpret_cast<Sgemm>(dlsym(RTLD_DEFAULT, "cblas_sgemm"));
  return sgemm;
}

namespace {

void sgemm(int m, int n, int k, const float* x, const float* weight, float* out, int ldc) {
  constexpr int kRowMajor = 101;
  constexpr int kNoTranspose = 111;
  constexpr int kTranspose = 112;
  cpu::find_sgemm()(kRowMajor, kNoTranspose, kTranspose, m, n, k, 1, x, k, weight, k, 0, out, ldc);
}

// Multiplies many rows: unpacks a cache-sized slab of the weights at a time and multiplies all of x
// by it.
void multiply_many(const float* x, const cpu::WeightView& weights, float* out, int m) {
  constexpr int64_t kSlabBytes = 32 << 20;
  constexpr int kAlign = 16;
  constexpr int kAtOnce = 8;  // rows of weights
  int64_t fit = kSlabBytes / (int64_t(weights.k) * int64_t(sizeof(float)));
  int columns = int(std::clamp<int64_t>(fit / kAlign * kAlign, kAlign, weights.n + kAlign));
  // Reused, so that its pages are not mapped anew for every product.
  thread_local Scratch memory;
  float* slab = memory.at_least<float>(size_t(columns) * weights.k);
  for (int begin = 0; begin < weights.n; begin += columns) {
    int count = std::min(columns, weights.n - begin);
    cpu::parallel_for((count + kAtOnce - 1) / kAtOnce, [&, to = slab](int task, int) {
      int64_t row = int64_t(task) * kAtOnce;
      cpu::kernels().product.unpack(
          weights, begin + row, begin + std::min<int64_t>(row + kAtOnce, count),
          to + row * weights.k);
    });
    sgemm(m, count, weights.k, x, slab, out + begin, weights.n);
  }
}

// An operand of products: [rows, k].
struct Rows {
  const float* x;
  int count;
  uint64_t input;  // see cpu::input_number

  Rows range(int begin, int end, int k) const {
    return {x + int64_t(begin) * k, end - begin, input};
  }
};

// Rows that a task rounds. A task with a whole block of rows shares no cache line with others.
constexpr int kRoundedAtOnce = 4;

// Rows that are rounded at a time, so that they stay in the L2 cache while all weights pass.
// Processors with AMX have 2 MB of it, others that multiply integers by vectors 1 MB.
int rows_at_once(bool uses_amx, int64_t row_bytes) {
  constexpr int kMinRows = 64;
  const int max_rows = uses_amx ? 512 : 256;
  const int64_t bytes = uses_amx ? 1 << 20 : 1 << 19;
  return int(std::clamp<int64_t>(bytes / row_bytes / 16 * 16, kMinRows, max_rows));
}

// Multiplies `max_rows` rounded rows at a time. round(rows, to, begin, end) rounds rows [begin,
// end) of a block, `at_once` per task; multiply(rows, rounded, first) multiplies a block, whose
// first row is row `first`.
template <typename Round, typename Multiply>
void multiply_rounded_blocks(
    const Rows& x, const cpu::WeightView& weights, const void* kernels, int max_rows,
    int64_t block_bytes, int at_once, const Round& round, const Multiply& multiply) {
  thread_local cpu::RoundedRows rounded;
  rounded.begin(
      {x.input, x.x, x.count, weights.bits, kernels}, (x.count + max_rows - 1) / max_rows,
      block_bytes);
  for (int begin = 0, block = 0; begin < x.count; begin += max_rows, block++) {
    Rows rows = x.range(begin, std::min(begin + max_rows, x.count), weights.k);
    char* to = rounded.block(block);
    if (!rounded.has(block)) {
      cpu::parallel_for((rows.count + at_once - 1) / at_once, [&](int task, int) {
        int first = task * at_once;
        round(rows, to, first, std::min(first + at_once, rows.count));
      });
      rounded.set_done(block);
    }
    multiply(rows, to, begin);
  }
}

// Multiplies many rows with integer activations.
void multiply_integers(
    const cpu::IntegerKernels& integers, const Rows& x, const cpu::WeightView& weights,
    float* out) {
  int n = weights.n;
  int k = weights.k;
  // Long rows pass in chunks.
  bool uses_amx = integers.uses_blocks(x.count);
  int64_t row_bytes = uses_amx ? integers.blocks.bytes(std::min(k, cpu::kAmxChunk)) / cpu::kRowBlock
                               : integers.row_bytes(std::min(k, cpu::kTileChunk));
  int max_rows = std::min(x.count, rows_at_once(uses_amx, row_bytes));
  multiply_rounded_blocks(
      x, weights, &integers, max_rows, integers.rounded_bytes(max_rows, k),
      uses_amx ? cpu::kRowBlock : kRoundedAtOnce,
      [&](const Rows& rows, char* to, int begin, int end) {
        integers.round({rows.x, k, rows.count, k, weights.bits, to}, begin, end);
      },
      [&](const Rows& rows, const char* rounded, int row) {
        float* to = out + int64_t(row) * n;
        cpu::for_product_pieces(
            rows.count, n, k, weights.bits, n,
            [&](int64_t first, int64_t last) {
              float* scratch =
                  cpu::thread_scratch(integers.num_scratch_floats(rows.count, weights));
              cpu::multiply_rounded(
                  integers, {rounded, weights, to, rows.count, n, scratch}, rows.x, k, first, last);
            },
            cpu::kIntegerTileColumns);
      });
}

// The same with activations rounded to bfloat16, or split into several.
void multiply_bfloat(
    const cpu::BFloatKernels& bfloat, const Rows& x, const cpu::WeightView& weights, float* out) {
  int n = weights.n;
  int k = weights.k;
  bool uses_amx = bfloat.row_block > 1;
  constexpr int64_t kPart = sizeof(uint16_t);
  int64_t row_bytes = bfloat.parts * cpu::bfloat_stride(k) * kPart;
  int max_rows = uses_amx ? std::min(x.count, rows_at_once(true, row_bytes)) : x.count;
  multiply_rounded_blocks(
      x, weights, &bfloat, max_rows, bfloat.rounded_size(max_rows, k) * kPart, kRoundedAtOnce,
      [&](const Rows& rows, char* to, int begin, int end) {
        bfloat.round({rows.x, k, rows.count, k, reinterpret_cast<uint16_t*>(to)}, begin, end);
      },
      [&](const Rows& rows, const char* rounded, int row) {
        auto from = reinterpret_cast<const uint16_t*>(rounded);
        float* to = out + int64_t(row) * n;
        cpu::for_product_pieces(
            rows.count, n, k, weights.bits, n,
            [&](int64_t first, int64_t last) {
              float* scratch = cpu::thread_scratch(bfloat.num_scratch_floats(k));
              bfloat.product({from, weights, to, rows.count, n, scratch}, first, last);
            },
            cpu::kBFloatTileColumns);
      });
}

// Up to this many rows, a BLAS is not faster than products by rows.
constexpr int kFewRows = 64;

// Computes x [rows, k] times the rows of weights, plus bias if there is one. The first `by_rows`
// rows are summed in the same order for any number of rows.
void multiply(
    const Rows& x, const cpu::WeightView& weights, const float* bias, float* out,
    Activations activations, int by_rows) {
  int m = x.count;
  if (m == 0) {
    return;
  }
  int n = weights.n;
  int k = weights.k;
  const auto* integers = cpu::integer_kernels(activations, weights);
  bool is_exact = integers && !integers->leaves_many_rows;
  if (!is_exact && m > kFewRows && by_rows > 0 && by_rows < m) {
    multiply(x.range(0, by_rows, k), weights, bias, out, activations, by_rows);
    return multiply(
        x.range(by_rows, m, k), weights, bias, out + int64_t(by_rows) * n, activations, 0);
  }
  const auto& product = cpu::kernels().product;
  bool is_float = weights.format == WeightFormat::dense && weights.dtype == DType::float32;
  bool is_by_row = by_rows >= m || m <= kFewRows || !cpu::find_sgemm();
  if (is_exact || (integers && is_by_row)) {
    multiply_integers(*integers, x, weights, out);
  } else if (
      activations == Activations::bfloat16 && cpu::kernels().rounded.bfloat.serves(weights) &&
      m > product.max_rows(weights)) {
    multiply_bfloat(cpu::kernels().rounded.bfloat, x, weights, out);
  } else if (is_by_row) {
    cpu::for_product_pieces(m, n, k, weights.bits, n, [&](int64_t begin, int64_t end) {
      product.few_rows({x.x, weights, out, m, k, n}, begin, end);
    });
  } else if (cpu::kernels().rounded.wide_bfloat.serves(weights)) {
    multiply_bfloat(cpu::kernels().rounded.wide_bfloat, x, weights, out);
  } else if (is_float) {
    sgemm(m, n, k, x.x, static_cast<const float*>(weights.data), out, n);
  } else {
    multiply_many(x.x, weights, out, m);
  }
  if (!bias) {
    return;
  }
  cpu::for_ranges(m, n * int64_t(sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      for (int i = 0; i < n; i++) {
        out[row * n + i] += bias[i];
      }
    }
  });
}

}  // namespace

namespace cpu {

WeightView weights_of(const mx::array* weight, const WeightCodes& codes) {
  WeightView w;
  w.data = weight->data<void>();
  if (codes.format == WeightFormat::dense) {
    w.k = weight->shape(-1);
    w.dtype = dtype_of(weight->dtype());
    w.bits = int(weight->itemsize()) * 8;
  } else {
    w.k = int(int64_t(weight->shape(-1)) * 32 / codes.bits);
    w.format = codes.format;
    w.bits = codes.bits;
    w.group_size = codes.group_size;
    w.scales = weight[1].data<void>();
  }
  w.n = int(int64_t(weight->size()) / weight->shape(-1));
  w.row_bytes = int64_t(weight->shape(-1)) * int64_t(weight->itemsize());
  if (codes.format == WeightFormat::affine) {
    w.dtype = dtype_of(weight[1].dtype());
    w.biases = weight[2].data<void>();
  }
  return w;
}

ExpertWeights weights_of(const ExpertLinear& node, const Arrays& in) {
  constexpr size_t kWeight = 2;
  ExpertWeights w;
  w.all = weights_of(&in[kWeight], node.format());
  w.num_experts = in[kWeight].shape(0);
  size_t next = kWeight + 1 + bool(w.all.scales) + bool(w.all.biases);
  if (node.has_bias()) {
    w.bias = in[next++].data<float>();
  }
  w.scales = in.size() > next ? in[next].data<float>() : nullptr;
  return w;
}

void read_row(const WeightView& weights, int64_t id, float* out) {
  id += id < 0 ? weights.n : 0;
  if (id < 0 || id >= weights.n) {
    std::fill_n(out, weights.k, std::nanf(""));
    return;
  }
  kernels().product.unpack(weights, id, id + 1, out);
}

}  // namespace cpu

void Linear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  cpu::dispatch(
      encoder, out,
      [x =
           Rows{
               in[0].data<float>(), int(in[0].size() / in[1].shape(1)),
               cpu::input_number(inputs[0])},
       weights = cpu::weights_of(&in[1], kDenseWeight),
       bias = in.size() > 2 ? in[2].data<float>() : nullptr, out = out[0].data<float>(),
       activations = activations_,
       by_rows = by_rows_] { multiply(x, weights, bias, out, activations, by_rows); });
}

void QuantizedLinear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  auto w = cpu::weights_of(&in[1], codes_);
  size_t bias = w.biases ? 4 : 3;
  cpu::dispatch(
      encoder, out,
      [x = Rows{in[0].data<float>(), int(in[0].size() / w.k), cpu::input_number(inputs[0])}, w,
       bias = in.size() > bias ? in[bias].data<float>() : nullptr, out = out[0].data<float>(),
       activations = activations_,
       by_rows = by_rows_] { multiply(x, w, bias, out, activations, by_rows); });
}

void Lookup::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  auto w = cpu::weights_of(&in[1], codes_);
  cpu::dispatch(
      encoder, out,
      [size = int64_t(in[0].size()), ids = in[0].data<int32_t>(), w, out = out[0].data<float>()] {
        cpu::for_ranges(size, w.k * int64_t(sizeof(float)), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            cpu::read_row(w, ids[i], out + i * w.k);
          }
        });
      });
}

void ExpertLinear::eval_cpu(const Arrays& inputs, Arrays& out) {
  if (inputs[0].dtype() != mx::float32) {
    throw std::runtime_error("[expert_linear] x must be float32 outside of an executable");
  }
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  cpu::ExpertArgs args;
  args.weights = cpu::weights_of(*this, in);
  int64_t k = args.weights.all.k;
  bool shares_rows = in[0].size() != in[1].size() * k;
  args.x = in[0].data<float>();
  args.indices = in[1].data<uint32_t>();
  args.per_row = in[1].shape(-1);
  args.num_rows = args.per_row ? int(in[1].size() / args.per_row) : 0;
  args.x_row_stride = shares_rows ? k : args.per_row * k;
  args.x_pair_stride = shares_rows ? 0 : k;
  args.index_row_stride = args.per_row;
  args.out = out[0].data<float>();
  cpu::dispatch(encoder, out, [args] {
    cpu::ExpertGroups groups;
    groups.assign(args);
    int shares = cpu::expert_shares(args);
    cpu::parallel_for(
        shares, [&](int share, int) { cpu::run_experts(args, groups, share, shares); });
  });
}

}  // namespace mlx_paged
