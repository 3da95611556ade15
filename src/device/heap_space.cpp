#include "device/heap_space.h"

#include <algorithm>
#include <iterator>

namespace switchyard {

std::optional<std::int64_t> HeapSpace::take(std::int64_t bytes) {
  const auto found =
      std::ranges::find_if(free_, [&](const auto& part) { return part.second >= bytes; });
  if (found == free_.end()) return std::nullopt;
  const auto [offset, room] = *found;
  free_.erase(found);
  if (room > bytes) free_.emplace(offset + bytes, room - bytes);
  used_.emplace(offset, bytes);
  return offset;
}

void HeapSpace::give_back(std::int64_t offset) {
  const auto used = used_.extract(offset);
  add_free(offset, used.mapped());
}

void HeapSpace::add_free(std::int64_t offset, std::int64_t bytes) {
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace switchyard
