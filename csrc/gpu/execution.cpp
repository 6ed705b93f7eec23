// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "execution.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

namespace mlx_paged {

namespace {

constexpr uint64_t kStepAlignment = 256;

uint64_t aligned(uint64_t bytes) {
  return (bytes + kStepAlignment - 1) / kStepAlignment * kStepAlignment;
}

// Index of the first launch that uses one of these operands.
size_t first_of(const std::vector<int>& operands, const std::vector<Launch>& launches) {
  auto found = std::find_if(launches.begin(), launches.end(), [&](const Launch& launch) {
    return std::any_of(launch.buffers.begin(), launch.buffers.end(), [&](const Binding& binding) {
      return std::find(operands.begin(), operands.end(), binding.operand) != operands.end();
    });
  });
  return found - launches.begin();
}

}  // namespace

const mx::array& StepMemory::at_least(uint64_t bytes, Use use, StepDevice& device) {
  auto& kept = kept_[use == Use::workspace];
  if (!kept || kept->nbytes() < bytes) {
    uint64_t twice = kept ? 2 * kept->nbytes() : kStepAlignment;
    kept = device.allocate(std::max(bytes, twice));
  }
  return *kept;
}

std::shared_ptr<StepMemory> step_memory(int stream) {
  thread_local std::map<int, std::weak_ptr<StepMemory>> memories;
  auto& known = memories[stream];
  auto memory = known.lock();
  if (!memory) {
    known = memory = std::make_shared<StepMemory>();
  }
  return memory;
}

GpuExecution::GpuExecution(const GpuExecutable& executable, std::shared_ptr<StepMemory> memory)
    : executable_(executable), memory_(std::move(memory)) {
  for (size_t i = 0; i < executable.num_inputs(); i++) {
    // Inputs that grow with contexts get room to do so.
    uint64_t bytes = executable.input_bytes(int(i)) * (executable.has_any_size(int(i)) ? 2 : 1);
    capacities_.push_back(is_copied(i) ? aligned(bytes) : 0);
  }
  place_inputs({});
  for (size_t i = 0; i < executable.operands().size(); i++) {
    const auto& operand = executable.operands()[i];
    if (operand.kind == StepOperand::Kind::result) {
      result_operands_.push_back(int(i));
    } else if (operand.kind == StepOperand::Kind::input && is_copied(operand.index)) {
      input_operands_.push_back(int(i));
    }
  }
}

bool GpuExecution::is_copied(size_t input) const {
  return executable_.is_used(int(input)) && !executable_.is_pool(int(input));
}

void GpuExecution::place_inputs(const Arrays& in) {
  value_bytes_ = executable_.temporary_bytes();
  input_offsets_.clear();
  for (size_t i = 0; i < capacities_.size(); i++) {
    if (i < in.size() && is_copied(i) && in[i].nbytes() > capacities_[i]) {
      capacities_[i] = aligned(2 * in[i].nbytes());
    }
    input_offsets_.push_back(int64_t(value_bytes_));
    value_bytes_ += capacities_[i];
  }
}

void GpuExecution::run(const Arrays& in, const Arrays& results, StepDevice& device) {
  for (size_t i = 0; i < in.size(); i++) {
    if (is_copied(i) && in[i].nbytes() > capacities_[i]) {
      graphs_.clear();  // They expect the inputs elsewhere. The device keeps those that run.
      place_inputs(in);
    }
  }
  Key key{executable_.attention(in, device.kind()), {}};
  // Pools and constants keep their addresses unless MLX moves them, as it does when the host reads
  // an array of device memory.
  for (int i : executable_.pools()) {
    key.fixed.push_back(device.address_of(in[i]));
  }
  for (const auto& constant : executable_.constants()) {
    key.fixed.push_back(device.address_of(constant));
  }
  auto graph = graph_of(std::move(key), in, device);
  auto& placed = graph->launches;
  if (device.captures() && graph->has_run && !graph->was_captured) {
    capture(*graph, device);
  }
  std::vector<StepCopy> copies;
  for (size_t i = 0; device.captures() && i < in.size(); i++) {
    if (is_copied(i) && in[i].nbytes() > 0) {
      char* to = device.address_of(graph->values) + input_offsets_[i];
      copies.push_back({device.address_of(in[i]), to, in[i].nbytes()});
    }
  }
  for (int operand : result_operands_) {
    const auto& o = executable_.operands()[operand];
    placed.addresses[operand] = device.address_of(results[o.index]) + o.offset;
  }
  if (!device.captures()) {
    for (int operand : input_operands_) {
      const auto& o = executable_.operands()[operand];
      placed.addresses[operand] = device.address_of(in[o.index]) + o.offset;
    }
    device.address_of(graph->values);
    device.address_of(graph->workspace);
  }
  device.begin();
  device.copy(copies);
  for (const auto& segment : graph->segments) {
    if (segment.captured) {
      device.replay(segment.captured.get());
    } else {
      device.run(placed, segment.begin, segment.end);
    }
  }
  graph->has_run = true;
  // This includes copies of inputs that were made for this step and kept only until begin().
  for (size_t i = 0; i < in.size(); i++) {
    if (is_copied(i)) {
      device.keep(in[i]);
    }
  }
  for (const auto& result : results) {
    device.keep(result);
  }
  device.keep(graph->values);
  device.keep(graph->workspace);
  device.keep(graph);
}

void GpuExecution::capture(CapturedGraph& graph, StepDevice& device) const {
  // Registers the arrays that the addresses belong to.
  device.address_of(graph.values);
  device.address_of(graph.workspace);
  for (size_t i = 0; i + 1 < graph.segments.size(); i++) {
    auto& segment = graph.segments[i];
    if (!graph.launches.launches[segment.begin].collective || device.captures_collectives()) {
      segment.captured = device.capture(graph.launches, segment.begin, segment.end);
    }
  }
  graph.was_captured = true;
}

std::vector<GpuExecution::Segment> GpuExecution::segments_of(
    const std::vector<Launch>& launches, const StepDevice& device) const {
  size_t result_begin = first_of(result_operands_, launches);
  std::vector<Segment> segments;
  size_t begin = 0;
  auto end_at = [&](size_t end) {
    if (begin < end) {
      segments.push_back({begin, end});
    }
    begin = end;
  };
  for (size_t i = 0; i < launches.size(); i++) {
    if (i == result_begin) {
      end_at(i);
    }
    if (launches[i].collective && !device.captures_collectives()) {
      end_at(i);
      end_at(i + 1);
    }
  }
  end_at(launches.size());
  return segments;
}

std::shared_ptr<GpuExecution::CapturedGraph> GpuExecution::graph_of(
    Key key, const Arrays& in, StepDevice& device) {
  for (auto it = graphs_.begin(); it != graphs_.end(); ++it) {
    if ((*it)->key == key) {
      graphs_.splice(graphs_.begin(), graphs_, it);
      return graphs_.front();
    }
  }
  mx::array values = memory_->at_least(value_bytes_, StepMemory::Use::values, device);
  mx::array workspace = memory_->at_least(
      executable_.workspace_bytes(key.attention), StepMemory::Use::workspace, device);
  std::vector<char*> addresses;
  for (const auto& o : executable_.operands()) {
    char* begin = nullptr;
    switch (o.kind) {
      case StepOperand::Kind::input:
        begin = is_copied(o.index) ? device.address_of(values) + input_offsets_[o.index]
                                   : device.address_of(in[o.index]);
        break;
      case StepOperand::Kind::constant:
        begin = device.address_of(executable_.constants()[o.index]);
        break;
      case StepOperand::Kind::temporary:
        begin = device.address_of(values);
        break;
      case StepOperand::Kind::workspace:
        begin = device.address_of(workspace);
        break;
      case StepOperand::Kind::result:
        break;  // set in each run
    }
    addresses.push_back(begin ? begin + o.offset : nullptr);
  }
  PlacedLaunches launches{executable_.launches(key.attention, device.kind()), std::move(addresses)};
  device.prepare(launches);
  auto segments = segments_of(launches.launches, device);
  auto made = std::make_shared<CapturedGraph>(
      CapturedGraph{std::move(key), values, workspace, std::move(launches), std::move(segments)});
  graphs_.push_front(made);
  if (graphs_.size() > kMaxGraphs) {
    graphs_.pop_back();  // the device keeps it while it runs
  }
  return made;
}

}  // namespace mlx_paged
