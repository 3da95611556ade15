// SPDX-License-Identifier: Apache-2.0
// Records why a group failed, in memory shared by its ranks' hosts and devices.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/shared_pages.h"
#include "device/device_backend.h"

namespace switchyard {

class GroupFailure {
 public:
  GroupFailure(std::unique_ptr<SharedPages> pages, const DeviceBackend& device)
      : pages_(std::move(pages)), registered_(device.share_host_memory(pages_->bytes())) {}

  PeerFailure* shared() const { return reinterpret_cast<PeerFailure*>(pages_->bytes().data()); }
  const SharedPages& pages() const { return *pages_; }
  bool has_failed() const { return failed_by() != 0; }

  // Records that `rank` gave up, or learnt of a failure, outside a meeting. An empty cause may be
  // filled in by a later call.
  void give_up(int rank, std::string_view cause) noexcept;
  // The same for a failure that `world_ranks` caused, by their numbers in the job.
  void give_up(int rank, std::string_view cause, std::span<const int> world_ranks) noexcept;
  // Records that `rank` found `ranks` at fault, outside a meeting.
  void blame(int rank, PeerFailure::Kind kind, Meeting meeting,
             std::span<const int> ranks) noexcept;

  struct Explanation {
    std::string what;
    std::vector<int> ranks;  // at fault
    // The same by their numbers in the job, if they may be outside the group.
    std::optional<std::vector<int>> world_ranks = {};
  };
  // Explains the failure of a group that has failed. Returns the same on every rank.
  Explanation explain(std::chrono::nanoseconds timeout) const;

 private:
  std::uint32_t failed_by() const;
  // Records that `rank` gave up. Writes the cause if there is none yet, after calling
  // write_culprits(part).
  template <typename Write>
  void note(int rank, std::string_view cause, Write write_culprits) noexcept;
  // Makes `rank` the one whose part counts, unless another is already named.
  void name(int rank) const;
  PeerFailure::Part& part_of(int rank) const {
    return shared()->parts[static_cast<std::size_t>(rank)];
  }

  std::unique_ptr<SharedPages> pages_;
  std::shared_ptr<void> registered_;
  std::mutex mutex_;  // guards writes by the host threads of this process
};

}  // namespace switchyard
