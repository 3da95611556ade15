// SPDX-License-Identifier: Apache-2.0
#include "emulation/ptx.h"

#include "emulation/tensor_map.h"
#include "emulation/work.h"

namespace emulation {
namespace {

// The 128-byte swizzle: within eight lines of 128 bytes, pieces of 16 bytes change places.
std::uint32_t swizzled(std::uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Calls visit(element in the tensor or null, address in shared memory) for each element of the box.
template <typename Visit>
void walk_box(const TensorMap& map, const int (&corner)[4], std::uint32_t shared,
              const Visit& visit) {
  constexpr std::uint32_t kElement = 2;
  if (shared % 1024 != 0) fail("a box at an address that is no multiple of 1024 bytes");
  std::uint32_t address = shared;
  for (int d3 = 0; d3 < static_cast<int>(map.box[3]); ++d3) {
    for (int d2 = 0; d2 < static_cast<int>(map.box[2]); ++d2) {
      for (int d1 = 0; d1 < static_cast<int>(map.box[1]); ++d1) {
        const std::int64_t at[4] = {0, corner[1] + d1, corner[2] + d2, corner[3] + d3};
        bool is_inside = true;
        std::int64_t offset = 0;
        for (int d = 1; d < 4; ++d) {
          is_inside = is_inside && at[d] >= 0 && at[d] < static_cast<std::int64_t>(map.extents[d]);
          offset += at[d] * static_cast<std::int64_t>(map.strides[d - 1]);
        }
        for (int d0 = 0; d0 < static_cast<int>(map.box[0]); ++d0) {
          const std::int64_t column = corner[0] + std::int64_t{d0};
          std::byte* const element =
              is_inside && column >= 0 && column < static_cast<std::int64_t>(map.extents[0])
                  ? map.data + offset + column * kElement
                  : nullptr;
          visit(element, swizzled(address));
          address += kElement;
        }
      }
    }
  }
}

}  // namespace

WorkDone& work_done() {
  static WorkDone work;
  return work;
}

std::size_t bytes_of_box(const CUtensorMap_st& map) {
  const TensorMap& decoded = decode(map);
  return std::size_t{2} * decoded.box[0] * decoded.box[1] * decoded.box[2] * decoded.box[3];
}

void load_box_later(const CUtensorMap_st* map, const int (&corner)[4], std::uint32_t to,
                    std::uint32_t barrier, bool for_both) {
  Thread& thread = self();
  const TensorMap decoded = decode(*map);
  const auto bytes = static_cast<int>(bytes_of_box(*map));
  shared_at(to, static_cast<std::size_t>(bytes));
  work_done().loaded_bytes += static_cast<std::uint64_t>(bytes);
  const auto copy_to = [&](Block& block) {
    thread.block->machine->later([decoded, corner0 = corner[0], corner1 = corner[1],
                                  corner2 = corner[2], corner3 = corner[3], to, barrier, bytes,
                                  &block] {
      const int from[4] = {corner0, corner1, corner2, corner3};
      walk_box(decoded, from, to, [&](const std::byte* element, std::uint32_t address) {
        if (element == nullptr) {
          std::memset(block.shared + address, 0, 2);
        } else {
          std::memcpy(block.shared + address, element, 2);
        }
      });
      complete_bytes(block, barrier, bytes);
    });
  };
  if (!for_both) return copy_to(*thread.block);
  for (const auto& block : thread.block->cluster->blocks) copy_to(*block);
}

void store_box_later(const CUtensorMap_st* map, const int (&corner)[4], std::uint32_t from) {
  Thread& thread = self();
  Block& block = *thread.block;
  const TensorMap decoded = decode(*map);
  shared_at(from, bytes_of_box(*map));
  auto store = [decoded, corner0 = corner[0], corner1 = corner[1], corner2 = corner[2],
                corner3 = corner[3], from, &block] {
    const int to[4] = {corner0, corner1, corner2, corner3};
    walk_box(decoded, to, from, [&](std::byte* element, std::uint32_t address) {
      if (element != nullptr) std::memcpy(element, block.shared + address, 2);
    });
  };
  if (!block.machine->flips(2)) {
    store();
  } else {
    thread.open_stores.push_back(std::move(store));
  }
}

void copy_later(std::uint32_t to, const void* from, std::size_t bytes, std::size_t wanted) {
  Thread& thread = self();
  std::byte* const at = shared_at(to, bytes);
  if (reinterpret_cast<std::uintptr_t>(from) % bytes != 0 && wanted != 0) {
    fail("cp.async from a misaligned address");
  }
  work_done().copied_bytes += wanted;
  auto copy = [at, from, bytes, wanted] {
    if (wanted != 0) std::memcpy(at, from, wanted);
    std::memset(at + wanted, 0, bytes - wanted);
  };
  if (!thread.block->machine->flips(2)) {
    copy();
  } else {
    thread.open_copies.push_back(copy);
  }
}

void arrive_after_copies(std::uint32_t barrier) {
  Thread& thread = self();
  Block& block = *thread.block;
  block.machine->later([&block, barrier, copies = std::move(thread.open_copies)] {
    for (const auto& copy : copies) copy();
    arrive(block, barrier, 0);
  });
  thread.open_copies.clear();
}

void finish_copies(std::deque<Copies>& groups, std::size_t pending) {
  while (groups.size() > pending) {
    for (const auto& copy : groups.front()) copy();
    groups.pop_front();
  }
}

void load_matrices(std::uint32_t* const (&to)[4], std::uint32_t from, bool is_transposed) {
  struct Lane {
    const std::byte* row;
    std::uint32_t* const* to;
  } mine{shared_at(from, 16), to};
  meet_lanes(~0U, &mine, [is_transposed](void** lanes) {
    const auto row = [&](int matrix, int i) {
      return static_cast<const Lane*>(lanes[matrix * 8 + i])->row;
    };
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t pair[2];
        for (int e = 0; e < 2; ++e) {
          const int other = lane % 4 * 2 + e;
          const std::byte* const element =
              is_transposed ? row(matrix, other) + lane / 4 * 2 : row(matrix, lane / 4) + other * 2;
          std::memcpy(&pair[e], element, 2);
        }
        *static_cast<const Lane*>(lanes[lane])->to[matrix] =
            pair[0] | static_cast<std::uint32_t>(pair[1]) << 16;
      }
    }
  });
}

