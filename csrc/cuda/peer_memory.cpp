// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Buffers that the GPUs of several processes share, by CUDA's handles for other processes. Such
// memory comes from CUDA itself: a handle names a whole allocation, and MLX's allocator pools them.

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "../peer_sum.h"
#include "mlx/backend/cuda/device.h"
#include "status.h"

namespace mlx_paged {

namespace {

// Sets the device of the CUDA runtime linked here; MLX has its own runtime.
void use_device() {
  auto stream = mx::default_stream(mx::Device::gpu);
  cuda::check(
      cudaSetDevice(mx::cu::get_command_encoder(stream).device().cuda_device()), "a device");
}

}  // namespace

char* make_peer_buffer() {
  use_device();
  void* buffer = nullptr;
  cuda::check(cudaMalloc(&buffer, cuda::kPeerBufferBytes), "a buffer for other ranks");
  cuda::check(cudaMemset(buffer, 0, cuda::kPeerBufferBytes), "a buffer of zeros");
  cuda::check(cudaDeviceSynchronize(), "a buffer of zeros");
  return static_cast<char*>(buffer);
}

std::string peer_buffer_handle(char* buffer) {
  use_device();
  cudaIpcMemHandle_t handle;
  cuda::check(cudaIpcGetMemHandle(&handle, buffer), "a handle of its memory");
  return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

char* open_peer_buffer(const std::string& handle) {
  use_device();
  cudaIpcMemHandle_t named;
  if (handle.size() != sizeof(named)) {
    throw std::runtime_error(
        "[peer_memory] a handle must have " + std::to_string(sizeof(named)) + " bytes but has " +
        std::to_string(handle.size()));
  }
  std::memcpy(&named, handle.data(), sizeof(named));
  void* buffer = nullptr;
  cuda::check(
      cudaIpcOpenMemHandle(&buffer, named, cudaIpcMemLazyEnablePeerAccess),
      "the memory of another rank");
  return static_cast<char*>(buffer);
}

}  // namespace mlx_paged
