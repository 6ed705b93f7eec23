// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Contract between the host and copy_inputs. Plain C++ that nvcc reads too.

#pragma once

namespace mlx_paged::cuda {

struct StepInput {
  const int* from;
  int* to;
  int words;  // 4-byte words
};

constexpr int kMaxStepInputs = 32;

struct StepInputs {
  StepInput inputs[kMaxStepInputs];
};

}  // namespace mlx_paged::cuda
