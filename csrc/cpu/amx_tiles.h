// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// AMX tiles: eight registers of up to 16 rows of 64 bytes, and products of two of them. The kernels
// that use them are compiled twice: with the processor's tiles, and with SoftwareTiles, which
// behave the same, so that tests run and check these kernels on any processor with AVX-512.
//
// Semantics follow the Intel 64 and IA-32 Software Developer's Manual, volume 2: LDTILECFG,
// TILELOADD, TILESTORED, TDPBSUD and TDPBF16PS.

#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kNumTiles = 8;

// The rows of a tile in use, and the bytes of each. In a product a [m, k] x b [k, n], `b` has one
// row for each four bytes of a's rows, with the four bytes of each column adjacent.
struct TileShape {
  int rows = 0;
  int row_bytes = 0;
};

constexpr TileShape kWholeTile{kTileRows, kTileRowBytes};
constexpr TileShape kWholeTiles[kNumTiles] = {kWholeTile, kWholeTile, kWholeTile, kWholeTile,
                                              kWholeTile, kWholeTile, kWholeTile, kWholeTile};

// The processor's tiles. An object holds the thread's tile registers: they are configured by its
// constructor and released by its destructor. There must be one at a time per thread.
class HardwareTiles {
 public:
  explicit HardwareTiles(const TileShape (&shapes)[kNumTiles]) {
    Configuration c;
    for (int i = 0; i < kNumTiles; i++) {
      c.row_bytes[i] = uint16_t(shapes[i].row_bytes);
      c.rows[i] = uint8_t(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(c));
  }
  ~HardwareTiles() { asm volatile("tilerelease"); }
  HardwareTiles(const HardwareTiles&) = delete;
  HardwareTiles& operator=(const HardwareTiles&) = delete;

  template <int Tile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }

  // Loads rows that are `stride` bytes apart.
  template <int Tile>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
  }

  template <int Tile>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }

  // c (int32) += a (int8) x b (uint8).
  template <int C, int A, int B>
  void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }

  // c (float32) += a x b, pairs of bfloat16.
  template <int C, int A, int B>
  void multiply_bfloats() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }

 private:
  struct Configuration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Configuration) == 64);
};

// The same in software. A shape that the processor would refuse with a fault ends the program.
class SoftwareTiles {
 public:
  explicit SoftwareTiles(const TileShape (&shapes)[kNumTiles]) {
    for (int i = 0; i < kNumTiles; i++) {
      const TileShape& s = shapes[i];
      require(s.rows >= 0 && s.rows <= kTileRows);
      require(s.row_bytes >= 0 && s.row_bytes <= kTileRowBytes);
      require((s.rows == 0) == (s.row_bytes == 0));
      shapes_[i] = s;
    }
  }
  SoftwareTiles(const SoftwareTiles&) = delete;
  SoftwareTiles& operator=(const SoftwareTiles&) = delete;

  template <int Tile>
  void zero() {
    require(shapes_[Tile].rows > 0);
    __builtin_memset(tiles_[Tile], 0, sizeof(tiles_[Tile]));
  }

  template <int Tile>
  void load(const void* from, int64_t stride) {
    zero<Tile>();
    for (int m = 0; m < shapes_[Tile].rows; m++) {
      const char* row = static_cast<const char*>(from) + m * stride;
      __builtin_memcpy(tiles_[Tile][m], row, shapes_[Tile].row_bytes);
    }
  }

  template <int Tile>
  void store(void* to, int64_t stride) {
    require(shapes_[Tile].rows > 0);
    for (int m = 0; m < shapes_[Tile].rows; m++) {
      char* row = static_cast<char*>(to) + m * stride;
      __builtin_memcpy(row, tiles_[Tile][m], shapes_[Tile].row_bytes);
    }
  }

  template <int C, int A, int B>
  void multiply_bytes() {
    check(C, A, B);
    for (int m = 0; m < shapes_[C].rows; m++) {
      uint32_t sums[kTileRowBytes / 4];  // wrap around
      __builtin_memcpy(sums, tiles_[C][m], sizeof(sums));
      for (int k = 0; k < shapes_[A].row_bytes; k++) {
        const int32_t x = int8_t(tiles_[A][m][k]);
        for (int n = 0; n < shapes_[C].row_bytes / 4; n++) {
          sums[n] += uint32_t(x * int32_t(tiles_[B][k / 4][4 * n + k % 4]));
        }
      }
      __builtin_memcpy(tiles_[C][m], sums, sizeof(sums));
    }
    clear_unused(C);
  }

  // Denormals count as zero, in inputs and results, whatever the thread's own mode.
  template <int C, int A, int B>
  void multiply_bfloats() {
    check(C, A, B);
    constexpr unsigned kExceptionsMasked = 0x1f80, kZeroDenormals = 0x8040;
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(kExceptionsMasked | kZeroDenormals);
    for (int m = 0; m < shapes_[C].rows; m++) {
      add_pairs(tiles_[A][m], tiles_[B], shapes_[A].row_bytes / 4, tiles_[C][m]);
    }
    _mm_setcsr(mode);
    clear_unused(C);
  }

 private:
  typedef uint8_t Row[kTileRowBytes];

  static void require(bool holds) {
    if (!holds) {
      __builtin_trap();
    }
  }

  void check(int c, int a, int b) const {
    require(c != a && c != b && a != b);
    require(shapes_[c].rows > 0 && shapes_[c].rows == shapes_[a].rows);
    require(shapes_[c].row_bytes > 0 && shapes_[c].row_bytes == shapes_[b].row_bytes);
    require(shapes_[b].rows > 0 && shapes_[a].row_bytes == 4 * shapes_[b].rows);
    require(shapes_[c].row_bytes % 4 == 0);
  }

  // The processor clears what is outside of the shape.
  void clear_unused(int tile) {
    for (int m = 0; m < kTileRows; m++) {
      int used = m < shapes_[tile].rows ? shapes_[tile].row_bytes : 0;
      __builtin_memset(tiles_[tile][m] + used, 0, kTileRowBytes - used);
    }
  }

  static float widened(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, sizeof(half));
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // Even and odd elements have their own sums, which start at zero. Not inlined, so that no
  // arithmetic leaves the changed mode.
  __attribute__((noinline)) static void add_pairs(const Row& a, const Row* b, int pairs, Row& c) {
    float sums[kTileRowBytes / 4];
    __builtin_memcpy(sums, c, sizeof(sums));
    for (int n = 0; n < kTileRowBytes / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < pairs; k++) {
        even = __builtin_fmaf(widened(a + 4 * k), widened(b[k] + 4 * n), even);
        odd = __builtin_fmaf(widened(a + 4 * k + 2), widened(b[k] + 4 * n + 2), odd);
      }
      sums[n] += even + odd;
    }
    __builtin_memcpy(c, sums, sizeof(sums));
  }

  TileShape shapes_[kNumTiles];
  alignas(64) Row tiles_[kNumTiles][kTileRows] = {};
};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
