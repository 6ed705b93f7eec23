// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for csrc/cuda/kernels/warpgroup.h where kernels run on the CPU. Products happen when
// they are waited for, as late as the hardware might.

#pragma once

#include <array>

#include "tensor_core.h"

#define PAGED_HAS_WGMMA

namespace mlx_paged::cuda {

inline int same_in_warp(int v) {
  fibers::together_in_warp(v, [](int* lanes) {
    for (int lane = 1; lane < 32; lane++) {
      fibers::require(lanes[lane] == lanes[0], "all lanes have the same");
    }
  });
  return v;
}

struct StartedProduct {
  float (*d)[4];
  int tiles;
  unsigned int a;
  unsigned int b;
  float (*value)(unsigned short);
  std::array<unsigned int, 4> registers = {};  // of A, if it is not in shared memory
  bool is_in_registers = false;

  // Row `row` of a tile of rows of 64 columns, and a column of its sixteen.
  float at(unsigned int columns, int row, int column) const {
    const unsigned int address = columns * 16;
    const int chunk = int(address % 1024) / 16 + column / 8;
    const unsigned int tile = address - address % 1024;
    return value(
        fibers::shared_at<unsigned short>(
            tile + paged::tile_offset<8>(row, chunk) + column % 8 * 2));
  }

  // By all lanes of a warp.
  void run_of_registers() const {
    struct Operands {
      const unsigned int* a;
      float (*d)[4];
    };
    fibers::together_in_warp(Operands{registers.data(), d}, [this](Operands* lanes) {
      double left[16][16];
      for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 8; i++) {
          const unsigned int pair = lanes[lane].a[i / 2];
          left[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] =
              value(static_cast<unsigned short>(pair >> 16 * (i % 2)));
        }
      }
      for (int column = 0; column < 8 * tiles; column++) {
        double right[16];
        for (int k = 0; k < 16; k++) {
          right[k] = at(b, column, k);
        }
        for (int row = 0; row < 16; row++) {
          float& result =
              lanes[row % 8 * 4 + column % 8 / 2].d[column / 8][row / 8 * 2 + column % 2];
          double sum = result;
          for (int k = 0; k < 16; k++) {
            sum += left[row][k] * right[k];
          }
          result = float(sum);
        }
      }
    });
  }

  void run(int thread) const {
    if (is_in_registers) {
      run_of_registers();
      return;
    }
    const int lane = thread % 32;
    const int first_row = thread / 32 % 4 * 16 + lane / 4;
    double left[2][16];  // read once for all tiles, which is most of a product's cost here
    for (int k = 0; k < 16; k++) {
      left[0][k] = at(a, first_row, k);
      left[1][k] = at(a, first_row + 8, k);
    }
    for (int t = 0; t < tiles; t++) {
      for (int i = 0; i < 2; i++) {
        const int column = 8 * t + lane % 4 * 2 + i;
        double right[16];
        for (int k = 0; k < 16; k++) {
          right[k] = at(b, column, k);
        }
        for (int half = 0; half < 2; half++) {
          double sum = d[t][2 * half + i];
          for (int k = 0; k < 16; k++) {
            sum += left[half][k] * right[k];
          }
          d[t][2 * half + i] = float(sum);
        }
      }
    }
  }
};

// By threads of the block.
inline thread_local std::vector<std::vector<StartedProduct>> open_products(fibers::kMostThreads);
inline thread_local std::vector<std::deque<std::vector<StartedProduct>>> product_batches(
    fibers::kMostThreads);

inline unsigned int first_columns(unsigned int tile) {
  fibers::require(tile % 1024 == 0, "tiles are aligned");
  return tile / 16;
}
constexpr unsigned int kNextColumns = 2;

inline void show_to_products() {}

inline void begin_products() {}

template <int TILES>
void take_product(float (&)[TILES][4]) {}

inline void commit_products() {
  auto& open = open_products[fibers::block->current];
  product_batches[fibers::block->current].push_back(std::move(open));
  open.clear();
}

template <int PENDING, int TILES>
void wait_for_products(float (&)[TILES][4]) {
  auto& batches = product_batches[fibers::block->current];
  while (int(batches.size()) > PENDING) {
    for (const StartedProduct& product : batches.front()) {
      product.run(fibers::block->current);
    }
    batches.pop_front();
  }
}

template <int TILES, typename T>
void start_product(float (&d)[TILES][4], unsigned int a, unsigned int b, T) {
  auto value = [](unsigned short bits) { return paged::half_of<T>(bits, 0); };
  open_products[fibers::block->current].push_back({d, TILES, a, b, value});
}

template <bool IS_FIRST, bool IS_TRANSPOSED, int TILES, typename T>
void start_product(float (&d)[TILES][4], const paged::FragmentA& a, unsigned int b, T) {
  static_assert(!IS_FIRST && !IS_TRANSPOSED);
  auto value = [](unsigned short bits) { return paged::half_of<T>(bits, 0); };
  open_products[fibers::block->current].push_back(
      {d, TILES, 0, b, value, {a[0], a[1], a[2], a[3]}, true});
}

}  // namespace mlx_paged::cuda
