// SPDX-License-Identifier: Apache-2.0
// MPI collectives that always end: they complete, or fail with an error that names the missing
// ranks.
#include "comm/mpi/mpi_communicator.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <limits>
#include <numeric>
#include <thread>
#include <tuple>

#include "comm/backends.h"
#include "comm/mpi/errors.h"
#include "comm/world_numbers.h"
#include "core/require.h"

namespace switchyard::mpi {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kWatchInterval = std::chrono::milliseconds(1);
constexpr int kEagerTests = 200;  // polls before a waiting rank yields its core

// If a message is longer than its receiver expects, Open MPI writes past the end of the receive
// buffer unless the message is short. A rank that sends more than this first checks with its peers.
constexpr std::int64_t kShortMessage = 1024;

// Before rows travel, each rank tells every other how many it sends, how many it expects, and how
// long they are.
constexpr int kAnnouncement = 3;

std::vector<int> to_counts(std::span<const std::int64_t> rows, std::string_view what) {
  std::vector<int> counts;
  std::int64_t total = 0;
  for (const auto n : rows) {
    total += n;
    require<Unsupported>(total <= std::numeric_limits<int>::max(),
                         "{} rows are too many for one all_to_all, because MPI counts {} in an "
                         "int; send fewer and longer rows, or split the call",
                         total, what);
    counts.push_back(static_cast<int>(n));
  }
  return counts;
}

std::vector<int> offsets_of(const std::vector<int>& counts) {
  std::vector<int> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), 0);
  return offsets;
}

