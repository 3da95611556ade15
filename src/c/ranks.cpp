// SPDX-License-Identifier: Apache-2.0
// C interface: ranks, placements and memory.
#include "c/ranks.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <span>
#include <string_view>
#include <tuple>

#include "c/views.h"
#include "comm/agreement.h"
#include "comm/backends.h"
#include "comm/threads/thread_communicator.h"
#include "core/require.h"
#include "switchyard/reshard.h"

namespace switchyard::c {

const Device& RankState::device_like(const switchyard_device& device) {
  auto found = devices_.find(device.id);
  if (found == devices_.end()) found = devices_.emplace(device.id, device.make()).first;
  return found->second;
}

void RankState::retire(std::shared_ptr<void> object) {
  {
    const std::scoped_lock lock(retired_mutex_);
    retired_.push_back(std::move(object));
  }
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (lock.owns_lock()) bury_retired();
}

void RankState::bury_retired() {
  std::vector<std::shared_ptr<void>> dead;
  const std::scoped_lock lock(retired_mutex_);
  dead.swap(retired_);
}

RankLock::RankLock(std::vector<RankState*> ranks) {
  std::sort(ranks.begin(), ranks.end(), std::less<>());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  for (RankState* rank : ranks) {
    if (rank == nullptr) continue;
    locks_.emplace_back(rank->mutex);
    rank->bury_retired();
  }
}

TensorView tensor_of(const switchyard_tensor& tensor, Memory memory, std::string_view name) {
  require(1 <= tensor.num_extents && tensor.num_extents <= Shape::kMaxRank,
          "{} has {} extents, but must have 1 to {}", name, tensor.num_extents, Shape::kMaxRank);
  require(0 <= tensor.dtype && tensor.dtype <= switchyard_f16, "{} has the unknown dtype {}", name,
          tensor.dtype);
  const Shape shape(std::span(tensor.extents, static_cast<std::size_t>(tensor.num_extents)));
  require(tensor.data != nullptr || shape.num_elements() == 0, "{} is a null pointer", name);
  return {static_cast<std::byte*>(tensor.data),
          static_cast<Dtype>(tensor.dtype),
          shape,
          shape.row_elements(),
          nullptr,
          memory};
}

ExpertPlacement placement_of(const switchyard_placement& placement) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  require(0 < placement.num_experts && placement.num_experts <= kMost,
          "num_experts ({}) must be positive", placement.num_experts);
  require(0 < placement.num_ranks && placement.num_ranks <= kMost,
          "num_ranks ({}) must be positive", placement.num_ranks);
  require(placement.owners != nullptr, "owners is a null pointer");
  return ExpertPlacement::from_owners({placement.owners, placement.owners + placement.num_experts},
                                      static_cast<int>(placement.num_ranks));
}

Activation activation_for(const switchyard_tensor& gate_up, const switchyard_tensor& down) {
  const auto width = gate_up.extents[std::max<std::int64_t>(gate_up.num_extents, 2) - 2];
  const auto intermediate = down.extents[std::max<std::int64_t>(down.num_extents, 1) - 1];
  return width == 2 * intermediate ? Activation::swiglu : Activation::relu;
}

std::chrono::milliseconds timeout_of(std::int64_t timeout_ms) {
  require(timeout_ms > 0, "timeout ({} ms) must be positive", timeout_ms);
  return std::min(std::chrono::milliseconds(timeout_ms), kLongestTimeout);
}

int rank_number(std::int64_t number, std::string_view name) {
  require(std::numeric_limits<int>::min() <= number && number <= std::numeric_limits<int>::max(),
          "{} ({}) is beyond 32 bits", name, number);
  return static_cast<int>(number);
}

