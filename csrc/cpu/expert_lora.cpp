// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "expert_lora.h"

#include <algorithm>

#include "../allocation.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel_for.h"
#include "scratch.h"

namespace mlx_paged {

namespace cpu {

namespace {

const float* base_of(const ExpertLoraArgs& args, int pair) {
  return args.base + pair / args.per_row * args.base_row_stride +
         int64_t(pair % args.per_row) * args.shape.n;
}

const float* x_of(const ExpertLoraArgs& args, int pair) {
  return args.x + pair / args.per_row * args.x_row_stride +
         pair % args.per_row * args.x_pair_stride;
}

void copy_base(const ExpertLoraArgs& args, int pair) {
  std::copy_n(base_of(args, pair), args.shape.n, args.out + int64_t(pair) * args.shape.n);
}

// Adds matrices `group` to up to kLoraRows pairs. `next`: those of the next call.
void add_adapter(const ExpertLoraArgs& args, int group, int next, const int* pairs, int num_pairs) {
  const auto& s = args.shape;
  auto matrix = [&](const char* all, int i, int columns) {
    return all + int64_t(i) * s.rank * columns * s.item_size;
  };
  float* hidden = thread_scratch(size_t(num_pairs) * s.rank);
  LoraArgs rows{};
  rows.dtype = s.dtype;
  rows.num_rows = num_pairs;
  rows.rank = s.rank;
  rows.k = s.k;
  rows.n = s.n;
  for (int i = 0; i < num_pairs; i++) {
    copy_base(args, pairs[i]);
    rows.x[i] = x_of(args, pairs[i]);
    rows.hidden[i] = hidden + i * s.rank;
    rows.out[i] = args.out + int64_t(pairs[i]) * s.n;
  }
  rows.a = matrix(args.a, group, s.k);
  rows.next = matrix(args.a, next, s.k);
  kernels().layer.lora_down(rows, 0, s.rank);
  rows.b = matrix(args.b, group, s.n);
  rows.next = matrix(args.b, next, s.n);
  kernels().layer.lora_up(rows, 0, s.n);
}

}  // namespace

ExpertLoraArgs expert_lora_args(const Arrays& in) {
  const auto& a = in[ExpertLora::kA];
  const auto& b = in[ExpertLora::kB];
  const auto& experts = in[ExpertLora::kExperts];
  ExpertLoraArgs args;
  args.shape = {a.shape(0) * a.shape(1), a.shape(2),           a.shape(3), b.shape(3),
                dtype_of(a.dtype()),     int64_t(a.itemsize())};
  args.num_experts = a.shape(1);
  args.num_rows = int(in[ExpertLora::kAdapters].size());
  args.per_row = experts.shape(-1);
  return args;
}

void assign(ExpertGroups& groups, const ExpertLoraArgs& args) {
  int num_adapters = args.shape.num_adapters / args.num_experts;
  groups.assign(args.shape.num_adapters, args.num_rows, args.per_row, [&](int row, int i) {
    int32_t adapter = args.adapters[row];
    uint32_t expert = args.experts[row * args.expert_row_stride + i];
    bool exists = adapter >= 0 && adapter < num_adapters && expert < uint32_t(args.num_experts);
    return exists ? uint32_t(adapter) * args.num_experts + expert : UINT32_MAX;
  });
}

int expert_lora_shares(const ExpertLoraArgs& args) {
  constexpr int64_t kMinWork = 1 << 16;  // products of two numbers
  constexpr int kSharesPerThread = 8;
  int64_t work = int64_t(args.num_pairs()) * args.shape.rank * (args.shape.k + args.shape.n);
  int64_t most = std::min<int64_t>(args.num_pairs(), kSharesPerThread * num_threads());
  return int(std::clamp<int64_t>(work / kMinWork, 1, std::max<int64_t>(most, 1)));
}

void run_expert_lora(
    const ExpertLoraArgs& args, const ExpertGroups& groups, int share, int num_shares) {
  auto part = [&](int64_t count, int i) { return int(count * i / num_shares); };
  int num_without = int(groups.without().size());
  for (int i = part(num_without, share); i < part(num_without, share + 1); i++) {
    copy_base(args, groups.without()[i]);
  }
  int num_with = args.num_pairs() - num_without;
  int first = part(num_with, share);
  int last = part(num_with, share + 1);
  const auto& all = groups.groups();
  for (size_t g = 0; g < all.size(); g++) {
    int end = std::min(all[g].end, last);
    for (int i = std::max(all[g].begin, first); i < end; i += kLoraRows) {
      bool is_last = i + kLoraRows >= end && g + 1 < all.size();
      add_adapter(
          args, all[g].expert, all[g + is_last].expert, groups.pairs().data() + i,
          std::min(kLoraRows, end - i));
    }
  }
}

}  // namespace cpu

void ExpertLora::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  allocate(out[0]);
  auto args = cpu::expert_lora_args(in);
  int64_t k = args.shape.k, n = args.shape.n;
  bool shares_rows = int64_t(in[kX].size()) != args.num_pairs() * k;
  args.a = in[kA].data<char>();
  args.b = in[kB].data<char>();
  args.x = in[kX].data<float>();
  args.x_row_stride = shares_rows ? k : args.per_row * k;
  args.x_pair_stride = shares_rows ? 0 : k;
  args.adapters = in[kAdapters].data<int32_t>();
  args.experts = in[kExperts].data<uint32_t>();
  args.expert_row_stride = args.per_row;
  args.base = in[kBase].data<float>();
  args.base_row_stride = args.per_row * n;
  args.out = out[0].data<float>();
  cpu::dispatch(encoder, out, [args] {
    cpu::ExpertGroups groups;
    cpu::assign(groups, args);
    int shares = cpu::expert_lora_shares(args);
    cpu::parallel_for(
        shares, [&](int share, int) { cpu::run_expert_lora(args, groups, share, shares); });
  });
}

}  // namespace mlx_paged
