// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "products.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include "variants.h"

namespace mlx_paged::cuda {

namespace {

constexpr int kManyTiles = 4;  // of x

// Buffers of a launch: x, a residual, then each part's weight, bias and output.
constexpr int kFirstPart = 2;
constexpr int kPartBuffers = 3;
constexpr int kQuantizedPartBuffers = 5;  // with the scales and biases of a quantized weight

int tiles_of(int num_rows) {
  int tiles = 1;
  while (8 * tiles < num_rows) {
    tiles *= 2;
  }
  return tiles;
}

// Number of blocks of `rows` outputs each. No block spans two weights.
uint32_t blocks_of(const LinearParams& params, int rows) {
  int blocks = 0;
  for (int i = 0; i < (params.is_gated ? 1 : params.num_weights); i++) {
    blocks += (params.n[i] + rows - 1) / rows;
  }
  return uint32_t(blocks);
}

MatrixMap map_of_x(const LinearParams& params, int tiles) {
  return {0, 2, params.num_rows, params.k, params.x_stride, 8 * tiles, kLinearChunk};
}

void bind_after_parts(
    Launch& launch, const LinearOperands& operands, const LinearAdapters& adapters) {
  auto written = adapters.count > 0 ? Access::read_write : Access::read;
  launch.buffers.push_back({operands.rotations, Access::read, 0});
  launch.buffers.push_back({operands.slots, Access::read, 0});
  launch.buffers.push_back({operands.hidden, written, 0});
  launch.buffers.push_back({operands.adapters, Access::read, 0});
  launch.buffers.push_back({operands.finished, written, 0});
  for (int operand : operands.adapter_a) {
    launch.buffers.push_back({operand, Access::read, 0});
  }
  for (const auto& part : operands.parts) {
    launch.buffers.push_back({part.adapter_b, Access::read, 0});
  }
}

// Divides the first half of adapters' work into units. Blocks of up to kAdapterUnitTiles tiles of x
// compute them by `warps` warps before their product, if shared memory allows. Otherwise extra
// blocks come in front, in whole clusters of `cluster`, and no more than can run beside the others:
// later blocks would end last.
void divide_adapters(Launch& launch, LinearParams& params, int cluster, int tiles, int warps) {
  auto& adapters = params.adapters;
  if (adapters.count == 0) {
    return;
  }
  adapters.num_targets = int(std::count_if(
      std::begin(adapters.target), std::end(adapters.target), [](int t) { return t >= 0; }));
  adapters.num_units = adapter_parts(params.k) * int(div_up(adapters.rank, kAdapterRanks)) *
                       adapters.num_targets * adapter_tiles(params.num_rows, adapters.count);
  uint32_t with_sums = launch.threadgroup_memory + adapter_sum_bytes(warps);
  if (tiles <= kAdapterUnitTiles && with_sums <= kBlockPairBytes) {
    adapters.num_workers = std::min(adapters.num_units, int(launch.grid[0]));
    launch.threadgroup_memory = with_sums;
    return;
  }
  // Clusters of eight leave four of a GPC's 36 places empty.
  int max_blocks = cluster == 8 ? kStreamMaxBlocks / 33 * 32 : kStreamMaxBlocks;
  int num_clusters = std::clamp(
      (max_blocks - int(launch.grid[0])) / cluster, 1, int(div_up(adapters.num_units, cluster)));
  adapters.num_blocks = num_clusters * cluster;
  adapters.num_workers = adapters.num_blocks;  // Some may have no unit, but all report their end.
  launch.grid[0] += adapters.num_blocks;
}

// Warpgroup products give the same bits; single-warp products are faster for few rows.
bool uses_wgmma(int tiles, TmaKernels tma) {
  return tma == TmaKernels::wgmma && tiles == kWgmmaTiles;
}

}  // namespace

std::string stream_kernel(DType dtype, int tiles, TmaKernels tma) {
  std::ostringstream name;
  name << "linear_stream_" << (uses_wgmma(tiles, tma) ? "wgmma_" : "") << name_of(dtype) << "_"
       << tiles;
  return name.str();
}

// Buffer sizes stay unset; CUDA's encoder ignores them.
Launch linear_launch(
    LinearParams params, DType dtype, const LinearOperands& operands, TmaKernels tma) {
  int tiles = tiles_of(params.num_rows);
  Launch launch;
  if (tma != TmaKernels::none) {
    uint32_t num_tiles = blocks_of(params, kStreamRows / (params.is_gated ? 2 : 1));
    int num_chunks = (params.k + kLinearChunk - 1) / kLinearChunk;
    uint32_t blocks = stream_cluster(num_tiles, num_chunks, kStreamMinChunks);
    launch.kernel.host_name = stream_kernel(dtype, tiles, tma);
    launch.threadgroup_memory =
        uses_wgmma(tiles, tma) ? wgmma_scratch(tiles) : stream_scratch(tiles);
    launch.cluster = blocks > 1 ? blocks : 0;
    launch.grid = {num_tiles * blocks, 1, 1};
    divide_adapters(launch, params, int(blocks), tiles, kStreamRows / kLinearRows);
    launch.threadgroup = {kStreamThreads, 1, 1};
    launch.maps.push_back(map_of_x(params, tiles));
    for (int i = 0; i < params.num_weights; i++) {
      launch.maps.push_back(
          {kFirstPart + kPartBuffers * i, 2, params.n[i], params.k, params.k, kStreamRows / 2,
           kLinearChunk});
    }
  } else {
    tiles = std::min(tiles, kLinearBlockRows / 8);
    // Rows of x are read again for every group of weight rows, so larger groups save reads but make
    // fewer blocks. Gate and up take one group each.
    bool whole = true;
    for (int i = 0; i < params.num_weights; i++) {
      whole = whole && params.n[i] % (2 * kLinearRows) == 0;
    }
    int groups = params.is_gated || (tiles >= kManyTiles && whole) ? 2 : 1;
    int rows = groups * kLinearRows;
    launch.kernel.host_name = std::string(params.head_dim ? "linear_heads_" : "linear_") +
                              name_of(dtype) + "_" + std::to_string(tiles) + "_" +
                              std::to_string(groups);
    launch.threadgroup_memory = kLinearParts * tiles * 8 * (rows + 1) * sizeof(float);
    launch.grid = {
        blocks_of(params, params.is_gated ? kLinearRows : rows),
        uint32_t((params.num_rows + 8 * tiles - 1) / (8 * tiles)), 1};
    launch.threadgroup = {32 * kLinearParts, 1, 1};
    // Its few blocks would crowd onto the multiprocessors that the previous launch frees first.
    launch.after_previous = true;
  }
  launch.buffers.push_back({operands.x, Access::read, 0});
  launch.buffers.push_back({operands.residual, Access::read, 0});
  for (int i = 0; i < kLinearMaxWeights; i++) {
    const auto& part = operands.parts[std::min(i, params.num_weights - 1)];
    launch.buffers.push_back({part.weight, Access::read, 0});
    launch.buffers.push_back({part.bias, Access::read, 0});
    launch.buffers.push_back({part.out, Access::write, 0});
  }
  bind_after_parts(launch, operands, params.adapters);
  launch.constants = bytes_of(params);
  return launch;
}

namespace {

std::optional<CodeFormat> kernel_format(const WeightCodes& codes) {
  using Format = WeightFormat;
  auto is_one_of = [](int value, std::initializer_list<int> all) {
    return std::find(all.begin(), all.end(), value) != all.end();
  };
  if (codes.format == Format::affine && is_one_of(codes.bits, {2, 3, 4, 5, 6, 8}) &&
      is_one_of(codes.group_size, {32, 64, 128})) {
    return CodeFormat::affine;
  }
  if (codes.format == Format::mxfp4 && codes.bits == 4 && codes.group_size == 32) {
    return CodeFormat::mxfp4;
  }
  if (codes.format == Format::mxfp8 && codes.bits == 8 && codes.group_size == 32) {
    return CodeFormat::mxfp8;
  }
  return std::nullopt;  // nvfp4: a group has too few codes for four lanes
}

const char* name_of(CodeFormat format) {
  return format == CodeFormat::mxfp4 ? "mxfp4" : format == CodeFormat::mxfp8 ? "mxfp8" : "affine";
}

std::string quantized_kernel(
    const char* kernel, DType dtype, CodeFormat format, const WeightCodes& codes, int tiles) {
  std::ostringstream name;
  name << kernel << "_" << mlx_paged::name_of(dtype) << "_" << name_of(format) << "_" << codes.bits
       << "_" << codes.group_size << "_" << tiles;
  return name.str();
}

int scale_bytes_of(CodeFormat format) {
  return format == CodeFormat::affine ? 2 : 1;
}

// True if rows of scales are also multiples of 16 bytes apart, as the copy engine requires.
bool streams_quantized(CodeFormat format, const WeightCodes& codes, int k) {
  return k % 128 == 0 && k / codes.group_size * scale_bytes_of(format) % 16 == 0;
}

// True if all scales of half a tile of rows can instead be copied at once.
bool streams_whole(CodeFormat format, const WeightCodes& codes, int k, int n, bool is_gated) {
  int bytes = k / codes.group_size * scale_bytes_of(format);
  constexpr int kHalf = kQuantizedStreamRows / 2;
  return k % 128 == 0 && bytes <= kQuantizedWholeScales && n % (is_gated ? kHalf : 2 * kHalf) == 0;
}

// The value of an environment variable that changes kernels, to find faults and to compare.
int setting(const char* variable, int by_default) {
  const char* set = std::getenv(variable);
  return set ? std::atoi(set) : by_default;
}

// Maximum rows of x. Without the copy engine, each block of 16 rows reads the weight again; without
// warpgroup products, MLX's kernel is as fast for the many rows of prompts.
int quantized_max_rows(CodeFormat format, const WeightCodes& codes, int k, TmaKernels tma) {
  if (tma < TmaKernels::any || !streams_quantized(format, codes, k)) {
    return kLinearMaxRows;
  }
  const int max_rows = tma == TmaKernels::wgmma ? kQuantizedMaxRows : kLibraryMaxRows;
  return std::clamp(setting("MLX_PAGED_QUANTIZED_ROWS", max_rows), kLinearMaxRows, max_rows);
}

// True if linear_quantized_wgmma serves the product.
bool by_four_warps(
    CodeFormat format, const WeightCodes& codes, int num_rows, int k, TmaKernels tma) {
  return tma == TmaKernels::wgmma && streams_quantized(format, codes, k) &&
         tiles_of(num_rows) >= kQuantizedWgmmaTiles;
}

// Maps of the weights, whose first buffer is `first`, with `count` matrices each. Without
// has_scales, kernels copy scales without maps, so the codes' map fills their places.
std::vector<MatrixMap> quantized_maps(
    const LinearParams& params, CodeFormat format, const WeightCodes& codes, int first,
    int buffers_of_part, int count, bool has_scales) {
  constexpr int kBoxRows = kQuantizedStreamRows / 2;
  std::vector<MatrixMap> maps;
  int words = params.k * codes.bits / 32;
  int groups = params.k / codes.group_size;
  int scale_bytes = scale_bytes_of(format);
  for (int i = 0; i < params.num_weights; i++) {
    int buffer = first + buffers_of_part * i;
    int rows = params.n[i] * count;
    maps.push_back(
        {buffer, 4, rows, words, words, kBoxRows,
         quantized_stream_chunk(codes.bits) * codes.bits / 32,
         quantized_stream_swizzles(codes.bits)});
    for (int array : {1, 2}) {  // formats without biases have the scales again
      MatrixMap scales{buffer + array, scale_bytes,      rows, groups, groups,
                       kBoxRows,       16 / scale_bytes, false};
      maps.push_back(has_scales ? scales : maps.back());
    }
  }
  return maps;
}

}  // namespace

bool serves_quantized(int num_rows, int n, int k, const WeightCodes& codes, TmaKernels tma) {
  auto format = kernel_format(codes);
  // Rows of codes are copied 16 bytes at a time.
  return format && num_rows > 0 && n > 0 && k > 0 && k % codes.group_size == 0 &&
         int64_t(k) * codes.bits % 128 == 0 &&
         num_rows <= quantized_max_rows(*format, codes, k, tma);
}

CodeOrder order_of_x(const ProductStep& step, TmaKernels tma) {
  auto format = step.codes ? kernel_format(*step.codes) : std::nullopt;
  bool is_ordered = format && by_four_warps(*format, *step.codes, step.num_rows, step.k, tma);
  return is_ordered ? code_order(step.codes->bits, step.codes->group_size) : CodeOrder{};
}

Launch quantized_launch(
    LinearParams params, DType dtype, const WeightCodes& codes, const LinearOperands& operands,
    TmaKernels tma) {
  auto format = kernel_format(codes).value();
  int tiles = tiles_of(params.num_rows);
  bool by_stream = tma >= TmaKernels::any && streams_quantized(format, codes, params.k);
  bool by_wgmma = by_four_warps(format, codes, params.num_rows, params.k, tma);
  Launch launch;
  if (by_stream) {
    bool is_wide = by_wgmma && setting("MLX_PAGED_WIDE_PRODUCTS", 1) != 0;
    tiles = std::min(tiles, is_wide ? quantized_wgmma_tiles(codes.bits) : kQuantizedStreamTiles);
    auto shape =
        quantized_stream_shape(format, codes.bits, codes.group_size, tiles, false, by_wgmma);
    uint32_t num_tiles = blocks_of(params, kQuantizedStreamRows / (params.is_gated ? 2 : 1));
    uint32_t blocks = stream_cluster(num_tiles, params.k, kQuantizedStreamMinColumns);
    launch.threadgroup_memory = shape.scratch;
    launch.cluster = blocks > 1 ? blocks : 0;
    launch.grid = {num_tiles * blocks, uint32_t(div_up(params.num_rows, 8 * tiles)), 1};
    // Without warpgroup products, there are no registers for units beside a product.
    divide_adapters(
        launch, params, int(blocks), by_wgmma ? tiles : kAdapterUnitTiles + 1,
        kQuantizedWgmmaThreads / 32);
    launch.threadgroup = {
        uint32_t(by_wgmma ? kQuantizedWgmmaThreads : kQuantizedStreamThreads), 1, 1};
    launch.maps = quantized_maps(params, format, codes, kFirstPart, kQuantizedPartBuffers, 1, true);
    launch.maps.insert(launch.maps.begin(), map_of_x(params, tiles));
  } else {
    tiles = std::min(tiles, 2);
    int rows = kQuantizedRows / (params.is_gated ? 2 : 1);
    launch.threadgroup_memory =
        quantized_rows_shape(format, codes.bits, codes.group_size, tiles).scratch;
    launch.grid = {
        blocks_of(params, rows), uint32_t((params.num_rows + 8 * tiles - 1) / (8 * tiles)), 1};
    launch.threadgroup = {32 * kLinearParts, 1, 1};
    launch.after_previous = true;  // like linear
  }
  launch.kernel.host_name = quantized_kernel(
      by_wgmma    ? "linear_quantized_wgmma"
      : by_stream ? "linear_quantized_stream"
                  : "linear_quantized",
      dtype, format, codes, tiles);
  launch.buffers.push_back({operands.x, Access::read, 0});
  launch.buffers.push_back({operands.residual, Access::read, 0});
  for (int i = 0; i < kLinearMaxWeights; i++) {
    const auto& part = operands.parts[std::min(i, params.num_weights - 1)];
    for (int operand : {part.weight, part.scales, part.biases, part.bias}) {
      launch.buffers.push_back({operand, Access::read, 0});
    }
    launch.buffers.push_back({part.out, Access::write, 0});
  }
  bind_after_parts(launch, operands, params.adapters);
  launch.constants = bytes_of(params);
  return launch;
}

int expert_tiles(int num_rows, int top_k, int num_experts) {
  int pairs = (2 * num_rows * top_k + num_experts - 1) / num_experts;
  return std::min({tiles_of(pairs), tiles_of(num_rows), kWgmmaTiles});
}

int quantized_expert_tiles(int tiles) {
  return tiles == 1 ? 1 : kQuantizedExpertTiles;
}

bool serves_experts(const ProductStep& products, TmaKernels tma) {
  bool is_served =
      tma != TmaKernels::none && products.dtype != DType::float32 && products.k % kLinearStep == 0;
  for (const auto& part : products.parts) {
    is_served = is_served && part.n % 4 == 0;
  }
  if (is_served && products.codes) {
    auto format = kernel_format(*products.codes);
    return format && tma >= TmaKernels::any && products.k % products.codes->group_size == 0 &&
           (streams_quantized(*format, *products.codes, products.k) ||
            streams_whole(
                *format, *products.codes, products.k, products.parts[0].n, products.is_gated));
  }
  return is_served;
}

Launch expert_launch(
    const MixtureStep& step, const ProductStep& products, bool is_first, int tiles, int max_items) {
  constexpr int kFirst = 1;  // buffer of the first weight
  const auto& codes = products.codes;
  const int num_experts = step.route.num_experts;
  const int rows = codes ? kQuantizedStreamRows : kStreamRows;
  ExpertProductParams params{};
  auto& product = params.product;
  product.num_rows = is_first ? step.route.num_rows : step.num_pairs();
  product.k = products.k;
  product.x_stride = products.x_stride;
  product.num_weights = int(products.parts.size());
  product.is_gated = products.is_gated;
  for (int i = 0; i < product.num_weights; i++) {
    product.n[i] = products.parts[i].n;
    product.has_bias[i] = products.parts[i].bias >= 0;
  }
  params.num_tiles = int(blocks_of(product, rows / (product.is_gated ? 2 : 1)));
  params.top_k = step.route.top_k;
  params.is_first = is_first;

  Launch launch;
  launch.buffers.push_back({products.x, Access::read, 0});
  for (int i = 0; i < 2; i++) {
    const auto& part = products.parts[std::min(i, product.num_weights - 1)];
    std::vector<int> of_part{part.weight};
    if (codes) {
      of_part.push_back(part.scales);
      of_part.push_back(part.biases >= 0 ? part.biases : part.scales);
    }
    of_part.push_back(part.bias >= 0 ? part.bias : part.weight);
    for (int operand : of_part) {
      launch.buffers.push_back({operand, Access::read, 0});
    }
  }
  launch.buffers.push_back({products.parts[0].out, Access::write, 0});
  launch.buffers.push_back({step.sorted_pairs, Access::read, 0});
  launch.buffers.push_back({step.items, Access::read, 0});
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(max_items * params.num_tiles), 1, 1};

