// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The extension `mlx_paged._ext`. Users meet it through mlx_paged.ops, which documents it.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "build_info.h"
#include "cpu/parallel_for.h"
#include "cuda/variants.h"
#include "kernel_source.h"
#include "launch.h"
#include "mlx/transforms.h"
#include "ops.h"
#include "sim/simulator.h"
#include "transfer.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace mx = mlx::core;

namespace {

nb::dict describe(const mlx_paged::Launch& launch) {
  nb::list buffers;
  for (const auto& [operand, access, bytes] : launch.buffers) {
    const char* names[] = {"read", "write", "read_write"};
    buffers.append(nb::make_tuple(operand, names[int(access)], bytes));
  }
  auto extent = [](const mlx_paged::Extent& e) { return nb::make_tuple(e[0], e[1], e[2]); };
  nb::dict d;
  d["kernel"] = launch.kernel.host_name;
  d["buffers"] = buffers;
  d["constants"] =
      nb::bytes(reinterpret_cast<const char*>(launch.constants.data()), launch.constants.size());
  d["grid"] = extent(launch.grid);
  d["threadgroup"] = extent(launch.threadgroup);
  d["threadgroup_memory"] = launch.threadgroup_memory;
  return d;
}

mx::Dtype dtype_of(nb::dlpack::dtype dtype) {
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

NB_MODULE(_ext, m) {
  // MLX's types must be known before ours name them: in calls, and in the generated stubs.
  nb::module_::import_("mlx.core");
  m.doc() = "Native primitives of mlx_paged. Use them through mlx_paged.ops.";

  m.def(
      "write_kv", &mlx_paged::write_kv, "key_pool"_a, "value_pool"_a, "keys"_a, "values"_a,
      "slot_mapping"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def(
      "copy_blocks", &mlx_paged::copy_blocks, "pools"_a, "block_pairs"_a, nb::kw_only(),
      "stream"_a = nb::none());

  m.def(
      "gather_kv", &mlx_paged::gather_kv, "key_pool"_a, "value_pool"_a, "block_tables"_a,
      "context_lens"_a, "max_context_len"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def(
      "paged_attention",
      [](const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
         const mx::array& positions, const mx::array& block_tables, const mx::array& work_items,
         const mx::array& merge_items, float scale, int window, float softcap,
         std::optional<mx::array> sinks, mx::StreamOrDevice stream) {
        return mlx_paged::paged_attention(
            queries, key_pool, value_pool, {positions, block_tables, work_items, merge_items},
            {scale, window, softcap, std::move(sinks)}, stream);
      },
      "queries"_a, "key_pool"_a, "value_pool"_a, "positions"_a, "block_tables"_a, "work_items"_a,
      "merge_items"_a, nb::kw_only(), "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
      "sinks"_a = nb::none(), "stream"_a = nb::none());

  m.def(
      "rope_rotations", &mlx_paged::rope_rotations, "positions"_a, "inv_freqs"_a, nb::kw_only(),
      "scale"_a, "stream"_a = nb::none());

  m.def(
      "rope", &mlx_paged::rope, "x"_a, "rotations"_a, nb::kw_only(), "traditional"_a,
      "stream"_a = nb::none());

  m.def(
      "rms_norm", &mlx_paged::rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(),
      "stream"_a = nb::none());

  m.def("silu_mul", &mlx_paged::silu_mul, "gate"_a, "x"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def(
      "greedy_tokens", &mlx_paged::greedy_tokens, "logits"_a, nb::kw_only(),
      "stream"_a = nb::none());

  m.def(
      "nucleus_thresholds", &mlx_paged::nucleus_thresholds, "logits"_a, "floors"_a, "top_p"_a,
      nb::kw_only(), "stream"_a = nb::none());

  m.def(
      "linear", &mlx_paged::linear, "x"_a, "weight"_a, "bias"_a.none(), nb::kw_only(),
      "stream"_a = nb::none());

  m.def("has_transfers", &mlx_paged::has_transfers, "Whether `upload` and `to_host` are there.");

  m.def(
      "upload",
      [](const std::vector<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>& arrays,
         mx::StreamOrDevice stream) {
        std::vector<mlx_paged::HostArray> parts;
        for (const auto& a : arrays) {
          mx::Shape shape;
          for (size_t i = 0; i < a.ndim(); i++) {
            shape.push_back(int(a.shape(i)));
          }
          parts.push_back({a.data(), std::move(shape), dtype_of(a.dtype())});
        }
        return mlx_paged::upload(parts, stream);
      },
      "arrays"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def("to_host", &mlx_paged::to_host, "array"_a, nb::kw_only(), "stream"_a = nb::none());

  m.def("allocate_pool", &mlx_paged::allocate_pool, "shape"_a, "dtype"_a);

  m.def(
      "pool_copies", &mlx_paged::pool_copies, "Whole-pool copies made since the process started.");

  m.def(
      "accepts", [](const mx::array& a) { return a.ndim(); }, "array"_a,
      "The array's rank. Fails with TypeError where this extension's nanobind and MLX's do not "
      "share their types.");

  m.def(
      "kernel_names",
      [] {
        nb::list names;
        for (const auto& kernel : mlx_paged::kernel_names()) {
          names.append(nb::make_tuple(kernel.host_name, kernel.file, kernel.instantiation));
        }
        return names;
      },
      "Every GPU kernel: host name, file of metal/, template-id.");

  m.def(
      "kernel_source",
      [](const std::string& host_name) {
        return mlx_paged::kernel_source(
            mlx_paged::kernel_named(host_name), mlx_paged::kernel_folder());
      },
      "host_name"_a, "What a GPU's run-time compiler gets for a kernel.");

  m.def(
      "paged_attention_launches",
      [](const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
         const mx::array& positions, const mx::array& block_tables, const mx::array& work_items,
         const mx::array& merge_items, float scale, int window, float softcap,
         std::optional<mx::array> sinks, bool cuda) {
        std::vector<mx::array> in{queries,      key_pool,   value_pool, positions,
                                  block_tables, work_items, merge_items};
        if (sinks) {
          in.push_back(*sinks);
        }
        mx::eval(in);
        mx::array out(
            {queries.shape(0), queries.shape(1), value_pool.shape(3)}, queries.dtype(), nullptr,
            {});
        auto list = mlx_paged::paged_attention_launches(in, {out}, {scale, window, softcap});
        if (cuda) {
          list = mlx_paged::cuda::with_variants(std::move(list), in);
        }
        nb::list launches;
        for (const auto& launch : list.launches) {
          launches.append(describe(launch));
        }
        return launches;
      },
      "queries"_a, "key_pool"_a, "value_pool"_a, "positions"_a, "block_tables"_a, "work_items"_a,
      "merge_items"_a, nb::kw_only(), "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
      "sinks"_a = nb::none(), "cuda"_a = false,
      "What a GPU would run for a call of paged_attention: Apple's, or with `cuda` NVIDIA's.");

  m.def(
      "set_simulator",
      [](uintptr_t address) {
        mlx_paged::sim::set_simulator(reinterpret_cast<mlx_paged::sim::Simulator>(address));
      },
      "address"_a, "The C function that runs GPU kernels where MLX_PAGED_SIM is 1.");

  m.def(
      "simulated_launches",
      [] {
        nb::list launches;
        for (const auto& record : mlx_paged::sim::take_records()) {
          nb::dict d = describe(record.launch);
          d["threadgroups"] = record.threadgroups;
          nb::dict traffic;
          for (const auto& t : record.traffic) {
            traffic[nb::int_(t.index)] = nb::make_tuple(t.bytes_read, t.bytes_written);
          }
          d["traffic"] = traffic;
          launches.append(d);
        }
        return launches;
      },
      "The launches simulated since the last call, with the bytes that buffers saw read and "
      "written.");

  m.def(
      "limit_threads", &mlx_paged::cpu::limit_threads, "most"_a,
      "Threads of the CPU kernels, unless MLX_PAGED_NUM_THREADS is set. Before their first use.");

  m.def(
      "build_info",
      [] {
        nb::dict d;
        for (const auto& [key, value] : mlx_paged::build_info()) {
          d[key.c_str()] = value;
        }
        return d;
      },
      "What this extension was built with and what it chose at run time.");
}
