// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "selected_rows.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "dense.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "validate.h"

namespace mlx_paged {

namespace {

using Arrays = std::vector<mx::array>;

// Operations that are made again, at most: those of a few layers. (Where nothing ends the way back,
// it would lead to the tokens.)
constexpr size_t kMostOperations = 512;

// How an operation treats rows.
enum class Kind {
  elements,   // each element of the result depends on those in its place
  first,      // of the inputs the first one has rows
  first_two,  // and the second one
  product,    // a matrix of rows and one that all share
  sum,        // such a product added to rows
  view,       // the same elements in the same order
  broadcast,
  transpose,
  columns,  // some of an axis that is not the rows'
  split,    // one result of several, of such an axis
  joined,   // side by side along such an axis
};

const std::unordered_map<std::string_view, Kind> kKinds = {
    // clang-format off
    {"Add", Kind::elements},
    {"Subtract", Kind::elements},
    {"Multiply", Kind::elements},
    {"Divide", Kind::elements},
    {"Maximum", Kind::elements},
    {"Minimum", Kind::elements},
    {"Power", Kind::elements},
    {"Negative", Kind::elements},
    {"Abs", Kind::elements},
    {"Square", Kind::elements},
    {"Sqrt", Kind::elements},
    {"Rsqrt", Kind::elements},
    {"Exp", Kind::elements},
    {"Sigmoid", Kind::elements},
    {"Tanh", Kind::elements},
    {"Erf", Kind::elements},
    {"AsType", Kind::elements},
    {"StopGradient", Kind::elements},
    {"Copy", Kind::elements},
    {"silu_mul", Kind::elements},
    {"gelu", Kind::elements},
    {"clipped_swiglu", Kind::elements},
    {"RMSNorm", Kind::first},
    {"rms_norm", Kind::first},
    {"LayerNorm", Kind::first},
    {"layer_norm", Kind::first},
    {"linear", Kind::first},
    {"quantized_linear", Kind::first},
    {"rope", Kind::first_two},
    {"RoPE", Kind::first_two},
    {"Matmul", Kind::product},
    {"QuantizedMatmul", Kind::product},
    {"AddMM", Kind::sum},
    {"Reshape", Kind::view},
    {"Flatten", Kind::view},
    {"Unflatten", Kind::view},
    {"ExpandDims", Kind::view},
    {"Squeeze", Kind::view},
    {"Broadcast", Kind::broadcast},
    {"Transpose", Kind::transpose},
    {"Slice", Kind::columns},
    {"Split", Kind::split},
    {"Concatenate", Kind::joined},
    // clang-format on
};

class Selection {
 public:
  Selection(
      int num_rows, const mx::array& rows, const Arrays& kept,
      const std::vector<SelectedRows>& known)
      : num_rows_(num_rows), rows_(rows), known_(known) {
    for (const auto& a : kept) {
      keep(a);
    }
  }

  mx::array of(const mx::array& a) {
    // Arrays that must be computed for all rows, because of others that are not rebuilt, are not
    // rebuilt either. (That is complete: it holds for everything it depends on.)
    Arrays ends;
    find_ends(a, ends);
    for (const auto& end : ends) {
      keep(end);
    }
    return select(a);
  }

 private:
  bool is_kept(const mx::array& a) const { return kept_.count(a.id()) > 0; }

  // Notes `a` and all that is computed for it.
  void keep(const mx::array& a) {
    Arrays todo{a};
    while (!todo.empty()) {
      const mx::array next = std::move(todo.back());
      todo.pop_back();
      if (!is_pending(next) || !kept_.insert(next.id()).second) {
        continue;
      }
      for (const auto& sibling : next.siblings()) {
        kept_.insert(sibling.id());
      }
      todo.insert(todo.end(), next.inputs().begin(), next.inputs().end());
    }
  }

  const mx::array* selected_of(const mx::array& a) const {
    for (const auto& [all, selected] : known_) {
      if (all.id() == a.id()) {
        return &selected;
      }
    }
    return nullptr;
  }

  bool has_rows(const mx::array& a) const { return a.ndim() > 0 && a.shape(0) == num_rows_; }