  auto map_of_rows = map_of_x(product, tiles);
  map_of_rows.box_rows = is_first ? 1 : map_of_rows.box_rows;
  launch.maps.push_back(map_of_rows);
  if (codes) {
    auto format = kernel_format(*codes).value();
    bool whole = !streams_quantized(format, *codes, products.k);
    launch.kernel.host_name = quantized_kernel(
        whole ? "expert_quantized_whole" : "expert_quantized_stream", products.dtype, format,
        *codes, tiles);
    launch.threadgroup_memory =
        quantized_stream_shape(format, codes->bits, codes->group_size, tiles, whole).scratch;
    launch.threadgroup = {kQuantizedStreamThreads, 1, 1};
    auto maps = quantized_maps(product, format, *codes, kFirst, 4, num_experts, !whole);
    launch.maps.insert(launch.maps.end(), maps.begin(), maps.end());
  } else {
    launch.kernel.host_name = std::string("expert_stream_") + mlx_paged::name_of(products.dtype) +
                              "_" + std::to_string(tiles);
    launch.threadgroup_memory = stream_scratch(tiles);
    launch.threadgroup = {kStreamThreads, 1, 1};
    for (int i = 0; i < product.num_weights; i++) {
      launch.maps.push_back(
          {kFirst + 2 * i, 2, product.n[i] * num_experts, product.k, product.k, kStreamRows / 2,
           kLinearChunk});
    }
  }
  return launch;
}

