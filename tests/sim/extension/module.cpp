// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// mlx_paged._sim: the extension on a simulated GPU, and what tests want to know of its launches.
// Built with -DMLX_PAGED_BUILD_TESTS=ON only.

#include <sys/mman.h>

#include <cstddef>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../../csrc/bindings.h"
#include "../../../csrc/cuda/products.h"
#include "../../../csrc/cuda/variants.h"
#include "../../../csrc/gpu/executable.h"
#include "../../../csrc/graph/passes.h"
#include "../../../csrc/host_copies.h"
#include "../../../csrc/kernel_source.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "simulator.h"

namespace mlx_paged {

namespace {

nb::dict describe(const Launch& launch) {
  nb::list buffers;
  for (const auto& [operand, access, bytes] : launch.buffers) {
    const char* names[] = {"read", "write", "read_write"};
    buffers.append(nb::make_tuple(operand, names[int(access)], bytes));
  }
  auto extent = [](const Extent& e) { return nb::make_tuple(e[0], e[1], e[2]); };
  nb::dict d;
  d["kernel"] = launch.kernel.host_name;
  d["buffers"] = buffers;
  d["constants"] =
      nb::bytes(reinterpret_cast<const char*>(launch.constants.data()), launch.constants.size());
  nb::list function_constants;
  for (bool value : launch.function_constants) {
    function_constants.append(value);
  }
  d["function_constants"] = nb::tuple(function_constants);
  d["beside_previous"] = launch.beside_previous;
  d["grid"] = extent(launch.grid);
  d["threadgroup"] = extent(launch.threadgroup);
  d["threadgroup_memory"] = launch.threadgroup_memory;
  return d;
}

// With what only NVIDIA's have.
nb::dict describe_for_cuda(const Launch& launch) {
  nb::dict d = describe(launch);
  d["cluster"] = launch.cluster;
  nb::list maps;
  for (const auto& map : launch.maps) {
    maps.append(
        nb::make_tuple(
            map.buffer, map.item_bytes, map.rows, map.columns, map.stride, map.box_rows,
            map.box_columns, map.is_swizzled));
  }
  d["maps"] = maps;
  return d;
}

cuda::TmaKernels tma_named(const std::string& name) {
  using cuda::TmaKernels;
  static const std::map<std::string, TmaKernels> all{
      {"none", TmaKernels::none},
      {"small", TmaKernels::small},
      {"any", TmaKernels::any},
      {"wgmma", TmaKernels::wgmma}};
  return all.at(name);
}

cuda::LinearParams product_params(
    int num_rows, const std::vector<int>& outputs, int k, bool is_gated) {
  cuda::LinearParams params{};
  params.num_rows = num_rows;
  params.k = params.x_stride = k;
  params.num_weights = int(outputs.size());
  params.is_gated = is_gated;
  std::copy(outputs.begin(), outputs.end(), params.n);
  return params;
}

DType product_dtype(const std::string& name) {
  return name == "float16" ? DType::float16 : DType::bfloat16;
}

nb::list describe(const std::vector<Launch>& launches, bool cuda = false) {
  nb::list described;
  for (const auto& launch : launches) {
    described.append(cuda ? describe_for_cuda(launch) : describe(launch));
  }
  return described;
}

using Fusions = std::vector<std::pair<std::string, std::vector<std::string>>>;

Fusions run_pass(const Arrays& inputs, const Arrays& outputs, const std::string& name) {
  StepGraph graph(inputs, outputs);
  if (name == "gate_up") {
    fuse_gate_up(graph, is_linear);
  } else if (name == "residual") {
    fuse_residual(graph, is_linear);
  } else if (name == "add_norm") {
    fuse_add_norm(graph);
  } else if (name == "qkv_write") {
    fuse_qkv_write(graph, true);
  } else if (name == "adapters") {
    fuse_adapters(graph, is_linear, true);
  } else if (name == "lone_adapters") {
    fuse_lone_adapters(graph, is_linear);
  } else if (name == "experts") {
    fuse_experts(graph);
  } else {
    throw std::invalid_argument("[run_pass] no pass " + name);
  }
  Fusions found;
  std::vector<std::string> absorbed;
  for (const auto& node : graph.nodes()) {
    if (node.is_absorbed) {
      absorbed.push_back(node.primitive->name());
    }
    if (!std::holds_alternative<std::monostate>(node.fusion)) {
      found.push_back({node.primitive->name(), std::exchange(absorbed, {})});
    }
  }
  if (!absorbed.empty()) {  // nodes that follow the one that takes them in
    found.push_back({"", absorbed});
  }
  return found;
}

}  // namespace

// A pool of which only what is touched takes memory, and whose size is not held against the
// machine's. Zeros.
mx::array virtual_pool(const std::vector<int>& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (int extent : shape) {
    bytes *= extent;
  }
  size_t header = 16;  // MLX's CPU buffers begin with their size, arrays 8 bytes later
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, bytes + header, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();
  }
  *static_cast<size_t*>(memory) = bytes;
  auto release = [bytes, header](mx::allocator::Buffer b) { munmap(b.ptr(), bytes + header); };
  mx::allocator::Data data(mx::allocator::Buffer(memory), release);
  return mx::array(std::move(data), mx::Shape(shape.begin(), shape.end()), dtype);
}

