#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "shadow.h"
#include "state.h"

namespace sim {
namespace {

// Regions lie 4 GB apart, so an index that leaves its buffer does not land in another one.
constexpr int kRegionBits = 32;
constexpr uint64_t kRegionBytes = 1ull << kRegionBits;
// Buffers of gigabytes, such as pools that are mostly untouched, lie 256 GB apart in an arena of
// their own. They are copied in page by page, when a page is touched first.
constexpr int kLargeBits = 38;
constexpr uint64_t kLarge = 1ull << 30;
constexpr uint32_t kMaxLarge = 4;
constexpr uint64_t kPage = 4096;
constexpr uint32_t kMaxRegions = 64;
constexpr uint32_t kThreadgroupRegion = 0, kFirstBuffer = 1;
// Threadgroup variables: 64 places of 128 KB in their region.
constexpr int kVariableBits = 17;
constexpr uint32_t kMaxVariables = 64;
constexpr unsigned char kPoison = 0xff;

struct Region {
  uint64_t base = 0, bytes = 0;
  uint32_t access = 0;
  void* host = nullptr;
  uint64_t mapped = 0;
  std::string name;
  bool large = false;
  std::vector<bool> fetched;  // pages of a large one
  Shadow shadow;
  Touched read, written;
  uint64_t bytes_read = 0, bytes_written = 0;
};
struct Variable {
  uint64_t bytes = 0;
  uint32_t site = 0;  // of its declaration, + 1; 0: a host-sized argument
  uint32_t argument = ~0u;
  uint32_t run = 0;  // threadgroup that it was last made for
};

uint64_t arena, large_arena;
uint32_t large_regions[kMaxLarge], num_large;
Region regions[kMaxRegions];
uint32_t num_regions = kFirstBuffer;
uint32_t region_of_index[METAL_SIM_MAX_BUFFERS];
Variable variables[kMaxVariables];
uint32_t num_variables;

// `count` places of 2^bits bytes.
struct Places {
  void* memory;
  uint64_t bytes;
};
Places arena_places, large_places;

void reserve(Places& places, uint64_t& start, int bits, uint32_t count) {
  if (start) return;
  uint64_t each = 1ull << bits;
  places.bytes = each * (count + 1);
  void* memory = places.memory = mmap(
      nullptr, places.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("metal simulator: mmap of the arena");
    abort();
  }
  start = (reinterpret_cast<uint64_t>(memory) + each - 1) & ~(each - 1);
}

void reserve_arena() {
  reserve(arena_places, arena, kRegionBits, kMaxRegions);
}

// Addresses are many, but there are as many kernels in a process as tests compile, each with places
// of its own.
void release(Places& places, uint64_t& start) {
  if (start) munmap(places.memory, places.bytes);
  start = 0;
}

uint64_t region_start(uint32_t region) {
  return arena + region * kRegionBytes + kRegionBytes / 4;
}

void open_memory(uint64_t start, uint64_t bytes) {
  uint64_t first = start & ~uint64_t(16383), last = (start + bytes + 16383) & ~uint64_t(16383);
  if (mprotect(reinterpret_cast<void*>(first), last - first, PROT_READ | PROT_WRITE)) {
    perror("metal simulator: mprotect");
    abort();
  }
}

uint64_t place_of(uint32_t number, bool large) {
  if (!large) return region_start(number);
  reserve(large_places, large_arena, kLargeBits, kMaxLarge);
  if (num_large == kMaxLarge) {
    fprintf(stderr, "metal simulator: more than %u buffers of a gigabyte\n", kMaxLarge);
    abort();
  }
  large_regions[num_large] = number;
  return large_arena + (uint64_t(num_large++) << kLargeBits) + (1ull << kLargeBits) / 4;
}

// The region that an address belongs to, or lies just outside of; num_regions: none.
uint32_t region_at(uint64_t address) {
  uint64_t number = (address - arena) >> kRegionBits;
  if (number < num_regions) return uint32_t(number);
  uint64_t large = (address - large_arena) >> kLargeBits;
  return large < num_large ? large_regions[large] : num_regions;
}

void copy_page(Region& r, uint64_t page, bool in) {
  uint64_t offset = page * kPage, bytes = std::min(kPage, r.bytes - offset);
  void* ours = reinterpret_cast<char*>(r.base) + offset;
  void* theirs = static_cast<char*>(r.host) + offset;
  memcpy(in ? ours : theirs, in ? theirs : ours, bytes);
}

void fetch(Region& r, uint64_t offset, uint64_t bytes) {
  for (uint64_t page = offset / kPage; page <= (offset + bytes - 1) / kPage; page++) {
    if (!r.fetched[page]) copy_page(r, page, true);
    r.fetched[page] = true;
  }
}

uint32_t new_region(
    const void* host, uint64_t bytes, uint32_t access, const std::string& name, uint64_t offset) {
  reserve_arena();
  if (num_regions == kMaxRegions) {
    fprintf(stderr, "metal simulator: more than %u buffers\n", kMaxRegions);
    abort();
  }
  uint32_t number = num_regions++;
  Region& r = regions[number];
  r = Region{};
  r.large = bytes >= kLarge && access & METAL_SIM_READ;
  r.base = place_of(number, r.large) + offset % 256;
  r.bytes = bytes;
  r.access = access;
  r.host = const_cast<void*>(host);
  r.name = name;
  open_memory(r.base, std::max<uint64_t>(bytes, 1));
  r.mapped = bytes;
  if (r.large)
    r.fetched.assign(bytes / kPage + 1, false);
  else if (access & METAL_SIM_READ)
    memcpy(reinterpret_cast<void*>(r.base), host, bytes);
  else
    memset(reinterpret_cast<void*>(r.base), kPoison, bytes);
  if (access & METAL_SIM_WRITE) r.shadow.open(bytes);
  r.read.open(bytes);
  if (access & METAL_SIM_WRITE) r.written.open(bytes);
  return number;
}

uint32_t new_variable(uint64_t bytes, uint32_t site, uint32_t argument) {
  reserve_arena();
  Region& r = regions[kThreadgroupRegion];
  if (!r.base) {
    r.base = region_start(kThreadgroupRegion);
    r.bytes = uint64_t(kMaxVariables) << kVariableBits;
    r.access = METAL_SIM_READ_WRITE;
    open_memory(r.base, r.bytes);
  }
  if (num_variables == kMaxVariables) return ~0u;
  if (!r.shadow.is_open()) r.shadow.open(r.bytes);
  variables[num_variables] = {bytes, site, argument, 0};
  launch.report->threadgroup_bytes += (bytes + 15) / 16 * 16;
  return num_variables++;
}

uint64_t variable_address(uint32_t v) {
  Variable& variable = variables[v];
  uint64_t address = regions[kThreadgroupRegion].base + (uint64_t(v) << kVariableBits);
  if (variable.run != launch.run) {
    memset(reinterpret_cast<void*>(address), kPoison, variable.bytes);
    variable.run = launch.run;
  }
  return address;
}

std::string variable_name(const Variable& v) {
  return v.site ? "the threadgroup variable of " + place(v.site - 1)
                : "[[threadgroup(" + std::to_string(v.argument) + ")]]";
}

std::string byte_of_variable(const void* variable, uint64_t offset) {
  return "byte " + std::to_string(offset) + " of " +
         variable_name(*static_cast<const Variable*>(variable));
}

std::string byte_of_region(const void* region, uint64_t offset) {
  return "byte " + std::to_string(offset) + " of " + static_cast<const Region*>(region)->name;
}

bool on_own_stack(uint64_t address) {
  uint64_t stack = reinterpret_cast<uint64_t>(group.current->stack);
  return address - stack < kStackBytes;
}

// Program-scope constants, and literals that the compiler keeps in memory.
void check_program_scope(uint64_t address, uint64_t bytes, bool writes, uint32_t site) {
  for (uint32_t i = 0; i < sim_num_constants; i++) {
    const SimConstant& c = sim_constants[i];
    if (address - reinterpret_cast<uint64_t>(c.address) >= c.bytes) continue;
    if (writes) break;
    if (!launch.constants_defined[i]) {
      fault(
          "function constant", site, 0,
          "function constant " + std::to_string(c.index) + " is read at " + place(site) +
              " but has no value in this launch");
    }
    return;
  }
  if (launch.initialising) return;
  for (uint32_t i = 0; i < sim_num_globals && !writes; i++) {
    uint64_t offset = address - reinterpret_cast<uint64_t>(sim_globals[i].address);
    if (offset < sim_globals[i].bytes && offset + bytes <= sim_globals[i].bytes) return;
  }
  char text[160];
  snprintf(
      text, sizeof text,
      "%s of %llu bytes at %#llx, which is in no buffer, variable or constant, at ",
      writes ? "write" : "read", (unsigned long long)bytes, (unsigned long long)address);
  fatal(
      "out of bounds", site,
      text + place(site) + " by " + thread_name(group.current->index, launch.run));
}

[[noreturn]] void out_of_bounds(
    uint64_t offset, uint64_t bytes, uint64_t size, bool writes, uint32_t site,
    const std::string& name) {
  fatal(
      "out of bounds", site,
      std::string(writes ? "write" : "read") + " of " + std::to_string(bytes) + " bytes at byte " +
          std::to_string(int64_t(offset)) + " of " + name + ", which has " + std::to_string(size) +
          ", at " + place(site) + " by " + thread_name(group.current->index, launch.run));
}

void check(uint64_t address, uint64_t bytes, bool reads, bool writes, bool atomic, uint32_t site) {
  uint32_t number = region_at(address);
  if (number >= num_regions || bytes == 0) {
    if (bytes && !on_own_stack(address)) check_program_scope(address, bytes, writes, site);
    return;
  }
  if (address % sim_sites[site].align) {
    fatal(
        "misaligned", site,
        std::string(writes ? "write" : "read") + " of " + std::to_string(bytes) +
            " bytes at an address that is " + std::to_string(address % sim_sites[site].align) +
            " bytes past a multiple of " + std::to_string(sim_sites[site].align) + ", at " +
            place(site) + " by " + thread_name(group.current->index, launch.run));
  }
  Region& r = regions[number];
  uint64_t offset = address - r.base;
  if (number == kThreadgroupRegion) {
    uint64_t v = offset >> kVariableBits, inside = offset & ((1u << kVariableBits) - 1);
    if (v >= num_variables) out_of_bounds(offset, bytes, 0, writes, site, "threadgroup memory");
    if (inside + bytes > variables[v].bytes) {
      // Past the middle between two variables it is the next one's negative index.
      bool before = inside > (1u << kVariableBits) / 2 && v + 1 < num_variables;
      const Variable& variable = variables[before ? v + 1 : v];
      out_of_bounds(
          before ? inside - (1u << kVariableBits) : inside, bytes, variable.bytes, writes, site,
          variable_name(variable));
    }
    r.shadow.access(
        offset, bytes, reads, writes, atomic, kThreadgroup, true, site,
        {byte_of_variable, &variables[v], inside});
    return;
  }
  if (offset > r.bytes || offset + bytes > r.bytes)
    out_of_bounds(offset, bytes, r.bytes, writes, site, r.name);
  if (writes && !(r.access & METAL_SIM_WRITE)) {
    fatal(
        "read-only", site,
        "write to byte " + std::to_string(offset) + " of " + r.name + ", which is only read, at " +
            place(site) + " by " + thread_name(group.current->index, launch.run));
  }
  if (r.large) fetch(r, offset, bytes);
  if (reads) {
    r.bytes_read += bytes;
    r.read.mark(offset, bytes);
  }
  if (writes) {
    r.bytes_written += bytes;
    r.written.mark(offset, bytes);
  }
  if (r.shadow.is_open()) {
    r.shadow.access(
        offset, bytes, reads, writes, atomic, kDevice, !(r.access & METAL_SIM_READ), site,
        {byte_of_region, &r, offset});
  }
}

}  // namespace

uint64_t bind_buffer(const MetalSimBuffer& buffer) {
  std::string name = "buffer " + std::to_string(buffer.index);
  if (buffer.label && *buffer.label) name += std::string(" '") + buffer.label + "'";
  for (uint32_t i = kFirstBuffer; i < num_regions; i++) {
    Region& r = regions[i];
    if (r.host != buffer.data || r.bytes != buffer.bytes || !buffer.bytes) continue;
    if (r.access != buffer.access) {  // as input here and as output there
      r.access |= buffer.access | METAL_SIM_READ;
      if (!r.large) memcpy(reinterpret_cast<void*>(r.base), buffer.data, buffer.bytes);
      if (!r.shadow.is_open()) r.shadow.open(r.bytes), r.written.open(r.bytes);
    }
    region_of_index[buffer.index] = i;
    return r.base;
  }
  region_of_index[buffer.index] = new_region(buffer.data, buffer.bytes, buffer.access, name, buffer.offset);
  return buffer_address(buffer.index);
}

uint64_t bind_bytes(const MetalSimBytes& bytes) {
  alignas(16) static char copy[4096];  // aligned as Metal's are; setBytes takes no more
  memcpy(copy, bytes.data, bytes.bytes);
  std::string name = "the bytes at index " + std::to_string(bytes.index);
  region_of_index[bytes.index] = new_region(copy, bytes.bytes, METAL_SIM_READ, name, 0);
  regions[region_of_index[bytes.index]].host = nullptr;
  return buffer_address(bytes.index);
}

uint64_t buffer_address(uint32_t index) {
  uint32_t region = index < METAL_SIM_MAX_BUFFERS ? region_of_index[index] : 0;
  return region ? regions[region].base : 0;
}

uint64_t threadgroup_argument(uint32_t index, uint64_t bytes) {
  for (uint32_t v = 0; v < num_variables; v++) {
    if (!variables[v].site && variables[v].argument == index) return variable_address(v);
  }
  return variable_address(new_variable(bytes, 0, index));
}

void begin_threadgroup() {
  for (uint32_t v = 0; v < num_variables; v++) variable_address(v);
}

void end_launch(const MetalSimLaunch& args, MetalSimReport& report) {
  report.num_traffic = 0;
  for (uint32_t index = 0; index < METAL_SIM_MAX_BUFFERS; index++) {
    if (!region_of_index[index]) continue;
    const Region& r = regions[region_of_index[index]];
    report.traffic[report.num_traffic++] = {
        index, r.bytes_read, r.bytes_written, r.read.count(), r.written.count()};
  }
  for (uint32_t i = kFirstBuffer; i < num_regions; i++) {
    Region& r = regions[i];
    if (r.large) {
      for (uint64_t page = 0; r.access & METAL_SIM_WRITE && page < r.fetched.size(); page++)
        if (r.fetched[page]) copy_page(r, page, false);
    } else if (r.access & METAL_SIM_WRITE && r.host) {
      memcpy(r.host, reinterpret_cast<void*>(r.base), r.bytes);
    }
    r.shadow.close(), r.read.close(), r.written.close();
  }
  regions[kThreadgroupRegion].shadow.close();
  num_regions = kFirstBuffer;
  num_large = 0;
  release(arena_places, arena);
  release(large_places, large_arena);
  regions[kThreadgroupRegion].base = 0;
  num_variables = 0;
  memset(region_of_index, 0, sizeof region_of_index);
  (void)args;
}

}  // namespace sim

