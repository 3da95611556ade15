// SPDX-License-Identifier: Apache-2.0
#include "peer/peer_group.h"

#include <array>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include "comm/agreement.h"
#include "comm/gather_numbers.h"
#include "device/device_backend.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

std::int64_t random_number() {
  std::random_device random;
  return static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random());
}

std::int64_t this_process() {
  static const std::int64_t number = random_number();
  return number;
}

std::int64_t this_host() {
  static const std::int64_t number = [] {
    std::string boot_id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
    return static_cast<std::int64_t>(std::hash<std::string>{}(boot_id));
  }();
  return number;
}

}  // namespace

void set_up(Communicator& comm, const std::function<void()>& step) {
  agree(comm, "peer memory", [&] {
    try {
      step();
    } catch (const Error& error) {  // also if it blames another rank, which reports itself
      throw Unsupported(error.what());
    }
  });
}

std::vector<PeerHello> exchange_hellos(Communicator& comm, const Device& device,
                                       std::int64_t group) {
  const DeviceBackend& backend = backend_of(device);
  const std::array<std::int64_t, 6> own{group,
                                        this_process(),
                                        this_host(),
                                        backend.ordinal(),
                                        reinterpret_cast<std::intptr_t>(&backend),
                                        reinterpret_cast<std::intptr_t>(device.stream().handle)};
  const Tensor all = gather_numbers(comm, own);
  std::vector<PeerHello> hellos;
  for (std::int64_t r = 0; r < comm.size(); ++r) {
    const auto words = all.view().slice(r, r + 1).span<std::int64_t>();
    hellos.push_back({.group = words[0],
                      .process = words[1],
                      .host = words[2],
                      .ordinal = words[3],
                      .device = words[4],
                      .stream = words[5]});
  }
  return hellos;
}

}  // namespace switchyard