namespace {

switchyard_tensor as_one_expert(const switchyard_tensor& matrix, std::string_view name) {
  require(matrix.num_extents == 2, "{} has {} extents, but must have 2", name, matrix.num_extents);
  return {matrix.data, matrix.dtype, 3, {1, matrix.extents[0], matrix.extents[1], 0}};
}

TensorView tensor_if_given(const switchyard_tensor& tensor, Memory memory, std::string_view name) {
  return is_given(tensor) ? tensor_of(tensor, memory, name) : TensorView();
}

ReduceOp reduce_op(std::int64_t op) {
  require(0 <= op && op <= 2, "there is no reduction {}", op);
  return static_cast<ReduceOp>(op);
}

TensorView host_tensor(const switchyard_tensor* tensor, std::string_view name) {
  return tensor_of(at(tensor, name), Memory::host, name);
}

// Wraps raw bytes in a tensor, which is what devices copy.
TensorView bytes_of_memory(void* data, std::int64_t bytes, Memory memory) {
  require(data != nullptr || bytes == 0, "{} bytes of {} memory are at a null pointer", bytes,
          name_of(memory));
  require(bytes >= 0 && bytes % 2 == 0, "bytes ({}) must be even and not negative", bytes);
  return {static_cast<std::byte*>(data), Dtype::bf16, Shape{bytes / 2}, 1, nullptr, memory};
}

}  // namespace

MoeViews views_of(const switchyard_layer_weights& weights, const LayerActivations& activations,
                  Memory memory) {
  const auto view = [&](const switchyard_tensor& tensor, std::string_view name) {
    return tensor_if_given(tensor, memory, name);
  };
  MoeViews views{.router = {.gate = view(weights.gate, "gate"),
                            .gate_bias = view(weights.gate_bias, "gate_bias"),
                            .score_bias = view(weights.score_bias, "score_bias")}};
  if (is_given(weights.gate_up) || is_given(weights.down)) {
    views.experts =
        unpack(PackedExpertViews{.gate_up = view(weights.gate_up, "gate_up"),
                                 .down = view(weights.down, "down"),
                                 .gate_up_bias = view(weights.gate_up_bias, "gate_up_bias"),
                                 .down_bias = view(weights.down_bias, "down_bias")},
               activations.routed);
  }
  if (is_given(weights.shared_gate_up) || is_given(weights.shared_down)) {
    const auto one = [&](const switchyard_tensor& tensor, std::string_view name) {
      return tensor_of(as_one_expert(tensor, name), memory, name);
    };
    views.shared =
        unpack(PackedExpertViews{.gate_up = one(weights.shared_gate_up, "shared_gate_up"),
                                 .down = one(weights.shared_down, "shared_down")},
               activations.shared)
            .front();
  }
  return views;
}

}  // namespace switchyard::c

struct switchyard_buffer {
  switchyard_device* device;
  switchyard::Tensor memory;
};

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::guarded;
using c::on_rank;

namespace {

// A bad argument on one rank aborts the communicator, as it does in the C++ collectives: the peers
// are already waiting.
template <typename Call>
int in_collective(switchyard_comm* comm, std::string_view name, Call call) {
  return on_rank(comm,
                 [&](Communicator& ranks) { or_abort({&ranks}, name, [&] { call(ranks); }); });
}

}  // namespace

int switchyard_buffer_make(switchyard_device* device, void* stream, int64_t bytes,
                           switchyard_buffer** buffer, void** data) {
  return c::on_stream(device, stream, [&](const Device& on) {
    require(bytes >= 0, "bytes ({}) must not be negative", bytes);
    c::at(buffer, "buffer");
    c::at(data, "data");
    const auto words = bytes / 4 + (bytes % 4 == 0 ? 0 : 1);
    *buffer = new switchyard_buffer{device, on.empty({words}, Dtype::f32)};
    *data = (*buffer)->memory.data();
  });
}

void switchyard_buffer_free(switchyard_buffer* buffer) {
  if (buffer == nullptr) return;
  const std::scoped_lock lock(buffer->device->mutex);
  delete buffer;
}

int switchyard_copy_in(switchyard_device* device, void* stream, const void* host, void* data,
                       int64_t bytes) {
  return c::on_stream(device, stream, [&](const Device& on) {
    on.copy(c::bytes_of_memory(const_cast<void*>(host), bytes, Memory::host),
            c::bytes_of_memory(data, bytes, on.memory()));
  });
}