bool serves_sorted(const SortedProduct& product, TmaKernels tma) {
  const auto& codes = product.codes;
  auto format = kernel_format(codes);
  return format && tma == TmaKernels::wgmma && product.dtype != DType::float32 &&
         product.num_rows > 0 && product.num_experts <= kMaxSortedExperts && product.n % 4 == 0 &&
         product.k % codes.group_size == 0 &&
         (streams_quantized(*format, codes, product.k) ||
          streams_whole(*format, codes, product.k, product.n, product.parts.size() == 2));
}

CodeOrder order_of_sorted(const WeightCodes& codes) {
  return code_order(codes.bits, codes.group_size);
}

// Most experts have one item that is not full, so large ones only help where they have many rows.
SortedItems SortedItems::of(const SortedProduct& product) {
  const bool is_few = product.num_rows <= kFewExpertRows * product.num_experts;
  const bool is_wide = product.num_rows > kManyExpertRows * product.num_experts;
  const int tiles = is_wide  ? quantized_wgmma_tiles(product.codes.bits)
                    : is_few ? kQuantizedExpertTiles
                             : kQuantizedStreamTiles;
  return {product.num_rows, product.num_experts, 8 * tiles};
}

int SortedItems::max_count() const {
  return std::min(num_rows, std::min(num_rows, num_experts) + num_rows / item_rows);
}

