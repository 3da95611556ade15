// SPDX-License-Identifier: Apache-2.0
// Ranks as MPI processes: MPI's non-blocking collectives with a deadline and a watch on peers.
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi/board.h"
#include "comm/mpi/flight.h"
#include "comm/mpi/roll_call.h"
#include "comm/mpi/session.h"
#include "switchyard/communicator.h"

namespace switchyard::mpi {

class MpiCommunicator final : public Communicator {
 public:
  // Collective. Takes ownership of `comm`, which nothing else may use. `session` is null for the
  // communicator that the session itself owns. `roll_call` may be null.
  static std::unique_ptr<MpiCommunicator> make(std::shared_ptr<Session> session,
                                               std::shared_ptr<RollCall> roll_call, MPI_Comm comm,
                                               std::chrono::milliseconds timeout);
  ~MpiCommunicator() override;

  std::string_view backend() const override { return "mpi"; }

 private:
  MpiCommunicator(std::shared_ptr<Session> session, std::shared_ptr<RollCall> roll_call,
                  MPI_Comm comm, std::chrono::milliseconds timeout);

  void do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) override;
  void do_all_gather(const Bytes& send, const Bytes& recv) override;
  void do_broadcast(const Bytes& values, int root) override;
  void do_barrier() override;
  std::unique_ptr<Communicator> do_split(int color, int key) override;
  void do_abort(const std::string& reason, const std::vector<int>& culprits) override;

  void open_board();
  // Starts a phase that moves units of `unit_bytes` bytes.
  void enter(std::int64_t unit_bytes);
  // Ends the phase and records how long this rank waited for each peer.
  void complete();
  // Posts a flight's requests and completes them as the next phase. If it throws, the flight and
  // its memory are kept until the process ends.
  void fly(const std::shared_ptr<Flight>& flight, std::int64_t unit_bytes,
           const std::function<void()>& post);
  void wait(std::span<MPI_Request> requests, std::chrono::steady_clock::time_point deadline);
  // Waits until all visible peers have entered the phase. Throws if they disagree about it.
  void wait_for_entries(std::chrono::steady_clock::time_point deadline);
  void watch_peers(std::chrono::steady_clock::time_point deadline);
  // Finds a rank that died or gave up before the board was open.
  Board::Trouble find_early_trouble() const;
  // Finds what the board shows. A rank that is dead may have given up before it had this board, and
  // have reported why to the roll call.
  Board::Trouble find_trouble() const;
  // Returns the rank of the job in this group's numbers; −1 − world_rank if it is not in the group.
  std::vector<int> culprits_of(int world_rank) const;
  std::string words_for_unknown() const;
  void require_heard(const Flight& flight) const;
  void throw_trouble(const Board::Trouble& trouble) const;
  // Tells the roll call why this rank gives up in `connect`: a peer whose board is not open yet
  // would see only that this process ends.
  void report_early(const Board::Trouble& trouble) const;
  void check(int code, std::string_view function) const;

  std::shared_ptr<Session> session_;
  std::shared_ptr<RollCall> roll_call_;
  MPI_Comm comm_;
  std::vector<int> world_ranks_;  // world rank of each rank of this group
  std::unique_ptr<Board> board_;
  std::uint64_t phase_ = 0;
};

}  // namespace switchyard::mpi
