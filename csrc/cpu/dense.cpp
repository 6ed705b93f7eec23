// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "dense.h"

#include <cstring>

#include "../allocation.h"
#include "../primitives.h"

namespace mlx_paged::cpu {

namespace {
// Copies the axes from `axis` on and advances `dst`.
void copy_strided(
    const mx::Shape& shape, const mx::Strides& strides, int64_t item, size_t axis, const char* src,
    char*& dst) {
  if (axis == shape.size() || (axis + 1 == shape.size() && strides[axis] == 1)) {
    int64_t bytes = axis == shape.size() ? item : shape[axis] * item;
    std::memcpy(dst, src, bytes);
    dst += bytes;
    return;
  }
  for (int i = 0; i < shape[axis]; i++) {
    copy_strided(shape, strides, item, axis + 1, src + i * strides[axis] * item, dst);
  }
}

}  // namespace

void copy_to_dense(const mx::array& in, mx::array& out, mx::cpu::CommandEncoder& encoder) {
  allocate(out);
  encoder.dispatch([shape = in.shape(), strides = in.strides(), item = int64_t(in.itemsize()),
                    src = in.data<char>(), dst = out.data<char>()]() mutable {
    copy_strided(shape, strides, item, 0, src, dst);
  });
}

mx::array dense(const mx::array& in, mx::cpu::CommandEncoder& encoder) {
  if (in.flags().row_contiguous) {
    return mx::array::unsafe_weak_copy(in);
  }
  mx::array out(in.shape(), in.dtype(), nullptr, {});
  copy_to_dense(in, out, encoder);
  encoder.add_temporary(out);
  return mx::array::unsafe_weak_copy(out);
}

std::vector<mx::array> dense_inputs(
    const std::vector<mx::array>& in, size_t first, mx::cpu::CommandEncoder& encoder) {
  std::vector<mx::array> out(in.begin(), in.begin() + first);
  for (size_t i = first; i < in.size(); i++) {
    out.push_back(dense(in[i], encoder));
  }
  return out;
}

void alias_or_copy_pool(const mx::array& in, mx::array& out, mx::cpu::CommandEncoder& encoder) {
  if (can_alias_pool(in)) {
    out.copy_shared_buffer(in);
    return;
  }
  count_pool_copy();
  copy_to_dense(in, out, encoder);
}

mx::array dense_pool(const mx::array& in, mx::cpu::CommandEncoder& encoder) {
  if (!in.flags().row_contiguous) {
    count_pool_copy();
  }
  return dense(in, encoder);
}

}  // namespace mlx_paged::cpu
