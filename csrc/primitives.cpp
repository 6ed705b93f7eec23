// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "primitives.h"

namespace mlx_paged {

std::vector<mx::Shape> WriteKV::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape(), inputs[1].shape()};
}

bool WriteKV::is_equivalent(const mx::Primitive&) const {
  return true;
}

std::vector<mx::Shape> CopyBlocks::output_shapes(const std::vector<mx::array>& inputs) {
  std::vector<mx::Shape> shapes;
  for (size_t i = 0; i + 1 < inputs.size(); i++) {
    shapes.push_back(inputs[i].shape());
  }
  return shapes;
}

bool CopyBlocks::is_equivalent(const mx::Primitive&) const {
  return true;
}

std::vector<mx::Shape> GatherKV::output_shapes(const std::vector<mx::array>& inputs) {
  auto dense = [&](const mx::array& pool) {
    return mx::Shape{inputs[2].shape(0), pool.shape(2), max_context_len_, pool.shape(3)};
  };
  return {dense(inputs[0]), dense(inputs[1])};
}

bool GatherKV::is_equivalent(const mx::Primitive& other) const {
  return max_context_len_ == static_cast<const GatherKV&>(other).max_context_len_;
}

std::vector<mx::Shape> PagedAttention::output_shapes(const std::vector<mx::array>& inputs) {
  return {{inputs[0].shape(0), inputs[0].shape(1), inputs[2].shape(3)}};
}

bool PagedAttention::is_equivalent(const mx::Primitive& other) const {
  const auto& o = static_cast<const PagedAttention&>(other);
  return scale_ == o.scale_ && window_ == o.window_ && softcap_ == o.softcap_;
}

std::vector<mx::Shape> RopeRotations::output_shapes(const std::vector<mx::array>& inputs) {
  return {{inputs[0].shape(0), 2, inputs[1].shape(0)}};
}

bool RopeRotations::is_equivalent(const mx::Primitive& other) const {
  return scale_ == static_cast<const RopeRotations&>(other).scale_;
}

std::vector<mx::Shape> Rope::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape()};
}

bool Rope::is_equivalent(const mx::Primitive& other) const {
  return traditional_ == static_cast<const Rope&>(other).traditional_;
}

std::vector<mx::Shape> RmsNorm::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape()};
}

bool RmsNorm::is_equivalent(const mx::Primitive& other) const {
  return eps_ == static_cast<const RmsNorm&>(other).eps_;
}

std::vector<mx::Shape> SiluMul::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape()};
}

bool SiluMul::is_equivalent(const mx::Primitive&) const {
  return true;
}

std::vector<mx::Shape> Linear::output_shapes(const std::vector<mx::array>& inputs) {
  auto shape = inputs[0].shape();
  shape.back() = inputs[1].shape(0);
  return {shape};
}

bool Linear::is_equivalent(const mx::Primitive&) const {
  return true;
}

std::vector<mx::Shape> GreedyTokens::output_shapes(const std::vector<mx::array>& inputs) {
  return {{inputs[0].shape(0)}, {inputs[0].shape(0)}};
}

bool GreedyTokens::is_equivalent(const mx::Primitive&) const {
  return true;
}

std::vector<mx::Shape> NucleusThresholds::output_shapes(const std::vector<mx::array>& inputs) {
  return {{inputs[0].shape(0)}};
}

bool NucleusThresholds::is_equivalent(const mx::Primitive&) const {
  return true;
}

}  // namespace mlx_paged
