// Collectives over MPI that end: complete, or with an error that names who is missing.
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
#include "core/require.h"

namespace switchyard::mpi {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kWatchInterval = std::chrono::milliseconds(1);
constexpr int kEagerTests = 200;  // polls before a waiting rank offers its core to others

// Open MPI copies a message that is longer than its receiver expects past the end of the memory,
// unless it is a short one. So a rank that sends a longer one than this makes sure first.
constexpr std::int64_t kShortMessage = 1024;

// Each rank tells each other, before rows travel: how many it sends, how many it expects, and how
// long they are.
constexpr int kAnnouncement = 3;

std::vector<int> to_counts(std::span<const std::int64_t> rows, std::string_view what) {
  std::vector<int> counts;
  std::int64_t total = 0;
  for (const auto n : rows) {
    total += n;
    require<Unsupported>(total <= std::numeric_limits<int>::max(),
                         "{} rows in one all_to_all: MPI counts {} in an int; send fewer, longer "
                         "rows or split the call",
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

}  // namespace

MpiCommunicator::MpiCommunicator(std::shared_ptr<Session> session, MPI_Comm comm, int rank,
                                 int size, std::chrono::milliseconds timeout)
    : Communicator(rank, size, timeout),
      session_(std::move(session)),
      comm_(comm),
      board_(std::make_unique<Board>(rank, std::vector<Hello>(static_cast<std::size_t>(size)))) {}

std::unique_ptr<MpiCommunicator> MpiCommunicator::make(std::shared_ptr<Session> session,
                                                       MPI_Comm comm,
                                                       std::chrono::milliseconds timeout) {
  const ReturnedErrors returned;
  check_call(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0;
  int size = 0;
  check_call(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  check_call(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  std::unique_ptr<MpiCommunicator> result(
      new MpiCommunicator(std::move(session), comm, rank, size, timeout));
  result->run_collective("connect", "", [&] { result->open_board(); });
  return result;
}

MpiCommunicator::~MpiCommunicator() {
  board_->leave();
  if (!is_poisoned()) MPI_Comm_free(&comm_);
}

void MpiCommunicator::open_board() {
  const Hello mine = make_hello();
  std::vector<Hello> hellos(static_cast<std::size_t>(size()));
  do_all_gather({reinterpret_cast<std::byte*>(const_cast<Hello*>(&mine)), sizeof(mine), nullptr},
                {reinterpret_cast<std::byte*>(hellos.data()),
                 static_cast<std::int64_t>(sizeof(Hello) * hellos.size()), nullptr});
  board_ = std::make_unique<Board>(rank(), hellos);
  board_->create();
  do_barrier();
  board_->open();
  do_barrier();
  board_->unlink();
  std::ranges::fill(waits(), std::chrono::nanoseconds::zero());  // until here there was no group
}

void MpiCommunicator::check(int code, std::string_view function) const {
  if (code == MPI_SUCCESS) return;
  throw_trouble(board_->find_trouble(phase_));  // MPI knows its messages, not who is to blame
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
  // Complete here, but if a peer made another call of the same shape, or gave up before this rank
  // came, this is not what was meant.
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
    int is_there = 0;  // asked for the progress alone that peers may still need from this rank
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
  throw CommunicationError(
      trouble.is_relayed ? trouble.reason : fmt::format("{}: {}", current_call(), trouble.reason),
      trouble.ranks);
}

void MpiCommunicator::watch_peers(Clock::time_point deadline) {
  board_->beat();
  throw_trouble(board_->find_trouble(phase_));
  if (Clock::now() < deadline) return;
  const auto missing = board_->find_missing(phase_);
  const auto seconds = static_cast<double>(timeout().count()) / 1000.0;
  if (!missing.empty()) {
    throw CommunicationError(
        fmt::format("{}: rank{} {} did not arrive within {:g} s", current_call(),
                    missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), seconds),
        missing);
  }
  throw CommunicationError(fmt::format(
      "{}: not complete within {:g} s; {}", current_call(), seconds,
      board_->sees_all() ? "all ranks entered it and are alive"
                         : "all ranks on this host entered it, others cannot be seen from here"));
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
      refuse(fmt::format("rank {} brought {} bytes where rank {} brought {}", r, its_bytes, rank(),
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

  // MPI does not notice a sender and a receiver who count differently, or waits for ever; so the
  // counts travel beside the rows and are looked at first.
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
  flight->largest_message = recv.bytes;  // some of its algorithms pass on what they have received
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

std::unique_ptr<Communicator> MpiCommunicator::do_split(int color, int key) {
  const ReturnedErrors returned;
  do_barrier();  // all are here and alive: MPI_Comm_split has no deadline of its own
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
    worker.detach();  // one that never returns must not keep this rank
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
    return make(session_, result.second, timeout());
  } catch (const CommunicationError& error) {  // its ranks are numbers of the new group
    throw CommunicationError(fmt::format("{}: in the new group: {}", current_call(), error.what()));
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

// A duplicate of the world, or an error at the deadline.
MPI_Comm duplicate_world(std::chrono::milliseconds timeout) {
  struct Duplicate {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  const auto duplicate = std::make_shared<Duplicate>();
  check_call(MPI_Comm_idup(MPI_COMM_WORLD, &duplicate->comm, &duplicate->request), "MPI_Comm_idup");
  const auto deadline = Clock::now() + timeout;
  for (int done = 0; done == 0;) {
    check_call(MPI_Test(&duplicate->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0 || Clock::now() < deadline) continue;
    keep_for_good(duplicate);
    throw CommunicationError(
        fmt::format("connect: not all ranks arrived within {} ms", timeout.count()));
  }
  return duplicate->comm;
}

std::unique_ptr<Communicator> connect_world(const ConnectOptions& options) {
  const auto timeout = std::min(options.timeout, kLongestTimeout);
  auto session = Session::join();
  const ReturnedErrors returned;
  try {
    if (session->needs_farewell()) {
      session->set_farewell(MpiCommunicator::make(nullptr, duplicate_world(timeout), timeout));
    }
    return MpiCommunicator::make(session, duplicate_world(timeout), timeout);
  } catch (...) {
    session->abandon();
    throw;
  }
}

}  // namespace

BackendEntry backend() { return {"mpi", availability, connect_world}; }

}  // namespace switchyard::mpi