std::int64_t total_of(std::span<const std::int64_t> rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check_call(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  check_call(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

// Returns the rank in `whole` of each rank of `part`.
std::vector<int> ranks_in(MPI_Comm whole, MPI_Comm part) {
  std::vector<int> ranks(static_cast<std::size_t>(size_of(part)));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<int> result(ranks.size());
  MPI_Group of_whole = MPI_GROUP_NULL;
  MPI_Group of_part = MPI_GROUP_NULL;
  check_call(MPI_Comm_group(whole, &of_whole), "MPI_Comm_group");
  check_call(MPI_Comm_group(part, &of_part), "MPI_Comm_group");
  check_call(
      MPI_Group_translate_ranks(of_part, size_of(part), ranks.data(), of_whole, result.data()),
      "MPI_Group_translate_ranks");
  MPI_Group_free(&of_whole);
  MPI_Group_free(&of_part);
  return result;
}

// Says which ranks have arrived, before there is a board.
std::string words_for_arrivals(const RollCall& roll_call, std::span<const int> world_ranks) {
  const auto unseen = words_for_unseen(roll_call.find_unseen(world_ranks));
  return unseen.empty() ? "all ranks have arrived and are alive" : unseen;
}

}  // namespace

MpiCommunicator::MpiCommunicator(std::shared_ptr<Session> session,
                                 std::shared_ptr<RollCall> roll_call, MPI_Comm comm,
                                 std::chrono::milliseconds timeout)
    : Communicator(rank_in(comm), size_of(comm), timeout),
      session_(std::move(session)),
      roll_call_(std::move(roll_call)),
      comm_(comm),
      world_ranks_(ranks_in(MPI_COMM_WORLD, comm)),
      board_(
          std::make_unique<Board>(rank(), std::vector<Hello>(static_cast<std::size_t>(size())))) {}

std::unique_ptr<MpiCommunicator> MpiCommunicator::make(std::shared_ptr<Session> session,
                                                       std::shared_ptr<RollCall> roll_call,
                                                       MPI_Comm comm,
                                                       std::chrono::milliseconds timeout) {
  const ReturnedErrors returned;
  check_call(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  std::unique_ptr<MpiCommunicator> result(
      new MpiCommunicator(std::move(session), std::move(roll_call), comm, timeout));
  result->run_collective("connect", "", [&] { result->open_board(); });
  return result;
}

MpiCommunicator::~MpiCommunicator() {
  give_up_if_unwinding();
  board_->leave();
  if (is_poisoned()) return;
  const WithoutBrokenPipes without_broken_pipes;
  MPI_Comm_free(&comm_);
}

void MpiCommunicator::open_board() {
  const auto bytes_of = [](const auto& values) {
    const auto bytes = [&] {
      if constexpr (std::ranges::range<decltype(values)>) {
        return std::as_bytes(std::span(values));
      } else {
        return std::as_bytes(std::span(&values, 1));
      }
    }();
    return Bytes{const_cast<std::byte*>(bytes.data()), std::ssize(bytes), nullptr};
  };
  const Hello mine = make_hello();
  std::vector<Hello> hellos(static_cast<std::size_t>(size()));
  do_all_gather(bytes_of(mine), bytes_of(hellos));
  board_ = std::make_unique<Board>(rank(), hellos);
  const std::int64_t created = board_->create();
  std::vector<std::int64_t> all_created(static_cast<std::size_t>(size()));
  do_all_gather(bytes_of(created), bytes_of(all_created));
  board_->open(all_created);
  do_barrier();
  board_->close();
  std::ranges::fill(waits(), std::chrono::nanoseconds::zero());  // until here there was no group
}

void MpiCommunicator::check(int code, std::string_view function) const {
  if (code == MPI_SUCCESS) return;
  throw_trouble(find_trouble());  // MPI does not say who is to blame
  throw CommunicationError(fmt::format("{}: {}", current_call(), error_text(code, function)));
}

void MpiCommunicator::enter(std::int64_t unit_bytes) {
  ++phase_;
  board_->enter(
      phase_, detail().empty() ? current_call() : fmt::format("{} ({})", current_call(), detail()),
      unit_bytes);
}

void MpiCommunicator::complete() {
  board_->complete(phase_);
  board_->add_waits(phase_, waits());
}

void MpiCommunicator::fly(const std::shared_ptr<Flight>& flight, std::int64_t unit_bytes,
                          const std::function<void()>& post) {
  const ReturnedErrors returned;
  enter(unit_bytes);
  const auto deadline = Clock::now() + timeout();
  try {
    if (flight->largest_message > kShortMessage) wait_for_entries(deadline);
    post();
    const std::span<MPI_Request> requests(flight->requests);
    if (flight->check_first) {
      wait(requests.first(1), deadline);
      flight->check_first();
    }
    wait(requests, deadline);
  } catch (...) {
    keep_for_good(flight);
    throw;
  }
  // The collective is complete here, but its result is invalid if a peer made another call of the
  // same shape, or gave up before this rank entered.
  throw_trouble(board_->find_breach(phase_));
  complete();
}

void MpiCommunicator::wait(std::span<MPI_Request> requests, Clock::time_point deadline) {
  auto next_watch = Clock::now() + kWatchInterval;
  for (int tests = 0;; ++tests) {
    int done = 0;
    check(
        MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
        "MPI_Testall");
    if (done != 0) return;
    if (tests < kEagerTests) continue;
    std::this_thread::yield();
    if (Clock::now() < next_watch) continue;
    watch_peers(deadline);
    next_watch = Clock::now() + kWatchInterval;
  }
}

void MpiCommunicator::wait_for_entries(Clock::time_point deadline) {
  auto next_watch = Clock::now() + kWatchInterval;
  for (int tests = 0; !board_->has_all(phase_); ++tests) {
    int is_there = 0;  // unused: the probe only drives progress that peers may need
    check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &is_there, MPI_STATUS_IGNORE),
          "MPI_Iprobe");
    if (tests < kEagerTests) continue;
    std::this_thread::yield();
    if (Clock::now() < next_watch) continue;
    watch_peers(deadline);
    next_watch = Clock::now() + kWatchInterval;
  }
  throw_trouble(board_->find_breach(phase_));
}

void MpiCommunicator::throw_trouble(const Board::Trouble& trouble) const {
  if (trouble.reason.empty()) return;
  report_early(trouble);
  throw CommunicationError(
      trouble.is_relayed ? trouble.reason : fmt::format("{}: {}", current_call(), trouble.reason),
      trouble.ranks);
}

void MpiCommunicator::report_early(const Board::Trouble& trouble) const {
  if (roll_call_ == nullptr || operation() != "connect") return;
  const int culprit = trouble.ranks.empty() ? RollCall::kNobody
                                            : number_in_world(world_ranks_, trouble.ranks.front());
  roll_call_->report(
      {culprit, trouble.is_death ? fmt::format("rank {} died", culprit) : trouble.reason});
}

void MpiCommunicator::watch_peers(Clock::time_point deadline) {
  board_->beat();
  throw_trouble(find_early_trouble());
  throw_trouble(find_trouble());
  if (Clock::now() < deadline) return;
  const auto missing = board_->find_missing(phase_);
  const auto seconds = static_cast<double>(timeout().count()) / 1000.0;
  if (!missing.empty()) {
    throw CommunicationError(
        fmt::format("{}: rank{} {} did not arrive within {:g} s", current_call(),
                    missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), seconds),
        missing);
  }
  const auto why = fmt::format("not complete within {:g} s; {}", seconds, words_for_unknown());
  if (!board_->is_open() && roll_call_ != nullptr) roll_call_->report_unseen(world_ranks_, why);
  throw CommunicationError(fmt::format("{}: {}", current_call(), why));
}

