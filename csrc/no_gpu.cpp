// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linked where no GPU backend is built. Each primitive says which one was asked for and what to do.

#include <stdexcept>
#include <string>

#include "primitives.h"

namespace mlx_paged {

namespace {
[[noreturn]] void throw_no_gpu(const char* name) {
  throw std::runtime_error(
      std::string("[") + name +
      "] must run on the CPU: this build of mlx_paged has no GPU backend. Pass stream=mx.cpu, or "
      "call mx.set_default_device(mx.cpu) first.");
}
}  // namespace

void WriteKV::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw_no_gpu("write_kv");
}
void CopyBlocks::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw_no_gpu("copy_blocks");
}
void GatherKV::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw_no_gpu("gather_kv");
}
void PagedAttention::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw_no_gpu("paged_attention");
}

}  // namespace mlx_paged
