// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stubs for builds without the CUDA backend, which use MLX's own arrays and products.

#include <stdexcept>

#include "cuda/products.h"
#include "gpu/portable_products.h"
#include "peer_sum.h"
#include "primitives.h"
#include "transfer.h"

namespace mlx_paged {

bool has_transfers() {
  return false;
}

Arrays upload(const std::vector<HostArray>&, mx::StreamOrDevice, bool) {
  throw std::runtime_error("[upload] this build of mlx_paged has no CUDA backend");
}

mx::array to_host(const mx::array&, mx::StreamOrDevice) {
  throw std::runtime_error("[to_host] this build of mlx_paged has no CUDA backend");
}

void RopeRotations::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

bool Rope::served_on_gpu(const mx::array&, const mx::array&, bool) {
  return false;
}

void Rope::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

bool SiluMul::served_on_gpu(const mx::array&) {
  return false;
}

void SiluMul::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

bool Linear::served_on_gpu(const mx::array&, const mx::array&, const std::optional<mx::array>&) {
  return false;
}

void Linear::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

bool QuantizedLinear::served_on_gpu(const Arrays& in, const WeightCodes& codes, bool for_program) {
  return for_program && serves_quantized_linear(in, codes);
}

void QuantizedLinear::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

bool SortedExpertLinear::served_on_gpu(const Arrays&, const WeightCodes&, bool) {
  return false;
}

void SortedExpertLinear::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

bool ExpertGlu::served_on_gpu(const Arrays&, const Formats&) {
  return false;
}

void ExpertGlu::eval_gpu(const Arrays& in, Arrays& out) {
  Node::eval_gpu(in, out);
}

namespace {
std::runtime_error no_peer_memory() {
  return std::runtime_error("[peer_memory] this build of mlx_paged has no CUDA backend");
}
}  // namespace

char* make_peer_buffer() {
  throw no_peer_memory();
}

std::string peer_buffer_handle(char*) {
  throw no_peer_memory();
}

char* open_peer_buffer(const std::string&) {
  throw no_peer_memory();
}

// Tests inspect launches for NVIDIA in any build.
cuda::TmaKernels cuda::tma_kernels() {
  return TmaKernels::any;
}

bool cuda::has_library_products() {
  return true;
}

}  // namespace mlx_paged
