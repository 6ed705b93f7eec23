// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Kernels for NVIDIA in place of portable ones, where they were measured to be faster
// (docs/cuda.md). Needs neither CUDA nor a GPU, so that its rule can be tested anywhere.

#pragma once

#include "../launch.h"
#include "products.h"

namespace mlx_paged::cuda {

// The launches of an operation, of which
//   - decodes and drafts in 16 bits with up to 16 queries (query rows x heads of a group) go to
//     paged_decode_tensor, which needs equal head dims of keys and values out of 64, 128 and 256
//     (there up to 8 queries) and blocks of at least 16 tokens, as a tile of 16 must lie in one;
//   - prefill chunks in 16 bits go to paged_prefill_tensor, or with more than 16 queries where
//     there are kernels for sm_90a to paged_prefill_wgmma, which gives the same bits; both need
//     equal head dims of 64 or 128 and blocks of at least 16 tokens;
//   - decodes and drafts of quantised pools in 16 bits with up to 16 queries go to
//     paged_decode_quantised, which needs equal head dims of 64 or 128 and such blocks, too;
//   - writes of quantised pools go to quantise_rows and rotations to rotate_rows, to the same bits,
//     where head dims are (equal and) 64, 128 or 256;
//   - merges go to merge_splits;
//   - what is left goes to the portable kernels for bounds where the step has some.
// Without bounds, which kernel serves a row follows from the row alone: its bits do not depend on
// other rows.
LaunchList with_variants(LaunchList list, const Arrays& in, Streams streams);

// Has a norm in 16 bits write its result in an order.
void norm_in_order(Launch& norm, CodeOrder order);

// The grid in CUDA's order, which is large along x only: kernels whose tokens, pairs or blocks lie
// along another dim (kernels/data.cu, quantised_data.cu) turn theirs. Throws where it is too large.
Extent kernel_grid(const Launch& launch);

}  // namespace mlx_paged::cuda
