// SPDX-License-Identifier: Apache-2.0
// State shared by the handles of communicators and layers, and tensors of the C interface.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "c/handles.h"
#include "comm/threads/meeting_point.h"
#include "switchyard/c/layers.h"
#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/moe_parameters.h"
#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard::c {

// One rank of a group: its communicator, and everything that only the rank's thread uses.
class RankState {
 public:
  RankState(std::unique_ptr<Communicator> communicator,
            std::shared_ptr<threads::MeetingPoint> meeting_point = nullptr)
      : point(std::move(meeting_point)), comm(std::move(communicator)) {}

  // Returns the rank's own device of this kind. The caller holds the lock.
  const Device& device_like(const switchyard_device& device);
  // Destroys an object of the rank once the rank is in no call: immediately, or during its next
  // call. Python frees objects on any thread, possibly one that the rank is waiting for.
  void retire(std::shared_ptr<void> object);
  void bury_retired();

  const std::shared_ptr<threads::MeetingPoint> point;  // null: the ranks are not our threads
  const std::unique_ptr<Communicator> comm;
  // Recursive: run_step holds it while the step that it calls back runs layers of the communicator.
  std::recursive_mutex mutex;

 private:
  std::map<std::uint64_t, Device> devices_;  // by handle id
  std::mutex retired_mutex_;
  std::vector<std::shared_ptr<void>> retired_;
};

// Holds the locks of the ranks that a call uses. Skips null pointers.
class RankLock {
 public:
  explicit RankLock(std::vector<RankState*> ranks);

 private:
  std::vector<std::unique_lock<std::recursive_mutex>> locks_;
};

TensorView tensor_of(const switchyard_tensor& tensor, Memory memory, std::string_view name);
inline bool is_given(const switchyard_tensor& tensor) { return tensor.num_extents != 0; }
ExpertPlacement placement_of(const switchyard_placement& placement);

// Returns a gated or an ungated activation, whichever fits the sizes of the two matrices.
Activation activation_for(const switchyard_tensor& gate_up, const switchyard_tensor& down);
struct LayerActivations {
  Activation routed = Activation::swiglu;
  Activation shared = Activation::swiglu;
};
MoeViews views_of(const switchyard_layer_weights& weights, const LayerActivations& activations,
                  Memory memory);

std::chrono::milliseconds timeout_of(std::int64_t timeout_ms);
int rank_number(std::int64_t number, std::string_view name);

// Returns "" for null.
inline std::string_view text_of(const char* text) { return text == nullptr ? "" : text; }

}  // namespace switchyard::c

struct switchyard_comm {
  std::shared_ptr<switchyard::c::RankState> rank;
};

namespace switchyard::c {

template <typename Work>
int on_rank(const switchyard_comm* comm, const Work& work) {
  return guarded([&] {
    const RankLock lock({at(comm, "comm").rank.get()});
    work(*comm->rank->comm);
  });
}

}  // namespace switchyard::c
