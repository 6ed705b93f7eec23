// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "../dense.h"
#include "../validate.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "passes.h"

namespace mlx_paged {

namespace {

// Maximum number of rebuilt operations: those of a few layers. Without a limit the search could go
// back to the tokens.
constexpr size_t kMaxOperations = 512;

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
    // Arrays that must be computed for all rows, because an array outside of the rebuilt part needs
    // them, are not rebuilt either.
    Arrays ends;
    find_ends(a, ends);
    for (const auto& end : ends) {
      keep(end);
    }
    return select(a);
  }

 private:
  bool is_kept(const mx::array& a) const { return kept_.count(a.id()) > 0; }

  // Marks `a` and everything it is computed from.
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

  // Marks inputs of a row-wise operation that have the rows as well; nothing if rows of the result
  // may depend on other rows.
  std::optional<std::vector<bool>> inputs_with_rows(const mx::array& a) const {
    if (!is_pending(a) || a.inputs().empty()) {
      return std::nullopt;
    }
    auto& primitive = a.primitive();
    const Arrays& in = a.inputs();
    std::vector<bool> with(in.size(), false);
    with[0] = has_rows(in[0]);
    bool holds = with[0] && has_rows(a);
    switch (row_rule(op_of(a))) {
      case RowRule::elementwise:
        holds = has_rows(a) && a.siblings().empty();
        for (size_t i = 0; i < in.size(); i++) {
          with[i] = in[i].ndim() == a.ndim() && has_rows(in[i]);
        }
        break;
      case RowRule::first:
        holds = holds && a.ndim() > 1;
        break;
      case RowRule::first_two:
        with[1] = in.size() > 1 && has_rows(in[1]);
        holds = holds && in.size() > 1 && (with[1] || in[1].size() == 1);
        break;
      case RowRule::first_three:
        with[1] = with[2] = true;
        holds = holds && has_rows(in[1]) && has_rows(in[2]);
        break;
      case RowRule::product:
        holds = holds && a.ndim() > 1 && in[1].ndim() == 2;
        break;
      case RowRule::product_sum:
        holds = holds && a.ndim() == 2 && in[1].ndim() == 2 && in[2].shape() == a.shape();
        with.back() = true;
        break;
      case RowRule::reshape:
        break;
      case RowRule::broadcast:
        with[0] = in[0].ndim() == a.ndim() && has_rows(in[0]);
        holds = has_rows(a);
        break;
      case RowRule::transpose:
        holds = holds && static_cast<mx::Transpose&>(primitive).state()[0] == 0;
        break;
      case RowRule::slice: {
        const auto [begin, end, strides] = static_cast<mx::Slice&>(primitive).state();
        const bool forwards = std::ranges::all_of(strides, [](auto by) { return by > 0; });
        holds = holds && begin[0] == 0 && strides[0] == 1 && forwards;
        break;
      }
      case RowRule::split:
        holds = holds && static_cast<mx::Split&>(primitive).state().second != 0;
        break;
      case RowRule::concatenate:
        holds = holds && static_cast<mx::Concatenate&>(primitive).state() != 0;
        with.assign(in.size(), true);
        break;
      case RowRule::dependent:
        holds = false;
    }
    return holds ? std::optional(std::move(with)) : std::nullopt;
  }

  // Finds the arrays at which the search back from `a` ends.
  void find_ends(const mx::array& a, Arrays& ends) {
    if (!visited_.insert(a.id()).second || (selected_of(a) && !is_kept(a))) {
      return;
    }
    const auto with = is_kept(a) ? std::nullopt : inputs_with_rows(a);
    if (!with || visited_.size() > kMaxOperations) {
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
    const auto rule = row_rule(op_of(a));
    if (rule == RowRule::reshape) {
      return mx::reshape(in[0], std::move(shape), stream);
    }
    if (rule == RowRule::broadcast) {
      return mx::broadcast_to(in[0], shape, stream);
    }
    if (rule == RowRule::slice) {
      auto [begin, end, strides] = static_cast<mx::Slice&>(primitive).state();
      end[0] = shape[0];
      return mx::slice(in[0], std::move(begin), std::move(end), std::move(strides), stream);
    }
    if (rule == RowRule::split) {
      const auto [ends, axis] = static_cast<mx::Split&>(primitive).state();
      const auto parts = mx::split(in[0], ends, axis, stream);
      const auto all = a.outputs();
      for (size_t i = 0; i < all.size(); i++) {
        made_.insert({all[i].id(), parts[i]});
      }
      return made_.at(a.id());
    }
    // Primitives of all other rules accept any number of rows.
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
    const mx::array& a, const mx::array& rows, const Arrays& kept,
    const std::vector<SelectedRows>& known) {
  Validator v("select_rows");
  v.require(a.ndim() > 0, "a", "an array with at least one axis", "a scalar");
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
