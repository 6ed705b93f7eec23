// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Contract between the host and the kernels of products with quantised weights: formats, how the
// work is divided, and every instantiation. Plain C++: nvcc reads it too.

#pragma once

#include "linear_shape.h"

namespace mlx_paged::cuda {

enum class CodeFormat {
  affine,  // code * scale + bias; scales and biases of the dtype of x
  mxfp4,   // E2M1 * 2^(scale - 127)
  mxfp8,   // E4M3 * 2^(scale - 127)
};

// Rows that were looked up of a quantised embedding: a thread makes eight elements.
struct DequantiseParams {
  int num_chunks;  // of eight elements
  int k;
  int row_words;
  int group_size;
  int bits;
};
static_assert(sizeof(DequantiseParams) == 20, "the same for every compiler");

// Columns are added up in one order, as in linear_shape.h: chunk i of so many columns belongs to
// part i % 8, and a part adds its groups in order, each with its scale. (Copies of a row's scales
// have 4 bytes or more.)
constexpr int quantised_chunk(int group) {
  return group == 128 ? 256 : 128;
}

// linear_quantised: a block has a warp for each part, and sixteen rows of the weight.
constexpr int kQuantisedRows = 16;

// From one row's codes of a chunk to the next's: what eight lanes read at once, a group's codes of
// two or four rows, lies in different banks.
constexpr int quantised_pitch(int bits, int group) {
  const int row = quantised_chunk(group) * bits / 8;
  const int of_group = group * bits / 8;
  const int step = of_group == 32 || of_group == 64 ? of_group : 16;
  int pitch = (row + step - 1) / step * step;
  return pitch / step % 2 == 1 ? pitch : pitch + step;
}

// A row's scales of a chunk (and as many biases).
constexpr int quantised_scale_bytes(CodeFormat format, int group) {
  return quantised_chunk(group) / group * (format == CodeFormat::affine ? 2 : 1);
}

// A warp's rows of the weight in a stage of a ring: their codes, then their scales and biases.
constexpr int quantised_stage_bytes(CodeFormat format, int bits, int group, int rows) {
  const int arrays = format == CodeFormat::affine ? 2 : 1;
  const int bytes =
      rows * (quantised_pitch(bits, group) + arrays * quantised_scale_bytes(format, group));
  return (bytes + 15) / 16 * 16;
}

// Thread blocks that a multiprocessor should have at once, by tiles of eight rows of x. (By hand:
// so that registers suffice.)
constexpr int quantised_blocks(int tiles) {
  return tiles == 1 ? 3 : 2;
}

// Stages of a ring: up to four, of which so many blocks have room.
constexpr int quantised_stages(int block_stage_bytes, int blocks) {
  const int room = 227 * 1024 / blocks - 1024;
  const int fit = room / block_stage_bytes;
  return fit > 4 ? 4 : fit < 2 ? 2 : fit;
}

struct QuantisedShape {
  int stage_bytes;  // of a block
  int stages;
  int scratch;  // bytes of shared memory: the ring, and in its place at the end the results
};

constexpr QuantisedShape quantised_rows_shape(CodeFormat format, int bits, int group, int tiles) {
  const int stage = kLinearParts * quantised_stage_bytes(format, bits, group, kQuantisedRows);
  const int stages = quantised_stages(stage, quantised_blocks(tiles));
  const int results = kLinearParts * 8 * tiles * (kQuantisedRows + 4) * 4;
  return {stage, stages, stages * stage > results ? stages * stage : results};
}

// linear_quantised_stream, where blocks can form clusters: of a block four pairs of warps have 32
// rows of the weight each, a warp of a pair every other run of columns of a chunk. A run has the
// columns of one group, 64 at most.
constexpr int kQuantisedStreamRows = 128;
constexpr int kQuantisedStreamThreads = 32 * (8 + 1);            // one warp copies
constexpr int kQuantisedStreamPitch = kQuantisedStreamRows + 4;  // floats, of results
constexpr int kQuantisedStreamFewestColumns = 1024;              // of a block of a cluster

// Columns of a turn: a row's codes are one line of 128 bytes where that is possible.
constexpr int quantised_stream_chunk(int bits) {
  return bits <= 4 ? 256 : 128;
}

constexpr bool quantised_stream_swizzles(int bits) {
  return quantised_stream_chunk(bits) * bits / 8 == 128;
}

// Shared memory that a block must be able to have: all of sm_90's and sm_100's.
constexpr int kQuantisedStreamBytes = 227 * 1024;

// Blocks that a multiprocessor has at once, by tiles of eight rows of x: registers allow no more.
constexpr int quantised_stream_blocks(int tiles) {
  return tiles <= 4 ? 2 : 1;
}

// linear_quantised_wgmma, sm_90a's, of so many tiles and more: of few rows x is not worth bringing
// into order for all warps.
constexpr int kQuantisedWgmmaTiles = 4;
constexpr int kQuantisedWgmmaBlocks = 2;
constexpr int kQuantisedWgmmaThreads = 32 * 8;  // all multiply: so a thread has 128 registers

// Tiles of the kernels for experts, which have one tile or this many.
constexpr int kQuantisedExpertTiles = 4;

// Scales of rows that are no multiples of 16 bytes are copied all at once (`whole`): those of a
// tile's rows lie side by side. A row's, at most, in bytes:
constexpr int kQuantisedWholeScales = 48;

constexpr int quantised_stream_run(int group) {
  return group < 64 ? group : 64;
}

// Where lanes have whole words of codes, and words whole pairs 16 bits apart, these are pairs;
// else neighbours are.
constexpr CodeOrder code_order(int bits, int group) {
  return {quantised_stream_run(group), bits == 4 || bits == 8 ? 16 / bits : 1};
}

// Scales (and biases) are copied 16 bytes a row at a time: of so many chunks.
constexpr int quantised_stream_span(CodeFormat format, int bits, int group) {
  return (format == CodeFormat::affine ? 8 : 16) * group / quantised_stream_chunk(bits);
}

struct QuantisedStreamShape {
  int codes_bytes;  // of a stage: codes, then x
  int stage_bytes;
  int scales_bytes;  // of one slot
  int stages;
  int slots;     // of scales, behind the stages: none is needed again before its stages are
  int barriers;  // where they are: behind all of this, in whose place are the results at the end
  int scratch;   // bytes of shared memory
};

constexpr QuantisedStreamShape quantised_stream_shape(
    CodeFormat format, int bits, int group, int tiles, bool whole = false, bool wgmma = false) {
  const int chunk = quantised_stream_chunk(bits);
  const int codes = kQuantisedStreamRows * chunk * bits / 8;
  const int stage = codes + 8 * tiles * chunk * 2;
  const int blocks = wgmma ? kQuantisedWgmmaBlocks : quantised_stream_blocks(tiles);
  const int most = (blocks == 2 ? 112 : 216) * 1024;
  const int row = whole ? kQuantisedWholeScales : 16;
  const int scales = kQuantisedStreamRows * row * (format == CodeFormat::affine ? 2 : 1);
  const int span = quantised_stream_span(format, bits, group);
  int stages = 8;
  int slots = 0;
  int bytes = 0;
  for (; stages >= 2; stages--) {
    slots = whole ? 1 : (stages - 1 + span - 1) / span + 1;
    bytes = stages * stage + slots * scales;
    if (bytes <= most) {
      break;
    }
  }
  const int results = 8 * tiles * kQuantisedStreamPitch * 4;
  const int barriers = bytes > results ? bytes : results;
  const int ring = copy_ring_bytes(stages) + (wgmma ? stages * 4 : 0);  // and counters
  return {codes, stage, scales, stages, slots, barriers, barriers + ring};
}

}  // namespace mlx_paged::cuda
