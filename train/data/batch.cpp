// SPDX-License-Identifier: Apache-2.0
#include "data/batch.h"

#include <fmt/format.h>

#include "switchyard/error.h"

namespace switchyard::train {
namespace {

// A mesh need not have every axis.
int size_of(const Mesh& mesh, std::string_view axis) {
  return mesh.has_axis(axis) ? mesh.size(axis) : 1;
}

int coordinate_of(const Mesh& mesh, std::string_view axis) {
  return mesh.has_axis(axis) ? mesh.coordinate(axis) : 0;
}

void append(std::vector<std::uint8_t>& bytes, std::string_view text) {
  bytes.insert(bytes.end(), text.begin(), text.end());
}

}  // namespace

TokenBatch cut_batch(Mesh& mesh, std::span<const std::string_view> windows, std::int64_t length) {
  for (const auto window : windows) {
    if (static_cast<std::int64_t>(window.size()) == length + 1) continue;
    throw InvalidArgument(
        fmt::format("a window has {} bytes instead of length + 1 ({})", window.size(), length + 1));
  }
  const std::int64_t num_shares = size_of(mesh, "dp") * size_of(mesh, "ep");
  const std::int64_t share =
      coordinate_of(mesh, "dp") * size_of(mesh, "ep") + coordinate_of(mesh, "ep");
  const auto num_windows = static_cast<std::int64_t>(windows.size());
  const auto first = num_windows * share / num_shares;
  const auto last = num_windows * (share + 1) / num_shares;

  TokenBatch batch{
      .shard = SequenceShard(last - first, length, size_of(mesh, "sp"), coordinate_of(mesh, "sp")),
      .tokens = {},
      .targets = {},
      .total_tokens = num_windows * length};
  const auto offset = static_cast<std::size_t>(batch.shard.offset());
  const auto count = static_cast<std::size_t>(batch.shard.count());
  for (auto w = first; w < last; ++w) {
    const auto window = windows[static_cast<std::size_t>(w)];
    append(batch.tokens, window.substr(offset, count));
    append(batch.targets, window.substr(offset + 1, count));
  }
  return batch;
}

}  // namespace switchyard::train