using namespace sim;

extern "C" {

void __sim_read(uint64_t address, uint64_t bytes, uint32_t site) {
  check(address, bytes, true, false, false, site);
}
void __sim_write(uint64_t address, uint64_t bytes, uint32_t site) {
  check(address, bytes, false, true, false, site);
}
// writes: 0 a load, 1 read and written, 2 a store
void __sim_atomic(uint64_t address, uint32_t bytes, uint32_t writes, uint32_t site) {
  check(address, bytes, writes != 2, writes != 0, true, site);
}
uint64_t __sim_buffer(uint32_t index) {
  return buffer_address(index);
}

uint64_t __sim_threadgroup_argument(uint32_t index) {
  for (uint32_t i = 0; i < launch.args->num_threadgroup; i++) {
    const MetalSimThreadgroup& t = launch.args->threadgroup[i];
    if (t.index == index) return threadgroup_argument(index, t.bytes);
  }
  return 0;  // an access says so
}

uint64_t __sim_threadgroup_variable(uint64_t bytes, uint32_t align, uint32_t site) {
  (void)align;  // variables begin at multiples of 128 KB
  for (uint32_t v = 0; v < num_variables; v++) {
    if (variables[v].site == site + 1) return variable_address(v);
  }
  uint32_t v = new_variable(bytes, site + 1, ~0u);
  if (v == ~0u || bytes > kMaxThreadgroupBytes ||
      launch.report->threadgroup_bytes > kMaxThreadgroupBytes) {
    fatal(
        "threadgroup memory", site,
        "threadgroup memory grows to " + std::to_string(launch.report->threadgroup_bytes) +
            " bytes, more than 32768, at " + place(site));
  }
  return variable_address(v);
}

}  // extern "C"