uint64_t SortedItems::bytes() const {
  return uint64_t(max_count()) * 3 * sizeof(int);
}

Launch sorted_items_launch(const SortedItems& items, int experts, int to) {
  Launch launch;
  launch.kernel.host_name = "sorted_items";
  launch.buffers = {{experts, Access::read, 0}, {to, Access::write, items.bytes()}};
  launch.constants = bytes_of(
      SortedItemsParams{items.num_rows, items.num_experts, items.item_rows, items.max_count()});
  launch.grid = {1, 1, 1};
  launch.threadgroup = {32 * div_up(items.num_experts + 1, 32), 1, 1};
  launch.threadgroup_memory = uint32_t(items.num_experts + 1) * sizeof(int);
  return launch;
}

Launch sorted_rows_launch(const SortedRows& rows, CodeOrder order, int x, int pairs, int to) {
  constexpr int kElements = 8;  // of a chunk
  Launch launch;
  launch.kernel.host_name =
      "sorted_rows_" + std::to_string(order.run) + "_" + std::to_string(order.apart);
  launch.buffers = {{x, Access::read, 0}, {pairs, Access::read, 0}, {to, Access::write, 0}};
  SortedRowsParams params{rows.k / kElements, rows.x_stride / kElements, rows.top_k};
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(rows.num_pairs), 1, 1};
  launch.threadgroup = {std::min<uint32_t>(256, 32 * div_up(params.row_chunks, 32)), 1, 1};
  return launch;
}

