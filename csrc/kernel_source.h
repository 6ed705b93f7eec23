// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The text that a GPU's run-time compiler gets for one kernel. Users need no Metal toolchain, and
// a process compiles only the instantiations that it uses.

#pragma once

#include <filesystem>
#include <string>

#include "kernel_names.h"

namespace mlx_paged {

// metal/ as it is installed: beside the extension.
std::filesystem::path kernel_folder();

// The kernel's file with its includes of metal/ in their places, each once, and, for a template,
// the one instantiation that `kernel` names. Lines keep their numbers by #line directives.
std::string kernel_source(const KernelName& kernel, const std::filesystem::path& folder);

}  // namespace mlx_paged
