#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace sim {

void LazyMemory::open(uint64_t bytes) {
  close();
  bytes_ = std::max<uint64_t>(bytes, 1);
  memory_ = mmap(
      nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) {
    perror("metal simulator: mmap of shadow memory");
    abort();
  }
}

void LazyMemory::close() {
  if (memory_) munmap(memory_, bytes_);
  memory_ = nullptr;
  bytes_ = 0;
}

uint64_t Touched::count() const {
  const auto* bytes = static_cast<const unsigned char*>(map_.get());
  uint64_t sum = 0;
  for (uint64_t page = 0; bytes && page < pages_.size(); page++) {
    if (!pages_[page]) continue;
    uint64_t end = std::min(map_.bytes(), (page + 1) * kPage);
    for (uint64_t i = page * kPage; i < end; i++) sum += bytes[i];
  }
  return sum;
}

namespace {

constexpr uint64_t kAtomic = 1;
constexpr int kMask = 1, kSimdEpoch = 3, kEpoch = 16, kThread = 32, kRun = 42;
constexpr uint32_t kMaxEpoch = 0xffff, kMaxSimdEpoch = 0x1fff;

uint32_t run_of(Stamp s) {
  return uint32_t(s >> kRun);
}
uint32_t thread_of(Stamp s) {
  return uint32_t(s >> kThread) & 1023;
}
uint32_t epoch_of(Stamp s) {
  return uint32_t(s >> kEpoch) & kMaxEpoch;
}
uint32_t simd_epoch_of(Stamp s) {
  return uint32_t(s >> kSimdEpoch) & kMaxSimdEpoch;
}

// True if `before` and `now` touch a common byte with nothing between them that orders them.
bool unordered(Stamp before, Stamp now, Memory memory) {
  if (!before || !((before >> kMask) & (now >> kMask) & 3)) return false;
  if (before & now & kAtomic) return false;
  if (run_of(before) != run_of(now)) return memory == kDevice;
  if (thread_of(before) == thread_of(now) || epoch_of(before) < epoch_of(now)) return false;
  return !(
      thread_of(before) / kLanes == thread_of(now) / kLanes &&
      simd_epoch_of(before) < simd_epoch_of(now));
}

void race(
    const char* earlier, Stamp before, uint32_t before_site, const char* later, uint32_t site,
    const Name& name) {
  fault(
      "race", std::min(before_site, site), std::max(before_site, site),
      name() + " is " + earlier + " by " + thread_name(thread_of(before), run_of(before)) + " at " +
          place(before_site) + "\n    and " + later + " by " +
          thread_name(group.current->index, launch.run) + " at " + place(site) +
          "\n    with no barrier between them");
}

// Keeps two readers: the last one, and one of another thread or threadgroup.
void remember_read(Cell& cell, Stamp now, uint32_t site) {
  Stamp last = cell.read;
  if (last && thread_of(last) == thread_of(now) && run_of(last) == run_of(now)) {
    cell.read = now | (epoch_of(last) == epoch_of(now) ? last & (3ull << kMask) : 0);
  } else {
    // A reader of another SIMD-group is ordered by fewer barriers, so it is the one to keep.
    bool keep = cell.other_read && run_of(cell.other_read) == run_of(now) &&
                epoch_of(cell.other_read) == epoch_of(now) &&
                thread_of(cell.other_read) / kLanes != thread_of(now) / kLanes;
    if (last && !keep) cell.other_read = last, cell.other_read_site = cell.read_site;
    cell.read = now;
  }
  cell.read_site = site;
}

}  // namespace

void Shadow::access(
    uint64_t offset, uint64_t bytes, bool reads, bool writes, bool atomic, Memory memory,
    bool begins_unwritten, uint32_t site, const Name& name) {
  uint32_t thread = group.current->index;
  uint32_t epoch = group.epoch[memory],
           simd_epoch = group.simdgroups[thread / kLanes].epoch[memory];
  if (epoch > kMaxEpoch || simd_epoch > kMaxSimdEpoch) {
    fatal(
        "too many barriers", site,
        "more barriers in one threadgroup than the simulator can tell apart");
  }
  Stamp base = uint64_t(launch.run) << kRun | uint64_t(thread) << kThread |
               uint64_t(epoch) << kEpoch | uint64_t(simd_epoch) << kSimdEpoch |
               (atomic ? kAtomic : 0);
  Cell* cells = static_cast<Cell*>(cells_.get());
  for (uint64_t at = offset & ~1ull; at < offset + bytes; at += 2) {
    Cell& cell = cells[at / 2];
    uint64_t mask = (at >= offset ? 1 : 0) | (at + 1 >= offset && at + 1 < offset + bytes ? 2 : 0);
    Stamp now = base | mask << kMask;
    uint32_t written =
        memory == kThreadgroup && cell.written >> 2 != launch.run ? 0 : cell.written & 3;
    if (reads) {
      if (begins_unwritten && (written & mask) != mask) {
        fault(
            "uninitialised", site, 0,
            name() + " is read before anything was written there, by " +
                thread_name(thread, launch.run) + " at " + place(site));
      }
      if (unordered(cell.write, now, memory)) {
        race("written", cell.write, cell.write_site, "read", site, name);
      }
      if (!writes) remember_read(cell, now, site);
    }
    if (writes) {
      if (unordered(cell.write, now, memory)) {
        race("written", cell.write, cell.write_site, "written", site, name);
      }
      if (unordered(cell.read, now, memory))
        race("read", cell.read, cell.read_site, "written", site, name);
      if (unordered(cell.other_read, now, memory)) {
        race("read", cell.other_read, cell.other_read_site, "written", site, name);
      }
      cell.write = now;
      cell.write_site = site;
      cell.written = launch.run << 2 | written | uint32_t(mask);
    }
  }
}

}  // namespace sim
