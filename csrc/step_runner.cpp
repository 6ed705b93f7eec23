// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "step_runner.h"

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

// The first launch that names one of these operands.
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

StepRunner::StepRunner(const DeviceProgram& program, std::shared_ptr<StepMemory> memory)
    : program_(program), memory_(std::move(memory)), value_bytes_(program.temporary_bytes()) {
  for (size_t i = 0; i < program.num_inputs(); i++) {
    input_offsets_.push_back(int64_t(value_bytes_));
    value_bytes_ += is_copied(i) ? aligned(program.input_bytes(int(i))) : 0;
  }
  for (size_t i = 0; i < program.operands().size(); i++) {
    const auto& operand = program.operands()[i];
    if (operand.kind == ProgramOperand::Kind::result) {
      result_operands_.push_back(int(i));
    } else if (operand.kind == ProgramOperand::Kind::input && is_copied(operand.index)) {
      input_operands_.push_back(int(i));
    }
  }
}

bool StepRunner::is_copied(size_t input) const {
  return program_.is_used(int(input)) && !program_.is_pool(int(input));
}

void StepRunner::run(const Arrays& in, const Arrays& results, StepDevice& device) {
  Key key{program_.attention(in, device.kind()), {}};
  // (They stay where they are as long as nobody has MLX move them; a host that reads an array of
  // device memory does.)
  for (int i : program_.pools()) {
    key.fixed.push_back(device.address_of(in[i]));
  }
  for (const auto& constant : program_.constants()) {
    key.fixed.push_back(device.address_of(constant));
  }
  auto step = way_of(std::move(key), in, device);
  if (device.captures() && step->has_run && !step->was_captured) {
    device.address_of(step->values);  // (so that it knows all that addresses lie in)
    device.address_of(step->workspace);
    step->replayed = device.capture(step->launches, step->result_begin);
    step->was_captured = true;
  }
  std::vector<StepCopy> copies;
  for (size_t i = 0; device.captures() && i < in.size(); i++) {
    if (is_copied(i) && in[i].nbytes() > 0) {
      char* to = device.address_of(step->values) + input_offsets_[i];
      copies.push_back({device.address_of(in[i]), to, in[i].nbytes()});
    }
  }
  for (int operand : result_operands_) {
    const auto& o = program_.operands()[operand];
    step->launches.addresses[operand] = device.address_of(results[o.index]) + o.offset;
  }
  if (!device.captures()) {
    for (int operand : input_operands_) {
      const auto& o = program_.operands()[operand];
      step->launches.addresses[operand] = device.address_of(in[o.index]) + o.offset;
    }
    device.address_of(step->values);
    device.address_of(step->workspace);
  }
  device.begin();
  device.copy(copies);
  if (step->replayed) {
    device.replay(step->replayed.get());
  } else {
    device.run(step->launches, 0, step->result_begin);
  }
  device.run(step->launches, step->result_begin, step->launches.launches.size());
  step->has_run = true;
  // Also of what was kept until begin() only: copies made to be read here.
  for (size_t i = 0; i < in.size(); i++) {
    if (is_copied(i)) {
      device.keep(in[i]);
    }
  }
  for (const auto& result : results) {
    device.keep(result);
  }
  device.keep(step->values);
  device.keep(step->workspace);
  device.keep(step);
}

std::shared_ptr<StepRunner::Way> StepRunner::way_of(Key key, const Arrays& in, StepDevice& device) {
  for (auto it = ways_.begin(); it != ways_.end(); ++it) {
    if ((*it)->key == key) {
      ways_.splice(ways_.begin(), ways_, it);
      return ways_.front();
    }
  }
  mx::array values = memory_->at_least(value_bytes_, StepMemory::Use::values, device);
  mx::array workspace = memory_->at_least(
      program_.workspace_bytes(key.attention), StepMemory::Use::workspace, device);
  std::vector<char*> addresses;
  for (const auto& o : program_.operands()) {
    char* begin = nullptr;
    switch (o.kind) {
      case ProgramOperand::Kind::input:
        begin = is_copied(o.index) ? device.address_of(values) + input_offsets_[o.index]
                                   : device.address_of(in[o.index]);
        break;
      case ProgramOperand::Kind::constant:
        begin = device.address_of(program_.constants()[o.index]);
        break;
      case ProgramOperand::Kind::temporary:
        begin = device.address_of(values);
        break;
      case ProgramOperand::Kind::workspace:
        begin = device.address_of(workspace);
        break;
      case ProgramOperand::Kind::result:
        break;  // in each run
    }
    addresses.push_back(begin ? begin + o.offset : nullptr);
  }
  PlacedLaunches launches{program_.launches(key.attention, device.kind()), std::move(addresses)};
  size_t result_begin = first_of(result_operands_, launches.launches);
  device.prepare(launches);
  auto made = std::make_shared<Way>(
      Way{std::move(key), values, workspace, std::move(launches), result_begin});
  ways_.push_front(made);
  if (ways_.size() > kMostWays) {
    ways_.pop_back();  // (while it runs, it is kept)
  }
  return made;
}

}  // namespace mlx_paged
