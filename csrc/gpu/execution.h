// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// GpuExecution: one executable on one stream. It owns the memory of the step's values and the
// launches captured for them. It knows no GPU framework; a StepDevice does what it asks
// (cuda/step_graph.cpp, metal/step_encoder.cpp, and the simulator of the tests).
//
// One step on a stream is, in the stream's order,
//   copy     the inputs to where the captured launches expect them
//   replay   launches that were captured once; a device that cannot capture collectives runs those
//            in between
//   run      launches that write the results: new arrays each time, because a caller may keep them
// Launches run when they first occur and are captured the second time: a capture takes as long as
// several launches, and the device would wait for it. A device that captures nothing runs all
// launches, on the inputs where they are. As steps run one after another, those of all executables
// share the memory of their temporaries.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "executable.h"

namespace mlx_paged {

// Launches and the addresses of their operands.
struct PlacedLaunches {
  std::vector<Launch> launches;
  std::vector<char*> addresses;  // by operand
};

struct StepCopy {
  const char* from;
  char* to;
  uint64_t bytes;
};

class StepDevice {
 public:
  virtual ~StepDevice() = default;

  virtual Gpu kind() const = 0;
  // True if the device can capture launches.
  virtual bool captures() const = 0;
  // True if captured launches may include collectives.
  virtual bool captures_collectives() const = 0;
  // Loads the kernels of launches before their first run.
  virtual void prepare(const PlacedLaunches& launches) = 0;
  // Allocates memory that never moves. Called before any launch of a step.
  virtual mx::array allocate(uint64_t bytes) = 0;
  virtual char* address_of(const mx::array& a) = 0;
  // Captures launches [begin, end), which have run before. Null: they are launched each time, still
  // on copies of the inputs. Throws on failure and then leaves nothing behind.
  virtual std::shared_ptr<void> capture(PlacedLaunches& launches, size_t begin, size_t end) = 0;

  // All methods below run in stream order, after everything encoded before begin().
  virtual void begin() = 0;
  virtual void copy(const std::vector<StepCopy>& copies) = 0;
  virtual void replay(void* captured) = 0;
  virtual void run(PlacedLaunches& launches, size_t begin, size_t end) = 0;
  // Keeps an object alive until the step has ended.
  virtual void keep(const mx::array& a) = 0;
  virtual void keep(std::shared_ptr<const void> object) = 0;
};

// Memory of a stream's steps while they run: one allocation per use, replaced by one at least twice
// as large if a step needs more. Captured launches keep the old one.
class StepMemory {
 public:
  enum class Use { values, workspace };

  const mx::array& at_least(uint64_t bytes, Use use, StepDevice& device);

 private:
  std::optional<mx::array> kept_[2];
};

// Returns the memory of one of this thread's streams. It lives as long as an execution holds it.
std::shared_ptr<StepMemory> step_memory(int stream);

class GpuExecution {
 public:
  // Maximum number of captured graphs. Their launches of attention differ, as those of contexts of
  // up to some thousand tokens do.
  static constexpr size_t kMaxGraphs = 32;

  // `executable` must outlive this, but not the steps in flight.
  GpuExecution(const GpuExecutable& executable, std::shared_ptr<StepMemory> memory);

  // Runs a step. `in`: the inputs, dense where the executable uses them. Pools among them are
  // written in place.
  void run(const Arrays& in, const Arrays& results, StepDevice& device);

 private:
  // Conditions under which a step can reuse a set of launches.
  struct Key {
    std::vector<LaunchList> attention;
    std::vector<const void*> fixed;  // addresses of pools and constants

    bool operator==(const Key& other) const = default;
  };

  // Launches that are captured together, or that are run.
  struct Segment {
    size_t begin, end;
    std::shared_ptr<void> captured = nullptr;
  };

  struct CapturedGraph {
    Key key;
    mx::array values;     // temporaries, then inputs
    mx::array workspace;  // of attention
    PlacedLaunches launches;
    std::vector<Segment> segments;  // the last one writes results and is never captured
    bool has_run = false;
    bool was_captured = false;
  };

  bool is_copied(size_t input) const;
  // Gives the inputs places after the temporaries, with room for those of this step.
  void place_inputs(const Arrays& in);
  std::shared_ptr<CapturedGraph> graph_of(Key key, const Arrays& in, StepDevice& device);
  std::vector<Segment> segments_of(
      const std::vector<Launch>& launches, const StepDevice& device) const;
  void capture(CapturedGraph& graph, StepDevice& device) const;

  const GpuExecutable& executable_;
  std::shared_ptr<StepMemory> memory_;
  std::vector<uint64_t> capacities_;    // of the inputs, in bytes; 0: not copied
  std::vector<int64_t> input_offsets_;  // in `values`
  uint64_t value_bytes_ = 0;
  std::vector<int> result_operands_;
  std::vector<int> input_operands_;                   // copied if launches are captured
  std::list<std::shared_ptr<CapturedGraph>> graphs_;  // most recent first
};

}  // namespace mlx_paged
