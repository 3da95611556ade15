// SPDX-License-Identifier: Apache-2.0
// A communicator that can end a rank at a chosen collective.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/communicator.h"

namespace switchyard::cli {

// Forwards to another communicator, and calls `before(n)` ahead of the n-th collective.
class KillingCommunicator final : public Communicator, public MappedBuffers {
 public:
  KillingCommunicator(Communicator& inner, std::function<void(std::int64_t)> before);

  std::string_view backend() const override { return inner_.backend(); }
  MappedBuffers* mapped_buffers() override;
  std::vector<std::vector<TensorView>> map(std::span<const TensorView> views) override;
  void phase_barrier() override;

 private:
  void do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) override;
  void do_all_gather(const Bytes& send, const Bytes& recv) override;
  void do_broadcast(const Bytes& values, int root) override;
  void do_barrier() override;
  std::unique_ptr<Communicator> do_split(int color, int key) override;
  void do_abort(const std::string& reason, const std::vector<int>& culprits) override;
  void count() { before_(++num_collectives_); }

  Communicator& inner_;
  std::function<void(std::int64_t)> before_;
  std::int64_t num_collectives_ = 0;
};

}  // namespace switchyard::cli
