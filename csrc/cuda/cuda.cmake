# The CUDA backend: built where nvcc and an MLX that was built with CUDA are. MLX's own headers need
# those of fmt (Debian and Ubuntu: libfmt-dev).
set(MLX_PAGED_CUDA AUTO CACHE STRING "Build the CUDA backend: ON, OFF, or AUTO where it can be")
set_property(CACHE MLX_PAGED_CUDA PROPERTY STRINGS AUTO ON OFF)

include(CheckLanguage)
set(cuda_missing "")
if(MLX_PAGED_CUDA)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "from importlib.metadata import distributions as d; \
import sys; sys.exit(not any((x.name or '').startswith('mlx-cuda') for x in d()))"
    RESULT_VARIABLE mlx_has_no_cuda)
  check_language(CUDA)
  find_path(FMT_INCLUDE fmt/format.h)
  if(mlx_has_no_cuda)
    set(cuda_missing "an MLX built with CUDA (pip install 'mlx[cuda13]')")
  elseif(NOT CMAKE_CUDA_COMPILER)
    set(cuda_missing "nvcc (the CUDA toolkit)")
  elseif(NOT FMT_INCLUDE)
    set(cuda_missing "the headers of fmt (apt install libfmt-dev)")
  endif()
  if(cuda_missing AND MLX_PAGED_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MLX_PAGED_CUDA=ON needs ${cuda_missing}")
  elseif(cuda_missing)
    message(STATUS "mlx_paged: no CUDA backend, for want of ${cuda_missing}")
  endif()
endif()
if(NOT MLX_PAGED_CUDA OR cuda_missing)
  return()
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 86 89 90 100 120)
endif()
message(STATUS "mlx_paged: CUDA backend for ${CMAKE_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

# The kernels of metal/, read by nvcc through msl/; one file for each dtype, to compile side by side, and
# four architectures of each at a time.
add_library(cuda_backend INTERFACE)
function(add_cuda_kernels NAME SOURCE)
  add_library(cuda_${NAME} OBJECT csrc/cuda/kernels/${SOURCE}.cu)
  target_include_directories(cuda_${NAME} PRIVATE csrc/cuda/msl metal)
  target_compile_definitions(cuda_${NAME} PRIVATE ${ARGN})
  target_compile_options(cuda_${NAME} PRIVATE --expt-relaxed-constexpr --threads=4)
  set_target_properties(cuda_${NAME} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
  target_sources(cuda_backend INTERFACE $<TARGET_OBJECTS:cuda_${NAME}>)
endfunction()
add_cuda_kernels(data data)
add_cuda_kernels(quantised_data quantised_data)
add_cuda_kernels(linear linear)
add_cuda_kernels(linear_cluster linear_cluster)
foreach(dtype float32 float16 bfloat16)
  foreach(source decode decode_matrix prefill bounds quantised)
    add_cuda_kernels(${source}_${dtype} ${source} PAGED_DTYPE_${dtype})
  endforeach()
endforeach()
foreach(dtype float16 bfloat16)
  add_cuda_kernels(decode_tensor_${dtype} decode_tensor PAGED_DTYPE_${dtype})
  add_cuda_kernels(prefill_tensor_${dtype} prefill_tensor PAGED_DTYPE_${dtype})
endforeach()

target_link_libraries(cuda_backend INTERFACE CUDA::cudart_static)
target_compile_definitions(cuda_backend INTERFACE MLX_PAGED_CUDA FMT_HEADER_ONLY)
# CUDA's, fmt's and, among MLX's, those of the C++ library for CUDA: none of them are ours to warn of.
target_include_directories(cuda_backend SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS} ${FMT_INCLUDE})
string(APPEND BACKENDS " cuda")
set(GPU_SOURCES csrc/gpu_eval.cpp csrc/cuda/binder.cpp csrc/cuda/compiled_kernels.cpp
                csrc/cuda/linear_launch.cpp csrc/cuda/memory.cpp csrc/cuda/transfer.cpp)
