// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../allocation.h"
#include "../primitives.h"
#include "attention_run.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

void PagedAttention::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, kPositions, encoder);
  check_ids(in);
  auto queries = cpu::dense(in[kQueries], encoder);
  auto key_pool = cpu::dense_pool(in[kKeyPool], encoder);
  auto value_pool = cpu::dense_pool(in[kValuePool], encoder);
  const auto& tables = in[kTables];
  allocate(out[0]);

  cpu::AttentionArgs args{};
  args.dtype = dtype_of(queries.dtype());
  args.queries = queries.data<void>();
  args.keys = {layout_of(key_pool), key_pool.data<char>()};
  args.values = {layout_of(value_pool), value_pool.data<char>()};
  args.out = out[0].data<void>();
  args.positions = in[kPositions].data<int32_t>();
  args.num_rows = queries.shape(0);
  args.block_tables = tables.data<int32_t>();
  args.work_items = reinterpret_cast<const paged::WorkItem*>(in[kWork].data<int32_t>());
  args.merge_items = reinterpret_cast<const paged::MergeItem*>(in[kMerge].data<int32_t>());
  args.per_head = in.size() > kPerHead ? in[kPerHead].data<float>() : nullptr;
  args.num_q_heads = queries.shape(1);
  args.num_kv_heads = key_pool.shape(2);
  args.block_size = key_pool.shape(1);
  args.max_blocks = tables.shape(1);
  args.options = options_;
  args.options.bounded_rows = in[kPositions].ndim() == 2 ? args.num_rows : 0;
  args.activations = activations_;
  int num_items = in[kWork].shape(0);
  int num_merges = in[kMerge].shape(0);

  cpu::dispatch(encoder, out, [args, num_items, num_merges] {
    cpu::AttentionRun run(args, num_items, num_merges);
    Scratch partials;
    run.set_partials(partials.at_least<float>(run.num_partial_floats()));
    cpu::parallel_for(run.num_tasks(), [&](int task, int) { run.attend(task); });
    cpu::parallel_for(run.num_merges(), [&](int task, int) { run.merge(task); });
  });
}

}  // namespace mlx_paged
