// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Contract between the host and the kernels for products with quantized weights: formats, work
// division, and every instantiation. Plain C++ that nvcc reads too.

#pragma once

#include "linear_shape.h"

namespace mlx_paged::cuda {

enum class CodeFormat {
  affine,  // code * scale + bias, with scales and biases in the dtype of x
  mxfp4,   // E2M1 * 2^(scale - 127)
  mxfp8,   // E4M3 * 2^(scale - 127)
};

// Parameters for dequantizing rows looked up in an embedding. Each thread writes eight elements.
struct DequantizeParams {
  int num_chunks;  // of eight elements
  int k;
  int row_words;
  int group_size;
  int bits;
};
static_assert(sizeof(DequantizeParams) == 20, "the same for every compiler");

// Columns are summed in one fixed order, as in linear_shape.h: chunk i of this many columns belongs
// to part i % 8, and a part adds its groups in order, each with its scale. At least 4 bytes, so
// that a row's scales can be copied asynchronously.
constexpr int quantized_chunk(int group) {
  return group == 128 ? 256 : 128;
}

// linear_quantized: a block has one warp per part, and sixteen rows of the weight.
constexpr int kQuantizedRows = 16;

// Bytes between the codes of consecutive rows of a chunk. Eight lanes read a group's codes of two
// or four rows at once, so these must lie in different banks.
constexpr int quantized_pitch(int bits, int group) {
  const int row = quantized_chunk(group) * bits / 8;
  const int of_group = group * bits / 8;
  const int step = of_group == 32 || of_group == 64 ? of_group : 16;
  int pitch = (row + step - 1) / step * step;
  return pitch / step % 2 == 1 ? pitch : pitch + step;
}

// Bytes of one row's scales in a chunk; biases take the same.
constexpr int quantized_scale_bytes(CodeFormat format, int group) {
  return quantized_chunk(group) / group * (format == CodeFormat::affine ? 2 : 1);
}

// Bytes of a warp's weight rows in a ring stage: codes, then scales and biases.
constexpr int quantized_stage_bytes(CodeFormat format, int bits, int group, int rows) {
  const int arrays = format == CodeFormat::affine ? 2 : 1;
  const int bytes =
      rows * (quantized_pitch(bits, group) + arrays * quantized_scale_bytes(format, group));
  return (bytes + 15) / 16 * 16;
}

// Thread blocks per multiprocessor, by tiles of eight rows of x. Tuned by hand so that registers
// suffice.
constexpr int quantized_blocks(int tiles) {
  return tiles == 1 ? 3 : 2;
}

// Stages of a ring: as many as fit with `blocks` per multiprocessor, from two to four.
constexpr int quantized_stages(int block_stage_bytes, int blocks) {
  const int room = 227 * 1024 / blocks - 1024;
  const int fit = room / block_stage_bytes;
  return fit > 4 ? 4 : fit < 2 ? 2 : fit;
}

struct QuantizedShape {
  int stage_bytes;  // per block
  int stages;
  int scratch;  // bytes of shared memory for the ring; the results reuse it at the end
};

constexpr QuantizedShape quantized_rows_shape(CodeFormat format, int bits, int group, int tiles) {
  const int stage = kLinearParts * quantized_stage_bytes(format, bits, group, kQuantizedRows);
  const int stages = quantized_stages(stage, quantized_blocks(tiles));
  const int results = kLinearParts * 8 * tiles * (kQuantizedRows + 4) * 4;
  return {stage, stages, stages * stage > results ? stages * stage : results};
}

// linear_quantized_stream, for GPUs whose blocks can form clusters. Four pairs of warps in a block
// take 32 rows of the weight each; the warps of a pair take alternate runs of columns in a chunk. A
// run has one group's columns, at most 64.
constexpr int kQuantizedStreamRows = 128;
constexpr int kQuantizedStreamThreads = 32 * (8 + 1);            // one producer warp
constexpr int kQuantizedStreamPitch = kQuantizedStreamRows + 4;  // floats between rows of results
constexpr int kQuantizedStreamMinColumns = 1024;                 // per block of a cluster

// Columns per turn: a row's codes fill one 128-byte line where possible.
constexpr int quantized_stream_chunk(int bits) {
  return bits <= 4 ? 256 : 128;
}

constexpr bool quantized_stream_swizzles(int bits) {
  return quantized_stream_chunk(bits) * bits / 8 == 128;
}

// Shared memory that a block needs: all of sm_90's and sm_100's.
constexpr int kQuantizedStreamBytes = 227 * 1024;

// Blocks per multiprocessor by tiles of eight rows of x, limited by registers.
constexpr int quantized_stream_blocks(int tiles) {
  return tiles <= 4 ? 2 : 1;
}

// Maximum tiles of a block. Beyond that, the rows of x are split across blocks along y. Each block
// unpacks its own weight rows, so columns are summed in the same order for any number of rows.
constexpr int kQuantizedStreamTiles = 8;

constexpr int kQuantizedMaxRows = 1 << 20;  // of sm_90a's kernel: as many as a grid has room for

// linear_quantized_wgmma (sm_90a), used from this many tiles on: with fewer rows, reordering x for
// all warps costs more than it saves.
constexpr int kQuantizedWgmmaTiles = 4;
constexpr int kQuantizedWgmmaThreads = 32 * 8;  // no producer warp, so more registers per thread

// Blocks per multiprocessor: two have 128 registers per thread, which the sums of 64 rows fill.
constexpr int quantized_wgmma_blocks(int tiles) {
  return tiles <= 8 ? 2 : 1;
}

// Maximum tiles of a block. 128 rows halve the work of unpacking a weight for each of them.
constexpr int quantized_wgmma_tiles(int bits) {
  return bits == 4 || bits == 8 ? 16 : kQuantizedStreamTiles;
}

// Rows per expert, on average, from which on gathering them for warpgroup products pays, and from
// which on items have the maximum tiles.
constexpr int kSortedExpertRows = 8;
constexpr int kManyExpertRows = 96;

// Rows per expert up to which items have kQuantizedExpertTiles tiles: a stage of the ring has less
// of x, which few rows need, so more stages fit.
constexpr int kFewExpertRows = 20;

// Tiles of the kernels for experts: one or this many.
constexpr int kQuantizedExpertTiles = 4;

// Maximum bytes of a row's scales that are copied all at once (`whole`), because they are not a
// multiple of 16 bytes. Scales of a tile's rows are contiguous.
constexpr int kQuantizedWholeScales = 48;

constexpr int quantized_stream_run(int group) {
  return group < 64 ? group : 64;
}

// Pairs are codes 16 bits apart if lanes hold whole words of codes and words hold whole such pairs;
// otherwise pairs are neighbors.
constexpr CodeOrder code_order(int bits, int group) {
  return {quantized_stream_run(group), bits == 4 || bits == 8 ? 16 / bits : 1};
}

// Chunks whose scales (and biases) arrive in one copy of 16 bytes per row.
constexpr int quantized_stream_span(CodeFormat format, int bits, int group) {
  return (format == CodeFormat::affine ? 8 : 16) * group / quantized_stream_chunk(bits);
}

struct QuantizedStreamShape {
  int codes_bytes;  // of a stage: codes, followed by x
  int stage_bytes;
  int scales_bytes;  // per slot
  int stages;
  int slots;     // for scales, after the stages; a slot is reused no earlier than its stages
  int barriers;  // offset of the barriers; the results reuse the memory before them
  int scratch;   // bytes of shared memory
};

constexpr QuantizedStreamShape quantized_stream_shape(
    CodeFormat format, int bits, int group, int tiles, bool whole = false, bool wgmma = false) {
  const int chunk = quantized_stream_chunk(bits);
  const int codes = kQuantizedStreamRows * chunk * bits / 8;
  const int stage = codes + 8 * tiles * chunk * 2;
  const int blocks = wgmma ? quantized_wgmma_blocks(tiles) : quantized_stream_blocks(tiles);
  const int max_bytes = (blocks == 2 ? 112 : 216) * 1024;
  const int row = whole ? kQuantizedWholeScales : 16;
  const int scales = kQuantizedStreamRows * row * (format == CodeFormat::affine ? 2 : 1);
  const int span = quantized_stream_span(format, bits, group);
  int stages = 8;
  int slots = 0;
  int bytes = 0;
  for (; stages >= 2; stages--) {
    slots = whole ? 1 : (stages - 1 + span - 1) / span + 1;
    bytes = stages * stage + slots * scales;
    if (bytes <= max_bytes) {
      break;
    }
  }
  const int results = 8 * tiles * kQuantizedStreamPitch * 4;
  const int barriers = bytes > results ? bytes : results;
  const int ring = copy_ring_bytes(stages) + (wgmma ? stages * 4 : 0);  // and counters
  const int scratch = (barriers + ring + 15) / 16 * 16;
  return {codes, stage, scales, stages, slots, barriers, scratch};
}

}  // namespace mlx_paged::cuda
