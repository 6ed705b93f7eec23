// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "bindings.h"

#include "active_wait.h"
#include "array_contents.h"
#include "attention_plan.h"
#include "cpu/amx.h"
#include "cpu/kernels.h"
#include "cpu/parallel_for.h"
#include "crc32.h"
#include "cuda/products.h"
#include "cuda/variants.h"
#include "exit_deadline.h"
#include "gpu.h"
#include "kernel_names.h"
#include "mlx/version.h"
#include "primitives.h"
#include "rejected_kernels.h"
#include "thread_end.h"
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
  d["amx"] = cpu::amx_status();
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

template <typename T, size_t Dimensions>
using Numbers = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

// Sends the arrays of a plan to the device.
Arrays sent(const AttentionPlan& plan, mx::StreamOrDevice stream, bool stays) {
  auto part = [](const std::vector<int32_t>& values, mx::Shape shape) {
    return HostArray{values.data(), std::move(shape), mx::int32};
  };
  auto items = [](const auto& values) {
    constexpr int kColumns = sizeof(values[0]) / sizeof(int32_t);
    return HostArray{values.data(), {int(values.size()), kColumns}, mx::int32};
  };
  std::vector<HostArray> parts{
      part(plan.positions, {plan.num_rows}),
      part(plan.slots, {plan.num_rows}),
      part(plan.block_tables, {plan.num_seqs, plan.table_width}),
      part(plan.context_lens, {plan.num_seqs}),
      part(plan.query_starts, {plan.num_seqs + 1}),
      items(plan.work_items),
      items(plan.merge_items)};
  if (!plan.bounds.empty()) {
    parts.push_back(part(plan.bounds, {3, plan.num_rows}));
  }
  if (has_transfers()) {
    return upload(parts, stream, stays);
  }
  Arrays made;
  for (const auto& p : parts) {
    made.emplace_back(static_cast<const int32_t*>(p.data), p.shape, p.dtype);
  }
  return made;
}

void bind_array_contents(nb::module_& m) {
  // Otherwise this is the simulator, loaded beside the extension.
  if (!nb::type<ArrayContents>().is_valid()) {
    nb::class_<ArrayContents>(
        m, "ArrayContents", "Identifies an array's contents without keeping them alive.")
        .def(nb::init<const mx::array&>(), "array"_a)
        .def(
            "are_still_of", &ArrayContents::are_still_of, "array"_a,
            "False once the array object has been replaced or updated in place.");
  }
}

void bind_capabilities(nb::module_& m) {
  m.def("has_transfers", &has_transfers, "True if `upload` and `to_host` are available.");
  m.def(
      "has_wgmma", [] { return has_transfers() && cuda::tma_kernels() == cuda::TmaKernels::wgmma; },
      "True if this build has warpgroup kernels and this GPU can run them.");
  m.def(
      "has_wgmma_prefill", &cuda::has_wgmma_prefill, "key_dim"_a, "value_dim"_a, "block_size"_a,
      "True if there is a warpgroup kernel for prefill over such pools.");
  m.def(
      "max_product_rows", [] { return cuda::kLinearMaxRows; },
      "Maximum rows of a step whose products are our own GPU kernels.");
}

