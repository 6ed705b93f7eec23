// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Stands in for csrc/cuda/kernels/copy_ring.h where kernels run on the CPU. The copies of a stage
// happen when somebody has waited for it, or (`copies_at_once`) when they are asked for.

#pragma once

#include "../fibers.h"

struct CUtensorMap {
  const unsigned char* data;
  int item_bytes;
  int rows;
  int columns;
  int stride;  // elements
  int box_rows;
  int box_columns;
  bool is_swizzled;
};

#include "operand_maps.h"

namespace mlx_paged::cuda {

struct BoxCopy {
  unsigned int to;
  CUtensorMap map;
  int column;
  int row;

  int bytes() const { return map.box_rows * map.box_columns * map.item_bytes; }

  void run() const {
    for (int r = 0; r < map.box_rows; r++) {
      for (int c = 0; c < map.box_columns; c++) {
        unsigned int at = to + (r * map.box_columns + c) * map.item_bytes;
        if (map.is_swizzled) {
          at ^= (at >> 7 & 7) << 4;  // by where a row is in shared memory
        }
        unsigned char* item = fibers::block->shared + at;
        if (row + r < map.rows && column + c < map.columns) {
          size_t from = (size_t(row + r) * map.stride + column + c) * map.item_bytes;
          std::memcpy(item, map.data + from, map.item_bytes);
        } else {
          std::memset(item, 0, map.item_bytes);
        }
      }
    }
  }
};

struct PlainCopy {
  unsigned int to;
  const void* from;
  int bytes;

  void run() const { std::memcpy(fibers::block->shared + to, from, bytes); }
};

struct StageState {
  int turns = 0;  // that bytes are expected of, the last of them now
  int missing = 0;
  int released = 0;
  std::vector<BoxCopy> open;
  std::vector<PlainCopy> open_plain;
};

inline thread_local std::vector<StageState> stage_states;
inline thread_local int stage_readers;

constexpr int copy_ring_bytes(int stages);

template <int STAGES>
struct CopyRing {
  unsigned int barriers;

  void begin(int readers) const {
    fibers::require(barriers % 8 == 0, "barriers are aligned");
    fibers::require(
        int(barriers) + copy_ring_bytes(STAGES) <= fibers::block->limit, "barriers have room");
    stage_states.assign(STAGES, {});
    stage_readers = readers;
  }

  void expect(int stage, int round, int bytes) const {
    StageState& state = stage_states.at(stage);
    while (state.released < round * stage_readers) {
      fibers::yield();
    }
    fibers::require(state.turns == round && state.missing == 0, "turns come in order");
    state.turns++;
    state.missing = bytes;
  }

  void expect_at_once(int stage, int bytes) const {
    StageState& state = stage_states.at(stage);
    fibers::require(state.missing == 0, "turns come in order");
    state.turns++;
    state.missing = bytes;
  }

  void wait_until_released(int stage, int round) const {
    while (stage_states.at(stage).released < (round + 1) * stage_readers) {
      fibers::yield();
    }
  }

  void copy(
      int stage, unsigned int to, const CUtensorMap* map, int column, int row,
      paged::CachePolicy) const {
    BoxCopy box{to, *map, column, row};
    // (Also of what is not swizzled: the hardware stops otherwise.)
    fibers::require(column * map->item_bytes % 16 == 0, "boxes begin at multiples of 16 bytes");
    fibers::require(map->stride * map->item_bytes % 16 == 0, "rows are multiples of 16 bytes");
    bool has_rows = map->is_swizzled && map->box_rows > 1;
    fibers::require(to % (has_rows ? 1024 : 128) == 0, "boxes are aligned");
    fibers::require(to + box.bytes() <= barriers, "boxes lie before the barriers");
    StageState& state = stage_states[stage];
    state.missing -= box.bytes();
    fibers::require(state.missing >= 0, "no more is copied than is expected");
    if (fibers::copies_at_once) {
      box.run();
    } else {
      state.open.push_back(box);
    }
  }

  void wait_until_full(int stage, int round) const {
    StageState& state = stage_states.at(stage);
    while (state.turns < round + 1 || state.missing > 0) {
      fibers::yield();
    }
    for (const BoxCopy& box : state.open) {
      box.run();
    }
    for (const PlainCopy& copy : state.open_plain) {
      copy.run();
    }
    state.open.clear();
    state.open_plain.clear();
  }

  void copy_bytes(
      int stage, unsigned int to, const void* from, int bytes, paged::CachePolicy) const {
    fibers::require(
        (to | bytes | reinterpret_cast<size_t>(from)) % 16 == 0, "copies are of 16 bytes");
    fibers::require(to + bytes <= barriers, "copies lie before the barriers");
    StageState& state = stage_states[stage];
    state.missing -= bytes;
    fibers::require(state.missing >= 0, "no more is copied than is expected");
    if (fibers::copies_at_once) {
      PlainCopy{to, from, bytes}.run();
    } else {
      state.open_plain.push_back({to, from, bytes});
    }
  }

  void release(int stage, int lane, unsigned int none = 0) const {
    __syncwarp();
    if (lane == 0) {
      stage_states[stage].released++;
    }
  }
};

inline bool is_last(unsigned int counter, int warps) {
  unsigned int& before = fibers::shared_at<unsigned int>(counter);
  before = (before + 1) % warps;
  return before == 0;
}

inline int cluster_size() {
  return fibers::block->cluster->size;
}

}  // namespace mlx_paged::cuda
