// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Selects NVIDIA-only kernels in place of portable ones where they measured faster (docs/cuda.md).
// Needs neither CUDA nor a GPU, so its rules can be tested anywhere.

#pragma once

#include "../launch.h"
#include "products.h"

namespace mlx_paged::cuda {

// Replaces launches of an operation with NVIDIA-only kernels:
//   - paged_decode_tensor: decodes and drafts in 16 bits with up to 32, 24 or 8 queries (query rows
//     x heads per group) at equal head dims of 64, 128 or 256; needs blocks of at least 16 tokens,
//     as a tile of 16 must lie in one block;
//   - paged_prefill_tensor: prefill chunks in 16 bits. With more than 16 queries and sm_90a
//     kernels, paged_prefill_wgmma instead, with the same bits. Both need equal head dims of 64 or
//     128 and blocks of at least 16 tokens;
//   - paged_decode_quantized: decodes and drafts of quantized pools in 16 bits with up to 16
//     queries; needs equal head dims of 64 or 128 and such blocks;
//   - quantize_rows and rotate_rows: writes of quantized pools and rotations, with the same bits,
//     for (equal) head dims of 64, 128 or 256;
//   - merge_splits: merges;
//   - portable kernels for bounds: the rest, if the step has bounds;
//   - general kernels: all attention of a layer with an option that no other kernel serves.
// Without bounds, the kernel of a row depends on that row alone, and so do its bits. Kernels of
// paged_decode_tensor and paged_decode_quantized differ only in how many queries they hold: a row
// has the same bits in each, so one launch serves decodes and drafts.
LaunchList with_variants(LaunchList list, const Arrays& in, TmaKernels tma);

// Maximum rows of one item whose bits are those that each row has in an item of its own: as many as
// fit into such a kernel, or 1.
int max_shared_rows(const AttentionLayer& layer, int block_size);

// True if paged_prefill_wgmma serves 16-bit pools with these head dims and blocks.
bool has_wgmma_prefill(int key_dim, int value_dim, int block_size);

// Makes a 16-bit norm or lora_up write its result in code order, or lora_down read such an x.
void rows_in_order(Launch& launch, CodeOrder order);

// Returns the launch's grid in CUDA's order, which is large along x only: kernels whose tokens,
// pairs or blocks lie along another dim (kernels/data.cu, quantized_data.cu) have it swapped.
// Throws std::invalid_argument if the grid is too large.
Extent kernel_grid(const Launch& launch);

}  // namespace mlx_paged::cuda
