// SPDX-License-Identifier: Apache-2.0
// Initialises and finalises MPI.
#include "comm/mpi/session.h"

#include <mpi.h>

#include <mutex>
#include <optional>

#include "comm/mpi/errors.h"
#include "core/require.h"
#include "core/without_signals.h"

namespace switchyard::mpi {

std::shared_ptr<Session> Session::join(const ConnectOptions& options) {
  // There is one MPI per process, and it cannot be initialised twice.
  static std::mutex mutex;
  static std::weak_ptr<Session> current;
  const std::scoped_lock lock(mutex);
  auto session = current.lock();
  if (!session) {
    session.reset(new Session(options));
    current = session;
  }
  return session;
}

Session::Session(const ConnectOptions& options) : roll_call_(RollCall::answer()) {
  int finalized = 0;
  check_call(MPI_Finalized(&finalized), "MPI_Finalized");
  require<Unsupported>(finalized == 0,
                       "MPI has been finalised in this process and cannot be started again; keep a "
                       "communicator, or call MPI_Init yourself, for as long as MPI is needed");
  int initialized = 0;
  check_call(MPI_Initialized(&initialized), "MPI_Initialized");
  int provided = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    check_call(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    std::optional<InitWatchdog> watchdog;
    if (options.exit_if_init_hangs) watchdog.emplace(roll_call_.get(), options.timeout);
    const WithoutBrokenPipes without_broken_pipes;  // threads that MPI starts inherit this
    const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    require<CommunicationError>(code == MPI_SUCCESS, "MPI_Init_thread failed with code {}", code);
    owns_mpi_ = true;
  }
  allows_threads_ = provided == MPI_THREAD_MULTIPLE;
  int rank = 0;
  int size = 0;
  check_call(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check_call(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  const bool is_the_launchers =
      roll_call_ != nullptr && roll_call_->rank() == rank && roll_call_->size() == size;
  if (!is_the_launchers) roll_call_.reset();  // e.g. a world of processes that MPI spawned
}

Session::~Session() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!owns_mpi_ || finalized != 0 || farewell_ == nullptr) return;
  if (abandoned_) {
    farewell_->abort("a communicator of this rank has failed");
    return;
  }
  try {
    const WithoutBrokenPipes without_broken_pipes;
    farewell_->barrier();
    farewell_.reset();
    MPI_Finalize();
  } catch (const std::exception&) {
    abandoned_ = true;  // a rank is missing, so there is nothing to wait for
  }
}

}  // namespace switchyard::mpi
