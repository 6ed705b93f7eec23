// Products of tensors in every way that the simulator knows (msl/tensor.h).
#include <metal_stdlib>
#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

using namespace metal;
using namespace mpp::tensor_ops;

struct Shape {
  int m, n, k;
};

using Matrix = tensor<device half, dextents<int, 2>, tensor_inline>;
using Result = tensor<device float, dextents<int, 2>, tensor_inline>;

// Four SIMD-groups share a tile of 32 x 32; edges and the length of the sums are the tensors'.
kernel void from_device(
    device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* c [[buffer(2)]],
    constant Shape& shape [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]]) {
  constexpr auto descriptor =
      matmul2d_descriptor(32, 32, static_cast<int>(dynamic_extent), false, true);
  matmul2d<descriptor, execution_simdgroups<4>> product;
  Matrix left(a, dextents<int, 2>(shape.k, shape.m));
  Matrix right(b, dextents<int, 2>(shape.k, shape.n));
  Result result(c, dextents<int, 2>(shape.n, shape.m));
  auto rows = left.slice(0, int(group.y) * 32);
  auto columns = right.slice(0, int(group.x) * 32);
  auto tile = result.slice(int(group.x) * 32, int(group.y) * 32);
  product.run(rows, columns, tile);
}

// One SIMD-group: c = 2 (a^T b) + 100 row + column, from rows of 36 halves in threadgroup memory.
kernel void held_by_lanes(
    device const half* a [[buffer(0)]], device const half* b [[buffer(1)]],
    device float* c [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr int PITCH = 36;
  threadgroup half tiles[2][16 * PITCH];
  for (int i = int(lane); i < 16 * 32; i += 32) {
    tiles[0][i / 32 * PITCH + i % 32] = a[i];
    tiles[1][i / 32 * PITCH + i % 32] = b[i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  using Tile = tensor<threadgroup half, dextents<int, 2>, tensor_inline>;
  Tile left_tile(tiles[0], dextents<int, 2>(32, 16), array<int, 2>{1, PITCH});
  Tile right_tile(tiles[1], dextents<int, 2>(32, 16), array<int, 2>{1, PITCH});
  constexpr auto first = matmul2d_descriptor(32, 32, 16, true);
  constexpr auto then = matmul2d_descriptor(
      32, 32, 16, true, false, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<first, execution_simdgroup> multiply;
  matmul2d<then, execution_simdgroup> accumulate;
  auto left = multiply.get_left_input_cooperative_tensor<half, half, float>();
  auto right = multiply.get_right_input_cooperative_tensor<half, half, float>();
  left.load(left_tile);
  right.load(right_tile);
  auto sum = multiply.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  multiply.run(left, right, sum);
  accumulate.run(left, right, sum);
  for (ushort i = 0; i < sum.get_capacity(); i++) {
    if (sum.is_valid_element(i)) {
      auto at = sum.get_multidimensional_index(i);
      sum[i] += float(100 * at[1] + at[0]);
    }
  }
  Result result(c, dextents<int, 2>(32, 32));
  sum.store(result);
}

// Whole numbers; one half of the lanes may stay behind.
kernel void integers(
    device char* a [[buffer(0)]], device char* b [[buffer(1)]], device int* c [[buffer(2)]],
    constant int& lanes [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr auto descriptor = matmul2d_descriptor(16, 32, 32);
  matmul2d<descriptor, execution_simdgroup> product;
  tensor left(a, dextents<int, 2>(32, 16));
  tensor right(b, dextents<int, 2>(32, 32));
  tensor result(c, dextents<int, 2>(32, 16));
  if (int(lane) < lanes) {
    product.run(left, right, result);
  }
}