Board::Trouble MpiCommunicator::find_early_trouble() const {
  if (board_->is_open() || roll_call_ == nullptr) return {};
  roll_call_->look(world_ranks_);
  auto trouble = roll_call_->find_trouble(world_ranks_);
  const auto seen = board_->find_trouble(phase_);
  if (!trouble && !seen.ranks.empty()) {
    const int rank = world_ranks_[static_cast<std::size_t>(seen.ranks.front())];
    trouble = roll_call_->first_cause({rank, seen.reason});
  }
  if (!trouble) return {};
  return {culprits_of(trouble->rank), trouble->reason};
}

Board::Trouble MpiCommunicator::find_trouble() const {
  auto seen = board_->find_trouble(phase_);
  if (!seen.is_death || roll_call_ == nullptr) return seen;
  const int dead = world_ranks_[static_cast<std::size_t>(seen.ranks.front())];
  if (const auto cause = roll_call_->find_report_of(dead)) {
    return {culprits_of(cause->rank), cause->reason};
  }
  return seen;
}

std::vector<int> MpiCommunicator::culprits_of(int world_rank) const {
  if (world_rank == RollCall::kNobody) return {};
  return {number_in_group(world_ranks_, world_rank)};
}

// Explains a missed deadline when no rank can be named: the awaited ranks are on other hosts, or
// alive.
std::string MpiCommunicator::words_for_unknown() const {
  if (!board_->is_open()) {
    return roll_call_ != nullptr ? words_for_arrivals(*roll_call_, world_ranks_)
                                 : "which ranks have not arrived cannot be seen from here";
  }
  const auto unseen = board_->find_unseen();
  if (unseen.empty()) return "all ranks entered it or wait in an earlier call, and are alive";
  return fmt::format(
      "all ranks on this host entered it or wait in an earlier call; rank{} {} on other hosts "
      "cannot be seen from here",
      unseen.size() == 1 ? "" : "s", fmt::join(unseen, ", "));
}

void MpiCommunicator::require_heard(const Flight& flight) const {
  for (int r = 0; r < size(); ++r) {
    const auto i = static_cast<std::size_t>(r) * kAnnouncement;
    const auto [sends, expects, bytes] =
        std::tuple(flight.announced[i], flight.announced[i + 1], flight.announced[i + 2]);
    const auto [its_sends, its_expects, its_bytes] =
        std::tuple(flight.heard[i], flight.heard[i + 1], flight.heard[i + 2]);
    const auto refuse = [&](const std::string& why) {
      throw CommunicationError(fmt::format("{}: {}", current_call(), why), {r});
    };
    if (its_bytes != bytes) {
      throw_trouble(board_->find_breach(phase_));
      refuse(fmt::format("rank {} passed {} bytes, but rank {} passed {}", r, its_bytes, rank(),
                         bytes));
    }
    const auto sent = [](int from, std::int64_t rows, int to, std::int64_t expected) {
      return fmt::format("rank {} sends {} rows to rank {}, which expects {}", from, rows, to,
                         expected);
    };
    if (its_sends != expects) refuse(sent(r, its_sends, rank(), expects));
    if (its_expects != sends) refuse(sent(rank(), sends, r, its_expects));
  }
}

