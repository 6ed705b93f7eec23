// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

namespace mlx_paged::cpu {

enum class DataType { float32, float16, bfloat16 };

}  // namespace mlx_paged::cpu
