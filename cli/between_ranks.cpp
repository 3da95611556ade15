// SPDX-License-Identifier: Apache-2.0
#include "between_ranks.h"

#include <algorithm>
#include <cstring>

#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

// Where a rank's error came from. Errors of the rank itself take precedence.
enum class Cause { none, another_rank, this_rank };

std::string first_error(Communicator& comm, const std::string& mine, Cause cause) {
  const auto causes = gather_numbers(comm, {static_cast<double>(cause)});
  const auto worst = std::max_element(causes.begin(), causes.end());
  if (*worst == static_cast<double>(Cause::none)) return {};
  constexpr std::size_t kMostBytes = 1024;
  std::vector<double> text(kMostBytes / sizeof(double));
  std::memcpy(text.data(), mine.data(), std::min(mine.size(), kMostBytes - 1));
  const auto all = gather_numbers(comm, text);
  const auto rank = static_cast<std::size_t>(worst - causes.begin());
  return reinterpret_cast<const char*>(all.data() + rank * text.size());
}

}  // namespace

// There are no tensors of doubles, so this sends their bits as i64.
std::vector<double> gather_numbers(Communicator& comm, const std::vector<double>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  Tensor mine({count}, Dtype::i64);
  Tensor all({comm.size() * count}, Dtype::i64);
  std::memcpy(mine.data(), values.data(), static_cast<std::size_t>(mine.bytes()));
  comm.all_gather(mine, all);
  std::vector<double> result(static_cast<std::size_t>(all.rows()));
  std::memcpy(result.data(), all.data(), static_cast<std::size_t>(all.bytes()));
  return result;
}

std::int64_t reduce_number(Communicator& comm, std::int64_t value, ReduceOp op) {
  Tensor result = Tensor::from<std::int64_t>({1}, {value});
  comm.all_reduce(result, op);
  return result.span<std::int64_t>()[0];
}

std::string try_on_ranks(Communicator& comm, const std::function<void(Communicator&)>& body) {
  std::string error;
  auto cause = Cause::none;
  const auto ranks = comm.split(0, comm.rank());
  try {
    body(*ranks);
  } catch (const std::exception& caught) {
    error = caught.what();
    cause = dynamic_cast<const CommunicationError*>(&caught) != nullptr ? Cause::another_rank
                                                                        : Cause::this_rank;
    ranks->abort(error);
  }
  return first_error(comm, error, cause);
}

}  // namespace switchyard::cli
