// Tells which processes of a job are on this host and alive, before MPI can: MPI_Init waits for all
// of them without a deadline, and so does the first communicator.
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
  // Makes this process known to the others of its job. Null where the launcher's environment does
  // not say which process of which job this is.
  static std::unique_ptr<RollCall> answer();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  // Takes what others have said and asks those not heard of yet, every few milliseconds. Ranks are
  // the launcher's, which are those of MPI's world.
  void look(std::span<const int> ranks);
  // One of these ranks has died, or has said why it gives up.
  static constexpr int kNobody = -1;
  struct Trouble {
    int rank = kNobody;  // who is to blame
    std::string reason;
  };
  std::optional<Trouble> find_trouble(std::span<const int> ranks);
  // A rank that is seen to have ended may have given up for another one, and has said so.
  Trouble first_cause(Trouble seen);
  // Tells the others, which may see this process end before they see that of the rank it gave up
  // for.
  void report(const Trouble& trouble) const;
  // The same at a deadline: blames the first rank that has not answered, if there is one.
  void report_unseen(std::span<const int> ranks, const std::string& reason) const;
  // The ranks that have not answered: they are on other hosts, or have not started.
  std::vector<int> find_unseen(std::span<const int> ranks) const;

 private:
  struct Message;
  struct Peer {
    std::shared_ptr<const ProcessWatch> process;  // null: not heard of
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

// "rank 2 has not been seen on this host"; empty for no rank.
std::string words_for_unseen(const std::vector<int>& ranks);

// Lives while MPI_Init runs. Ends this process, with a message on stderr, when one of the job's
// processes has died or the time is over: nothing can be thrown out of MPI_Init.
class InitWatchdog {
 public:
  // The roll call may be null.
  InitWatchdog(RollCall* roll_call, std::chrono::milliseconds timeout);
  ~InitWatchdog();
  InitWatchdog(const InitWatchdog&) = delete;
  InitWatchdog& operator=(const InitWatchdog&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::mpi