Launch sorted_launch(const SortedProduct& of) {
  const auto format = kernel_format(of.codes).value();
  const bool whole = !streams_quantized(format, of.codes, of.k);
  const auto items = SortedItems::of(of);
  const int tiles = items.item_rows / 8;
  ExpertProductParams params{};
  auto& product = params.product;
  product.num_rows = of.num_rows;
  product.k = product.x_stride = of.k;
  product.num_weights = int(of.parts.size());
  product.is_gated = of.parts.size() == 2;
  product.x_is_ordered = of.x_is_ordered;
  product.out_order = of.out_order;
  for (int i = 0; i < product.num_weights; i++) {
    product.n[i] = of.n;
    product.has_bias[i] = of.parts[i].bias >= 0;
  }
  params.num_tiles = int(blocks_of(product, kQuantizedStreamRows / (product.is_gated ? 2 : 1)));
  params.top_k = 1;
  params.is_first = !of.pairs;
  Launch launch;
  launch.kernel.host_name = quantized_kernel(
      whole ? "expert_quantized_whole_wgmma" : "expert_quantized_wgmma", of.dtype, format, of.codes,
      tiles);
  auto read = [&](int operand) { launch.buffers.push_back({operand, Access::read, 0}); };
  read(of.x);
  for (int i = 0; i < 2; i++) {
    const auto& part = of.parts[std::min(i, product.num_weights - 1)];
    for (int operand :
         {part.weight, part.scales, part.biases, part.bias >= 0 ? part.bias : part.weight}) {
      read(operand);
    }
  }
  launch.buffers.push_back({of.out, Access::write, 0});
  read(of.pairs.value_or(of.items));
  read(of.items);
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(items.max_count() * params.num_tiles), 1, 1};
  launch.threadgroup = {kQuantizedWgmmaThreads, 1, 1};
  launch.threadgroup_memory =
      quantized_stream_shape(format, of.codes.bits, of.codes.group_size, tiles, whole, true)
          .scratch;
  launch.maps = quantized_maps(product, format, of.codes, 1, 4, of.num_experts, !whole);
  launch.maps.insert(launch.maps.begin(), map_of_x(product, tiles));
  return launch;
}