void bind_plans(nb::module_& m) {
  m.def(
      "upload",
      [](const std::vector<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>& arrays, bool stays,
         mx::StreamOrDevice stream) {
        std::vector<HostArray> parts;
        for (const auto& a : arrays) {
          mx::Shape shape;
          for (size_t i = 0; i < a.ndim(); i++) {
            shape.push_back(int(a.shape(i)));
          }
          parts.push_back({a.data(), std::move(shape), host_dtype(a.dtype())});
        }
        return upload(parts, stream, stays);
      },
      "arrays"_a, nb::kw_only(), "stays"_a = false, "stream"_a = nb::none());

  m.def(
      "plan_attention",
      [](const Numbers<const int32_t, 2>& tables, const Numbers<const int64_t, 1>& num_blocks,
         const Numbers<const int64_t, 1>& context_lens, const Numbers<const int64_t, 1>& query_lens,
         const std::optional<Numbers<const int32_t, 2>>& bounds, int block_size, int64_t window,
         int64_t rows_per_item, int64_t split_tokens, bool on_gpu, bool pads, int num_rows,
         int64_t shared_rows, bool stays, mx::StreamOrDevice stream) -> std::optional<Arrays> {
        size_t count = context_lens.shape(0);
        if (tables.shape(0) != count || num_blocks.shape(0) != count ||
            query_lens.shape(0) != count || (bounds && bounds->shape(0) != 2)) {
          return std::nullopt;
        }
        auto plan = plan_attention(
            {int(count), int(tables.shape(1)), tables.data(), num_blocks.data(),
             context_lens.data(), query_lens.data(), bounds ? bounds->data() : nullptr,
             bounds ? int(bounds->shape(1)) : 0},
            {block_size, window, rows_per_item, split_tokens, on_gpu, pads, num_rows, shared_rows});
        return plan ? std::optional(sent(*plan, stream, stays)) : std::nullopt;
      },
      "tables"_a, "num_blocks"_a, "context_lens"_a, "query_lens"_a, nb::kw_only(),
      "bounds"_a = nb::none(), "block_size"_a, "window"_a, "rows_per_item"_a, "split_tokens"_a,
      "on_gpu"_a, "pads"_a, "num_rows"_a, "shared_rows"_a, "stays"_a, "stream"_a = nb::none());
}

void bind_host_helpers(nb::module_& m) {
  m.def(
      "token_bytes",
      [](const nb::list& ids, uint32_t vocab_size) -> std::optional<nb::bytes> {
        std::vector<uint32_t> found(ids.size());
        for (size_t i = 0; i < found.size(); i++) {
          PyObject* id = PyList_GET_ITEM(ids.ptr(), i);  // no Python code runs here
          int overflow = 0;
          long value = PyLong_CheckExact(id) ? PyLong_AsLongAndOverflow(id, &overflow) : -1;
          if (overflow || value < 0 || value >= long(vocab_size)) {
            return std::nullopt;
          }
          found[i] = uint32_t(value);
        }
        return nb::bytes(found.data(), found.size() * sizeof(uint32_t));
      },
      "ids"_a, "vocab_size"_a);

  m.def(
      "crc32",
      [](const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data)
          -> std::optional<uint32_t> {
        nb::gil_scoped_release release;
        return has_fast_crc32() ? std::optional(crc32(data.data(), data.size())) : std::nullopt;
      },
      "data"_a, "CRC-32 of bytes; None if zlib is as fast on this processor.");

  m.def("to_host", &to_host, "array"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def(
      "wait_actively",
      [](const mx::array& a, double seconds) {
        if (!(seconds >= 0 && seconds <= 1e6)) {
          throw std::invalid_argument(
              "[wait_actively] seconds must be 0 to 1e6 but got " + std::to_string(seconds));
        }
        nb::gil_scoped_release release;
        return wait_actively(a, std::chrono::nanoseconds(int64_t(seconds * 1e9)));
      },
      "array"_a, "seconds"_a);

  m.def("allocate_pool", &allocate_pool, "shape"_a, "dtype"_a);

  m.def("pool_copies", &pool_copies, "Whole-pool copies made since the process started.");

  m.def(
      "accepts", [](const mx::array& a) { return a.ndim(); }, "array"_a,
      "The array's rank. Fails with TypeError if this extension's nanobind and MLX's do not "
      "share their types.");
}

void bind_kernel_catalog(nb::module_& m) {
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
      "Every GPU pipeline that steps of the layers seen so far can need: host name of the kernel, "
      "function constants.");

  m.def(
      "attention_layers",
      [] {
        nb::list layers;
        for (const auto& a : attention_layers()) {
          layers.append(
              nb::make_tuple(
                  name_of(a.dtype), a.group, a.key_dim, a.value_dim, a.features, int(a.key_format),
                  int(a.value_format)));
        }
        return layers;
      },
      "Kinds of attention layers seen so far: dtype, query heads per KV head, key dim, value dim, "
      "options (features_of in metal/attention_variant.h), formats of keys and values.");

  m.def(
      "attention_kernel",
      [](mx::Dtype dtype, int group, int key_dim, int value_dim, int rows) {
        AttentionLayer layer{dtype_of(dtype), group, key_dim, value_dim, 0};
        return attention_kernel_for(gpu::kind(), layer, rows);
      },
      "dtype"_a, "group"_a, "key_dim"_a, "value_dim"_a, "rows"_a,
      "Host name of the kernel for items of this many rows; empty if none is left.");

  m.def(
      "max_shared_rows",
      [](const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
         bool has_alibi) {
        auto layer = layer_of(queries, key_pool, value_pool, has_alibi ? paged::FEATURE_ALIBI : 0);
        return max_shared_rows(gpu::kind(), layer, key_pool.shape(1));
      },
      "queries"_a, "key_pool"_a, "value_pool"_a, "has_alibi"_a,
      "Maximum rows of a sequence that one pass serves with the bits that each has alone.");
}

