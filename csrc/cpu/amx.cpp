// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "amx.h"

#include <cerrno>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mlx_paged::cpu {

namespace {

AmxAnswers ask() {
  AmxAnswers answers;
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kInstructions = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
  constexpr unsigned kHasXgetbv = 1u << 27;
  unsigned eax, ebx, ecx, edx;
  answers.has_instructions =
      __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kInstructions) == kInstructions;
  if (!answers.has_instructions) {
    return answers;
  }
  constexpr unsigned kTileConfiguration = 1u << 17, kTileData = 1u << 18;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & kHasXgetbv)) {
    asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    answers.saves_tiles = (eax & kTileConfiguration) && (eax & kTileData);
  }
  if (!answers.saves_tiles) {
    return answers;
  }
  constexpr long kRequestPermission = 0x1023, kTileDataFeature = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) != 0) {
    answers.permission_error = errno;
  }
#endif
  return answers;
}

const AmxAnswers& answers_here() {
  static const AmxAnswers answers = ask();
  return answers;
}

}  // namespace

std::string amx_refusal(const AmxAnswers& answers) {
  if (!answers.has_instructions) {
    return "this processor has no AMX (amx-tile, amx-int8 and amx-bf16)";
  }
  if (!answers.saves_tiles) {
    return "the kernel or hypervisor does not save AMX's tile registers (Linux 5.16 and later do)";
  }
  if (answers.permission_error != 0) {
    std::string text = std::strerror(answers.permission_error);
    return "Linux or the container refused AMX's tile registers: "
           "arch_prctl(ARCH_REQ_XCOMP_PERM) failed with " +
           text;
  }
  return "";
}

const std::string& amx_refusal() {
  static const std::string refusal = amx_refusal(answers_here());
  return refusal;
}

std::string amx_status() {
  return !answers_here().has_instructions ? "no" : amx_refusal().empty() ? "yes" : amx_refusal();
}

}  // namespace mlx_paged::cpu
