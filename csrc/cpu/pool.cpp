// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "pool.h"

#include <cstring>

#include "../primitives.h"

namespace mlx_paged::cpu {

namespace {
void copy_strided(const mx::array& in, mx::array& out) {
  const char* src = in.data<char>();
  char* dst = out.data<char>();
  const auto& shape = in.shape();
  const auto& strides = in.strides();
  int64_t item = in.itemsize();
  for (int b = 0; b < shape[0]; b++) {
    for (int t = 0; t < shape[1]; t++) {
      for (int h = 0; h < shape[2]; h++) {
        const char* head = src + (b * strides[0] + t * strides[1] + h * strides[2]) * item;
        for (int d = 0; d < shape[3]; d++, dst += item) {
          std::memcpy(dst, head + d * strides[3] * item, item);
        }
      }
    }
  }
}
}  // namespace

void alias_or_copy_pool(const mx::array& in, mx::array& out, mx::cpu::CommandEncoder& encoder) {
  if (alias_pool(in, out)) {
    encoder.dispatch([in = mx::array::unsafe_weak_copy(in),
                      out = mx::array::unsafe_weak_copy(out)]() mutable { copy_strided(in, out); });
  }
}

mx::array dense_pool(const mx::array& in, mx::cpu::CommandEncoder& encoder) {
  if (in.flags().row_contiguous) {
    return mx::array::unsafe_weak_copy(in);
  }
  mx::array out(in.shape(), in.dtype(), nullptr, {});
  alias_or_copy_pool(in, out, encoder);
  encoder.add_temporary(out);
  return mx::array::unsafe_weak_copy(out);
}

}  // namespace mlx_paged::cpu