void store_matrices(std::uint32_t to, const std::uint32_t (&values)[4], bool is_transposed) {
  struct Lane {
    std::byte* row;
    const std::uint32_t* values;
  } mine{shared_at(to, 16), values};
  meet_lanes(~0U, &mine, [is_transposed](void** lanes) {
    const auto row = [&](int matrix, int i) {
      return static_cast<const Lane*>(lanes[matrix * 8 + i])->row;
    };
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const std::uint32_t pair = static_cast<const Lane*>(lanes[lane])->values[matrix];
        for (int e = 0; e < 2; ++e) {
          const int other = lane % 4 * 2 + e;
          std::byte* const element =
              is_transposed ? row(matrix, other) + lane / 4 * 2 : row(matrix, lane / 4) + other * 2;
          const auto bits = static_cast<std::uint16_t>(pair >> (16 * e));
          std::memcpy(element, &bits, 2);
        }
      }
    }
  });
}

void multiply_in_warp(float* const (&sums)[4], const std::uint32_t (&a)[4],
                      const std::uint32_t (&b)[2], const float (&c)[4]) {
  struct Lane {
    float* const* sums;
    const std::uint32_t* a;
    const std::uint32_t* b;
    const float* c;
  } mine{sums, a, b, c};
  meet_lanes(~0U, &mine, [](void** lanes) {
    const auto bf16 = [](std::uint32_t pair, int e) {
      const std::uint32_t bits = e == 0 ? pair << 16 : pair & 0xFFFF0000U;
      float value = 0;
      std::memcpy(&value, &bits, 4);
      return value;
    };
    float left[16][16];
    float right[16][8];
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      const auto& from = *static_cast<const Lane*>(lanes[lane]);
      for (int e = 0; e < 2; ++e) {
        const int k = lane % 4 * 2 + e;
        left[lane / 4][k] = bf16(from.a[0], e);
        left[lane / 4 + 8][k] = bf16(from.a[1], e);
        left[lane / 4][k + 8] = bf16(from.a[2], e);
        left[lane / 4 + 8][k + 8] = bf16(from.a[3], e);
        right[k][lane / 4] = bf16(from.b[0], e);
        right[k + 8][lane / 4] = bf16(from.b[1], e);
      }
    }
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      const auto& to = *static_cast<const Lane*>(lanes[lane]);
      float result[4];
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        const int column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        result[i] = to.c[i] + sum;
      }
      for (int i = 0; i < 4; ++i) *to.sums[i] = result[i];
    }
  });
}

}  // namespace emulation
