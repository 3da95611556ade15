// SPDX-License-Identifier: Apache-2.0
// Finds out which processes of a job are on this host and alive before MPI can: MPI_Init and the
// first communicator wait for all of them without a deadline.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/local_socket.h"
#include "core/process_watch.h"

namespace switchyard::mpi {

class RollCall {
 public:
  // Makes this process reachable for the others of its job. Returns null if the launcher's
  // environment does not identify process and job, or if there are no local sockets.
  static std::unique_ptr<RollCall> answer();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  // Reads messages from the others and, every 20 ms, asks the ranks not heard from yet. `ranks` are
  // the launcher's numbers, which are also those of MPI's world.
  void look(std::span<const int> ranks);
  static constexpr int kNobody = -1;
  // A rank that has died, or that has said why it gives up.
  struct Trouble {
    int rank = kNobody;  // the rank to blame
    std::string reason;
  };
  std::optional<Trouble> find_trouble(std::span<const int> ranks);
  // Returns a reported trouble in place of `seen`, if there is one: a rank that is seen to have
  // ended may have given up because of another and said so.
  Trouble first_cause(Trouble seen);
  // Returns the reason that `rank` has given for giving up, unless it blames this rank.
  std::optional<Trouble> find_report_of(int rank);
  // Tells the others, which may see this process end before they see the end of the rank to blame.
  void report(const Trouble& trouble) const;
  // Reports a missed deadline: blames the first rank that has not answered, if there is one.
  void report_unseen(std::span<const int> ranks, const std::string& reason) const;
  // Returns the ranks that have not answered: they are on other hosts or have not started.
  std::vector<int> find_unseen(std::span<const int> ranks) const;

 private:
  struct Message;
  struct Peer {
    std::shared_ptr<const ProcessWatch> process;  // null: not heard from
    std::optional<Trouble> reported = {};
  };

  RollCall(std::int64_t job, int rank, int size);
  LocalMailbox::Name name_of(int rank) const { return {job_, rank}; }
  void send(int rank, const Message& message) const;
  void take_messages();
  std::optional<Trouble> find_report() const;

  std::int64_t job_;
  int rank_;
  LocalMailbox mailbox_;
  std::vector<Peer> peers_;
  std::chrono::steady_clock::time_point next_look_ = {};
};

// Returns text such as "rank 2 has not been seen on this host", or an empty string for no ranks.
std::string words_for_unseen(const std::vector<int>& ranks);

// Lives while MPI_Init runs. Ends this process with a message on stderr when one of the job's
// processes has died or the timeout has passed: MPI_Init cannot be left by an exception.
class InitWatchdog {
 public:
  // `roll_call` may be null.
  InitWatchdog(RollCall* roll_call, std::chrono::milliseconds timeout);
  ~InitWatchdog();
  InitWatchdog(const InitWatchdog&) = delete;
  InitWatchdog& operator=(const InitWatchdog&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::mpi
