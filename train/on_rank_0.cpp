#include "on_rank_0.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

#include "switchyard/error.h"
#include "switchyard/tensor.h"

namespace switchyard::train {
namespace {

// The text of rank 0 on every rank, after its length and one more number.
struct Verdict {
  std::int64_t length = 0;  // of the message; 0: all is well
  std::int64_t is_storage = 0;
};

std::string broadcast_text(Communicator& world, const std::string& text) {
  Tensor bytes({static_cast<std::int64_t>(text.size())}, Dtype::i32);
  std::ranges::copy(text, bytes.span<std::int32_t>().begin());
  world.broadcast(bytes, 0);
  std::string result;
  for (const std::int32_t byte : bytes.span<std::int32_t>()) {
    result += static_cast<char>(byte);
  }
  return result;
}

}  // namespace

void on_rank_0(Communicator& world, const std::function<void()>& fn) {
  std::string message;
  Verdict verdict;
  if (world.rank() == 0) {
    try {
      fn();
    } catch (const StorageError& error) {
      message = error.what();
      verdict.is_storage = 1;
    } catch (const std::exception& error) {
      message = error.what();
    }
    verdict.length = static_cast<std::int64_t>(message.size());
  }
  Tensor shared = Tensor::from<std::int64_t>({2}, {verdict.length, verdict.is_storage});
  world.broadcast(shared, 0);
  verdict = {shared.span<std::int64_t>()[0], shared.span<std::int64_t>()[1]};
  if (verdict.length == 0) return;
  message.resize(static_cast<std::size_t>(verdict.length));
  message = broadcast_text(world, message);
  if (verdict.is_storage != 0) throw StorageError(message);
  throw InvalidArgument(message);
}

}  // namespace switchyard::train
