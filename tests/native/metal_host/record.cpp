// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs the Metal binder on the operations below and prints, a line for each dispatch, what MLX's
// encoder was told: kernel, grid, threads, threadgroup memory, index and bytes of the constants,
// then size and access of each buffer. The test compares that with what the simulator was told.
//
// record ITEMS MERGES: the plan's work and merge items, as comma-separated numbers.

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "../../csrc/launch.h"
#include "../../csrc/metal/binder.h"
#include "mlx/mlx.h"
#include "recorder.h"

namespace mx = mlx::core;

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

void print(const recorder::Call& call) {
  auto extent = [](const auto& e) { std::printf(" %zu,%zu,%zu", e[0], e[1], e[2]); };
  std::printf("%s", call.kernel.c_str());
  extent(call.grid);
  extent(call.threadgroup);
  std::printf(" %zu %zu ", call.threadgroup_memory, call.constants_index);
  for (auto byte : call.constants) {
    std::printf("%02x", unsigned(byte));
  }
  for (const auto& buffer : call.buffers) {
    std::printf(" %zu%c", buffer.bytes, buffer.written ? 'w' : 'r');
  }
  bool found = call.source.find(call.kernel) != std::string::npos;
  std::printf(" %s\n", found ? "source" : "no-source");
}

}  // namespace

int main(int, char** argv) {
  mx::set_default_device(mx::Device::cpu);
  mx::Stream stream(0, mx::Device::gpu);
  auto run = [&](const auto& builder, std::vector<mx::array> in, std::vector<mx::array> out) {
    mx::eval(in);
    mx::eval(out);
    mlx_paged::metal::encode(builder(in, out), in, out, stream);
  };
  auto keys = blank({9, 16, 2, 64}, mx::float16);
  auto values = blank({9, 16, 2, 64}, mx::float16);

  auto rows = blank({7, 2, 64}, mx::float16);
  run(mlx_paged::write_kv_launches, {keys, values, rows, rows, blank({7}, mx::int32)},
      {keys, values});
  run(mlx_paged::copy_blocks_launches, {keys, values, blank({3, 2}, mx::int32)}, {keys, values});
  auto dense = blank({2, 2, 50, 64}, mx::float16);
  run(mlx_paged::gather_kv_launches,
      {keys, values, blank({2, 4}, mx::int32), blank({2}, mx::int32)}, {dense, dense});
  auto queries = blank({20, 6, 64}, mx::float16);
  auto attention = [](const auto& in, const auto& out) {
    return mlx_paged::paged_attention_launches(in, out, {0.125f, 30, 0.0f});
  };
  run(attention,
      {queries, keys, values, blank({20}, mx::int32), blank({3, 4}, mx::int32), ints(argv[1], 6),
       ints(argv[2], 4), blank({6}, mx::float32)},
      {queries});
  for (const auto& call : recorder::calls) {
    print(call);
  }
}
