// SPDX-License-Identifier: Apache-2.0
// Maps the pieces by which peers' heaps grow, and notices when a peer's process ends.
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

// One process's connections to the other processes of a group. A dedicated thread listens on them,
// so peers need not wait for what this rank is doing.
class ProcessLinks {
 public:
  // `connections` and the `heaps` at their other ends are by rank; this rank's own entries are
  // empty.
  ProcessLinks(int rank, std::vector<LocalConnection> connections,
               std::vector<std::shared_ptr<ReachedHeap>> heaps,
               std::shared_ptr<GroupFailure> failure, std::chrono::nanoseconds timeout);
  ~ProcessLinks();
  ProcessLinks(const ProcessLinks&) = delete;
  ProcessLinks& operator=(const ProcessLinks&) = delete;

  // Returns once all peers have mapped a new piece of this rank's heap, except those that have let
  // go of the group. If it throws, the group has failed.
  void announce(const HeapPiece& piece);

 private:
  struct Peer {
    LocalConnection connection;
    std::shared_ptr<ReachedHeap> heap;
    bool is_gone = false;         // has let go of the group, or ended
    std::int64_t num_mapped = 0;  // how many of the announced pieces it has mapped
    std::string error = {};
  };

  void listen();
  void receive_from(int rank);
  void map(Peer& peer, const HeapPiece& piece) const;
  std::vector<int> ranks_that_wait() const;  // ranks that have not mapped the last piece

  int rank_;
  std::shared_ptr<GroupFailure> failure_;
  std::chrono::nanoseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::int64_t num_announced_ = 0;
  Descriptor stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace switchyard