int switchyard_copy_out(switchyard_device* device, void* stream, const void* data, void* host,
                        int64_t bytes) {
  return c::on_stream(device, stream, [&](const Device& on) {
    on.copy(c::bytes_of_memory(const_cast<void*>(data), bytes, on.memory()),
            c::bytes_of_memory(host, bytes, Memory::host));
  });
}

int switchyard_copy_on(switchyard_device* device, void* stream, const void* from, void* to,
                       int64_t bytes) {
  return c::on_stream(device, stream, [&](const Device& on) {
    on.copy(c::bytes_of_memory(const_cast<void*>(from), bytes, on.memory()),
            c::bytes_of_memory(to, bytes, on.memory()));
  });
}

int switchyard_synchronize(switchyard_device* device, void* stream) {
  return c::on_stream(device, stream, [](const Device& on) { on.synchronize(); });
}

int switchyard_placement_contiguous(int64_t num_experts, int64_t num_ranks, int32_t* owners) {
  return guarded([&] {
    c::at(owners, "owners");
    const auto placement = ExpertPlacement::contiguous(c::rank_number(num_experts, "num_experts"),
                                                       c::rank_number(num_ranks, "num_ranks"));
    std::ranges::copy(placement.owners(), owners);
  });
}

int switchyard_placement_check(const switchyard_placement* placement) {
  return guarded([&] { c::placement_of(c::at(placement, "placement")); });
}

int switchyard_comm_threads(int64_t num_ranks, int64_t timeout_ms, switchyard_comm** comms) {
  return guarded([&] {
    require(0 < num_ranks && num_ranks <= kMostThreadRanks, "num_ranks ({}) must be 1 to {}",
            num_ranks, int{kMostThreadRanks});
    c::at(comms, "comms");
    const auto point = std::make_shared<threads::MeetingPoint>(static_cast<int>(num_ranks),
                                                               c::timeout_of(timeout_ms));
    std::vector<std::unique_ptr<switchyard_comm>> ranks;
    for (int r = 0; r < num_ranks; ++r) {
      ranks.emplace_back(new switchyard_comm{std::make_shared<c::RankState>(
          std::make_unique<threads::ThreadCommunicator>(point, r), point)});
    }
    for (auto& rank : ranks) *comms++ = rank.release();
  });
}

int switchyard_comm_connect(const char* backend, int64_t timeout_ms, switchyard_comm** comm) {
  return guarded([&] {
    c::at(comm, "comm") = new switchyard_comm{std::make_shared<c::RankState>(connect(
        {.backend = std::string(c::text_of(backend)), .timeout = c::timeout_of(timeout_ms)}))};
  });
}

int switchyard_comm_split(switchyard_comm* comm, int64_t color, int64_t key,
                          switchyard_comm** group) {
  return in_collective(comm, "split", [&](Communicator& ranks) {
    c::at(group, "group");
    auto part = ranks.split(c::rank_number(color, "color"), c::rank_number(key, "key"));
    *group = part == nullptr ? nullptr
                             : new switchyard_comm{std::make_shared<c::RankState>(std::move(part))};
  });
}

void switchyard_comm_free(switchyard_comm* comm) {
  if (comm == nullptr) return;
  const auto& point = comm->rank->point;
  if (point != nullptr) point->leave(comm->rank->comm->rank());  // layers may still hold the rank
  delete comm;
}

int64_t switchyard_comm_rank(switchyard_comm* comm) {
  return c::number_of([&] { return c::at(comm, "comm").rank->comm->rank(); });
}
int64_t switchyard_comm_size(switchyard_comm* comm) {
  return c::number_of([&] { return c::at(comm, "comm").rank->comm->size(); });
}

int64_t switchyard_comm_first_failed(switchyard_comm* comm) {
  return c::number_of([&] {
    const auto& point = c::at(comm, "comm").rank->point;
    return point == nullptr ? -1 : point->first_failed_rank();
  });
}

