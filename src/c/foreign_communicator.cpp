// SPDX-License-Identifier: Apache-2.0
// Implements a communicator over the program's own functions. Before a collective moves data, the
// ranks compare which call they are in and its size, because frameworks do not check that.
#include "c/foreign_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/require.h"

namespace switchyard::c {
namespace {

// The call that a rank is in, which ranks compare.
struct Call {
  std::array<char, 24> operation = {};
  std::array<char, 32> detail = {};
  std::int64_t number = 0;
  std::int64_t bytes = 0;  // equal on all ranks; for all_to_all, the bytes of a row
};

template <std::size_t N>
std::array<char, N> letters(std::string_view text) {
  std::array<char, N> kept{};
  std::copy_n(text.begin(), std::min(text.size(), N - 1), kept.begin());
  return kept;
}

std::string in_words(const Call& call) {
  return fmt::format("{} #{} ({}, {} bytes)", call.operation.data(), call.number,
                     call.detail.data(), call.bytes);
}

class ForeignCommunicator final : public Communicator {
 public:
  ForeignCommunicator(int rank, int size, std::chrono::milliseconds timeout,
                      const switchyard_comm_functions& functions, void* context)
      : Communicator(rank, size, timeout), functions_(functions), context_(context) {}

  std::string_view backend() const override { return "foreign"; }

 protected:
  void do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) override {
    meet(row_bytes);
    const auto in_bytes = [row_bytes](std::span<const std::int64_t> rows) {
      std::vector<std::int64_t> bytes(rows.begin(), rows.end());
      for (auto& count : bytes) count *= row_bytes;
      return bytes;
    };
    const auto sent = in_bytes(send.rows);
    const auto received = in_bytes(recv.rows);
    // Senders announce their sizes, which must match what the receivers expect.
    std::vector<std::int64_t> announced(static_cast<std::size_t>(size()));
    const std::vector<std::int64_t> one_each(announced.size(), sizeof(std::int64_t));
    check(functions_.all_to_all(context_, sent.data(), one_each.data(), announced.data(),
                                one_each.data()));
    for (int r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      require(announced[i] == received[i], "{}: rank {} sends {} bytes, but rank {} expects {}",
              current_call(), r, announced[i], rank(), received[i]);
    }
    check(functions_.all_to_all(context_, send.data, sent.data(), recv.data, received.data()));
  }

  void do_all_gather(const Bytes& send, const Bytes& recv) override {
    meet(send.bytes);
    check(functions_.all_gather(context_, send.data, recv.data, send.bytes));
  }

  void do_broadcast(const Bytes& values, int root) override {
    meet(values.bytes);
    check(functions_.broadcast(context_, values.data, values.bytes, root));
  }

  void do_barrier() override { meet(0); }

  std::unique_ptr<Communicator> do_split(int /*color*/, int /*key*/) override {
    throw Unsupported(
        "a framework's communicator cannot be split: make the smaller group with the framework");
  }

  void do_abort(const std::string& reason, const std::vector<int>& /*culprits*/) override {
    functions_.give_up(context_, reason.c_str());
  }

 private:
  void meet(std::int64_t bytes) const {
    const Call own{.operation = letters<24>(operation()),
                   .detail = letters<32>(detail()),
                   .number = static_cast<std::int64_t>(sequence()),
                   .bytes = bytes};
    std::vector<Call> all(static_cast<std::size_t>(size()));
    check(functions_.all_gather(context_, &own, all.data(), sizeof(Call)));
    for (int r = 0; r < size(); ++r) {
      const Call& other = all[static_cast<std::size_t>(r)];
      if (std::memcmp(&other, all.data(), sizeof(Call)) == 0) continue;
      throw CommunicationError(fmt::format("ranks are in different calls: rank 0 in {}, rank {} in "
                                           "{}",
                                           in_words(all[0]), r, in_words(other)),
                               {r});
    }
  }

  void check(int result) const {
    if (result == switchyard_ok) return;
    const std::string what = fmt::format("{}: {}", current_call(), switchyard_last_error());
    throw CommunicationError(what, {});
  }

  switchyard_comm_functions functions_;
  void* context_;
};

}  // namespace

std::unique_ptr<Communicator> make_foreign_communicator(int rank, int size,
                                                        std::chrono::milliseconds timeout,
                                                        const switchyard_comm_functions& functions,
                                                        void* context) {
  require(size > 0 && 0 <= rank && rank < size, "rank ({}) must be one of {}", rank, size);
  require(functions.all_to_all != nullptr && functions.all_gather != nullptr &&
              functions.broadcast != nullptr && functions.barrier != nullptr &&
              functions.give_up != nullptr,
          "a function of the communicator is a null pointer");
  return std::make_unique<ForeignCommunicator>(rank, size, timeout, functions, context);
}

}  // namespace switchyard::c
