// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "simulator.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "../../../csrc/allocation.h"
#include "../../../csrc/cpu/dense.h"
#include "../../../csrc/gpu/execution.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged::sim {

namespace {

std::atomic<Simulator> installed{nullptr};
std::mutex records_mutex;
std::vector<Record> records;

Simulator simulator() {
  auto found = installed.load();
  if (!found) {
    throw std::runtime_error(
        "[simulator] mlx_paged._sim needs a simulator: call its set_simulator with the address of "
        "one");
  }
  return found;
}

struct Operand {
  void* data;
  uint64_t offset;  // in its buffer, which a GPU would have aligned
};

// A buffer that an earlier launch of the list wrote is not poisoned again.
uint32_t access_of(const Binding& binding, bool written_before) {
  switch (binding.access) {
    case Access::read:
      return METAL_SIM_READ;
    case Access::write:
      return written_before ? METAL_SIM_READ_WRITE : METAL_SIM_WRITE;
    case Access::read_write:
      return METAL_SIM_READ_WRITE;
  }
  throw std::logic_error("[simulator] unknown access");
}

void run_launch(const Launch& launch, std::vector<Operand>& operands, std::set<int>& written) {
  std::vector<MetalSimBuffer> buffers;
  for (const auto& binding : launch.buffers) {
    buffers.push_back(
        {uint32_t(buffers.size()), access_of(binding, written.count(binding.operand)),
         operands[binding.operand].data, binding.bytes, nullptr, operands[binding.operand].offset});
  }
  for (const auto& binding : launch.buffers) {
    if (binding.access != Access::read) {
      written.insert(binding.operand);
    }
  }
  MetalSimBytes constants{
      uint32_t(buffers.size()), uint32_t(launch.constants.size()), launch.constants.data()};
  std::vector<MetalSimConstant> function_constants;
  for (const auto& value : launch.function_constants) {
    function_constants.push_back({uint32_t(function_constants.size()), 1, &value});
  }
  MetalSimThreadgroup threadgroup{0, launch.threadgroup_memory};
  MetalSimLaunch call{};
  call.abi = METAL_SIM_ABI;
  call.kernel = launch.kernel.host_name.c_str();
  call.buffers = buffers.data();
  call.num_buffers = uint32_t(buffers.size());
  call.bytes = &constants;
  call.num_bytes = 1;
  call.constants = function_constants.data();
  call.num_constants = uint32_t(function_constants.size());
  call.threadgroup = &threadgroup;
  call.num_threadgroup = launch.threadgroup_memory > 0;
  for (int i = 0; i < 3; i++) {
    call.grid[i] = launch.grid[i];
    call.threads[i] = launch.threadgroup[i];
  }
  auto report = std::make_unique<MetalSimReport>();
  if (simulator()(&call, report.get()) != METAL_SIM_OK) {
    throw std::runtime_error("[simulator] " + launch.kernel.host_name + ": " + report->faults);
  }
  std::lock_guard lock(records_mutex);
  records.push_back(
      {launch, {report->traffic, report->traffic + report->num_traffic}, report->threadgroups});
}

// Runs the launches of a node in the place of its eval_cpu, on the evaluating thread, so that a
// fault is an exception there: std::runtime_error with the simulator's report.
void simulate(KernelNode& node, const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(node.stream());
  auto [first, count, in_place] = node.pools(inputs);
  int donated = node.donated();
  bool donates = donated >= 0 && can_donate(inputs[donated]) && can_read_on_gpu(inputs[donated]);
  Arrays in;
  for (int i = 0; i < int(inputs.size()); i++) {
    const auto& a = inputs[i];
    bool is_pool = i >= first && i < first + count;
    if ((is_pool ? can_alias_pool_on_gpu : can_read_on_gpu)(a)) {
      in.push_back(a);
      continue;
    }
    if (is_pool) {
      count_pool_copy();
    }
    in.emplace_back(a.shape(), a.dtype(), nullptr, Arrays{});
    cpu::copy_to_dense(a, in.back(), encoder);
  }
  node.check_ids(in);
  for (size_t i = 0; i < out.size(); i++) {
    if (in_place) {
      out[i].copy_shared_buffer(in[first + i]);
    } else if (donates) {
      out[i].copy_shared_buffer(in[donated]);
    } else {
      allocate(out[i]);
    }
  }
  mx::synchronize(node.stream());
  LaunchList list = node.launches(in, out, Gpu::apple);
  std::vector<Operand> operands;
  auto add = [&](const mx::array& a) {
    operands.push_back({const_cast<char*>(a.data<char>()), uint64_t(a.offset())});
  };
  for (const auto& a : in) {
    add(a);
  }
  for (const auto& a : out) {
    add(a);
  }
  std::vector<std::vector<float>> workspaces;
  for (uint64_t bytes : list.workspaces) {
    workspaces.emplace_back((bytes + 3) / 4);
    operands.push_back({workspaces.back().data(), 0});
  }
  std::set<int> written;
  for (const auto& launch : list.launches) {
    run_launch(launch, operands, written);
  }
}

StepCounts step_counts;
bool capture_fails = false;
bool preparation_fails = false;
bool captures_nothing = false;
struct SimulatedMemory {
  std::weak_ptr<mx::array::Data> data;
  char* begin;
  size_t bytes;
};
std::vector<SimulatedMemory> step_memories;

// A GPU whose captured launches are run with the addresses that they were captured with.
class SimulatedStepDevice : public StepDevice {
 public:
  explicit SimulatedStepDevice(mx::Stream stream) : stream_(stream) {}

