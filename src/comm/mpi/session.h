// MPI's one lifetime in this process.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "switchyard/communicator.h"

namespace switchyard::mpi {

// Initialises MPI unless the caller has, and finalises it at the end only if it did so itself and
// all ranks are there to do the same: MPI_Finalize waits for every rank, for ever.
class Session {
 public:
  // The session of this process; all communicators share it.
  static std::shared_ptr<Session> join();
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // A communicator over all ranks, used only to make sure of each other before MPI is finalised.
  bool needs_farewell() const { return owns_mpi_ && farewell_ == nullptr; }
  void set_farewell(std::unique_ptr<Communicator> world) { farewell_ = std::move(world); }
  // Whether another thread may make a blocking MPI call while this one watches the clock.
  bool allows_threads() const { return allows_threads_; }
  // A communicator failed: MPI is left as it is.
  void abandon() { abandoned_ = true; }

 private:
  Session();

  bool owns_mpi_ = false;
  bool allows_threads_ = false;
  std::atomic<bool> abandoned_ = false;
  std::unique_ptr<Communicator> farewell_;
};

}  // namespace switchyard::mpi
