// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel_for.h"

namespace mlx_paged::cpu {

// Runs body(begin, end) over one side, `extent` long, of a product of [m, k] and [k, n]. Each piece
// takes some 50 microseconds of arithmetic or weight streaming, and each thread gets a few pieces
// so that none waits long for another.
template <typename Body>
void for_product_pieces(
    int64_t m, int64_t n, int64_t k, int64_t weight_bits, int64_t extent, const Body& body,
    int64_t align = 16) {  // whole vectors and cache lines
  constexpr int64_t kFlopsPerPiece = 4'000'000;
  constexpr int64_t kBytesPerPiece = 1 << 19;
  constexpr int64_t kPiecesPerThread = 4;
  int64_t pieces = std::max(
      2 * m * n * k / kFlopsPerPiece, std::max(m, n) * k * weight_bits / 8 / kBytesPerPiece);
  pieces = std::clamp<int64_t>(pieces, 1, kPiecesPerThread * num_threads());
  int64_t piece_size = ((extent + pieces - 1) / pieces + align - 1) / align * align;
  parallel_for(int((extent + piece_size - 1) / piece_size), [&](int piece, int) {
    body(piece * piece_size, std::min(extent, (piece + 1) * piece_size));
  });
}

}  // namespace mlx_paged::cpu
