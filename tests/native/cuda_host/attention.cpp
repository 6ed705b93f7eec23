// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention of csrc/cuda/kernels on the CPU (fibers.h), with the work items that
// csrc/attention_plan.cpp makes: rows of drafts that share a pass over their context against the
// same rows one by one, which must have the same bits, and these against float64. Prints a line for
// each failure, and how many results were compared.

#include <map>
#include <random>
#include <string>
#include <tuple>

#include "fibers.h"

// (Metal's language wants these as CUDA has them.)
#undef blockIdx
#define blockIdx make_uint3(blockIdx_.x, blockIdx_.y, 0)
#define blockDim make_uint3(fibers::block->fibers.size(), 1, 1)
#define gridDim make_uint3(0, 0, 0)  // (not read by attention)

#define __CUDACC__  // Attention options are those of a GPU.
inline float __fmul_rn(float a, float b) {
  return a * b;
}

inline float __fadd_rn(float a, float b) {
  return a + b;
}

// The instruction for powers of two.
#define asm(...) y = ::exp2f(x)
#include <metal_stdlib>
#undef asm

// Kernels expect it outside of any namespace.
__thread unsigned char shared[fibers::kSharedBytes] __attribute__((aligned(128)));

#define PAGED_DTYPE_bfloat16  // (not read here: kernels are chosen below)
#include "kernels/merge_splits.h"
#include "kernels/paged_decode_quantized.h"
#include "kernels/paged_decode_tensor.h"
// The planner, whose namespace has its own vectors.
#include "attention_plan.cpp"

namespace {

using namespace paged;

int compared = 0;
int failed = 0;

// Rows of numbers of each head, as kernels read them.
template <typename T>
struct Numbers {
  std::vector<T> elements;

  Numbers(std::mt19937& rng, int blocks, int block_size, int heads, int dim)
      : elements(size_t(blocks) * block_size * heads * dim), row(heads * dim), dim(dim) {
    std::normal_distribution<float> normal;
    for (T& element : elements) {
      element = T(normal(rng));
    }
  }

  double at(size_t slot, int head, int i) const {
    return double(float(elements[slot * row + head * dim + i]));
  }

  const T* data() const { return elements.data(); }

  int row;
  int dim;
};

// Codes of a quantized pool; int8 codes have a scale for each head of a token.
template <typename T, int FORMAT>
struct Codes {
  std::vector<unsigned char> bytes;

  Codes(std::mt19937& rng, int blocks, int block_size, int heads, int dim)
      : bytes(size_t(blocks) * block_size * heads * (code_bytes(FORMAT, dim) + kTail(dim))),
        block_size(block_size),
        heads(heads),
        dim(dim) {
    std::uniform_int_distribution<int> code(0, FORMAT == FORMAT_FP8 ? 0x6f : 0xff);
    std::uniform_real_distribution<float> scale(0.005f, 0.02f);
    for (auto& byte : bytes) {
      byte = static_cast<unsigned char>(code(rng));
    }
    for (int block = 0; block < blocks; block++) {
      for (int i = 0; i < block_size * heads * kTail(dim) / 2; i++) {
        __half value = __float2half(scale(rng));
        std::memcpy(&bytes[block * block_bytes() + codes_of_block() + 2 * i], &value, 2);
      }
    }
  }

  static int kTail(int dim) { return tail_bytes(FORMAT, dim); }
  size_t codes_of_block() const { return size_t(block_size) * heads * code_bytes(FORMAT, dim); }
  size_t block_bytes() const { return codes_of_block() + size_t(block_size) * heads * kTail(dim); }

  double at(size_t slot, int head, int i) const {
    static_assert(FORMAT == FORMAT_INT8);
    const unsigned char* block = &bytes[slot / block_size * block_bytes()];
    size_t token = slot % block_size;
    auto code = static_cast<signed char>(block[(token * heads + head) * dim + i]);
    __half scale;
    std::memcpy(&scale, block + codes_of_block() + 2 * (size_t(head) * block_size + token), 2);
    return double(code) * double(__half2float(scale));
  }

  const T* data() const { return reinterpret_cast<const T*>(bytes.data()); }

