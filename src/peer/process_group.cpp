// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <chrono>
#include <random>

#include "comm/agreement.h"
#include "comm/gather_numbers.h"
#include "core/local_socket.h"
#include "core/require.h"
#include "device/device_backend.h"
#include "peer/peer_group.h"
#include "peer/process_links.h"

namespace switchyard {
namespace {

// Tells a peer which rank is connecting. Rank 0 also uses it to send the memory of the failure
// record.
struct Introduction {
  std::int64_t rank = 0;
};

std::span<const std::byte> bytes_of(const Introduction& own) {
  return std::as_bytes(std::span(&own, 1));
}

void require_one_host(const std::vector<PeerHello>& hellos) {
  for (std::size_t b = 1; b < hellos.size(); ++b) {
    require<Unsupported>(
        hellos[b].host == hellos[0].host,
        "ranks 0 and {} are on different hosts, so they cannot reach each other's memory", b);
    for (std::size_t a = 0; a < b; ++a) {
      require<Unsupported>(hellos[a].process != hellos[b].process,
                           "ranks {} and {} are threads of one process, but other ranks are "
                           "processes: use only threads or only processes",
                           a, b);
    }
  }
}

void require_reachable(Communicator& comm, const DeviceBackend& device) {
  DeviceIdentity own{};
  set_up(comm, [&] { own = device.identity(); });
  const Tensor identities = gather_numbers(comm, own);
  set_up(comm, [&] {
    for (int r = 0; r < comm.size(); ++r) {
      if (r == comm.rank()) continue;
      const auto words = identities.view().slice(r, r + 1).span<std::int64_t>();
      const std::string reason = device.reason_against_reaching({words[0], words[1]});
      require<Unsupported>(reason.empty(), "it cannot reach the memory of rank {}: {}", r, reason);
    }
  });
}

// Returns the connections by rank; this rank's own is not open. Higher ranks connect to lower ones.
std::vector<LocalConnection> connect_all(Communicator& comm) {
  // Half the timeout, so that the others are still waiting when this rank reports why it failed.
  const auto deadline = std::chrono::steady_clock::now() + comm.timeout() / 2;
  const int rank = comm.rank();
  std::unique_ptr<LocalListener> listener;
  set_up(comm, [&] { listener = std::make_unique<LocalListener>(); });
  const Tensor names = gather_numbers(comm, listener->name());
  std::vector<LocalConnection> connections(static_cast<std::size_t>(comm.size()));
  set_up(comm, [&] {
    for (int r = 0; r < rank; ++r) {
      const auto name = names.view().slice(r, r + 1).span<std::int64_t>();
      auto& connection = connections[static_cast<std::size_t>(r)];
      try {
        connection = connect_to({name[0], name[1]});
      } catch (const Unsupported& error) {
        throw Unsupported(fmt::format("rank {} to rank {}: {}", rank, r, error.what()));
      }
      require<Unsupported>(connection.send(bytes_of({.rank = rank}), -1, deadline),
                           "rank {} did not accept a message from rank {}", r, rank);
    }
  });
  set_up(comm, [&] {
    for (int missing = comm.size() - 1 - rank; missing > 0; --missing) {
      LocalConnection connection = listener->accept(deadline);
      require<Unsupported>(connection.is_open(), "{} ranks did not connect to rank {}", missing,
                           rank);
      Introduction other;
      Descriptor none;
      const auto received =
          connection.receive(std::as_writable_bytes(std::span(&other, 1)), none, deadline);
      require<Unsupported>(received == Received::message && rank < other.rank &&
                               other.rank < comm.size() &&
                               !connections[static_cast<std::size_t>(other.rank)].is_open(),
                           "a stranger connected to rank {}", rank);
      connections[static_cast<std::size_t>(other.rank)] = std::move(connection);
    }
  });
  return connections;
}

// Rank 0 creates the failure record's memory, and the others map it.
std::shared_ptr<GroupFailure> share_failure(Communicator& comm, const DeviceBackend& device,
                                            const std::vector<LocalConnection>& connections) {
  std::shared_ptr<GroupFailure> failure;
  const auto deadline = std::chrono::steady_clock::now() + comm.timeout() / 2;
  set_up(comm, [&] {
    if (comm.rank() != 0) return;
    failure =
        std::make_shared<GroupFailure>(std::make_unique<SharedPages>(sizeof(PeerFailure)), device);
    for (const LocalConnection& connection : connections) {
      if (!connection.is_open()) continue;
      require<Unsupported>(
          connection.send(bytes_of({.rank = 0}), failure->pages().file().get(), deadline),
          "a rank did not accept shared memory from rank 0");
    }
  });
  set_up(comm, [&] {
    if (comm.rank() == 0) return;
    Introduction first;
    Descriptor file;
    connections[0].receive(std::as_writable_bytes(std::span(&first, 1)), file, deadline);
    require<Unsupported>(file.is_open(), "rank {} received no shared memory from rank 0",
                         comm.rank());
    failure = std::make_shared<GroupFailure>(
        std::make_unique<SharedPages>(std::move(file), sizeof(PeerFailure)), device);
  });
  return failure;
}

}  // namespace

PeerGroup make_process_group(Communicator& comm, const Device& device,
                             const std::vector<PeerHello>& hellos) {
  const DeviceBackend& backend = backend_of(device);
  const int rank = comm.rank();
  PeerGroup group;
  require_one_host(hellos);
  require_reachable(comm, backend);
  std::vector<LocalConnection> connections = connect_all(comm);
  group.failure = share_failure(comm, backend, connections);
  const auto links = std::make_shared<std::weak_ptr<ProcessLinks>>();
  set_up(comm, [&] {
    group.heap = backend.make_peer_heap({.announce = [links](const HeapPiece& piece) {
      const auto alive = links->lock();
      require<DeviceError>(alive != nullptr, "a heap grows whose group is gone");
      alive->announce(piece);
    }});
  });
  const std::array<std::int64_t, 1> own{group.heap->reserved_bytes()};
  const Tensor reserved = gather_numbers(comm, own);
  std::shared_ptr<ProcessLinks> made;
  set_up(comm, [&] {
    std::vector<std::shared_ptr<ReachedHeap>> heaps;
    for (int r = 0; r < comm.size(); ++r) {
      const auto at = static_cast<std::size_t>(r);
      heaps.push_back(r == rank ? nullptr : backend.reach_heap(reserved.span<std::int64_t>()[at]));
      group.bases.push_back(r == rank ? group.heap->base() : heaps.back()->base());
    }
    made = std::make_shared<ProcessLinks>(rank, std::move(connections), std::move(heaps),
                                          group.failure, comm.timeout());
    *links = made;
  });
  group.kept = made;
  // Takes the first memory now, so that a rank that cannot map it is found during setup.
  set_up(comm, [&] { group.heap->take({1}, Dtype::i64); });
  std::random_device random;
  group.number = 1 + static_cast<std::int64_t>(random());
  comm.broadcast(TensorView(&group.number, {1}), 0);
  return group;
}

}  // namespace switchyard
