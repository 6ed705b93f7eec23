# Rejects a compiler that links libstdc++ statically. MLX links the shared one, and with two of them
# in a process, destroying or printing an object of the other copy crashes (seen in allocate_pool).
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  return()
endif()
set(probe ${CMAKE_CURRENT_BINARY_DIR}/shared_libstdcxx)
file(WRITE ${probe}.cpp "#include <iostream>\nvoid* f(int n) { std::cout << n; return new int(n); }\n\
int main(int n, char**) { delete static_cast<int*>(f(n)); }\n")
try_compile(probe_links ${probe} SOURCES ${probe}.cpp COPY_FILE ${probe}.bin
            OUTPUT_VARIABLE probe_output)
if(NOT probe_links)
  message(FATAL_ERROR "mlx_paged: ${CMAKE_CXX_COMPILER} cannot link a program\n${probe_output}")
endif()
# A shared library's name is in the program's dynamic section.
file(STRINGS ${probe}.bin shared_library REGEX "^libstdc\\+\\+\\.so" LIMIT_COUNT 1)
if(NOT shared_library)
  message(
    FATAL_ERROR  # CMake does not wrap lines that start with a space
      " mlx_paged: ${CMAKE_CXX_COMPILER} links libstdc++ statically (or another C++ library), and \
MLX links the shared one: two in a process crash. Choose another compiler: \
CXX=/usr/bin/g++ pip install . (or without -static-libstdc++ in CXXFLAGS and LDFLAGS)")
endif()