  // For an operation whose result has the rows as its first axis: which of its inputs have, too.
  // None where rows are not known to be independent.
  std::optional<std::vector<bool>> inputs_with_rows(const mx::array& a) const {
    if (!is_pending(a)) {
      return std::nullopt;
    }
    auto& primitive = a.primitive();
    const Arrays& in = a.inputs();
    std::vector<bool> with(in.size(), false);
    if (dynamic_cast<mx::Compiled*>(&primitive)) {  // elements, of inputs that broadcast
      if (!a.siblings().empty()) {
        return std::nullopt;
      }
      for (size_t i = 0; i < in.size(); i++) {
        with[i] = in[i].ndim() == a.ndim() && has_rows(in[i]);
      }
      return with;
    }
    const auto found = kKinds.find(primitive.name());
    if (found == kKinds.end() || in.empty()) {
      return std::nullopt;
    }
    with[0] = true;
    bool holds = has_rows(in[0]) && has_rows(a);
    switch (found->second) {
      case Kind::elements:
        for (size_t i = 0; i < in.size(); i++) {
          holds = holds && in[i].shape() == a.shape();
          with[i] = true;
        }
        break;
      case Kind::first:
        holds = holds && a.ndim() > 1;
        break;
      case Kind::first_two:
        // (The other inputs are frequencies. One position may serve all rows.)
        with[1] = holds && in.size() > 1 && has_rows(in[1]);
        holds = holds && in.size() > 1 && (with[1] || in[1].size() == 1);
        break;
      case Kind::product:
        holds = holds && a.ndim() > 1 && in[1].ndim() == 2;
        break;
      case Kind::sum:
        holds = holds && a.ndim() == 2 && in[1].ndim() == 2 && in[2].shape() == a.shape();
        with.back() = true;
        break;
      case Kind::view:
        break;
      case Kind::broadcast:
        with[0] = in[0].ndim() == a.ndim() && has_rows(in[0]);
        holds = has_rows(a);
        break;
      case Kind::transpose:
        holds = holds && static_cast<mx::Transpose&>(primitive).state()[0] == 0;
        break;
      case Kind::columns: {
        const auto [begin, end, strides] = static_cast<mx::Slice&>(primitive).state();
        const bool forwards = std::ranges::all_of(strides, [](auto by) { return by > 0; });
        holds = holds && begin[0] == 0 && strides[0] == 1 && forwards;
        break;
      }
      case Kind::split:
        holds = holds && static_cast<mx::Split&>(primitive).state().second != 0;
        break;
      case Kind::joined:
        holds = holds && static_cast<mx::Concatenate&>(primitive).state() != 0;
        with.assign(in.size(), true);
        break;
    }
    return holds ? std::optional(std::move(with)) : std::nullopt;
  }

  // Where the way back from `a` ends.
  void find_ends(const mx::array& a, Arrays& ends) {
    if (!visited_.insert(a.id()).second || (selected_of(a) && !is_kept(a))) {
      return;
    }
    const auto with = is_kept(a) ? std::nullopt : inputs_with_rows(a);
    if (!with || visited_.size() > kMostOperations) {
      ends.push_back(a);
      return;
    }
    for (size_t i = 0; i < with->size(); i++) {
      if ((*with)[i]) {
        find_ends(a.inputs()[i], ends);
      }
    }
  }

  mx::array select(const mx::array& a) {
    if (const auto made = made_.find(a.id()); made != made_.end()) {
      return made->second;
    }
    const mx::array* known = selected_of(a);
    const auto with = is_kept(a) ? std::nullopt : inputs_with_rows(a);
    mx::array selected = known && !is_kept(a) ? *known
                         : with               ? made_again(a, *with)
                                              : mx::take(a, rows_, 0, stream_of(a));
    made_.insert({a.id(), selected});
    return selected;
  }

  mx::array made_again(const mx::array& a, const std::vector<bool>& with) {
    Arrays in;
    for (size_t i = 0; i < with.size(); i++) {
      in.push_back(with[i] ? select(a.inputs()[i]) : a.inputs()[i]);
    }
    auto shape = a.shape();
    shape[0] = rows_.shape(0);
    auto& primitive = a.primitive();
    const auto stream = primitive.stream();
    const auto found = kKinds.find(primitive.name());
    const auto kind = found == kKinds.end() ? Kind::elements : found->second;
    if (kind == Kind::view) {
      return mx::reshape(in[0], std::move(shape), stream);
    }
    if (kind == Kind::broadcast) {
      return mx::broadcast_to(in[0], shape, stream);
    }
    if (kind == Kind::columns) {
      auto [begin, end, strides] = static_cast<mx::Slice&>(primitive).state();
      end[0] = shape[0];
      return mx::slice(in[0], std::move(begin), std::move(end), std::move(strides), stream);
    }
    if (kind == Kind::split) {
      const auto [ends, axis] = static_cast<mx::Split&>(primitive).state();
      const auto parts = mx::split(in[0], ends, axis, stream);
      const auto all = a.outputs();
      for (size_t i = 0; i < all.size(); i++) {
        made_.insert({all[i].id(), parts[i]});
      }
      return made_.at(a.id());
    }
    // (No operation of these knows how many rows it has.)
    return mx::array(std::move(shape), a.dtype(), a.primitive_ptr(), std::move(in));
  }

  static mx::StreamOrDevice stream_of(const mx::array& a) {
    return a.has_primitive() ? mx::StreamOrDevice(a.primitive().stream()) : mx::StreamOrDevice();
  }

  const int num_rows_;
  const mx::array& rows_;
  const std::vector<SelectedRows>& known_;
  std::unordered_set<uintptr_t> kept_;
  std::unordered_set<uintptr_t> visited_;
  std::unordered_map<uintptr_t, mx::array> made_;
};

}  // namespace

mx::array select_rows(
    const mx::array& a, const mx::array& rows, const std::vector<mx::array>& kept,
    const std::vector<SelectedRows>& known) {
  Validator v("select_rows");
  v.require(a.ndim() > 0, "a", "of at least one axis", "a scalar");
  v.shape(rows, "rows", {-1});
  v.int32(rows, "rows");
  for (const auto& [all, selected] : known) {
    auto shape = all.shape();
    v.require(!shape.empty(), "known", "arrays of rows", "a scalar");
    shape[0] = rows.shape(0);
    v.require(selected.shape() == shape, "known", shape, selected.shape());
    v.same_dtype(selected, "the selected rows", all, "all of them");
  }
  return Selection(a.shape(0), rows, kept, known).of(a);
}

}  // namespace mlx_paged
