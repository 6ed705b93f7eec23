// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "rounded_rows.h"

#include <atomic>
#include <optional>

#include "../array_contents.h"

namespace mlx_paged::cpu {

uint64_t input_number(const mlx::core::array& x) {
  static std::atomic<uint64_t> count{0};
  thread_local std::optional<ArrayContents> last;
  thread_local uint64_t number = 0;
  // An array that is available may be changed by the host, through a view of its memory.
  bool may_change = x.status() == mlx::core::array::Status::available;
  if (may_change || !last || !last->are_still_of(x)) {
    last.emplace(x);
    number = ++count;
  }
  return number;
}

void RoundedRows::begin(const RoundedInput& input, int num_blocks, int64_t block_bytes) {
  constexpr int64_t kMaxKept = 32 << 20;  // bytes
  if (input == input_) {
    return;
  }
  input_ = {};  // in case there is no memory
  num_done_ = 0;
  bool keeps = num_blocks * block_bytes <= kMaxKept;
  memory_ = scratch_.at_least<char>(keeps ? num_blocks * block_bytes : block_bytes);
  stride_ = keeps ? block_bytes : 0;
  input_ = keeps ? input : RoundedInput{};
}

}  // namespace mlx_paged::cpu
