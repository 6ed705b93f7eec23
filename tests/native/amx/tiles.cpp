// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs one operation of AMX tiles for test_amx.py, in software or with the processor's tiles, or
// prints what decides whether AMX may be used.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define MLX_PAGED_ISA test
#include "../../../csrc/cpu/amx.h"
#include "../../../csrc/cpu/amx_tiles.h"

using namespace mlx_paged::cpu;

namespace {

std::vector<char> read(int rows, int row_bytes) {
  std::vector<char> bytes(rows * row_bytes);
  if (std::fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) {
    std::fprintf(stderr, "the input ends early\n");
    std::exit(1);
  }
  return bytes;
}

// Multiplies each of `count` triples of tiles read from stdin; writes all of the third.
template <typename Tiles>
void multiply(bool bytes, int m, int k_bytes, int n, int count) {
  using test::TileShape;
  const TileShape shapes[test::kNumTiles] = {{m, k_bytes}, {k_bytes / 4, 4 * n}, {m, 4 * n}};
  Tiles tiles(shapes);
  for (int i = 0; i < count; i++) {
    auto a = read(m, k_bytes);
    auto b = read(k_bytes / 4, 4 * n);
    auto c = read(m, 4 * n);
    tiles.template load<0>(a.data(), k_bytes);
    tiles.template load<1>(b.data(), 4 * n);
    tiles.template load<2>(c.data(), 4 * n);
    if (bytes) {
      tiles.template multiply_bytes<2, 0, 1>();
    } else {
      tiles.template multiply_bfloats<2, 0, 1>();
    }
    // Rows may be anywhere.
    std::vector<char> out(m * 128, 0x55);
    tiles.template store<2>(out.data(), 128);
    for (int row = 0; row < m; row++) {
      std::fwrite(out.data() + row * 128, 1, 4 * n, stdout);
      for (int byte = 4 * n; byte < 128; byte++) {
        if (out[row * 128 + byte] != 0x55) {
          std::fprintf(stderr, "byte %d of row %d was written\n", byte, row);
          std::exit(1);
        }
      }
    }
    tiles.template zero<2>();
    std::vector<char> zeros(m * 4 * n, 1);
    tiles.template store<2>(zeros.data(), 4 * n);
    for (char byte : zeros) {
      if (byte != 0) {
        std::fprintf(stderr, "zero did not clear the tile\n");
        std::exit(1);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto number = [&](int i) { return std::atoi(argv[i]); };
  const std::string command = argv[1];
  if (command == "refusal") {
    if (argc == 2) {
      std::puts(amx_refusal().c_str());
    } else {
      std::puts(amx_refusal({number(2) != 0, number(3) != 0, number(4)}).c_str());
    }
    return 0;
  }
  const bool bytes = std::strcmp(argv[2], "bytes") == 0;
  if (command == "hardware") {
    if (!amx_refusal().empty()) {
      std::fprintf(stderr, "%s\n", amx_refusal().c_str());
      return 1;
    }
    multiply<test::HardwareTiles>(bytes, number(3), number(4), number(5), number(6));
  } else {
    multiply<test::SoftwareTiles>(bytes, number(3), number(4), number(5), number(6));
  }
  return 0;
}
