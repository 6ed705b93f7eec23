// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Validator: gives every error the form "[op] <what> must be <expectation> but got <actual>".

#pragma once

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "dtype.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "weight_format.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Checks the arguments of one op. Each method throws std::invalid_argument (Python: ValueError).
class Validator {
 public:
  explicit Validator(const char* op) : op_(op) {}

  template <typename Expected, typename Actual>
  void require(
      bool ok, const std::string& what, const Expected& expected, const Actual& actual) const {
    if (!ok) {
      std::ostringstream message;
      message << "[" << op_ << "] " << what << " must be " << expected << " but got " << actual;
      throw std::invalid_argument(message.str());
    }
  }

  // -1 in `dims` matches any extent.
  void shape(const mx::array& a, const char* what, std::initializer_list<int> dims) const;
  void int32(const mx::array& a, const char* what) const;
  void floating(const mx::array& a, const char* what) const;  // one of the activation dtypes
  void same_shape(
      const mx::array& a, const char* what, const mx::array& b, const char* other) const;
  void same_dtype(
      const mx::array& a, const char* what, const mx::array& b, const char* other) const;
  // Checks the layout of a pool that does not exist yet; the last extent is the head dim.
  void pool_layout(const std::vector<int>& shape, mx::Dtype dtype, const char* what) const;
  // Checks a pool's dtype, rank, block size and head dim, and that pending work is on `stream`.
  void pool(const mx::array& a, const char* what, mx::Stream stream) const;
  // Checks that a key pool and a value pool match.
  void pools(const mx::array& keys, const mx::array& values, mx::Stream stream) const;

 private:
  const char* op_;
};

// Returns the rounding of activations of that name, if this processor supports it.
Activations activations_named(const Validator& v, const std::string& name);  // layer_ops.cpp

}  // namespace mlx_paged
