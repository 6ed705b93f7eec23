// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Detects whether AMX tiles may be used. Having the instructions is not enough: Linux saves the 8
// KiB of tile registers only for processes that request it.

#pragma once

#include <string>

namespace mlx_paged::cpu {

// The results of the checks, in their order.
struct AmxAnswers {
  bool has_instructions = false;  // CPUID: amx-tile, amx-int8 and amx-bf16
  bool saves_tiles = false;       // XGETBV: the kernel saves the tile registers
  int permission_error = 0;       // errno of arch_prctl(ARCH_REQ_XCOMP_PERM); 0: granted
};

// Returns why AMX cannot be used; empty if it can.
std::string amx_refusal(const AmxAnswers& answers);

// The same for this process, detected once. Requests Linux's permission, which applies to the whole
// process.
const std::string& amx_refusal();

// Returns a status for people: "yes", "no" without the instructions, or the reason for a refusal.
std::string amx_status();

}  // namespace mlx_paged::cpu
