// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <string>

#include "comm/agreement.h"
#include "core/require.h"
#include "device/device_backend.h"
#include "peer/peer_group.h"

namespace switchyard {
namespace {

// Shared by all ranks, so the heaps live until the last rank lets go of the group.
struct Threads {
  std::shared_ptr<GroupFailure> failure;
  std::mutex mutex;
  std::vector<std::shared_ptr<PeerHeap>> heaps;
};

// Groups being made, by the number that rank 0 broadcasts to the others.
class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }
  std::int64_t add(const std::shared_ptr<Threads>& threads) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_[++last_] = threads;
    return last_;
  }
  std::shared_ptr<Threads> find(std::int64_t number) {
    const std::scoped_lock lock(mutex_);
    const auto found = groups_.find(number);
    return found == groups_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::map<std::int64_t, std::weak_ptr<Threads>> groups_;
};

// Warns once if a kernel that waits for another rank of this process could block that rank: through
// a hardware queue that streams share, or through lazy kernel loading.
void warn_of_environment(const Device& device, int rank) {
  static std::once_flag warned;
  const auto value_of = [](const char* name) -> std::string {
    const char* const value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (device.memory() == Memory::host || rank != 0) return;
  constexpr int kMostStreams = 32;
  const int connections = std::atoi(value_of("CUDA_DEVICE_MAX_CONNECTIONS").c_str());
  if (connections >= kMostStreams && value_of("CUDA_MODULE_LOADING") == "EAGER") return;
  std::call_once(warned, [] {
    std::cerr << "switchyard: ranks are threads that share GPUs: set "
                 "CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER before the program "
                 "starts, or a rank that waits may hold up the one it waits for\n";
  });
}

// If two ranks shared a device or a stream, one would wait for the other forever.
void require_own_devices(const std::vector<PeerHello>& hellos) {
  constexpr std::int64_t kStreamOfEachThread = 2;  // cudaStreamPerThread
  for (std::size_t b = 1; b < hellos.size(); ++b) {
    const PeerHello& second = hellos[b];
    for (std::size_t a = 0; a < b; ++a) {
      const PeerHello& first = hellos[a];
      require(first.device != second.device,
              "ranks {} and {} share one Device: ranks that use each other's memory need a device "
              "of their own each",
              a, b);
      const bool has_stream = first.stream != 0 && first.stream != kStreamOfEachThread;
      require(!has_stream || first.ordinal != second.ordinal || first.stream != second.stream,
              "ranks {} and {} share one stream: ranks that use each other's memory need a stream "
              "of their own each (CudaOptions::stream)",
              a, b);
    }
  }
}

}  // namespace

PeerGroup make_thread_group(Communicator& comm, const Device& device,
                            const std::vector<PeerHello>& hellos) {
  require_own_devices(hellos);
  warn_of_environment(device, comm.rank());
  const DeviceBackend& backend = backend_of(device);
  std::shared_ptr<Threads> threads;
  std::int64_t number = 0;
  set_up(comm, [&] {
    if (comm.rank() != 0) return;
    threads = std::make_shared<Threads>();
    threads->failure =
        std::make_shared<GroupFailure>(std::make_unique<SharedPages>(sizeof(PeerFailure)), backend);
    threads->heaps.resize(hellos.size());
    number = Registry::instance().add(threads);
  });
  comm.broadcast(TensorView(&number, {1}), 0);
  if (threads == nullptr) threads = Registry::instance().find(number);
  set_up(comm, [&] {
    require<InternalError>(threads != nullptr, "rank 0 has left");
    std::vector<int> ordinals;
    for (const PeerHello& hello : hellos) ordinals.push_back(static_cast<int>(hello.ordinal));
    auto heap = backend.make_peer_heap({.ordinals = ordinals});
    const std::scoped_lock lock(threads->mutex);
    threads->heaps[static_cast<std::size_t>(comm.rank())] = std::move(heap);
  });
  const std::scoped_lock lock(threads->mutex);
  PeerGroup group{.number = number,
                  .failure = threads->failure,
                  .heap = threads->heaps[static_cast<std::size_t>(comm.rank())],
                  .kept = threads};
  for (const auto& heap : threads->heaps) {
    if (heap == nullptr) {  // a communicator that loses messages lets this rank run ahead
      FailureListeners::fail(
          comm,
          fmt::format("peer memory: rank {} has no heap yet, but reported one", group.bases.size()),
          {});
    }
    group.bases.push_back(heap->base());
  }
  return group;
}

}  // namespace switchyard
