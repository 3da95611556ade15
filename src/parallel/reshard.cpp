// SPDX-License-Identifier: Apache-2.0
// One exchange per tensor: every rank sends its experts ordered by new owner, and puts the received
// ones in the order of their ids.
#include "switchyard/reshard.h"

#include <algorithm>

#include "comm/agreement.h"
#include "core/check_memory.h"
#include "core/hash.h"
#include "core/require.h"
#include "device/new_tensor.h"
#include "moe/expert_form.h"
#include "moe/expert_tensors.h"
#include "peer/device_collectives.h"

namespace switchyard {
namespace {

constexpr std::string_view kReshard = "reshard";

// A placement may have fewer ranks than the communicator. The other ranks own no experts.
std::span<const std::int32_t> experts_of(const ExpertPlacement& placement, int rank) {
  return rank < placement.num_ranks() ? placement.experts_of(rank)
                                      : std::span<const std::int32_t>{};
}

void require_placements(const ExpertPlacement& from, const ExpertPlacement& to, int num_ranks) {
  require(from.num_experts() == to.num_experts(),
          "experts cannot move from a placement of {} experts to one of {}", from.num_experts(),
          to.num_experts());
  require(from.num_experts() > 0, "the placements have no experts");
  for (const auto* placement : {&from, &to}) {
    require(placement->num_ranks() <= num_ranks,
            "a placement is for {} ranks, but the communicator has {}", placement->num_ranks(),
            num_ranks);
  }
}

ComparedList owners_of(const ExpertPlacement& placement, std::string_view one) {
  return {"owners", one, hash_of(placement.owners()), placement.owners().size(),
          [&](std::size_t i) { return std::to_string(placement.owners()[i]); }};
}

constexpr std::size_t kNumAlike = 4;

void add_alike(Agreement& agreement, const ExpertPlacement& from, const ExpertPlacement& to,
               const Device& device) {
  agreement.add({"num_experts", from.num_experts()});
  agreement.add(owners_of(from, "the old owner of expert"));
  agreement.add(owners_of(to, "the new owner of expert"));
  agreement.add({"the memory of their devices, 0 for the host's",
                 static_cast<std::int64_t>(device.memory())});
}

// Compares one expert's part of each tensor, such as "f32 [1,4]", since ranks have different
// numbers of experts.
ComparedList forms_of(std::span<const ConstTensorView> shard) {
  return {"tensors", "an expert's part of tensor", hash_of_shapes(shard, 1), shard.size(),
          [=](std::size_t i) {
            const auto& tensor = shard[i];
            return fmt::format("{} {}", name_of(tensor.dtype()), tensor.shape().with_rows(1));
          }};
}

// The experts that one rank sends and receives.
struct Moves {
  Moves(const ExpertPlacement& from, const ExpertPlacement& to, const Communicator& comm);

