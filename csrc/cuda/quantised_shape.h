// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// What the host and the kernels of products with quantised weights agree on: formats, how the work
// is divided, and every instantiation. Plain C++: nvcc reads it too.

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

// linear_quantised_cluster, from so many rows of x on: a block of a cluster has a part, and each of
// its warps 32 rows of the weight.
constexpr int kQuantisedClusterFewest = 9;
constexpr int kQuantisedClusterWarps = 4;

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
constexpr int quantised_blocks(int tiles, bool cluster) {
  return !cluster ? (tiles == 1 ? 3 : 2) : tiles <= 2 ? 4 : tiles <= 4 ? 3 : 2;
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
  const int stages = quantised_stages(stage, quantised_blocks(tiles, false));
  const int results = kLinearParts * 8 * tiles * (kQuantisedRows + 4) * 4;
  return {stage, stages, stages * stage > results ? stages * stage : results};
}

constexpr QuantisedShape quantised_cluster_shape(
    CodeFormat format, int bits, int group, int tiles) {
  const int stage =
      8 * tiles * quantised_chunk(group) * 2 +
      kQuantisedClusterWarps * quantised_stage_bytes(format, bits, group, kClusterWarpRows);
  const int stages = quantised_stages(stage, quantised_blocks(tiles, true));
  const int results = 8 * tiles * cluster_result_pitch(kQuantisedClusterWarps) * 4;
  return {stage, stages, stages * stage > results ? stages * stage : results};
}

}  // namespace mlx_paged::cuda
