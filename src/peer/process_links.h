// Keeps the heaps of processes mapped in each other as they grow, and notices when one ends.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/descriptor.h"
#include "core/local_socket.h"
#include "device/peer_memory.h"
#include "peer/group_failure.h"

namespace switchyard {

// One process's connections to the others of a group, which a thread of its own listens on: so
// others need not wait for what this rank is doing.
class ProcessLinks {
 public:
  // By rank: connections, and the heaps at their other ends. This rank's own are empty.
  ProcessLinks(int rank, std::vector<LocalConnection> connections,
               std::vector<std::shared_ptr<ReachedHeap>> heaps,
               std::shared_ptr<GroupFailure> failure, std::chrono::nanoseconds timeout);
  ~ProcessLinks();
  ProcessLinks(const ProcessLinks&) = delete;
  ProcessLinks& operator=(const ProcessLinks&) = delete;

  // Returns when all others have mapped a piece of this rank's heap, except for those that have let
  // go of the group. Throws, and then the group has failed.
  void announce(const HeapPiece& piece);

 private:
  struct Peer {
    LocalConnection connection;
    std::shared_ptr<ReachedHeap> heap;
    bool is_gone = false;         // it has let go of the group, or ended
    std::int64_t num_mapped = 0;  // of the pieces that were announced
    std::string error = {};
  };

  void listen();
  void receive_from(int rank);
  void map(Peer& peer, const HeapPiece& piece) const;
  std::vector<int> ranks_that_wait() const;  // for the last piece

  int rank_;
  std::shared_ptr<GroupFailure> failure_;
  std::chrono::nanoseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::int64_t num_announced_ = 0;
  Descriptor stop_;  // an event
  std::thread thread_;
};

}  // namespace switchyard