bool serves_product(int num_rows, int n, int k, bool is_gated, TmaKernels tma) {
  return num_rows > 0 && num_rows <= kLinearMaxRows && n > 0 &&
         (n % kLinearRows == 0 || tma != TmaKernels::none) && k > 0 && k % kLinearStep == 0 &&
         (!is_gated || n % 4 == 0);
}

namespace {

template <typename Params>
Params constants_of(const Launch& launch) {
  Params params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  return params;
}

[[noreturn]] void refuse_product(const ProductStep& step, int n) {
  std::ostringstream what;
  what << "a product of " << step.num_rows << " rows, " << n << " x " << step.k << " "
       << name_of(step.dtype);
  if (step.codes) {
    what << " with weights of " << step.codes->bits << " bits in groups of "
         << step.codes->group_size;
  }
  throw UnsupportedGraph(what.str());
}

// True if the products' kernel does the work of their adapters. With more rows, its blocks would
// wait long for those that multiply by `a`.
bool adds_adapters(const ProductStep& step, TmaKernels tma) {
  if (setting("MLX_PAGED_ADAPTERS_IN_PRODUCTS", 1) == 0 || step.num_rows > kLinearMaxRows) {
    return false;
  }
  bool is_served = step.codes
                       ? tma >= TmaKernels::any &&
                             streams_quantized(*kernel_format(*step.codes), *step.codes, step.k)
                       : tma != TmaKernels::none;
  for (const auto& part : step.parts) {
    is_served = is_served && (part.target < 0 || part.n % 8 == 0);
  }
  int rank = constants_of<paged::LoraParams>(step.adapters->up).rank;
  return is_served && rank % 8 == 0 && rank <= kAdapterMaxRank;
}

// Makes a product's kernel do the work of lora_down and lora_up.
void take_adapters(LinearParams& params, LinearOperands& operands, const ProductStep& step) {
  using Adapters = ProductStep::Adapters;
  const auto& [down, up, finished] = *step.adapters;
  const auto lora = constants_of<paged::LoraParams>(up);
  auto operand_at = [&up = up](int buffer) { return up.buffers[buffer].operand; };
  params.is_gated = lora.is_gated;
  params.has_residual = lora.has_residual;
  params.adapters = {lora.num_adapters, lora.rank, 0, 0, 0, 0, {-1, -1, -1}};
  operands.residual = operand_at(Adapters::kResidual);
  operands.hidden = operand_at(Adapters::kHidden);
  operands.adapters = operand_at(Adapters::kAdapters);
  operands.finished = finished;
  for (int i = 0; i < paged::LORA_TARGETS; i++) {
    operands.adapter_a[i] = down.buffers[Adapters::kDownMatrices + i].operand;
  }
  for (size_t i = 0; i < step.parts.size(); i++) {
    int target = params.adapters.target[i] = step.parts[i].target;
    if (target >= 0) {
      operands.parts[i].adapter_b = operand_at(Adapters::kUpMatrices + target);
      operands.parts[i].out = operand_at(Adapters::kResults + target);
    }
  }
}

Launch kernel_product(const ProductStep& step, TmaKernels tma) {
  LinearParams params{};
  params.num_rows = step.num_rows;
  params.k = step.k;
  params.x_stride = step.x_stride;
  params.num_weights = int(step.parts.size());
  params.is_gated = step.is_gated;
  params.has_residual = step.residual >= 0;
  params.x_is_ordered = step.x_is_ordered;
  params.out_order = step.out_order;
  LinearOperands operands{};
  operands.x = step.x;
  operands.residual = step.residual >= 0 ? step.residual : step.x;
  operands.rotations = operands.slots = operands.hidden = operands.adapters = step.x;
  operands.finished = step.x;
  std::fill_n(operands.adapter_a, kLinearMaxWeights, step.x);
  for (auto& part : operands.parts) {
    part.adapter_b = step.x;
  }
  for (int i = 0; i < params.num_weights; i++) {
    const auto& part = step.parts[i];
    params.n[i] = part.n;
    params.has_bias[i] = part.bias >= 0;
    operands.parts[i] = {part.weight, part.bias >= 0 ? part.bias : part.weight,     part.out,
                         part.scales, part.biases >= 0 ? part.biases : part.scales, step.x};
  }
  if (step.adapters) {
    take_adapters(params, operands, step);
  }
  if (step.write) {
    const auto& buffers = step.write->buffers;
    params.head_dim = step.head_dim;
    operands.rotations = buffers[ProductStep::kRotations].operand;
    operands.slots = buffers[ProductStep::kSlots].operand;
    for (int i = 0; i < 3; i++) {
      operands.parts[i].out = buffers[ProductStep::kQueriesOut + i].operand;
    }
  }
  return step.codes ? quantized_launch(params, step.dtype, *step.codes, operands, tma)
                    : linear_launch(params, step.dtype, operands, tma);
}

// Combines adjacent products of equal size: each alone would leave multiprocessors idle.
std::vector<Launch> library_products(const ProductStep& step, int workspace) {
  std::vector<Launch> launches;
  for (size_t i = 0; i < step.parts.size();) {
    const auto& part = step.parts[i];
    LibraryProductParams params{};
    params.num_rows = step.num_rows;
    params.k = step.k;
    params.x_stride = step.x_stride;
    params.n = part.n;
    params.count = 1;
    params.has_bias = part.bias >= 0;
    params.has_residual = step.residual >= 0;
    params.dtype = step.dtype;
    if (i + 1 < step.parts.size() && part.n == step.parts[i + 1].n && part.bias < 0 &&
        step.parts[i + 1].bias < 0 && step.residual < 0) {
      params.count = 2;
    }
    Launch launch;
    launch.kernel.host_name = kLibraryProduct;
    launch.buffers.push_back({step.x, Access::read, 0});
    launch.buffers.push_back({step.residual >= 0 ? step.residual : step.x, Access::read, 0});
    launch.buffers.push_back({workspace, Access::read_write, 0});
    for (int j = 0; j < params.count; j++, i++) {
      const auto& p = step.parts[i];
      launch.buffers.push_back({p.weight, Access::read, 0});
      launch.buffers.push_back({p.bias >= 0 ? p.bias : p.weight, Access::read, 0});
      launch.buffers.push_back({p.out, Access::write, 0});
    }
    launch.constants = bytes_of(params);
    launch.grid = launch.threadgroup = {1, 1, 1};
    launches.push_back(std::move(launch));
  }
  return launches;
}

}  // namespace

