// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "matrix_maps.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>

namespace mlx_paged::cuda {

namespace {

// Looks the function up in the loaded driver, so nothing links against it.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    auto status = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // clears the error, so that the next call does not report it
      throw std::runtime_error("[cuda] the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

void encode(CUtensorMap& to, const MatrixMap& map, char* address) {
  const cuuint64_t sizes[] = {cuuint64_t(map.columns), cuuint64_t(map.rows)};
  const cuuint64_t strides[] = {cuuint64_t(map.stride) * map.item_bytes};
  const cuuint32_t box[] = {cuuint32_t(map.box_columns), cuuint32_t(map.box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const auto type = map.item_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                    : map.item_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  auto status = encoder()(
      &to, type, 2, address, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      map.is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::ostringstream what;
    what << "[cuda] cannot map a matrix of " << map.rows << " x " << map.columns
         << " with row stride " << map.stride << " at " << static_cast<void*>(address) << ": error "
         << int(status);
    throw std::runtime_error(what.str());
  }
}

}  // namespace

EncodedMaps encode_maps(const Launch& launch, const std::vector<char*>& addresses) {
  EncodedMaps encoded{};
  for (size_t i = 0; i < launch.maps.size(); i++) {
    const auto& map = launch.maps[i];
    encode(encoded.at(i), map, addresses.at(launch.buffers.at(map.buffer).operand));
  }
  return encoded;
}

}  // namespace mlx_paged::cuda