void bind_simulator(nb::module_& m) {
  m.def(
      "virtual_pool", &virtual_pool, "shape"_a, "dtype"_a,
      "A pool of zeros that takes as much memory as is touched of it.");

  m.def(
      "remember_host_copy",
      [](const mx::array& a) {
        auto bytes = std::make_shared<std::vector<std::byte>>(a.offset() + a.nbytes());
        remember_host_copy(a, {bytes, bytes->data()});
      },
      "array"_a, "As if an evaluated array had been sent to a GPU.");

  m.def(
      "has_host_copy", [](const mx::array& a) { return find_host_copy(a) != nullptr; }, "array"_a,
      "Whether the host is taken to know an evaluated array's numbers.");

  m.def(
      "set_simulator",
      [](uintptr_t address) { sim::set_simulator(reinterpret_cast<sim::Simulator>(address)); },
      "address"_a, "The C function that runs GPU kernels.");

  m.def(
      "simulated_launches",
      [] {
        nb::list launches;
        for (const auto& record : sim::take_records()) {
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
      "paged_attention_launches",
      [](const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
         const mx::array& positions, const mx::array& block_tables, const mx::array& work_items,
         const mx::array& merge_items, float scale, int window, float softcap,
         std::optional<mx::array> sinks, std::optional<mx::array> alibi_slopes, bool cuda,
         const std::string& tma) {
        Arrays in{queries, key_pool, value_pool, positions, block_tables, work_items, merge_items};
        Arrays per_head;
        for (const auto& numbers : {sinks, alibi_slopes}) {
          if (numbers) {
            per_head.push_back(*numbers);
          }
        }
        if (!per_head.empty()) {
          in.push_back(mx::concatenate(per_head));
        }
        mx::eval(in);
        mx::array out(
            {queries.shape(0), queries.shape(1), value_pool.shape(3)}, queries.dtype(), nullptr,
            {});
        auto options = paged::attention_options(
            scale, window, softcap, sinks.has_value(), alibi_slopes.has_value());
        PagedAttention node(mx::default_stream(mx::Device::cpu), options);
        auto list = node.launches(in, {out}, cuda ? Gpu::nvidia : Gpu::apple);
        if (cuda) {
          list = cuda::with_variants(std::move(list), in, tma_named(tma));
        }
        return describe(list.launches, cuda);
      },
      "queries"_a, "key_pool"_a, "value_pool"_a, "positions"_a, "block_tables"_a, "work_items"_a,
      "merge_items"_a, nb::kw_only(), "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
      "sinks"_a = nb::none(), "alibi_slopes"_a = nb::none(), "cuda"_a = false, "tma"_a = "any",
      "What a GPU would run for a call of paged_attention: Apple's, or with `cuda` NVIDIA's.");

  m.def(
      "max_shared_rows_with_cuda",
      [](const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
         bool has_alibi) {
        int features = has_alibi ? paged::FEATURE_ALIBI : 0;
        return cuda::max_shared_rows(
            layer_of(queries, key_pool, value_pool, features), key_pool.shape(1));
      },
      "queries"_a, "key_pool"_a, "value_pool"_a, "has_alibi"_a,
      "max_shared_rows of NVIDIA's kernels.");

  m.def(
      "write_kv_launches",
      [](const mx::array& key_pool, const mx::array& value_pool, const mx::array& keys,
         const mx::array& values, const mx::array& slot_mapping, bool cuda) {
        Arrays in{key_pool, value_pool, keys, values, slot_mapping};
        mx::eval(in);
        WriteKV node(mx::default_stream(mx::Device::cpu));
        auto list = node.launches(in, {key_pool, value_pool}, cuda ? Gpu::nvidia : Gpu::apple);
        if (cuda) {
          list = cuda::with_variants(std::move(list), in, cuda::TmaKernels::any);
        }
        return describe(list.launches);
      },
      "key_pool"_a, "value_pool"_a, "keys"_a, "values"_a, "slot_mapping"_a, nb::kw_only(),
      "cuda"_a = false, "The same for a call of write_kv.");

  m.def(
      "gpu_executable_launches",
      [](const nb::capsule& made, const Arrays& inputs, bool cuda, const std::string& tma) {
        auto* program =
            static_cast<const std::shared_ptr<const GpuExecutable>*>(made.data("gpu_executable"));
        auto gpu = cuda ? Gpu::nvidia : Gpu::apple;
        auto attention = (*program)->attention(inputs, gpu);
        return describe((*program)->launches(attention, gpu, tma_named(tma)));
      },
      "program"_a, "inputs"_a, nb::kw_only(), "cuda"_a, "tma"_a = "any",
      "What a GPU would run for a step of a GpuExecutable: Apple's, or with `cuda` NVIDIA's.");

  m.def(
      "product_launch",
      [](int num_rows, const std::vector<int>& outputs, int k, const std::string& dtype,
         bool is_gated, const std::string& tma) {
        auto params = product_params(num_rows, outputs, k, is_gated);
        return describe_for_cuda(
            cuda::linear_launch(params, product_dtype(dtype), {}, tma_named(tma)));
      },
      "num_rows"_a, "outputs"_a, "k"_a, nb::kw_only(), "dtype"_a, "is_gated"_a, "tma"_a,
      "What NVIDIA's GPUs run for products of one input with weights of 16 bits.");

  static const std::map<std::string, WeightFormat> formats{
      {"affine", WeightFormat::affine},
      {"mxfp4", WeightFormat::mxfp4},
      {"mxfp8", WeightFormat::mxfp8},
      {"nvfp4", WeightFormat::nvfp4}};

  m.def(
      "sorted_expert_launches",
      [](int num_rows, int num_experts, int n, int k, const std::string& dtype, int bits,
         int group_size, const std::string& mode, bool is_gated,
         const std::string& tma) -> std::optional<nb::list> {
        cuda::SortedProduct product{};
        product.num_rows = num_rows;
        product.num_experts = num_experts;
        product.n = n;
        product.k = k;
        product.dtype = product_dtype(dtype);
        product.codes = {formats.at(mode), bits, group_size};
        product.parts.assign(is_gated ? 2 : 1, {});
        if (!cuda::serves_sorted(product, tma_named(tma))) {
          return std::nullopt;
        }
        auto items = cuda::SortedItems::of(product);
        return describe({sorted_items_launch(items, 0, 1), sorted_launch(product)}, true);
      },
      "num_rows"_a, "num_experts"_a, "n"_a, "k"_a, nb::kw_only(), "dtype"_a, "bits"_a,
      "group_size"_a, "mode"_a, "is_gated"_a, "tma"_a,
      "What NVIDIA's GPUs run for rows that are sorted by expert, if they have a kernel for them.");

  m.def(
      "quantized_product_launch",
      [](int num_rows, const std::vector<int>& outputs, int k, const std::string& dtype, int bits,
         int group_size, const std::string& mode, bool is_gated,
         const std::string& tma) -> std::optional<nb::dict> {
        WeightCodes codes{formats.at(mode), bits, group_size};
        for (int n : outputs) {
          if (!cuda::serves_quantized(num_rows, n, k, codes, tma_named(tma))) {
            return std::nullopt;
          }
        }
        auto params = product_params(num_rows, outputs, k, is_gated);
        return describe_for_cuda(
            cuda::quantized_launch(params, product_dtype(dtype), codes, {}, tma_named(tma)));
      },
      "num_rows"_a, "outputs"_a, "k"_a, nb::kw_only(), "dtype"_a, "bits"_a, "group_size"_a,
      "mode"_a, "is_gated"_a, "tma"_a,
      "What NVIDIA's GPUs run for a product with quantized weights, if they have a kernel for it.");

  m.def(
      "quantized_linear_node",
      [](const mx::array& x, const mx::array& weight, const mx::array& scales,
         const mx::array& biases, const std::optional<mx::array>& bias, int bits, int group_size) {
        Arrays inputs{x, weight, scales, biases};
        if (bias) {
          inputs.push_back(*bias);
        }
        auto shape = x.shape();
        shape.back() = weight.shape(0);
        WeightCodes codes{WeightFormat::affine, bits, group_size};
        auto node = std::make_shared<QuantizedLinear>(
            mx::default_stream(mx::Device::cpu), codes, Activations::float32, false);
        return mx::array(std::move(shape), x.dtype(), std::move(node), std::move(inputs));
      },
      "x"_a, "weight"_a, "scales"_a, "biases"_a, "bias"_a.none(), nb::kw_only(), "bits"_a,
      "group_size"_a, "quantized_linear as it is with CUDA: of the dtype of x.");

  m.def(
      "cuda_executable_launches",
      [](const Arrays& inputs, const Arrays& outputs, const std::string& tma) {
        GpuExecutable program(inputs, outputs, Gpu::nvidia, GpuExecutable::Residual::in_product);
        return describe(program.launches({}, Gpu::nvidia, tma_named(tma)));
      },
      "inputs"_a, "outputs"_a, nb::kw_only(), "tma"_a = "any",
      "The launches of a GpuExecutable for NVIDIA's GPUs, without attention. Raises RuntimeError.");

  m.def(
      "run_pass", &run_pass, "inputs"_a, "outputs"_a, "name"_a,
      "The fusions that a pass finds: (node, the primitives that it takes in).");

  m.def(
      "step_counts",
      [] {
        auto counts = sim::counts_of_steps();
        nb::dict named;
        named["steps"] = counts.steps;
        named["captures"] = counts.captures;
        named["replays"] = counts.replays;
        named["memory"] = counts.memory_bytes;
        return named;
      },
      "Steps of executables so far, captures and replays, and the bytes that executables have.");

  m.def(
      "capture_steps", &sim::capture_steps, "wanted"_a,
      "Captures the launches of executables, or run one after another.");

  m.def("fail_next_capture", &sim::fail_next_capture, "The next capture throws.");

  m.def("fail_next_preparation", &sim::fail_next_preparation, "What a step loads first throws.");

  m.def(
      "workspace_shape",
      [](uint64_t bytes) {
        auto shape = workspace_shape(bytes);
        return std::vector<int>(shape.begin(), shape.end());
      },
      "bytes"_a, "The shape of a workspace on a GPU.");

  m.def(
      "forget_attention_layers", &forget_attention_layers,
      "`pipelines_to_come` then counts only layers seen from now on.");

  m.def(
      "kernel_source",
      [](const std::string& host_name) {
        return kernel_source(kernel_named(host_name), kernel_folder());
      },
      "host_name"_a, "What a GPU's run-time compiler gets for a kernel.");
}

}  // namespace mlx_paged

NB_MODULE(_sim, m) {
  mlx_paged::bind_extension(m);
  mlx_paged::bind_simulator(m);
}