std::vector<Launch> product_launches(
    const ProductStep& step, const std::vector<StepOperand>& operands, int workspace,
    TmaKernels tma) {
  bool by_library = !step.codes && step.num_rows > kLinearMaxRows;
  for (const auto& part : step.parts) {
    bool served = step.codes   ? serves_quantized(step.num_rows, part.n, step.k, *step.codes, tma)
                  : by_library ? has_library_products() && step.num_rows <= kLibraryMaxRows &&
                                     part.n % 8 == 0 && step.k % 8 == 0
                               : serves_product(step.num_rows, part.n, step.k, false, tma);
    if (step.dtype == DType::float32 || !served) {
      refuse_product(step, part.n);
    }
  }
  if (!by_library && (!step.adapters || adds_adapters(step, tma))) {
    return {kernel_product(step, tma)};
  }
  ProductStep alone = step;
  alone.adapters = std::nullopt;
  alone.write = std::nullopt;
  alone.out_order = {};
  std::vector<Launch> launches{};
  if (step.adapters) {
    launches.push_back(step.adapters->down);
    if (step.x_is_ordered) {
      rows_in_order(launches.back(), order_of_x(step, tma));
    }
  }
  if (by_library) {
    for (auto& launch : library_products(alone, workspace)) {
      launches.push_back(std::move(launch));
    }
  } else {
    launches.push_back(kernel_product(alone, tma));
  }
  for (auto& launch : launches_after_products(step, operands)) {
    launches.push_back(std::move(launch));
  }
  return launches;
}

}  // namespace mlx_paged::cuda