  bool none = false;                    // no expert moves anywhere
  std::vector<std::int64_t> send_rows;  // [ranks]
  std::vector<std::int64_t> recv_rows;  // [ranks]
  std::vector<std::size_t> send_order;  // local experts, by new owner
  std::vector<std::size_t> places;      // the final row of each received row
};

Moves::Moves(const ExpertPlacement& from, const ExpertPlacement& to, const Communicator& comm)
    : none(std::ranges::equal(from.owners(), to.owners())) {
  const auto had = experts_of(from, comm.rank());
  const auto gets = experts_of(to, comm.rank());
  for (int r = 0; r < comm.size(); ++r) {
    const auto sent_before = send_order.size();
    for (std::size_t i = 0; i < had.size(); ++i) {
      if (to.owner(had[i]) == r) send_order.push_back(i);
    }
    send_rows.push_back(static_cast<std::int64_t>(send_order.size() - sent_before));
    const auto received_before = places.size();
    for (std::size_t i = 0; i < gets.size(); ++i) {
      if (from.owner(gets[i]) == r) places.push_back(i);
    }
    recv_rows.push_back(static_cast<std::int64_t>(places.size() - received_before));
  }
}

// Returns a view of the rows in place if they are stored in this order without gaps, so that
// nothing has to be packed. Otherwise returns an empty view.
ConstTensorView lying_in(const ExpertRows& rows, std::span<const std::size_t> order) {
  ConstTensorView first;
  const std::byte* end = nullptr;
  for (const auto row : order) {
    for (const auto& piece : rows.pieces[row]) {
      if (end == nullptr) {
        first = piece;
        end = piece.data();
      }
      const bool goes_on = piece.data() == end && piece.owner() == first.owner();
      if (!goes_on || !piece.is_contiguous()) return {};
      end += piece.bytes();
    }
  }
  return {first.data(),  rows.dtype,    rows.shape, rows.shape.row_elements(),
          first.owner(), first.memory()};
}

// Permutes the rows by swapping them, so that no second tensor is needed.
void put_in_place(const TensorView& rows, std::vector<std::size_t> places, const Device& device) {
  const auto row_at = [&](std::size_t i) {
    return rows.slice(static_cast<std::int64_t>(i), static_cast<std::int64_t>(i) + 1);
  };
  for (std::size_t i = 0; i < places.size(); ++i) {
    while (places[i] != i) {
      const auto to = places[i];
      const Tensor between = device.copy_of(row_at(to));
      device.copy(row_at(i), row_at(to));
      device.copy(between, row_at(i));
      std::swap(places[i], places[to]);
    }
  }
}

Tensor moved(const ExpertRows& rows, const Moves& moves, Communicator& comm, const Device& device) {
  if (moves.none) return pack(rows, moves.send_order, device);
  ConstTensorView send = lying_in(rows, moves.send_order);
  if (send.data() == nullptr) send = pack(rows, moves.send_order, device).view();
  const auto num_received = static_cast<std::int64_t>(moves.places.size());
  Tensor result = new_tensor(device, rows.shape.with_rows(num_received), rows.dtype);
  DeviceCollectives(comm, device, DeviceCollectives::Way::communicator)
      .all_to_all(send, moves.send_rows, result, moves.recv_rows);
  put_in_place(result, moves.places, device);
  return result;
}

void check(std::span<const ConstTensorView> shard, const ExpertPlacement& from,
           const ExpertPlacement& to, Communicator& comm, const Device& device) {
  agree(comm, kReshard, [&] {
    require_placements(from, to, comm.size());
    const auto num_experts = static_cast<std::int64_t>(experts_of(from, comm.rank()).size());
    for (std::size_t i = 0; i < shard.size(); ++i) {
      require(shard[i].rows() == num_experts, "tensor {} is {}, but this rank has {} experts", i,
              shard[i].shape(), num_experts);
      require_on_device(shard[i], device.memory(), fmt::format("tensor {}", i));
    }
  });
  Agreement agreement(comm, kReshard);
  add_alike(agreement, from, to, device);
  agreement.add(forms_of(shard));
  agreement.gather();
  agreement.require_equal();
}

// Checks the arguments and returns the form of the experts. Ranks without experts learn it from the
// others.
ExpertForm checked_form(std::span<const ExpertWeights> experts, const ExpertPlacement& from,
                        const ExpertPlacement& to, Communicator& comm, const Device& device) {
  ExpertForm form;
  agree(comm, kReshard, [&] {
    require_placements(from, to, comm.size());
    const auto num_experts = experts_of(from, comm.rank()).size();
    require(experts.size() == num_experts, "there are {} experts, but this rank has {}",
            experts.size(), num_experts);
    form = form_of(experts);
  });
  Agreement agreement(comm, kReshard);
  add_alike(agreement, from, to, device);
  for (const Field& field : form.fields()) agreement.add(field);
  agreement.gather();
  agreement.require_equal(kNumAlike);
  std::vector<int> owners(from.owners().begin(), from.owners().end());
  std::ranges::sort(owners);
  agreement.require_equal(kNumAlike + ExpertForm::kNumFields, owners);
  return ExpertForm::from_fields(agreement.values_of(owners.front()).subspan(kNumAlike));
}

}  // namespace

std::vector<Tensor> reshard(std::span<const ConstTensorView> shard, const ExpertPlacement& from,
                            const ExpertPlacement& to, Communicator& comm, const Device& device) {
  check(shard, from, to, comm, device);
  const Moves moves(from, to, comm);
  std::vector<Tensor> result;
  for (const auto& tensor : shard) {
    ExpertRows rows{.shape = tensor.shape(), .dtype = tensor.dtype()};
    for (std::int64_t i = 0; i < tensor.rows(); ++i) {
      rows.pieces.push_back({tensor.slice(i, i + 1)});
    }
    result.push_back(moved(rows, moves, comm, device));
  }
  return result;
}

MoeParameters reshard(MoeParameters shard, const ExpertPlacement& from, const ExpertPlacement& to,
                      Communicator& comm) {
  const Device device = shard.device();
  const auto& experts = shard.weights().experts;
  const ExpertForm form = checked_form(experts, from, to, comm, device);
  const Moves moves(from, to, comm);
  std::vector<Tensor> packed;
  for (const auto& rows : packed_rows(form, experts)) {
    packed.push_back(moved(rows, moves, comm, device));
  }
  MoeViews tensors = shard.views();
  tensors.experts = unpack(form, packed);
  return MoeParameters::of(std::move(tensors), device);
}

}  // namespace switchyard
