// Which parts of a range of offsets are in use: first fit, and neighbours that are free are one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace switchyard {

class HeapSpace {
 public:
  // More room at the end.
  void grow(std::int64_t bytes) {
    add_free(end_, bytes);
    end_ += bytes;
  }
  // The offset of so many bytes, if there is room.
  std::optional<std::int64_t> take(std::int64_t bytes);
  void give_back(std::int64_t offset);

  // Where it ends.
  std::int64_t end() const { return end_; }

 private:
  void add_free(std::int64_t offset, std::int64_t bytes);

  std::int64_t end_ = 0;
  std::map<std::int64_t, std::int64_t> free_;  // offset, bytes
  std::map<std::int64_t, std::int64_t> used_;
};

}  // namespace switchyard
