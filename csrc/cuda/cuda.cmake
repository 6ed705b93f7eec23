# The CUDA backend. scripts/build_backend.py says whether it is built, and with which nvcc; MLX's headers
# for CUDA are in every MLX, and what they want of fmt is in csrc/cuda/fmt.
set(MLX_PAGED_CUDA "$ENV{MLX_PAGED_CUDA}" CACHE STRING
    "Build the CUDA backend: ON, OFF, or AUTO, where an NVIDIA driver or an MLX for CUDA is")
set_property(CACHE MLX_PAGED_CUDA PROPERTY STRINGS AUTO ON OFF)

execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/scripts/build_backend.py
                        "${MLX_PAGED_CUDA}" "${CMAKE_CUDA_COMPILER}"
                OUTPUT_VARIABLE cuda_choice OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
list(POP_FRONT cuda_choice what_to_do)
if(what_to_do STREQUAL "skip")
  message(STATUS "mlx_paged: no CUDA backend: ${cuda_choice}")
  return()
elseif(NOT what_to_do STREQUAL "build")
  message(FATAL_ERROR " mlx_paged: ${cuda_choice}")  # CMake does not wrap lines that start with a space.
endif()

# The remaining items are the architectures of this machine's GPUs; without any, build for all.
list(POP_FRONT cuda_choice CMAKE_CUDA_COMPILER)
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${cuda_choice})
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 86 89 90 100 120)
endif()
message(STATUS "mlx_paged: CUDA backend for ${CMAKE_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# NVIDIA's Python packages have lib/, but nvcc looks in lib64/ when it links CMake's test programs.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_folder)
set(ENV{LIBRARY_PATH} "${cuda_folder}/../lib:$ENV{LIBRARY_PATH}")
# Use one host compiler everywhere: objects that nvcc compiled against another C++ library crash at
# run time.
if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
enable_language(CUDA)
# CMake's search for the toolkit does not know the layout of NVIDIA's Python packages either.
find_library(CUDART_STATIC cudart_static REQUIRED
             HINTS ${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT} ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
             PATH_SUFFIXES lib64 lib)
find_package(Threads REQUIRED)
# Link with the C++ compiler and its own libraries, because those of nvcc's host compiler may be
# static.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "")

# Compiles the kernels of metal/, which nvcc reads through msl/. One file per dtype compiles in
# parallel, with four architectures of each at a time.
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
add_cuda_kernels(quantized_data quantized_data)
add_cuda_kernels(dequantize dequantize)
add_cuda_kernels(draw draw)
add_cuda_kernels(experts experts)
add_cuda_kernels(greedy greedy)
add_cuda_kernels(thresholds thresholds)
add_cuda_kernels(layer layer)
add_cuda_kernels(linear linear)
add_cuda_kernels(lora lora)
add_cuda_kernels(peer_sum peer_sum)
add_cuda_kernels(linear_stream linear_stream)
# sm_90a code uses features that only sm_90 has; its PTX does not run elsewhere.
set(sm90a ${CMAKE_CUDA_ARCHITECTURES})
if(sm90a STREQUAL "native")
  set(sm90a ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
endif()
list(TRANSFORM sm90a REPLACE "^90a?(-real)?$" "90a-real")
if("90" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  list(APPEND sm90a 90-virtual)
endif()
set_target_properties(cuda_linear_stream PROPERTIES CUDA_ARCHITECTURES "${sm90a}")
if("90a-real" IN_LIST sm90a)
  target_compile_definitions(cuda_backend INTERFACE MLX_PAGED_SM90A)
  foreach(dtype float16 bfloat16)
    add_cuda_kernels(prefill_wgmma_${dtype} prefill_wgmma PAGED_DTYPE_${dtype})
    set_target_properties(cuda_prefill_wgmma_${dtype} PROPERTIES CUDA_ARCHITECTURES 90a-real)
  endforeach()
endif()
foreach(bits 2 3 4 5 6 8)
  add_cuda_kernels(linear_quantized_${bits} linear_quantized PAGED_CODE_BITS=${bits})
  if("90a-real" IN_LIST sm90a)
    add_cuda_kernels(linear_quantized_wgmma_${bits} linear_quantized_wgmma PAGED_CODE_BITS=${bits})
    add_cuda_kernels(expert_quantized_wgmma_${bits} expert_quantized_wgmma PAGED_CODE_BITS=${bits})
    set_target_properties(
      cuda_linear_quantized_wgmma_${bits} cuda_expert_quantized_wgmma_${bits}
      PROPERTIES CUDA_ARCHITECTURES 90a-real)
  endif()
endforeach()
foreach(dtype float32 float16 bfloat16)
  foreach(source decode decode_matrix prefill bounds quantized general)
    add_cuda_kernels(${source}_${dtype} ${source} PAGED_DTYPE_${dtype})
  endforeach()
endforeach()
foreach(dtype float16 bfloat16)
  add_cuda_kernels(decode_tensor_${dtype} decode_tensor PAGED_DTYPE_${dtype})
  add_cuda_kernels(decode_quantized_${dtype} decode_quantized PAGED_DTYPE_${dtype})
  add_cuda_kernels(prefill_tensor_${dtype} prefill_tensor PAGED_DTYPE_${dtype})
endforeach()

target_link_libraries(cuda_backend INTERFACE ${CUDART_STATIC} Threads::Threads ${CMAKE_DL_LIBS} rt)
target_compile_definitions(cuda_backend INTERFACE MLX_PAGED_CUDA)
# Treat CUDA's headers, and MLX's copies of the CUDA C++ library, as system headers: their warnings
# are not ours.
target_include_directories(cuda_backend SYSTEM INTERFACE csrc/cuda/fmt
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
set(CUDA_SOURCES csrc/gpu_eval.cpp csrc/gpu/eval_step.cpp csrc/cuda/binder.cpp
                 csrc/cuda/compiled_kernels.cpp csrc/cuda/library_products.cpp
                 csrc/cuda/layer_launch.cpp csrc/cuda/linear_launch.cpp
                 csrc/cuda/matrix_maps.cpp csrc/cuda/memory.cpp
                 csrc/cuda/peer_memory.cpp
                 csrc/cuda/step_graph.cpp csrc/cuda/transfer.cpp)