  int block_size;
  int heads;
  int dim;
};

struct Case {
  const char* name;
  int group;
  int shared_rows;  // of an item, at most
  int block_size;
  // Sequences: tokens of context before the step, and rows.
  std::vector<std::pair<int, int>> sequences;
  int window = 0;
  float softcap = 0;
  bool has_sinks = false;
};

// Rows of drafts, each a sequence of its own.
struct Rows {
  std::vector<int32_t> tables;
  std::vector<int64_t> num_blocks, context_lens, query_lens;
  int table_width = 0;
  int blocks = 1;  // of the pool; block 0 belongs to nobody

  explicit Rows(const Case& c) {
    for (auto [before, rows] : c.sequences) {
      table_width = std::max(table_width, (before + rows + c.block_size - 1) / c.block_size);
    }
    for (auto [before, rows] : c.sequences) {
      std::vector<int32_t> table(table_width);
      int used = (before + rows + c.block_size - 1) / c.block_size;
      std::iota(table.rbegin() + (table_width - used), table.rend(), blocks);
      blocks += used;
      for (int row = 0; row < rows; row++) {
        tables.insert(tables.end(), table.begin(), table.end());
        num_blocks.push_back(used);
        context_lens.push_back(before + row + 1);
        query_lens.push_back(1);
      }
    }
  }

  int count() const { return int(context_lens.size()); }

  mlx_paged::AttentionPlan plan(const Case& c, int shared_rows) const {
    mlx_paged::PlanSequences sequences{
        count(),
        table_width,
        tables.data(),
        num_blocks.data(),
        context_lens.data(),
        query_lens.data(),
        nullptr,
        0};
    mlx_paged::PlanRules rules{c.block_size, c.window, 32, 0, true, false, 0, shared_rows};
    return *mlx_paged::plan_attention(sequences, rules);
  }
};

template <typename T, int DIM, int COLUMNS, int KEYS, int VALUES>
struct Kernel {
  static constexpr bool kIsPlain = KEYS == FORMAT_PLAIN;

  static int scratch() {
    constexpr int kQueries = COLUMNS * TENSOR_QUERIES;
    return kIsPlain ? tensor_scratch(DIM, kQueries)
                    : quantized_scratch(KEYS, VALUES, DIM, kQueries);
  }

  template <typename... Arguments>
  static void run(Arguments... arguments) {
    if constexpr (kIsPlain) {
      decode_tensor_entry<T, DIM, COLUMNS>(arguments...);
    } else {
      decode_quantized_entry<T, DIM, COLUMNS, KEYS, VALUES>(arguments...);
    }
  }
};

constexpr int kHeads = 2;  // of keys and values

template <typename T, int DIM, int KEYS = FORMAT_PLAIN, int VALUES = KEYS>
class Attention {
  template <int FORMAT>
  using PoolOf = std::conditional_t<FORMAT == FORMAT_PLAIN, Numbers<T>, Codes<T, FORMAT>>;

 public:
  Attention(const Case& c, std::mt19937& rng)
      : case_(c),
        rows_(c),
        keys_(rng, rows_.blocks, c.block_size, kHeads, DIM),
        values_(rng, rows_.blocks, c.block_size, kHeads, DIM),
        queries_(rng, rows_.count(), 1, kHeads * c.group, DIM),
        sinks_(kHeads * c.group, 0.5f),
        options_{} {
    options_.scale = c.softcap > 0 ? 0.1f : 0.1f * PAGED_LOG2E;
    options_.softcap = c.softcap;
    options_.window = c.window ? c.window : WHOLE_CONTEXT;
    options_.has_sinks = c.has_sinks;
  }

  template <int COLUMNS>
  void check() {
    std::vector<float> partials_alone, partials_shared;
    std::vector<T> alone = run<1>(1, partials_alone);
    std::vector<T> shared = run<COLUMNS>(case_.shared_rows, partials_shared);
    // Rounding hides most differences of results, but not those of partials.
    int differing = different_bits(alone, shared) + different_bits(partials_alone, partials_shared);
    if (differing) {
      failed++;
      std::printf("%s: %d results with other bits\n", case_.name, differing);
    }
    if constexpr ((KEYS == FORMAT_PLAIN || KEYS == FORMAT_INT8) && VALUES == KEYS) {
      compare(alone);
    }
  }

