// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "bindings.h"

#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "decode_plan.h"
#include "gpu.h"
#include "kernel_names.h"
#include "mlx/version.h"
#include "primitives.h"
#include "transfer.h"

#define MLX_PAGED_STRING_(x) #x
#define MLX_PAGED_STRING(x) MLX_PAGED_STRING_(x)

namespace mlx_paged {

namespace {

nb::dict build_info() {
  nb::dict d;
  d["mlx_version"] = MLX_PAGED_STRING(MLX_VERSION_MAJOR) "." MLX_PAGED_STRING(
      MLX_VERSION_MINOR) "." MLX_PAGED_STRING(MLX_VERSION_PATCH);
  d["nanobind_version"] = MLX_PAGED_NANOBIND_VERSION;
  d["backends"] = MLX_PAGED_BACKENDS;
#if defined(__clang__)
  d["compiler"] = "clang " __clang_version__;
#else
  d["compiler"] = "gcc " __VERSION__;
#endif
  d["simd"] = cpu::kernels().simd;
  d["num_threads"] = std::to_string(cpu::num_threads());
  return d;
}

mx::Dtype host_dtype(nb::dlpack::dtype dtype) {
  if (dtype == nb::dtype<int32_t>()) {
    return mx::int32;
  }
  if (dtype == nb::dtype<uint32_t>()) {
    return mx::uint32;
  }
  if (dtype == nb::dtype<float>()) {
    return mx::float32;
  }
  throw std::invalid_argument("[upload] dtype must be int32, uint32 or float32");
}

}  // namespace

void bind_extension(nb::module_& m) {
  // MLX's types must be known before ours name them: in calls, and in the generated stubs.
  nb::module_::import_("mlx.core");
  m.doc() = "Native primitives of mlx_paged. Use them through mlx_paged.ops.";
  bind_kernel_ops(m);
  bind_layer_ops(m);
  bind_device_program(m);
  bind_step_program(m);

  m.def("has_transfers", &has_transfers, "Whether `upload` and `to_host` are there.");

  m.def(
      "upload",
      [](const std::vector<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>& arrays,
         mx::StreamOrDevice stream) {
        std::vector<HostArray> parts;
        for (const auto& a : arrays) {
          mx::Shape shape;
          for (size_t i = 0; i < a.ndim(); i++) {
            shape.push_back(int(a.shape(i)));
          }
          parts.push_back({a.data(), std::move(shape), host_dtype(a.dtype())});
        }
        return upload(parts, stream);
      },
      "arrays"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def(
      "plan_decodes",
      [](const nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& tables,
         const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& num_blocks,
         const nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& context_lens,
         int block_size, int64_t window, int64_t shortest_piece, int64_t most_pieces,
         int64_t most_half_pieces, bool pads, bool stays,
         mx::StreamOrDevice stream) -> std::optional<Arrays> {
        size_t num_rows = context_lens.shape(0);
        if (tables.shape(0) != num_rows || num_blocks.shape(0) != num_rows) {
          return std::nullopt;
        }
        auto plan = plan_decodes(
            tables.data(), int(num_rows), int(tables.shape(1)), num_blocks.data(),
            context_lens.data(),
            {block_size, window, shortest_piece, most_pieces, most_half_pieces, pads});
        if (!plan) {
          return std::nullopt;
        }
        int rows = plan->num_rows;
        auto part = [](const std::vector<int32_t>& values, mx::Shape shape) {
          return HostArray{values.data(), std::move(shape), mx::int32};
        };
        std::vector<HostArray> parts{
            part(plan->positions, {rows}),
            part(plan->slots, {rows}),
            part(plan->block_tables, {rows, plan->table_width}),
            part(plan->context_lens, {rows}),
            part(plan->query_starts, {rows + 1}),
            part(plan->work_items, {int(plan->work_items.size() / 6), 6}),
            part(plan->merge_items, {int(plan->merge_items.size() / 4), 4})};
        if (has_transfers()) {
          return upload(parts, stream, stays);
        }
        Arrays made;
        for (const auto& p : parts) {
          made.emplace_back(static_cast<const int32_t*>(p.data), p.shape, p.dtype);
        }
        return made;
      },
      "tables"_a, "num_blocks"_a, "context_lens"_a, nb::kw_only(), "block_size"_a, "window"_a,
      "shortest_piece"_a, "most_pieces"_a, "most_half_pieces"_a, "pads"_a, "stays"_a,
      "stream"_a = nb::none());

  m.def("to_host", &to_host, "array"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def("allocate_pool", &allocate_pool, "shape"_a, "dtype"_a);

  m.def("pool_copies", &pool_copies, "Whole-pool copies made since the process started.");

  m.def(
      "accepts", [](const mx::array& a) { return a.ndim(); }, "array"_a,
      "The array's rank. Fails with TypeError where this extension's nanobind and MLX's do not "
      "share their types.");

  m.def(
      "kernel_names",
      [] {
        nb::list names;
        for (const auto& kernel : kernel_names()) {
          names.append(nb::make_tuple(kernel.host_name, kernel.file, kernel.instantiation));
        }
        return names;
      },
      "Every GPU kernel: host name, file of metal/, template-id.");

  m.def(
      "pipelines_to_come",
      [] {
        nb::list pipelines;
        for (const auto& [kernel, function_constants] : pipelines_to_come(gpu::kind())) {
          nb::list values;
          for (bool value : function_constants) {
            values.append(value);
          }
          pipelines.append(nb::make_tuple(kernel.host_name, nb::tuple(values)));
        }
        return pipelines;
      },
      "Every GPU pipeline that steps of the layers seen so far may need: host name of the kernel, "
      "function constants.");

  m.def(
      "prepare_pipeline",
      [](const std::string& host_name, const std::vector<bool>& function_constants) {
        Pipeline pipeline{
            kernel_named(host_name), {function_constants.begin(), function_constants.end()}};
        nb::gil_scoped_release release;
        gpu::prepare(pipeline);
      },
      "host_name"_a, "function_constants"_a, "Compiles a pipeline, unless that has been done.");

  m.def(
      "limit_threads", &cpu::limit_threads, "most"_a,
      "Threads of the CPU kernels, unless MLX_PAGED_NUM_THREADS is set. Before their first use.");

  m.def(
      "build_info", &build_info,
      "What this extension was built with and what it chose at run time.");
}

}  // namespace mlx_paged
