// MPI's one lifetime in this process.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "comm/mpi/roll_call.h"
#include "switchyard/communicator.h"

namespace switchyard::mpi {

// Initialises MPI unless the caller has, and finalises it at the end only if it did so itself and
// all ranks are there to do the same: MPI_Finalize waits for every rank, for ever.
class Session {
 public:
  // The session of this process; all communicators share it. The first to join initialises MPI, as
  // the options say.
  static std::shared_ptr<Session> join(const ConnectOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // A communicator over all ranks, used only to make sure of each other before MPI is finalised.
  bool needs_farewell() const { return owns_mpi_ && farewell_ == nullptr; }
  void set_farewell(std::unique_ptr<Communicator> world) { farewell_ = std::move(world); }
  // Null where it is not known who is in the job.
  const std::shared_ptr<RollCall>& roll_call() const { return roll_call_; }
  // Whether another thread may make a blocking MPI call while this one watches the clock.
  bool allows_threads() const { return allows_threads_; }
  // A communicator failed: MPI is left as it is.
  void abandon() { abandoned_ = true; }

 private:
  explicit Session(const ConnectOptions& options);

  bool owns_mpi_ = false;
  bool allows_threads_ = false;
  std::atomic<bool> abandoned_ = false;
  std::shared_ptr<RollCall> roll_call_;
  std::unique_ptr<Communicator> farewell_;
};

}  // namespace switchyard::mpi
