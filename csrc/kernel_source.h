// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Assembles the source of one kernel for a GPU's run-time compiler. Users need no Metal toolchain,
// and a process compiles only the instantiations it uses.

#pragma once

#include <filesystem>
#include <string>

#include "kernel_names.h"

namespace mlx_paged {

// Installed location of metal/, beside the extension.
std::filesystem::path kernel_folder();

// Returns the kernel's file with its includes from metal/ inlined, each once, and for a template
// the one instantiation that `kernel` names. #line directives preserve line numbers.
std::string kernel_source(const KernelName& kernel, const std::filesystem::path& folder);

}  // namespace mlx_paged