void bind_calibration(nb::module_& m) {
  m.def(
      "reject_kernels", &reject_kernels, "host_names"_a,
      "Replaces the set of kernels that never run.");

  m.def(
      "allow_tensor_kernels", &allow_tensor_kernels, "allowed"_a,
      "Lets kernels for tensor units run unless they are rejected.");

  m.def(
      "allow_products",
      [](const std::vector<std::tuple<std::string, int, int>>& products) {
        std::vector<AllowedProduct> allowed;
        for (const auto& [host_name, min_rows, max_rows] : products) {
          allowed.push_back({host_name, min_rows, max_rows});
        }
        allow_products(allowed);
      },
      "products"_a,
      "Replaces the kernels that may multiply outside of whole steps: host name, minimum and "
      "maximum rows.");

  m.def(
      "set_piece_tokens", &set_piece_tokens, "num_tokens"_a,
      "Sets the minimum tokens of context per work item of a decode; 0: the built-in number.");

  m.def(
      "rejected_kernels",
      [] {
        nb::list names;
        for (const auto& name : rejected_kernels()) {
          names.append(name);
        }
        return names;
      },
      "Kernels that never run, by host name.");

  m.def(
      "prepare_pipeline",
      [](const std::string& host_name, const std::vector<bool>& function_constants) {
        Pipeline pipeline{
            kernel_named(host_name), {function_constants.begin(), function_constants.end()}};
        nb::gil_scoped_release release;
        gpu::prepare(pipeline);
      },
      "host_name"_a, "function_constants"_a, "Compiles a pipeline unless that has been done.");
}

void bind_process(nb::module_& m) {
  m.def(
      "limit_threads", &cpu::limit_threads, "max_threads"_a,
      "Limits the threads of the CPU kernels unless MLX_PAGED_NUM_THREADS is set. Call it before "
      "their first use.");

  m.def(
      "outlast_interpreter", &outlast_interpreter,
      "Keeps this thread from destroying MLX's thread-local variables during the exit.");

  m.def(
      "exit_unless_extended", &exit_unless_extended, "seconds"_a, "message"_a,
      "Ends the process with status 1 unless this is called again within `seconds`.");

  m.def("build_info", &build_info, "Build options of this extension and its choices at run time.");
}

}  // namespace

void bind_extension(nb::module_& m) {
  // MLX's types must be registered before calls and generated stubs name ours.
  nb::module_::import_("mlx.core");
  m.doc() = "Native primitives of mlx_paged. Use them through mlx_paged.ops.";
  bind_allocation(m);
  bind_distributed(m);
  bind_kernel_ops(m);
  bind_layer_ops(m);
  bind_gpu_executable(m);
  bind_cpu_executable(m);
  bind_graph_template(m);
  bind_array_contents(m);
  bind_capabilities(m);
  bind_plans(m);
  bind_host_helpers(m);
  bind_kernel_catalog(m);
  bind_calibration(m);
  bind_process(m);
}

}  // namespace mlx_paged