 private:
  template <typename Number>
  static int different_bits(const std::vector<Number>& a, const std::vector<Number>& b) {
    fibers::require(a.size() == b.size(), "as many results");
    int differing = 0;
    for (size_t i = 0; i < a.size(); i++) {
      differing += std::memcmp(&a[i], &b[i], sizeof(Number)) != 0;
    }
    compared += int(a.size());
    return differing;
  }

  // Rows that share a pass, at most `shared_rows`. Adds the sums of values of their pieces to
  // `of_pieces`, by row.
  template <int COLUMNS>
  std::vector<T> run(int shared_rows, std::vector<float>& of_pieces) {
    auto plan = rows_.plan(case_, shared_rows);
    int most = 0;
    for (const auto& item : plan.work_items) {
      most = std::max(most, item.row_end - item.row_begin);
    }
    fibers::require(most == shared_rows, "as many rows share a pass as may");
    int num_partials = 1;
    for (const auto& merge : plan.merge_items) {
      int rows = merge.row_end - merge.row_begin;
      num_partials = std::max(num_partials, merge.partial_begin + rows * merge.num_splits);
    }
    int num_q_heads = kHeads * case_.group;
    AttentionParams params{};
    params.num_q_heads = num_q_heads;
    params.num_kv_heads = kHeads;
    params.block_shift = std::countr_zero(unsigned(case_.block_size));
    params.max_blocks = plan.table_width;
    params.num_partials = num_partials;
    params.min_rows = 1;
    params.max_rows = COLUMNS * TENSOR_QUERIES / case_.group;
    params.options = options_;
    params.key_format = KEYS;
    params.value_format = VALUES;
    params.num_written = 8;
    std::vector<T> out(size_t(plan.num_rows) * num_q_heads * DIM, T(NAN));
    std::vector<float> workspace(size_t(num_partials) * num_q_heads * (DIM + 2) + 4, NAN);
    auto* partials = reinterpret_cast<float*>((size_t(workspace.data()) + 15) / 16 * 16);
    typedef Kernel<T, DIM, COLUMNS, KEYS, VALUES> Decode;
    fibers::run_grid(
        int(plan.work_items.size()) * kHeads, 1, 32 * tensor_warps(DIM), Decode::scratch(), 1, [&] {
          begin_block();
          Decode::run(
              queries_.data(), keys_.data(), values_.data(), plan.positions.data(),
              plan.block_tables.data(), plan.work_items.data(), sinks_.data(), out.data(), partials,
              params);
        });
    std::map<int, std::vector<float>> by_row;
    for (const auto& merge : plan.merge_items) {
      int rows = merge.row_end - merge.row_begin;
      for (int i = 0; i < rows * merge.num_splits; i++) {
        const float* piece = partials + size_t(merge.partial_begin + i) * num_q_heads * DIM;
        auto& of_row = by_row[merge.row_begin + i % rows];
        of_row.insert(of_row.end(), piece, piece + num_q_heads * DIM);
      }
    }
    for (const auto& [row, pieces] : by_row) {
      of_pieces.insert(of_pieces.end(), pieces.begin(), pieces.end());
    }
    int blocks = (num_q_heads + MERGE_HEADS - 1) / MERGE_HEADS;
    fibers::run_grid(
        int(plan.merge_items.size()) * blocks, shared_rows, 32 * MERGE_HEADS, 0, 1, [&] {
          begin_block();
          merge_splits_entry<T, DIM>(
              plan.merge_items.data(), partials, sinks_.data(), out.data(),
              {num_q_heads, num_partials, options_});
        });
    return out;
  }

  // The kernels' shared memory begins as NaN.
  static void begin_block() {
    if (fibers::block->shared != ::shared) {
      fibers::block->shared = ::shared;
      std::memset(::shared, 0xff, sizeof(::shared));
    }
  }

