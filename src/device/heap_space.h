// SPDX-License-Identifier: Apache-2.0
// Allocates parts of a range of offsets: first fit, with adjacent free parts merged.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace switchyard {

class HeapSpace {
 public:
  // Adds free space at the end.
  void grow(std::int64_t bytes);
  // Returns the offset of a part of this size, or nullopt if none is free.
  std::optional<std::int64_t> take(std::int64_t bytes);
  // Allocates no memory.
  void give_back(std::int64_t offset) noexcept;

  // Returns the end of the range, which is its size.
  std::int64_t end() const { return end_; }

 private:
  using Parts = std::map<std::int64_t, std::int64_t>;  // offset to bytes

  void add_free(Parts::node_type part) noexcept;

  std::int64_t end_ = 0;
  Parts free_;
  Parts used_;
};

}  // namespace switchyard
