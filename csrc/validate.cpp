// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "validate.h"

#include <limits>

#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mlx_paged {

namespace {

constexpr const char* kDTypes = "float32, float16 or bfloat16";
constexpr const char* kPoolDTypes =
    "float32, float16 or bfloat16, or int8, uint32 or uint8 for a quantized pool";

std::string shape_string(const std::vector<int>& dims) {
  std::ostringstream s;
  s << "(";
  for (size_t i = 0; i < dims.size(); i++) {
    s << (i ? "," : "");
    if (dims[i] < 0) {
      s << "*";
    } else {
      s << dims[i];
    }
  }
  s << ")";
  return s.str();
}

std::vector<int> dims_of(const mx::array& a) {
  return {a.shape().begin(), a.shape().end()};
}
}  // namespace

void Validator::shape(const mx::array& a, const char* what, std::initializer_list<int> dims) const {
  auto actual = dims_of(a);
  bool ok = actual.size() == dims.size();
  size_t i = 0;
  for (int d : dims) {
    ok = ok && (d < 0 || actual[i] == d);
    i++;
  }
  require(ok, what, "of shape " + shape_string(dims), shape_string(actual));
}

void Validator::int32(const mx::array& a, const char* what) const {
  require(a.dtype() == mx::int32, what, "int32", a.dtype());
}

void Validator::floating(const mx::array& a, const char* what) const {
  require(is_supported(a.dtype()), what, kDTypes, a.dtype());
}

void Validator::same_shape(
    const mx::array& a, const char* what, const mx::array& b, const char* other) const {
  require(
      a.shape() == b.shape(), what, "of shape " + shape_string(dims_of(b)) + " like " + other,
      shape_string(dims_of(a)));
}

void Validator::same_dtype(
    const mx::array& a, const char* what, const mx::array& b, const char* other) const {
  std::ostringstream expected;
  expected << b.dtype() << " like " << other;
  require(a.dtype() == b.dtype(), what, expected.str(), a.dtype());
}

void Validator::pool_layout(
    const std::vector<int>& shape, mx::Dtype dtype, const char* what) const {
  require(is_pool_dtype(dtype), what, kPoolDTypes, dtype);
  require(
      shape.size() == 4, what, "of shape (num_blocks,block_size,num_kv_heads,head_dim)",
      shape_string(shape));
  std::string of = std::string(" of ") + what;
  require(shape[0] > 0, "num_blocks" + of, "at least 1", shape[0]);
  int block_size = shape[1];
  require(
      block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64,
      "block_size" + of, "8, 16, 32 or 64", block_size);
  require(shape[2] > 0, "num_kv_heads" + of, "at least 1", shape[2]);
  int head_dim = shape[3];
  require(
      head_dim > 0 && head_dim <= paged::MAX_HEAD_DIM && head_dim % 8 == 0, "head_dim" + of,
      "a multiple of 8 up to " + std::to_string(paged::MAX_HEAD_DIM), head_dim);
  // Kernels index within a block in 32 bits, and slots are 32 bits. A pool's bytes fit 64 bits.
  constexpr int kMax = std::numeric_limits<int>::max();
  int max_blocks = kMax / block_size;
  require(
      shape[0] <= max_blocks, "num_blocks" + of,
      "at most " + std::to_string(max_blocks) + " at block_size " + std::to_string(block_size),
      shape[0]);
  int max_heads = kMax / (block_size * head_dim);
  require(
      shape[2] <= max_heads, "num_kv_heads" + of,
      "at most " + std::to_string(max_heads) + " at block_size " + std::to_string(block_size) +
          " and head_dim " + std::to_string(head_dim),
      shape[2]);
}

void Validator::pool(const mx::array& a, const char* what, mx::Stream stream) const {
  auto shape = dims_of(a);
  if (shape.size() == 4 && format_of(a.dtype()) != PoolFormat::plain) {
    int dim = layout_of(a).head_dim;
    require(
        dim > 0 && last_extent(a.dtype(), dim) == shape[3],
        std::string("the last extent of ") + what, "valid for a pool of its dtype", shape[3]);
    shape[3] = dim;
  }
  pool_layout(shape, a.dtype(), what);
  // Only the stream orders work on a pool: a second stream could read data before the first has
  // written it, or overwrite data before the first has read it.
  if (a.status() == mx::array::Status::unscheduled && a.has_primitive()) {
    std::ostringstream expected;
    expected << "on the op's stream " << stream;
    require(a.primitive().stream() == stream, what, expected.str(), a.primitive().stream());
  }
}

void Validator::pools(const mx::array& keys, const mx::array& values, mx::Stream stream) const {
  pool(keys, "key_pool", stream);
  pool(values, "value_pool", stream);
  // Kernels exist only for the format pairs in `mlx_paged/model/kv_formats.py`.
  if (keys.dtype() == mx::int8) {
    require(
        values.dtype() == mx::int8 || values.dtype() == mx::uint32, "value_pool",
        "int8 or uint32 beside an int8 key_pool", values.dtype());
  } else {
    same_dtype(values, "value_pool", keys, "key_pool");
  }
  shape(values, "value_pool", {keys.shape(0), keys.shape(1), keys.shape(2), -1});
}

}  // namespace mlx_paged
