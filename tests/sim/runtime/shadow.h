// Records who touched memory last, two bytes at a time, to find races and reads of unwritten
// memory.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "state.h"

namespace sim {

// Memory that costs nothing until it is touched, and is zero then.
class LazyMemory {
 public:
  void open(uint64_t bytes);
  void close();
  void* get() const { return memory_; }
  uint64_t bytes() const { return bytes_; }

 private:
  void* memory_ = nullptr;
  uint64_t bytes_ = 0;
};

// One access, packed: run 22 | thread 10 | epoch 16 | SIMD-group epoch 13 | byte mask 2 | atomic 1.
// Run is the threadgroup's place in the order of this launch, from 1: zero is no access.
using Stamp = uint64_t;

struct Cell {
  Stamp write, read, other_read;  // other_read: of another thread or an earlier threadgroup
  uint32_t write_site, read_site, other_read_site;
  uint32_t written;  // run << 2 | bytes written so far
};

// Names the accessed memory in a message; built only for a message.
struct Name {
  std::string (*make)(const void* memory, uint64_t offset);
  const void* memory;
  uint64_t offset;
  std::string operator()() const { return make(memory, offset); }
};

class Shadow {
 public:
  void open(uint64_t bytes) { cells_.open(bytes / 2 * sizeof(Cell) + sizeof(Cell)); }
  void close() { cells_.close(); }
  bool is_open() const { return cells_.get() != nullptr; }
  // Reports conflicts with earlier accesses, and reads of what nobody wrote if `begins_unwritten`.
  // Threadgroup memory begins anew with every threadgroup; device memory keeps what others did.
  void access(
      uint64_t offset, uint64_t bytes, bool reads, bool writes, bool atomic, Memory memory,
      bool begins_unwritten, uint32_t site, const Name& name);

 private:
  LazyMemory cells_;
};

// Marks the accessed bytes of a buffer.
class Touched {
 public:
  void open(uint64_t bytes) {
    map_.open(bytes);
    pages_.assign(bytes / kPage + 1, false);
  }
  void close() { map_.close(); }
  void mark(uint64_t offset, uint64_t bytes) {
    __builtin_memset(static_cast<char*>(map_.get()) + offset, 1, bytes);
    for (uint64_t page = offset / kPage; page <= (offset + bytes - 1) / kPage; page++)
      pages_[page] = true;
  }
  uint64_t count() const;

 private:
  static constexpr uint64_t kPage = 4096;
  LazyMemory map_;
  std::vector<bool> pages_;  // that have marks
};

}  // namespace sim
