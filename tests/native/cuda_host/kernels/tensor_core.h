// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for csrc/cuda/kernels/tensor_core.h where kernels run on the CPU: the same functions,
// of fibers instead of lanes.

#pragma once

#include "../fibers.h"

namespace paged {

typedef unsigned int FragmentA[4];
typedef unsigned int FragmentB[2];
typedef float FragmentD[4];

struct CachePolicy {};
inline CachePolicy evict_first() {
  return {};
}

inline CachePolicy evict_last() {
  return {};
}

template <int ROW_CHUNKS>
unsigned int tile_offset(int row, int chunk) {
  return (row * ROW_CHUNKS + (chunk ^ (row & 7))) * 16;
}

inline unsigned int shared_address(const void* at) {
  auto offset = static_cast<const unsigned char*>(at) - fibers::block->shared;
  fibers::require(offset >= 0 && offset <= fibers::kSharedBytes, "shared memory is the block's");
  return static_cast<unsigned int>(offset);
}

template <typename T>
float half_of(unsigned int pair, int i) {
  unsigned short bits = static_cast<unsigned short>(pair >> 16 * i);
  T value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

inline void load_matrices(FragmentA& to, unsigned int row) {
  struct Operands {
    unsigned int row;
    unsigned int* to;
  };
  fibers::together_in_warp(Operands{row, to}, [](Operands* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 4; i++) {
        unsigned int at = lanes[8 * i + lane / 4].row;
        fibers::require(at % 16 == 0, "rows of matrices are aligned");
        lanes[lane].to[i] = fibers::shared_at<unsigned int>(at + lane % 4 * 4);
      }
    }
  });
}

inline void load_matrices_transposed(FragmentA& to, unsigned int row) {
  struct Operands {
    unsigned int row;
    unsigned int* to;
  };
  fibers::together_in_warp(Operands{row, to}, [](Operands* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 4; i++) {
        unsigned int pair = 0;
        for (int e = 0; e < 2; e++) {
          unsigned int at = lanes[8 * i + lane % 4 * 2 + e].row;
          fibers::require(at % 16 == 0, "rows of matrices are aligned");
          pair |= unsigned(fibers::shared_at<unsigned short>(at + lane / 4 * 2)) << 16 * e;
        }
        lanes[lane].to[i] = pair;
      }
    }
  });
}

template <typename T>
unsigned int pack(float low, float high, T) {
  T pair[2] = {T(low), T(high)};
  unsigned int bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}

template <typename T>
void transpose(FragmentB& to, const FragmentD& from) {
  struct Operands {
    const float* from;
    unsigned int* to;
  };
  fibers::together_in_warp(Operands{from, to}, [](Operands* lanes) {
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 2; i++) {
        float values[2];  // rows 2c and 2c + 1, and those 8 below, of column r
        for (int e = 0; e < 2; e++) {
          int row = lane % 4 * 2 + e;
          int column = lane / 4;
          values[e] = lanes[row * 4 + column / 2].from[2 * i + column % 2];
        }
        lanes[lane].to[i] = pack(values[0], values[1], T(0.0f));
      }
    }
  });
}

inline float4 load(const float* from, CachePolicy) {
  return *reinterpret_cast<const float4*>(from);
}

inline void store(float* to, const float (&v)[4], CachePolicy) {
  std::memcpy(to, v, sizeof(v));
}

template <typename T>
void multiply_accumulate(FragmentD& d, const FragmentA& a, const FragmentB& b, T) {
  struct Operands {
    const unsigned int* a;
    const unsigned int* b;
    float* d;
  };
  fibers::together_in_warp(Operands{a, b, d}, [](Operands* lanes) {
    double left[16][16];
    double right[16][8];
    for (int lane = 0; lane < 32; lane++) {
      int r = lane / 4;
      int c = lane % 4 * 2;
      for (int i = 0; i < 2; i++) {
        left[r][c + i] = half_of<T>(lanes[lane].a[0], i);
        left[r + 8][c + i] = half_of<T>(lanes[lane].a[1], i);
        left[r][c + 8 + i] = half_of<T>(lanes[lane].a[2], i);
        left[r + 8][c + 8 + i] = half_of<T>(lanes[lane].a[3], i);
        right[c + i][r] = half_of<T>(lanes[lane].b[0], i);
        right[c + 8 + i][r] = half_of<T>(lanes[lane].b[1], i);
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 4; i++) {
        int r = lane / 4 + i / 2 * 8;
        int c = lane % 4 * 2 + i % 2;
        double sum = lanes[lane].d[i];
        for (int k = 0; k < 16; k++) {
          sum += left[r][k] * right[k][c];
        }
        lanes[lane].d[i] = static_cast<float>(sum);
      }
    }
  });
}

inline void copy_async(unsigned int to, const void* from, bool exists) {
  fibers::start_copy(to, from, 16, exists ? 16 : 0);
}

inline void copy_async(unsigned int to, const void* from, bool exists, CachePolicy) {
  copy_async(to, from, exists);
}

inline void commit_copies() {
  fibers::commit_copies();
}

template <int PENDING>
void wait_for_copies() {
  fibers::wait_for_copies(PENDING);
}

}  // namespace paged
