// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Evaluates the operations below on the Metal backend and prints, a line for each dispatch, what
// MLX's encoder was told: kernel, function constants, whether without a barrier before it, grid,
// threads, threadgroup memory, index and bytes of the constants, then size and access of each
// buffer. The test compares that with what the simulator was told.
//
// record ITEMS MERGES: the plan's work and merge items, as comma-separated numbers.
// record: a step of a device program, whose operands are addresses; the offset of each buffer in
// its array follows its size.

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../../csrc/allocation.h"
#include "../../../csrc/cuda/variants.h"
#include "../../../csrc/gpu.h"
#include "../../../csrc/primitives.h"
#include "mlx/mlx.h"
#include "recorder.h"

namespace mx = mlx::core;

// Stubs: the CPU's side, the checks of ids, and checked memory do not run here.
namespace mlx_paged {
void Node::eval_gpu(const Arrays&, Arrays&) {}
void KernelNode::check_ids(const Arrays&) {}
#define NOT_RUN(Op)                            \
  void Op::eval_cpu(const Arrays&, Arrays&) {} \
  void Op::check(const Arrays&) const {}
NOT_RUN(WriteKV)
NOT_RUN(CopyBlocks)
NOT_RUN(GatherKV)
NOT_RUN(PagedAttention)
NOT_RUN(ApplyTokenBitmask)
NOT_RUN(EditLogits)
NOT_RUN(TakeRows)
// csrc/allocation.cpp needs Python.
OutOfMemory::OutOfMemory(size_t num_bytes, const char*, const char*) : num_bytes_(num_bytes) {}
mx::allocator::Data allocate(size_t num_bytes) {
  return mx::allocator::malloc(num_bytes);
}
void allocate(mx::array& a) {
  a.set_data(mx::allocator::malloc(a.nbytes()));
}
// csrc/cuda/variants.cpp asks more than this program has; it is for NVIDIA GPUs.
int cuda::max_shared_rows(const AttentionLayer&, int) {
  return 1;
}
}  // namespace mlx_paged

namespace {

mx::array ints(const std::string& text, int columns) {
  std::vector<int> values;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    values.push_back(std::stoi(word));
  }
  return mx::array(values.begin(), {int(values.size()) / columns, columns}, mx::int32);
}

mx::array blank(mx::Shape shape, mx::Dtype dtype) {
  return mx::zeros(std::move(shape), dtype);
}

// Two launches: operands are parts of one array, of another, and of memory for the step.
void run_step(mx::Stream stream) {
  auto device = mlx_paged::gpu::step_device(stream);
  auto first = blank({100}, mx::float32);
  auto second = blank({30}, mx::float16);
  mx::eval(first, second);
  auto memory = device->allocate(4096);
  mlx_paged::PlacedLaunches placed;
  placed.addresses = {
      device->address_of(first) + 40, device->address_of(memory) + 256, nullptr,
      device->address_of(second), device->address_of(first)};
  for (std::vector<int> operands : {std::vector{0, 1}, std::vector{1, 3, 4}}) {
    mlx_paged::Launch launch;
    launch.kernel = mlx_paged::kernel_named("write_kv");
    for (int operand : operands) {
      auto access = operand == operands.back() ? mlx_paged::Access::write : mlx_paged::Access::read;
      launch.buffers.push_back({operand, access, 4});
    }
    launch.constants.resize(4);
    launch.grid = launch.threadgroup = {1, 1, 1};
    placed.launches.push_back(launch);
  }
  device->run(placed, 0, 2);
}

void print(const recorder::Call& call) {
  auto extent = [](const auto& e) { std::printf(" %zu,%zu,%zu", e[0], e[1], e[2]); };
  std::printf("%s [%s]", call.kernel.c_str(), call.function_constants.c_str());
  std::printf("%s", call.beside_previous ? " beside" : "");
  extent(call.grid);
  extent(call.threadgroup);
  std::printf(" %zu %zu ", call.threadgroup_memory, call.constants_index);
  for (auto byte : call.constants) {
    std::printf("%02x", unsigned(byte));
  }
  for (const auto& buffer : call.buffers) {
    std::printf(" %zu%c", buffer.bytes, buffer.written ? 'w' : 'r');
    if (buffer.offset) {
      std::printf("+%zu", buffer.offset);
    }
  }
  bool found = call.source.find(call.kernel) != std::string::npos;
  std::printf(" %s\n", found ? "source" : "no-source");
}

void run_operations(mx::Stream stream, char** argv) {
  auto run = [](mlx_paged::KernelNode&& node, std::vector<mx::array> in) {
    mx::eval(in);
    auto shapes = node.output_shapes(in);
    std::vector<mx::array> out;
    for (auto& shape : shapes) {
      out.emplace_back(std::move(shape), in[0].dtype(), nullptr, std::vector<mx::array>{});
    }
    node.eval_gpu(in, out);
  };
  auto keys = blank({9, 16, 2, 64}, mx::float16);
  auto values = blank({9, 16, 2, 64}, mx::float16);

  auto rows = blank({7, 2, 64}, mx::float16);
  run(mlx_paged::WriteKV(stream), {keys, values, rows, rows, blank({7}, mx::int32)});
  run(mlx_paged::CopyBlocks(stream), {keys, values, blank({3, 2}, mx::int32)});
  run(mlx_paged::GatherKV(stream, 50),
      {keys, values, blank({2, 4}, mx::int32), blank({2}, mx::int32)});
  auto logits = blank({3, 50}, mx::float16);
  auto masked = blank({2}, mx::int32);
  run(mlx_paged::ApplyTokenBitmask(stream), {logits, blank({2, 2}, mx::int32), masked});
  // In place: nothing else has these logits, as an initializer list would.
  std::vector<mx::array> only;
  only.push_back(blank({3, 50}, mx::float32));
  only.push_back(blank({2, 2}, mx::uint32));
  only.push_back(masked);
  run(mlx_paged::ApplyTokenBitmask(stream), std::move(only));
  auto queries = blank({20, 6, 64}, mx::float16);
  run(mlx_paged::PagedAttention(stream, paged::attention_options(0.125f, 30, 0.0f, true, false)),
      {queries, keys, values, blank({20}, mx::int32), blank({3, 4}, mx::int32), ints(argv[1], 6),
       ints(argv[2], 4), blank({6}, mx::float32)});
}

}  // namespace

int main(int argc, char** argv) {
  mx::set_default_device(mx::Device::cpu);
  mx::Stream stream(0, mx::Device::gpu);
  argc > 1 ? run_operations(stream, argv) : run_step(stream);
  for (const auto& call : recorder::calls) {
    print(call);
  }
}
