// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "kernel_source.h"

#include <dlfcn.h>

#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

namespace mlx_paged {

namespace {

void append(
    const std::string& name, const std::filesystem::path& folder, std::set<std::string>& seen,
    std::ostringstream& out) {
  if (!seen.insert(name).second) {
    return;
  }
  std::ifstream file(folder / name);
  if (!file) {
    throw std::runtime_error("[metal] cannot read kernel source " + (folder / name).string());
  }
  out << "#line 1 \"" << name << "\"\n";
  std::string line;
  for (int number = 1; std::getline(file, line); number++) {
    constexpr std::string_view kInclude = "#include \"";
    if (line.starts_with(kInclude)) {
      auto begin = kInclude.size();
      append(line.substr(begin, line.find('"', begin) - begin), folder, seen, out);
      out << "#line " << number + 1 << " \"" << name << "\"\n";
    } else if (line != "#pragma once") {
      out << line << "\n";
    } else {
      out << "\n";
    }
  }
}

}  // namespace

std::filesystem::path kernel_folder() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&kernel_folder), &info) || !info.dli_fname) {
    throw std::runtime_error("[metal] cannot find the folder of mlx_paged");
  }
  return std::filesystem::path(info.dli_fname).parent_path() / "metal";
}

std::string kernel_source(const KernelName& kernel, const std::filesystem::path& folder) {
  std::ostringstream out;
  std::set<std::string> seen;
  append(kernel.file, folder, seen, out);
  if (!kernel.instantiation.empty()) {
    append("language.h", folder, seen, out);
    out << "PAGED_INSTANTIATE(\"" << kernel.host_name << "\", " << kernel.instantiation << ")\n";
  }
  return out.str();
}

}  // namespace mlx_paged