void MpiCommunicator::do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) {
  const auto flight = std::make_shared<Flight>(2);
  flight->send_counts = to_counts(send.rows, "sent rows");
  flight->recv_counts = to_counts(recv.rows, "received rows");
  flight->send_offsets = offsets_of(flight->send_counts);
  flight->recv_offsets = offsets_of(flight->recv_counts);
  for (std::size_t r = 0; r < send.rows.size(); ++r) {
    flight->announced.insert(flight->announced.end(), {send.rows[r], recv.rows[r], row_bytes});
  }
  flight->heard.resize(flight->announced.size());
  const auto recv_bytes = total_of(recv.rows) * row_bytes;
  const auto* from =
      flight->borrow_for_send(send.data, total_of(send.rows) * row_bytes, send.owner);
  auto* to = flight->borrow_for_recv(recv.data, recv_bytes, recv.owner);

  // If sender and receiver disagree about counts, MPI may not notice or may hang. The counts
  // therefore travel beside the rows and are checked first.
  const bool is_short = std::ranges::max(send.rows) * row_bytes <= kShortMessage;
  const auto post_rows = [&] {
    check(MPI_Ialltoallv(from, flight->send_counts.data(), flight->send_offsets.data(),
                         flight->unit, to, flight->recv_counts.data(), flight->recv_offsets.data(),
                         flight->unit, comm_, flight->requests.data() + 1),
          "MPI_Ialltoallv");
  };
  flight->check_first = [&] {
    require_heard(*flight);
    if (!is_short) post_rows();
  };
  fly(flight, row_bytes, [&] {
    flight->set_unit(row_bytes);
    check(MPI_Ialltoall(flight->announced.data(), kAnnouncement, MPI_INT64_T, flight->heard.data(),
                        kAnnouncement, MPI_INT64_T, comm_, flight->requests.data()),
          "MPI_Ialltoall");
    if (is_short) post_rows();
  });
  if (to != recv.data && recv_bytes > 0) {
    std::memcpy(recv.data, to, static_cast<std::size_t>(recv_bytes));
  }
}

void MpiCommunicator::do_all_gather(const Bytes& send, const Bytes& recv) {
  const auto flight = std::make_shared<Flight>(1);
  flight->largest_message = recv.bytes;  // some algorithms forward what they have received
  const auto* from = flight->borrow_for_send(send.data, send.bytes, send.owner);
  auto* to = flight->borrow_for_recv(recv.data, recv.bytes, recv.owner);
  fly(flight, send.bytes, [&] {
    flight->set_unit(send.bytes);
    check(
        MPI_Iallgather(from, 1, flight->unit, to, 1, flight->unit, comm_, flight->requests.data()),
        "MPI_Iallgather");
  });
  if (to != recv.data && recv.bytes > 0) {
    std::memcpy(recv.data, to, static_cast<std::size_t>(recv.bytes));
  }
}

void MpiCommunicator::do_broadcast(const Bytes& values, int root) {
  const auto flight = std::make_shared<Flight>(1);
  flight->largest_message = values.bytes;
  auto* data = flight->borrow_for_send(values.data, values.bytes, values.owner);
  fly(flight, values.bytes, [&] {
    flight->set_unit(values.bytes);
    check(MPI_Ibcast(data, 1, flight->unit, root, comm_, flight->requests.data()), "MPI_Ibcast");
  });
  if (data != values.data && values.bytes > 0) {
    std::memcpy(values.data, data, static_cast<std::size_t>(values.bytes));
  }
}

void MpiCommunicator::do_barrier() {
  const auto flight = std::make_shared<Flight>(1);
  fly(flight, 0, [&] { check(MPI_Ibarrier(comm_, flight->requests.data()), "MPI_Ibarrier"); });
}

