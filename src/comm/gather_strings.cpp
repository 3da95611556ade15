// SPDX-License-Identifier: Apache-2.0
#include "comm/gather_strings.h"

#include <algorithm>
#include <cstring>

#include "comm/gather_numbers.h"

namespace switchyard {
namespace {

// The first exchange carries the length and as many bytes as fit behind it.
constexpr std::int64_t kHeadWords = 64;
constexpr std::size_t kWordBytes = sizeof(std::int64_t);
constexpr std::size_t kShortBytes = (kHeadWords - 1) * kWordBytes;

const char* chars(const Tensor& rows, std::size_t rank) {
  return reinterpret_cast<const char*>(rows.view().row(static_cast<std::int64_t>(rank)));
}

}  // namespace

std::vector<std::string> gather_strings(Communicator& comm, std::string_view own) {
  Tensor head = Tensor::zeros({1, kHeadWords}, Dtype::i64);
  head.span<std::int64_t>()[0] = static_cast<std::int64_t>(own.size());
  own.copy(reinterpret_cast<char*>(head.data()) + kWordBytes, kShortBytes);
  const Tensor heads = gather_numbers(comm, head.span<std::int64_t>());

  std::vector<std::size_t> lengths;
  std::vector<std::string> result;
  for (std::size_t r = 0; r < static_cast<std::size_t>(comm.size()); ++r) {
    std::int64_t length = 0;
    std::memcpy(&length, chars(heads, r), kWordBytes);
    lengths.push_back(static_cast<std::size_t>(length));
    result.emplace_back(chars(heads, r) + kWordBytes, std::min(lengths.back(), kShortBytes));
  }
  const auto longest = *std::ranges::max_element(lengths);
  if (longest <= kShortBytes) return result;

  const auto words = (longest - kShortBytes + kWordBytes - 1) / kWordBytes;
  Tensor rest = Tensor::zeros({1, static_cast<std::int64_t>(words)}, Dtype::i64);
  if (own.size() > kShortBytes) {
    own.substr(kShortBytes).copy(reinterpret_cast<char*>(rest.data()), own.size() - kShortBytes);
  }
  const Tensor rests = gather_numbers(comm, rest.span<std::int64_t>());
  for (std::size_t r = 0; r < result.size(); ++r) {
    result[r].append(chars(rests, r), lengths[r] - result[r].size());
  }
  return result;
}

}  // namespace switchyard
