// Why a group failed, in memory that its ranks, their hosts and their devices share.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
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

  // For a rank that fails, or knows of one that has, elsewhere than in a meeting. It may say why
  // later.
  void give_up(int rank, std::string_view cause) noexcept;
  // What `rank` found out about others, elsewhere than in a meeting.
  void blame(int rank, PeerFailure::Kind kind, Meeting meeting,
             std::span<const int> ranks) noexcept;

  struct Explanation {
    std::string what;
    std::vector<int> ranks;
  };
  // Of a group that has failed; the same on every rank.
  Explanation explain(std::chrono::nanoseconds timeout) const;

 private:
  std::uint32_t failed_by() const;
  void name(int rank) const;  // as the one whose part counts, unless another is
  PeerFailure::Part& part_of(int rank) const {
    return shared()->parts[static_cast<std::size_t>(rank)];
  }

  std::unique_ptr<SharedPages> pages_;
  std::shared_ptr<void> registered_;
  std::mutex mutex_;  // of what hosts of this process write
};

}  // namespace switchyard
