// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Asks whether AMX tiles may be used. A processor can have them although the kernel does not: tile
// registers are a state of 8 KiB that Linux saves only for processes that asked for it.

#pragma once

#include <string>

namespace mlx_paged::cpu {

// The answers that decide it, in the order in which they are asked.
struct AmxAnswers {
  bool has_instructions = false;  // CPUID: amx-tile, amx-int8 and amx-bf16
  bool saves_tiles = false;       // XGETBV: the kernel saves the tile registers
  int permission_error = 0;       // errno of arch_prctl(ARCH_REQ_XCOMP_PERM); 0: granted
};

// The reason why AMX cannot be used; empty if it can.
std::string amx_refusal(const AmxAnswers& answers);

// The same for this processor and process. Asks once, and asks Linux for the permission, which
// holds for the whole process.
const std::string& amx_refusal();

// The same for people: "yes", "no" where the processor has none, or the reason why it is refused.
std::string amx_status();

}  // namespace mlx_paged::cpu
