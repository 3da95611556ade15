// SPDX-License-Identifier: Apache-2.0
// Sums gradients over the ranks that hold copies of the same parameters. Each element is summed in
// rank order, so how tensors are batched does not change any bits.
#include <algorithm>
#include <functional>
#include <iterator>
#include <map>

#include "comm/agreement.h"
#include "core/check_memory.h"
#include "core/given.h"
#include "core/hash.h"
#include "core/require.h"
#include "moe/expert_tensors.h"
#include "parallel/gradient_axes.h"
#include "parallel/mesh_axes.h"
#include "peer/device_collectives.h"
#include "switchyard/parallelize.h"

namespace switchyard {
namespace {

// A contiguous run of elements.
struct Run {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

void append_runs(std::vector<Run>& runs, const TensorView& tensor) {
  const bool whole = tensor.is_contiguous();
  for (std::int64_t r = 0; r < (whole ? 1 : tensor.rows()); ++r) {
    runs.push_back({tensor.row(r), whole ? tensor.bytes() : tensor.row_bytes()});
  }
}

void sum(std::span<const TensorView> tensors, Communicator& comm, const Device& device) {
  or_abort_alone({&comm}, "reduce_gradients", [&] {
    const DeviceCollectives collectives(comm, device);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::i32, Dtype::i64}) {
      std::vector<TensorView> alike;
      std::ranges::copy_if(tensors, std::back_inserter(alike),
                           [&](const TensorView& tensor) { return tensor.dtype() == dtype; });
      collectives.all_reduce(alike);
    }
  });
}

// The gradients of a list that are given.
struct Gradients {
  Gradients(std::span<const TensorView> list, std::function<std::string(std::size_t)> name)
      : name_of_place(std::move(name)) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!is_given(list[i])) continue;
      tensors.push_back(list[i]);
      places.push_back(i);
    }
  }

  std::string name_of(std::size_t i) const { return name_of_place(places[i]); }

  std::vector<TensorView> tensors;
  std::vector<std::size_t> places;  // indices in the list
  std::function<std::string(std::size_t)> name_of_place;
};

// Compares gradients by their places in the list as well as by form: a gate must not be added to an
// up.
ComparedList compared(std::string_view all, std::string_view one, const Gradients& gradients) {
  const std::vector<ConstTensorView> tensors(gradients.tensors.begin(), gradients.tensors.end());
  const std::vector<std::int64_t> hashes{hash_of_shapes(tensors),
                                         hash_of(std::span<const std::size_t>(gradients.places))};
  return {all, one, hash_of(std::span<const std::int64_t>(hashes)), tensors.size(),
          [&gradients](std::size_t i) {
            return fmt::format("{}, {}", gradients.name_of(i), form_text(gradients.tensors[i]));
          }};
}

struct Call {
  std::string_view operation;
  Gradients experts;
  Gradients replicated;
  const Device& device;
};

std::string objection_to_memory(const Call& call) {
  for (const auto* list : {&call.experts, &call.replicated}) {
    for (std::size_t i = 0; i < list->tensors.size(); ++i) {
      auto objection = objection_to_memory(list->tensors[i], call.device.memory(),
                                           fmt::format("gradient {}", list->name_of(i)));
      if (!objection.empty()) return objection;
    }
  }
  return {};
}

// Returns an objection, or an empty string. Memory that is listed twice could be summed once or
// twice, depending on how it is cut into pieces.
std::string objection_to(const Call& call) {
  if (auto objection = objection_to_memory(call); !objection.empty()) return objection;
  struct Part {
    Run run;
    const Gradients* list = nullptr;
    std::size_t index = 0;
  };
  std::vector<Part> parts;
  std::vector<Run> runs;
  for (const auto* list : {&call.experts, &call.replicated}) {
    for (std::size_t i = 0; i < list->tensors.size(); ++i) {
      runs.clear();
      append_runs(runs, list->tensors[i]);
      for (const Run& run : runs) {
        if (run.bytes > 0) parts.push_back({run, list, i});
      }
    }
  }
  // The sort is stable, so equal addresses stay in list order wherever the memory is.
  const auto data_of = [](const Part& part) { return part.run.data; };
  std::ranges::stable_sort(parts, std::less<>(), data_of);
  const auto found = std::ranges::adjacent_find(
      parts, [](const Part& a, const Part& b) { return a.run.data + a.run.bytes > b.run.data; });
  if (found == parts.end()) return {};
  const auto other = std::next(found);
  return fmt::format("gradients {} and {} share memory: list tied parameters only once",
                     found->list->name_of(found->index), other->list->name_of(other->index));
}

