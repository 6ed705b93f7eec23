// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Runs the steps of a device program: where its values lie, for what its launches were captured,
// and how long all of it is kept. Knows no GPU framework; a StepDevice does what is asked
// (cuda/step_graph.cpp, metal/step_encoder.cpp, and the simulator of tests).
//
// One step of a program on a stream is
//   copy     the step's inputs to where the captured launches look for them
//   replay   launches that were captured once
//   run      those that write the results, which are new arrays each time (a caller may keep them)
// and all of it in the order of the stream. What is launched for the first time is run, and
// captured when it occurs again: a capture takes the time of some launches, and the device would
// wait for it. (A device that captures nothing runs all of them, on the inputs where they are.) So
// steps, of whatever programs, share one memory for what is needed within a step only.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "device_program.h"

namespace mlx_paged {

// Launches, and where what they name lies.
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
  // True if it keeps launches.
  virtual bool captures() const = 0;
  // Loads what launches need. Before they first run.
  virtual void prepare(const PlacedLaunches& launches) = 0;
  // Memory that stays where it is. Before any launch of a step.
  virtual mx::array allocate(uint64_t bytes) = 0;
  virtual char* address_of(const mx::array& a) = 0;
  // Launches [0, end), which have run, so that they can be replayed; null: they are run each time,
  // on copies of the inputs all the same. Throws where that fails, and then nothing is left of it.
  virtual std::shared_ptr<void> capture(PlacedLaunches& launches, size_t end) = 0;

  // From here on, all is in the order of the stream and after all that was encoded so far.
  virtual void begin() = 0;
  virtual void copy(const std::vector<StepCopy>& copies) = 0;
  virtual void replay(void* captured) = 0;
  virtual void run(PlacedLaunches& launches, size_t begin, size_t end) = 0;
  // Until the step has ended.
  virtual void keep(const mx::array& a) = 0;
  virtual void keep(std::shared_ptr<const void> what) = 0;
};

// Memory of a stream's steps while they run: one allocation for each use, replaced by one at least
// twice as large where a step needs more. Captured launches keep the old one.
class StepMemory {
 public:
  enum class Use { values, workspace };

  const mx::array& at_least(uint64_t bytes, Use use, StepDevice& device);

 private:
  std::optional<mx::array> kept_[2];
};

// That of a stream, of this thread. It lives as long as somebody has it.
std::shared_ptr<StepMemory> step_memory(int stream);

// Runs one program on one stream.
class StepRunner {
 public:
  // Ways to launch a program's steps that are kept.
  static constexpr size_t kMostWays = 4;

  // `program` must outlive it, though not its steps under way.
  StepRunner(const DeviceProgram& program, std::shared_ptr<StepMemory> memory);

  // `in`: of what the program uses, dense arrays. The pools among them are written in place.
  void run(const Arrays& in, const Arrays& results, StepDevice& device);

 private:
  // Key of a set of launches.
  struct Key {
    std::vector<LaunchList> attention;
    std::vector<const void*> fixed;  // where pools and constants are

    bool operator==(const Key& other) const = default;
  };

  struct Way {
    Key key;
    mx::array values;     // temporaries, then inputs
    mx::array workspace;  // of attention
    PlacedLaunches launches;
    size_t result_begin;  // launches from there on write results
    bool has_run = false;
    bool was_captured = false;
    std::shared_ptr<void> replayed = nullptr;
  };

  bool is_copied(size_t input) const;
  std::shared_ptr<Way> way_of(Key key, const Arrays& in, StepDevice& device);

  const DeviceProgram& program_;
  std::shared_ptr<StepMemory> memory_;
  std::vector<int64_t> input_offsets_;  // in `values`
  uint64_t value_bytes_;
  std::vector<int> result_operands_;
  std::vector<int> input_operands_;       // that are copied, where launches are captured
  std::list<std::shared_ptr<Way>> ways_;  // the one used last first
};

}  // namespace mlx_paged
