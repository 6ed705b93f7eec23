// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "program_values.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../dense.h"

namespace mlx_paged::cpu {

mx::Strides dense_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = size;
    size *= shape[i];
  }
  return strides;
}

InnerAxes inner_axes(const std::vector<const View*>& views) {
  InnerAxes axes;
  axes.steps.resize(views.size());
  const mx::Shape& shape = views[0]->shape;
  for (size_t i = 1; i < shape.size(); i++) {
    if (shape[i] == 1) {
      continue;
    }
    bool joins = !axes.sizes.empty();
    for (size_t v = 0; v < views.size(); v++) {
      joins = joins && axes.steps[v].back() == views[v]->strides[i] * shape[i];
    }
    if (joins) {
      axes.sizes.back() *= shape[i];
    } else {
      axes.sizes.push_back(shape[i]);
    }
    for (size_t v = 0; v < views.size(); v++) {
      if (joins) {
        axes.steps[v].back() = views[v]->strides[i];
      } else {
        axes.steps[v].push_back(views[v]->strides[i]);
      }
    }
  }
  return axes;
}

bool ProgramValues::is(const Node& node, const char* name) {
  return std::strcmp(node.primitive->name(), name) == 0;
}

const View& ProgramValues::view(const mx::array& a) {
  auto found = views_.find(a.id());
  if (found == views_.end()) {
    require(!depends_.count(a.id()), "an operation whose input is not known");
    int buffer = add_buffer({.kind = Buffer::Kind::constant});
    program_.buffers_[buffer].data = const_cast<char*>(a.data<char>());
    found = views_.emplace(a.id(), View{buffer, 0, a.shape(), a.strides()}).first;
    for (const auto& constant : program_.constants_) {
      if (constant.id() == a.id()) {  // (a handle of it that is evaluated)
        program_.buffers_[buffer].data = const_cast<char*>(constant.data<char>());
        found->second.strides = constant.strides();
        break;
      }
    }
  }
  return found->second;
}

const float* ProgramValues::constant(const mx::array& a) {
  require(!depends_.count(a.id()), "weights that depend on the inputs");
  require(a.dtype() == mx::float32, "weights of other than float32");
  View v = view(a);
  require(v.is_dense(), "weights that are not dense");
  return reinterpret_cast<const float*>(program_.buffers_[v.buffer].data) + v.offset;
}

mx::array ProgramValues::evaluated(const mx::array& a) const {
  auto found = std::find_if(
      program_.constants_.begin(), program_.constants_.end(),
      [&](const mx::array& constant) { return constant.id() == a.id(); });
  return found == program_.constants_.end() ? a : *found;
}

Arrays ProgramValues::evaluated(const Node& node, size_t first) const {
  Arrays in = node.inputs;
  for (size_t i = first; i < in.size(); i++) {
    require(!depends_.count(in[i].id()), "weights that depend on the inputs");
    in[i] = evaluated(in[i]);
    require(is_dense(in[i]), "weights that are not dense");
  }
  return in;
}

View ProgramValues::new_value(const mx::array& a) {
  require(a.dtype() == mx::float32, "a value of other than float32");
  return new_temporary(a);
}

View ProgramValues::new_ids(const mx::array& a) {
  require(a.dtype() == mx::uint32, "numbers of rows of other than uint32");
  return new_temporary(a);
}

View ProgramValues::new_temporary(const mx::array& a) {
  require(a.ndim() > 0 && a.size() > 0, "a value without rows");
  int buffer = add_buffer({.kind = Buffer::Kind::temporary});
  program_.buffers_[buffer].bytes = int64_t(a.nbytes());
  program_.buffers_[buffer].row_size = int64_t(a.size()) / a.shape(0);
  View v{buffer, 0, a.shape(), dense_strides(a.shape())};
  views_[a.id()] = v;
  return v;
}

View ProgramValues::copied(const View& from) {
  int buffer = add_buffer({.kind = Buffer::Kind::temporary});
  View to{buffer, 0, from.shape, dense_strides(from.shape)};
  program_.buffers_[buffer].bytes = from.rows() * from.row_size() * int64_t(sizeof(float));
  program_.buffers_[buffer].row_size = from.row_size();
  require(from.shape.size() > 0, "a copy of a scalar");
  InnerAxes axes = inner_axes({&from});
  require(axes.sizes.size() <= 3, "a copy of more than four axes");
  std::array<int64_t, 3> size{1, 1, 1}, step{};
  std::copy_backward(axes.sizes.begin(), axes.sizes.end(), size.end());
  std::copy_backward(axes.steps[0].begin(), axes.steps[0].end(), step.end());
  add_row_operation(to, {from}, {}, [=](const Bases& bases, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const float* src = from.row(bases, i);
      float* dst = to.row(bases, i);
      for (int64_t a = 0; a < size[0]; a++) {
        for (int64_t b = 0; b < size[1]; b++) {
          for (int64_t c = 0; c < size[2]; c++) {
            *dst++ = src[a * step[0] + b * step[1] + c * step[2]];
          }
        }
      }
    }
  });
  return to;
}

int ProgramValues::add_buffer(Buffer buffer) {
  program_.buffers_.push_back(buffer);
  return int(program_.buffers_.size()) - 1;
}

bool ProgramValues::is_aligned(const View& v) const {
  int64_t size = buffer(v).row_size;
  int64_t end = v.offset + 1;
  for (size_t i = 1; i < v.shape.size(); i++) {
    end += (v.shape[i] - 1) * v.strides[i];
  }
  return end <= size && (v.rows() == 1 || v.strides[0] == size);
}

void ProgramValues::add_row_operation(
    const View& to, const std::vector<View>& reads, std::vector<int> gathers, RowTask task) {
  Operation op;
  op.kind = Operation::Kind::rows;
  op.rows = to.rows();
  op.task = std::move(task);
  op.gathers = std::move(gathers);
  for (const View& v : reads) {
    (is_aligned(v) ? op.reads : op.gathers).push_back(v.buffer);
  }
  op.writes = {to.buffer};
  operations_.push_back(std::move(op));
}

}  // namespace mlx_paged::cpu
