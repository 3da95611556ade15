// Which parts of a range of offsets are in use: first fit, and neighbours that are free are one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace switchyard {

class HeapSpace {
 public:
  // More room at the end.
  void grow(std::int64_t bytes);
  // The offset of so many bytes, if there is room.
  std::optional<std::int64_t> take(std::int64_t bytes);
  // Needs no memory.
  void give_back(std::int64_t offset) noexcept;

  // Where it ends.
  std::int64_t end() const { return end_; }

 private:
  using Parts = std::map<std::int64_t, std::int64_t>;  // offset, bytes

  void add_free(Parts::node_type part) noexcept;

  std::int64_t end_ = 0;
  Parts free_;
  Parts used_;
};

}  // namespace switchyard