  Gpu kind() const override { return Gpu::apple; }

  bool captures() const override { return !captures_nothing; }

  bool captures_collectives() const override { return false; }

  void prepare(const PlacedLaunches&) override {
    if (std::exchange(preparation_fails, false)) {
      throw std::runtime_error("[simulator] a preparation that fails");
    }
  }

  mx::array allocate(uint64_t bytes) override {
    mx::array a(mx::Shape{int((bytes + 3) / 4)}, mx::float32, nullptr, {});
    mlx_paged::allocate(a);
    step_memories.push_back({a.data_shared_ptr(), a.data<char>(), a.nbytes()});
    return a;
  }

  char* address_of(const mx::array& a) override {
    auto* data = const_cast<char*>(a.data<char>());
    known_.push_back({data, uint64_t(a.buffer_size() - a.offset()), uint64_t(a.offset())});
    return data;
  }

  std::shared_ptr<void> capture(PlacedLaunches& launches, size_t begin, size_t end) override {
    if (std::exchange(capture_fails, false)) {
      throw std::runtime_error("[simulator] a capture that fails");
    }
    step_counts.captures++;
    auto made = std::make_shared<Replayed>();
    made->launches.assign(launches.launches.begin() + begin, launches.launches.begin() + end);
    made->operands = operands_of(launches);
    return made;
  }

  // A step's memory holds values of earlier steps.
  void begin() override {
    step_counts.steps++;
    mx::synchronize(stream_);
    std::erase_if(step_memories, [](const auto& memory) { return memory.data.expired(); });
    for (const auto& memory : step_memories) {
      std::memset(memory.begin, 0xff, memory.bytes);
    }
  }

  void copy(const std::vector<StepCopy>& copies) override {
    for (const auto& [from, to, bytes] : copies) {
      std::memcpy(to, from, bytes);
    }
  }

  void replay(void* captured) override {
    step_counts.replays++;
    auto& replayed = *static_cast<Replayed*>(captured);
    run(replayed.launches, replayed.operands);
  }

  void run(PlacedLaunches& placed, size_t begin, size_t end) override {
    if (begin < end && placed.launches[begin].collective) {
      return run_collective(placed.launches[begin], placed.addresses);
    }
    auto operands = operands_of(placed);
    run({placed.launches.begin() + begin, placed.launches.begin() + end}, operands);
  }

  void keep(const mx::array&) override {}
  void keep(std::shared_ptr<const void>) override {}

 private:
  struct Replayed {
    std::vector<Launch> launches;
    std::vector<Operand> operands;
  };
  struct Known {
    char* data;
    uint64_t bytes;
    uint64_t offset;  // in its buffer
  };

