// How the memory of a group's ranks is mapped: that of threads is there for all of them, processes
// map each other's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "peer/group_failure.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard {

// A group as one of its ranks holds it.
struct PeerGroup {
  std::int64_t number = 0;  // the same on all ranks, and that of no other group
  std::shared_ptr<GroupFailure> failure;
  std::shared_ptr<PeerHeap> heap;      // this rank's
  std::vector<std::byte*> bases = {};  // of all ranks' heaps, as this rank reaches them
  std::shared_ptr<void> kept;          // what these need, for as long as this rank may reach them
};

// What ranks tell each other before they make a group.
struct PeerHello {
  std::int64_t group = 0;  // its number, where this rank has one already
  std::int64_t process = 0;
  std::int64_t host = 0;
  std::int64_t ordinal = 0;
  std::int64_t device = 0;  // its address
  std::int64_t stream = 0;  // likewise
};

// Collective, as all of these. Runs a step of the set-up: where it fails on a rank, every rank
// throws the same Unsupported, and may do without peer memory.
void set_up(Communicator& comm, const std::function<void()>& step);

// By rank.
std::vector<PeerHello> exchange_hellos(Communicator& comm, const Device& device,
                                       std::int64_t group);

// Of ranks that are threads of one process.
PeerGroup make_thread_group(Communicator& comm, const Device& device,
                            const std::vector<PeerHello>& hellos);
// Of ranks that are processes of one host. Throws Unsupported, on every rank, that names two that
// cannot reach each other's memory, and why.
PeerGroup make_process_group(Communicator& comm, const Device& device,
                             const std::vector<PeerHello>& hellos);

}  // namespace switchyard
