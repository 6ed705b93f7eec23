// Copyright © 2026 the mlx_paged authors. Apache-2.0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_paged {

// True if this processor has an instruction that makes `crc32` faster than zlib.
bool has_fast_crc32();

// CRC-32 of bytes, the same number as zlib's. Needs `has_fast_crc32`.
uint32_t crc32(const uint8_t* data, size_t size);

}  // namespace mlx_paged