int switchyard_comm_abort(switchyard_comm* comm, const char* reason) {
  return guarded([&] {
    const std::string why(c::text_of(reason));
    c::RankState& rank = *c::at(comm, "comm").rank;
    std::unique_lock lock(rank.mutex, std::try_to_lock);
    if (lock.owns_lock()) return rank.comm->abort(why);
    const int number = rank.comm->rank();
    require(rank.point != nullptr, "rank {} is in a call: only its own thread can abort it",
            number);
    rank.point->fail(number, {why, {number}});
  });
}

int switchyard_comm_barrier(switchyard_comm* comm) {
  return on_rank(comm, [](Communicator& ranks) { ranks.barrier(); });
}

int switchyard_comm_all_reduce(switchyard_comm* comm, const switchyard_tensor* values, int64_t op) {
  return in_collective(comm, "all_reduce", [&](Communicator& ranks) {
    ranks.all_reduce(c::host_tensor(values, "values"), c::reduce_op(op));
  });
}

int switchyard_comm_all_gather(switchyard_comm* comm, const switchyard_tensor* send,
                               const switchyard_tensor* recv) {
  return in_collective(comm, "all_gather", [&](Communicator& ranks) {
    ranks.all_gather(c::host_tensor(send, "send"), c::host_tensor(recv, "recv"));
  });
}

int switchyard_comm_reduce_scatter(switchyard_comm* comm, const switchyard_tensor* send,
                                   const switchyard_tensor* recv, int64_t op) {
  return in_collective(comm, "reduce_scatter", [&](Communicator& ranks) {
    ranks.reduce_scatter(c::host_tensor(send, "send"), c::host_tensor(recv, "recv"),
                         c::reduce_op(op));
  });
}

int switchyard_comm_broadcast(switchyard_comm* comm, const switchyard_tensor* values,
                              int64_t root) {
  return in_collective(comm, "broadcast", [&](Communicator& ranks) {
    ranks.broadcast(c::host_tensor(values, "values"), c::rank_number(root, "root"));
  });
}

int switchyard_comm_all_to_all(switchyard_comm* comm, const switchyard_tensor* send,
                               const int64_t* send_rows, const switchyard_tensor* recv,
                               const int64_t* recv_rows) {
  return in_collective(comm, "all_to_all", [&](Communicator& ranks) {
    const auto size = static_cast<std::size_t>(ranks.size());
    c::at(send_rows, "send_rows");
    c::at(recv_rows, "recv_rows");
    ranks.all_to_all(c::host_tensor(send, "send"), {send_rows, size}, c::host_tensor(recv, "recv"),
                     {recv_rows, size});
  });
}

int switchyard_reshard(switchyard_comm* comm, switchyard_device* device, void* stream,
                       const switchyard_placement* from, const switchyard_placement* to,
                       int64_t num_tensors, const switchyard_tensor* shard,
                       const switchyard_tensor* into) {
  return on_rank(comm, [&](Communicator& ranks) {
    std::vector<ConstTensorView> before;
    std::vector<TensorView> after;
    const auto [on, old_placement, new_placement] = or_abort({&ranks}, "reshard", [&] {
      const Device& used = comm->rank->device_like(c::at(device, "device"));
      if (used.memory() == Memory::gpu) used.set_stream({stream});
      require(num_tensors >= 0, "num_tensors ({}) must not be negative", num_tensors);
      if (num_tensors > 0) {
        c::at(shard, "shard");
        c::at(into, "into");
      }
      for (std::int64_t i = 0; i < num_tensors; ++i) {
        before.emplace_back(c::tensor_of(shard[i], used.memory(), "a tensor of the shard"));
        after.push_back(c::tensor_of(into[i], used.memory(), "a tensor to be filled"));
      }
      return std::tuple(used, c::placement_of(c::at(from, "from")),
                        c::placement_of(c::at(to, "to")));
    });
    const auto moved = reshard(before, old_placement, new_placement, ranks, on);
    for (std::size_t i = 0; i < moved.size(); ++i) on.copy(moved[i], after[i]);
  });
}
