// SPDX-License-Identifier: Apache-2.0
#include "device/heap_space.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace switchyard {

std::optional<std::int64_t> HeapSpace::take(std::int64_t bytes) {
  const auto found =
      std::ranges::find_if(free_, [&](const auto& part) { return part.second >= bytes; });
  if (found == free_.end()) return std::nullopt;
  const std::int64_t offset = found->first;
  used_.emplace(offset, bytes);
  if (found->second == bytes) {
    free_.erase(found);
    return offset;
  }
  auto rest = free_.extract(found);
  rest.key() += bytes;
  rest.mapped() -= bytes;
  free_.insert(std::move(rest));
  return offset;
}

void HeapSpace::grow(std::int64_t bytes) {
  Parts part{{end_, bytes}};
  add_free(part.extract(part.begin()));
  end_ += bytes;
}

void HeapSpace::give_back(std::int64_t offset) noexcept { add_free(used_.extract(offset)); }

void HeapSpace::add_free(Parts::node_type part) noexcept {
  auto after = free_.lower_bound(part.key());
  if (after != free_.end() && part.key() + part.mapped() == after->first) {
    part.mapped() += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == part.key()) {
      before->second += part.mapped();
      return;
    }
  }
  free_.insert(std::move(part));
}

}  // namespace switchyard
