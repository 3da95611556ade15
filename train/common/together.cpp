#include "common/together.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "switchyard/error.h"
#include "switchyard/tensor.h"

namespace switchyard::train {
namespace {

// The root's on every rank.
std::string broadcast_text(Communicator& comm, const std::string& text, int root) {
  auto bytes = static_cast<std::int64_t>(text.size());
  comm.broadcast(TensorView(&bytes, {1}), root);
  if (bytes == 0) return {};
  constexpr std::int64_t kUnit = sizeof(std::int32_t);
  std::vector<std::int32_t> units(static_cast<std::size_t>((bytes + kUnit - 1) / kUnit));
  if (comm.rank() == root) std::memcpy(units.data(), text.data(), text.size());
  comm.broadcast(TensorView(units.data(), {static_cast<std::int64_t>(units.size())}), root);
  return {reinterpret_cast<const char*>(units.data()), static_cast<std::size_t>(bytes)};
}

}  // namespace

void together(Communicator& comm, const std::function<void()>& work) {
  constexpr std::int64_t kKinds = 2;  // of errors: 0 is a StorageError
  const std::int64_t nobody = comm.size() * kKinds;
  std::int64_t first = nobody;  // rank · kinds + kind
  std::string message;
  try {
    work();
  } catch (const CommunicationError&) {
    throw;
  } catch (const StorageError& error) {
    first = comm.rank() * kKinds;
    message = error.what();
  } catch (const std::exception& error) {
    first = comm.rank() * kKinds + 1;
    message = error.what();
  }
  comm.all_reduce(TensorView(&first, {1}), ReduceOp::min);
  if (first == nobody) return;
  message = broadcast_text(comm, message, static_cast<int>(first / kKinds));
  if (first % kKinds == 0) throw StorageError(message);
  throw InvalidArgument(message);
}

void require_same(Communicator& comm, std::uint64_t mark, const std::string& what) {
  const Tensor own = Tensor::from<std::int64_t>({1}, {static_cast<std::int64_t>(mark)});
  Tensor all({comm.size()}, Dtype::i64);
  comm.all_gather(own, all);
  const auto seen = all.span<std::int64_t>();
  const auto other = std::ranges::find_if(seen, [&](auto value) { return value != seen[0]; });
  if (other == seen.end()) return;
  throw InvalidArgument(
      fmt::format("{} on rank {} differs from the one on rank 0", what, other - seen.begin()));
}

void on_rank_0(Communicator& comm, const std::function<void()>& work) {
  together(comm, [&] {
    if (comm.rank() == 0) work();
  });
}

}  // namespace switchyard::train