// MPI_Comm_split has no deadline, but split() has just gathered from all ranks, so they are alive.
std::unique_ptr<Communicator> MpiCommunicator::do_split(int color, int key) {
  const ReturnedErrors returned;
  enter(0);
  const auto split = [comm = comm_, color, key] {
    MPI_Comm part = MPI_COMM_NULL;
    const int code = MPI_Comm_split(comm, color < 0 ? MPI_UNDEFINED : color, key, &part);
    return std::pair(code, part);
  };
  std::pair<int, MPI_Comm> result;
  if (session_ != nullptr && session_->allows_threads()) {
    std::packaged_task<std::pair<int, MPI_Comm>()> task(split);
    auto answer = task.get_future();
    std::thread worker(std::move(task));
    worker.detach();  // a call that never returns must not block this rank
    const auto deadline = Clock::now() + timeout();
    while (answer.wait_for(kWatchInterval) != std::future_status::ready) watch_peers(deadline);
    result = answer.get();
  } else {
    result = split();
  }
  check(result.first, "MPI_Comm_split");
  complete();
  if (result.second == MPI_COMM_NULL) return nullptr;
  try {
    return make(session_, roll_call_, result.second, timeout());
  } catch (const CommunicationError& error) {  // it numbers ranks in the new group
    const auto numbers = ranks_in(comm_, result.second);
    auto message = fmt::format("{}: in the new group: {}", current_call(), error.what());
    std::vector<int> culprits;
    for (const int r : error.ranks()) {
      culprits.push_back(numbers[static_cast<std::size_t>(r)]);
      if (culprits.back() == r) continue;
      message +=
          fmt::format("; rank {} of the new group is rank {} of this group", r, culprits.back());
    }
    if (error.ranks().empty()) {  // those outside the new group come with their numbers in the job
      for (const int r : error.world_ranks()) culprits.push_back(culprits_of(r).front());
    }
    throw CommunicationError(message, std::move(culprits));
  }
}

void MpiCommunicator::do_abort(const std::string& reason, const std::vector<int>& culprits) {
  if (session_) session_->abandon();
  board_->give_up(reason, culprits);
}

namespace {

Availability availability() {
  std::string version(MPI_MAX_LIBRARY_VERSION_STRING, '\0');
  int length = 0;
  check_call(MPI_Get_library_version(version.data(), &length), "MPI_Get_library_version");
  version.resize(version.find_first_of(std::string_view(",\0", 2)));
  int finalized = 0;
  check_call(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) return {false, version + ", finalised in this process"};
  return {true, version};
}

// Returns a duplicate of the world. Throws as soon as a rank has died, or at the deadline.
MPI_Comm duplicate_world(RollCall* roll_call, std::chrono::milliseconds timeout) {
  struct Duplicate {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  const auto duplicate = std::make_shared<Duplicate>();
  check_call(MPI_Comm_idup(MPI_COMM_WORLD, &duplicate->comm, &duplicate->request), "MPI_Comm_idup");
  const auto ranks = ranks_in(MPI_COMM_WORLD, MPI_COMM_WORLD);
  const auto deadline = Clock::now() + timeout;
  const auto give_up = [&](const std::string& why, std::vector<int> culprits) {
    keep_for_good(duplicate);
    throw CommunicationError("connect: " + why, std::move(culprits));
  };
  for (int done = 0; done == 0;) {
    check_call(MPI_Test(&duplicate->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) continue;
    if (roll_call != nullptr) {
      roll_call->look(ranks);
      if (const auto trouble = roll_call->find_trouble(ranks)) {
        roll_call->report(*trouble);
        give_up(trouble->reason, trouble->rank == RollCall::kNobody ? std::vector<int>()
                                                                    : std::vector{trouble->rank});
      }
    }
    if (Clock::now() < deadline) continue;
    const auto why = fmt::format(
        "not all ranks arrived within {:g} s{}", static_cast<double>(timeout.count()) / 1000.0,
        roll_call == nullptr ? "" : "; " + words_for_arrivals(*roll_call, ranks));
    if (roll_call != nullptr) roll_call->report_unseen(ranks, why);
    give_up(why, {});
  }
  return duplicate->comm;
}

std::unique_ptr<Communicator> connect_world(const ConnectOptions& options) {
  const auto timeout = std::min(options.timeout, kLongestTimeout);
  auto session = Session::join(options);
  const auto& roll_call = session->roll_call();
  const ReturnedErrors returned;
  const auto make = [&](const std::shared_ptr<Session>& of) {
    return MpiCommunicator::make(of, roll_call, duplicate_world(roll_call.get(), timeout), timeout);
  };
  try {
    if (session->needs_farewell()) session->set_farewell(make(nullptr));
    return make(session);
  } catch (...) {
    session->abandon();
    throw;
  }
}

}  // namespace

BackendEntry backend() { return {"mpi", availability, connect_world}; }

}  // namespace switchyard::mpi
