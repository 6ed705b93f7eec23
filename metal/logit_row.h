// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// One pass of a threadgroup over a row of logits.

#pragma once

#include <metal_stdlib>

#include "language.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Calls `visitor.see(logit, index)` for this thread's share of a row. Each thread keeps several
// loads of 16 bytes in flight. A row whose size is not a multiple of 16 bytes is read by element,
// because it can start anywhere.
template <typename T, typename Visitor>
METAL_FUNC void visit_row(
    device const T* row, int size, uint thread_id, int threads, thread Visitor& visitor) {
  constexpr int CHUNK = chunk_size<T>();
  constexpr int AT_ONCE = 4;  // chunks that a thread keeps in flight
  if (size % CHUNK == 0) {
    int num_chunks = size / CHUNK;
    for (int first = int(thread_id); first < num_chunks; first += AT_ONCE * threads) {
      uint4 chunks[AT_ONCE];
      PAGED_UNROLL
      for (int i = 0; i < AT_ONCE; i++) {
        int chunk = first + i * threads;
        if (chunk < num_chunks) {
          chunks[i] = ((device const uint4*)row)[chunk];
        }
      }
      PAGED_UNROLL
      for (int i = 0; i < AT_ONCE; i++) {
        int chunk = first + i * threads;
        if (chunk < num_chunks) {
          float values[CHUNK];
          unpack(chunks[i], values, T(0.0f));
          PAGED_UNROLL
          for (int e = 0; e < CHUNK; e++) {
            visitor.see(values[e], chunk * CHUNK + e);
          }
        }
      }
    }
  } else {
    for (int i = int(thread_id); i < size; i += threads) {
      visitor.see(float(row[i]), i);
    }
  }
}

}  // namespace paged
