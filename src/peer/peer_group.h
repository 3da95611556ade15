// SPDX-License-Identifier: Apache-2.0
// Maps the memory of a group's ranks: threads share one address space, processes map each other's
// heaps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "peer/group_failure.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"

namespace switchyard {

// A group, as one of its ranks sees it.
struct PeerGroup {
  std::int64_t number = 0;  // the same on all ranks, unique to this group
  std::shared_ptr<GroupFailure> failure;
  std::shared_ptr<PeerHeap> heap;      // this rank's
  std::vector<std::byte*> bases = {};  // base addresses of all ranks' heaps, as mapped by this rank
  std::shared_ptr<void> kept;          // keeps the mappings alive while this rank may use them
};

// The record that each rank sends to the others before they form a group.
struct PeerHello {
  std::int64_t group = 0;  // number of the group that this rank already has, or 0
  std::int64_t process = 0;
  std::int64_t host = 0;
  std::int64_t ordinal = 0;
  std::int64_t device = 0;  // address of its backend
  std::int64_t stream = 0;  // address of its CUDA stream
};

// Runs one step of the setup. If the step fails on any rank, every rank throws the same
// Unsupported, and the caller may do without peer memory. Collective, like all functions below.
void set_up(Communicator& comm, const std::function<void()>& step);

// Returns the hellos of all ranks, by rank.
std::vector<PeerHello> exchange_hellos(Communicator& comm, const Device& device,
                                       std::int64_t group);

// For ranks that are threads of one process.
PeerGroup make_thread_group(Communicator& comm, const Device& device,
                            const std::vector<PeerHello>& hellos);
// For ranks that are processes of one host. If two ranks cannot reach each other's memory, throws
// Unsupported on every rank, naming the ranks and the reason.
PeerGroup make_process_group(Communicator& comm, const Device& device,
                             const std::vector<PeerHello>& hellos);

}  // namespace switchyard