// Returns this rank's place in its EP group. Ranks with the same place hold the same experts.
int place_of(const Mesh& mesh, const AxisUses& uses) {
  int place = 0;
  for (const auto& [name, role] : uses) {
    if (role == AxisRole::experts) place = place * mesh.size(name) + mesh.coordinate(name);
  }
  return place;
}

// Collective over the group of the last call, which notices if some of its ranks have other axes
// now. Replicated gradients must match on all ranks, those of an expert on the ranks that hold it.
void require_alike(const Call& call, Mesh& mesh, const AxisUses& last, const AxisUses& uses) {
  constexpr std::size_t kOfAll = 3;
  constexpr std::size_t kOfSameExperts = 4;
  Communicator& comm = mesh.comm(axes_of_same_layers(last));
  Agreement agreement(comm, call.operation);
  const auto texts = texts_of(uses);
  agreement.add(list_of("axes", "axis", texts));
  agreement.add({"the memory of their devices, 0 for the host's",
                 static_cast<std::int64_t>(call.device.memory())});
  agreement.add(compared("replicated gradients", "replicated gradient", call.replicated));
  agreement.add(compared("gradients of the same experts", "gradient of the same experts, number",
                         call.experts));
  agreement.add({"place", place_of(mesh, uses)});
  const auto objection = objection_to_axes(uses);
  agreement.object(objection.empty() ? objection_to(call) : objection);
  agreement.gather(mesh.world().rank());
  agreement.require_equal(1);
  if (uses != last) return;
  agreement.require_equal(kOfAll);
  std::map<std::int64_t, std::vector<int>> ranks_at;
  for (int r = 0; r < comm.size(); ++r) ranks_at[agreement.values_of(r).back()].push_back(r);
  for (const auto& [place, ranks] : ranks_at) agreement.require_equal(kOfSameExperts, ranks);
}

void sum(const Gradients& gradients, Mesh& mesh, const std::vector<std::string>& axes,
         const Device& device) {
  if (num_ranks_along(mesh, axes) > 1) sum(gradients.tensors, mesh.comm(axes), device);
}

void reduce(const Call& call, Mesh& mesh, const GradientAxes& axes) {
  const auto uses = uses_of(mesh, axes);
  if (mesh.world().size() == 1) {
    const auto objection = objection_to_axes(uses);
    return require(objection.empty(), "{}: {}", call.operation, objection);
  }
  AgreedAxes& agreed = AgreedAxes::of(mesh);
  const auto check = [&] {
    const bool alone = num_ranks_along(mesh, axes_of_same_layers(agreed.last)) == 1;
    if (!alone) require_alike(call, mesh, agreed.last, uses);
  };
  if (!agreed.last.empty()) check();
  if (agreed.last != uses) {
    agreed.agree(call.operation, mesh, uses);
    check();
  }
  sum(call.experts, mesh, axes_to_add_experts(uses), call.device);
  sum(call.replicated, mesh, axes_to_add(uses), call.device);
}

void append(std::vector<TensorView>& list, const ExpertGradients& expert) {
  const auto tensors = tensors_of(expert);
  list.insert(list.end(), tensors.begin(), tensors.end());
}

std::string name_of_expert_tensor(std::size_t place) {
  return fmt::format("{} of local expert {}", kExpertTensors.at(place % kNumExpertTensors),
                     place / kNumExpertTensors);
}

}  // namespace

void reduce_gradients(const MoeGradients& gradients, Mesh& mesh, const GradientAxes& axes,
                      const Device& device) {
  std::vector<TensorView> experts;
  for (const auto& expert : gradients.experts) append(experts, expert);
  std::vector<TensorView> replicated{gradients.router.gate, gradients.router.gate_bias};
  append(replicated, gradients.shared);
  const auto name_of_replicated = [](std::size_t place) -> std::string {
    if (place < 2) return place == 0 ? "gate of the router" : "gate_bias of the router";
    return fmt::format("{} of the shared expert", kExpertTensors.at(place - 2));
  };
  reduce({.operation = "reduce_gradients",
          .experts = {experts, name_of_expert_tensor},
          .replicated = {replicated, name_of_replicated},
          .device = device},
         mesh, axes);
}

void reduce_replicated(std::span<const TensorView> gradients, Mesh& mesh, const GradientAxes& axes,
                       const Device& device) {
  const auto name_of = [](std::size_t place) { return fmt::format("number {}", place); };
  reduce({.operation = "reduce_replicated",
          .experts = {{}, name_of},
          .replicated = {gradients, name_of},
          .device = device},
         mesh, axes);
}

}  // namespace switchyard