  static void run_collective(const Launch& launch, const std::vector<char*>& addresses) {
    const auto& collective = *launch.collective;
    mx::array in(collective.in_shape, collective.dtype, nullptr, {});
    mlx_paged::allocate(in);
    std::memcpy(in.data<char>(), addresses[launch.buffers[0].operand], in.nbytes());
    Arrays out{mx::array(collective.out_shape, collective.dtype, collective.primitive, {})};
    collective.primitive->eval_cpu({in}, out);
    mx::synchronize(collective.primitive->stream());
    char* to = addresses[launch.buffers[1].operand];
    std::memcpy(to, out[0].data<char>(), out[0].nbytes());
  }

  std::vector<Operand> operands_of(const PlacedLaunches& placed) const {
    std::vector<Operand> operands;
    for (char* address : placed.addresses) {
      uint64_t offset = 0;
      for (const auto& known : known_) {
        if (address >= known.data && address < known.data + known.bytes) {
          offset = known.offset + (address - known.data);
        }
      }
      operands.push_back({address, offset});
    }
    return operands;
  }

  // The launches of one attention write to different rows of its output; other steps' memory is
  // poisoned before they write it.
  static void run(const std::vector<Launch>& launches, std::vector<Operand>& operands) {
    std::set<int> written;
    for (const auto& launch : launches) {
      if (launch.kernel.file == "layer.h" || launch.kernel.file == "products.h") {
        written.clear();
      }
      run_launch(launch, operands, written);
    }
  }

  mx::Stream stream_;
  std::vector<Known> known_;
};

void simulate(GpuStep& node, const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(node.stream());
  const auto& executable = node.executable();
  Arrays in;
  for (int i = 0; i < int(inputs.size()); i++) {
    const auto& a = inputs[i];
    if (can_read_on_gpu(a) || executable.is_pool(i)) {
      in.push_back(a);
      continue;
    }
    in.emplace_back(a.shape(), a.dtype(), nullptr, Arrays{});
    cpu::copy_to_dense(a, in.back(), encoder);
  }
  size_t num_results = executable.results().size();
  for (size_t i = 0; i < out.size(); i++) {
    if (i < num_results) {
      allocate(out[i]);
    } else {
      out[i].copy_shared_buffer(in[executable.pools()[i - num_results]]);
    }
  }
  mx::synchronize(node.stream());
  SimulatedStepDevice device(node.stream());
  executable.execution(node.stream().index)
      ->run(in, {out.begin(), out.begin() + num_results}, device);
}

}  // namespace

void set_simulator(Simulator simulator) {
  installed = simulator;
}

void capture_steps(bool wanted) {
  captures_nothing = !wanted;
}

StepCounts counts_of_steps() {
  StepCounts counts = step_counts;
  for (const auto& memory : step_memories) {
    counts.memory_bytes += memory.data.expired() ? 0 : memory.bytes;
  }
  return counts;
}

void fail_next_capture() {
  capture_fails = true;
}

void fail_next_preparation() {
  preparation_fails = true;
}

std::vector<Record> take_records() {
  std::lock_guard lock(records_mutex);
  return std::exchange(records, {});
}

}  // namespace mlx_paged::sim

namespace mlx_paged {

#define SIMULATED(Node_)                                \
  void Node_::eval_cpu(const Arrays& in, Arrays& out) { \
    sim::simulate(*this, in, out);                      \
  }
SIMULATED(WriteKV)
SIMULATED(CopyBlocks)
SIMULATED(GatherKV)
SIMULATED(PagedAttention)
SIMULATED(ApplyTokenBitmask)
SIMULATED(EditLogits)
SIMULATED(TakeRows)
SIMULATED(GreedyTokens)
SIMULATED(DrawTokens)
SIMULATED(SamplingThresholds)
SIMULATED(GpuStep)
SIMULATED(Lora)
SIMULATED(SeparateProduct)

bool SeparateProduct::runs_on(mx::Stream) {
  return true;
}

}  // namespace mlx_paged
