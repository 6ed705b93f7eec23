// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for csrc/cuda/kernels/shared_words.h where kernels run on the CPU.

#pragma once

#include "../fibers.h"

namespace paged {

template <int WORDS>
void read_shared(unsigned int (&to)[WORDS], unsigned int at) {
  fibers::require(at % (4 * WORDS) == 0, "vectors of shared memory are aligned");
  for (int i = 0; i < WORDS; i++) {
    to[i] = fibers::shared_at<unsigned int>(at + 4 * i);
  }
}

inline unsigned int read_shared(unsigned int at) {
  return fibers::shared_at<unsigned int>(at);
}

inline float read_shared_half(unsigned int at) {
  return __half2float(fibers::shared_at<__half>(at));
}

inline void write_shared(unsigned int at, unsigned int word) {
  fibers::shared_at<unsigned int>(at) = word;
}

inline void write_shared_half(unsigned int at, unsigned short half) {
  fibers::shared_at<unsigned short>(at) = half;
}

}  // namespace paged