  void compare(const std::vector<T>& found) {
    double worst = 0;
    for (int row = 0; row < rows_.count(); row++) {
      int end = int(rows_.context_lens[row]);
      int begin = case_.window ? std::max(0, end - case_.window) : 0;
      auto slot = [&](int token) {
        int block = rows_.tables[size_t(row) * rows_.table_width + token / case_.block_size];
        return size_t(block) * case_.block_size + token % case_.block_size;
      };
      for (int head = 0; head < kHeads * case_.group; head++) {
        std::vector<double> weights;
        double sum = case_.has_sinks ? std::exp(double(sinks_[head])) : 0;
        for (int token = begin; token < end; token++) {
          double logit = 0;
          for (int i = 0; i < DIM; i++) {
            logit += queries_.at(row, head, i) * keys_.at(slot(token), head / case_.group, i);
          }
          logit *= double(0.1f);
          if (case_.softcap > 0) {
            logit = case_.softcap * std::tanh(logit / case_.softcap);
          }
          weights.push_back(std::exp(logit));
          sum += weights.back();
        }
        for (int i = 0; i < DIM; i++) {
          double expected = 0;
          for (int token = begin; token < end; token++) {
            double value = values_.at(slot(token), head / case_.group, i);
            expected += weights[token - begin] / sum * value;
          }
          size_t at = (size_t(row) * kHeads * case_.group + head) * DIM + i;
          double error = std::fabs(double(float(found[at])) - expected);
          worst = std::isnan(error) ? INFINITY : std::max(worst, error);
          compared++;
        }
      }
    }
    if (!(worst < 0.02)) {
      failed++;
      std::printf("%s: an error of %g\n", case_.name, worst);
    }
  }

  const Case& case_;
  Rows rows_;
  PoolOf<KEYS> keys_;
  PoolOf<VALUES> values_;
  Numbers<T> queries_;
  std::vector<float> sinks_;
  AttentionOptions options_;
};

template <typename T, int DIM, int COLUMNS, int KEYS = FORMAT_PLAIN, int VALUES = KEYS>
void check(const Case& c) {
  std::mt19937 rng(11);
  Attention<T, DIM, KEYS, VALUES>(c, rng).template check<COLUMNS>();
}

}  // namespace

// As calibration leaves it.
int mlx_paged::piece_tokens() {
  return 0;
}

int main() {
  // Rows beside others and alone, over the end of a block, and of a context in pieces, whose number
  // changes from one row to the next.
  const std::vector<std::pair<int, int>> sequences{{20, 5}, {30, 5}, {7, 1}, {382, 5}, {600, 5}};
#ifdef QUANTIZED
  check<__nv_bfloat16, 64, 2, FORMAT_INT8>({"int8", 3, 5, 32, sequences});
  check<__half, 128, 2, FORMAT_INT8, FORMAT_INT4>({"int8 and int4", 3, 5, 16, {{50, 5}, {200, 2}}});
  check<__nv_bfloat16, 64, 2, FORMAT_INT4>({"int4", 4, 4, 16, {{60, 4}, {12, 4}}, 20});
  check<__half, 64, 2, FORMAT_FP8>({"fp8", 8, 2, 32, {{60, 5}, {12, 2}}, 0, 0, true});
#else
  check<__nv_bfloat16, 128, 2>({"groups of 3", 3, 5, 32, sequences});
  check<__half, 64, 4>({"groups of 8", 8, 4, 16, {{100, 5}, {3, 4}}, 0, 30});
  check<__nv_bfloat16, 128, 3>({"groups of 4", 4, 5, 32, {{100, 5}, {9, 3}}, 0, 0, true});
  check<__half, 64, 2>({"windows", 2, 5, 32, {{100, 5}, {44, 5}, {3, 5}, {500, 5}}, 29});
  // The rows of the first sequence see tokens from 78 to 82 on.
  check<__half, 64, 2>({"windows in pieces", 2, 5, 32, {{577, 5}, {600, 5}}, 500});
  check<__nv_bfloat16, 256, 1>({"heads of 256", 2, 4, 16, {{40, 4}, {13, 5}}});
#endif
  std::printf("%d compared, %d failed\n", compared, failed);
  return failed != 0;
}
