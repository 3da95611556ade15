// Sums of gradients over the ranks that hold copies of what they belong to. Sums are made element
// by element in rank order, so that it changes no bit how tensors are laid side by side.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "core/given.h"
#include "core/hash.h"
#include "moe/mesh_axes.h"
#include "moe/plan_record.h"
#include "switchyard/parallelize.h"

namespace switchyard {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{32} << 20;  // of one sum

// Elements that lie without a gap.
struct Run {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  std::shared_ptr<std::byte> owner = {};
};

std::vector<Run> runs_of(std::span<const TensorView> tensors, Dtype dtype) {
  std::vector<Run> runs;
  for (const TensorView& tensor : tensors) {
    if (tensor.dtype() != dtype) continue;
    const bool whole = tensor.is_contiguous();
    for (std::int64_t r = 0; r < (whole ? 1 : tensor.rows()); ++r) {
      runs.push_back({tensor.row(r), whole ? tensor.bytes() : tensor.row_bytes(), tensor.owner()});
    }
  }
  return runs;
}

// Cuts runs into pieces of at most kMostBytes: [pieces][runs].
std::vector<std::vector<Run>> pieces_of(const std::vector<Run>& runs) {
  std::vector<std::vector<Run>> pieces;
  std::int64_t room = 0;
  for (Run run : runs) {
    while (run.bytes > 0) {
      if (room == 0) {
        pieces.emplace_back();
        room = kMostBytes;
      }
      const auto bytes = std::min(run.bytes, room);
      pieces.back().push_back({run.data, bytes, run.owner});
      run.data += bytes;
      run.bytes -= bytes;
      room -= bytes;
    }
  }
  return pieces;
}

void sum_piece(const std::vector<Run>& runs, Dtype dtype, Communicator& comm) {
  std::int64_t bytes = 0;
  for (const Run& run : runs) bytes += run.bytes;
  const Shape shape{bytes / size_of(dtype)};
  if (runs.size() == 1) {
    return comm.all_reduce(TensorView(runs[0].data, dtype, shape, 1, runs[0].owner));
  }
  Tensor buffer(shape, dtype);
  std::byte* at = buffer.data();
  for (const Run& run : runs) {
    std::memcpy(at, run.data, static_cast<std::size_t>(run.bytes));
    at += run.bytes;
  }
  comm.all_reduce(buffer);
  at = buffer.data();
  for (const Run& run : runs) {
    std::memcpy(run.data, at, static_cast<std::size_t>(run.bytes));
    at += run.bytes;
  }
}

void sum(std::span<const TensorView> tensors, Communicator& comm) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::i32, Dtype::i64}) {
    for (const auto& runs : pieces_of(runs_of(tensors, dtype))) sum_piece(runs, dtype, comm);
  }
}

std::vector<TensorView> given_of(std::span<const TensorView> tensors) {
  std::vector<TensorView> given;
  std::ranges::copy_if(tensors, std::back_inserter(given), is_given);
  return given;
}

void append(std::vector<TensorView>& list, const ExpertGradients& e) {
  list.insert(list.end(), {e.gate, e.up, e.down, e.gate_bias, e.up_bias, e.down_bias});
}

// Replicated gradients must be alike on all ranks, an expert's on the ranks that hold it: those
// that are at the same place of their EP groups.
void require_alike(std::span<const TensorView> experts, std::span<const TensorView> replicated,
                   int place, Communicator& comm) {
  const auto number = [](auto tensors) { return static_cast<std::int64_t>(tensors.size()); };
  const auto hash = [](auto tensors) {
    return hash_of_shapes(std::vector<ConstTensorView>(tensors.begin(), tensors.end()));
  };
  const std::array<Field, 5> fields{
      {{"the number of replicated gradients", number(replicated)},
       {"dtypes and extents of the replicated gradients (their hash)", hash(replicated)},
       {"the number of gradients of the same experts", number(experts)},
       {"dtypes and extents of the gradients of the same experts (their hash)", hash(experts)},
       {"place", place}}};
  const auto values_of_rank = gather_fields(comm, fields);
  require_equal_fields(std::span(fields).first(2), values_of_rank);
  std::map<std::int64_t, std::vector<int>> ranks_at;
  for (int r = 0; r < comm.size(); ++r) {
    ranks_at[values_of_rank[static_cast<std::size_t>(r)].back()].push_back(r);
  }
  for (const auto& [at, ranks] : ranks_at) {
    require_equal_fields(std::span(fields).first(4), values_of_rank, ranks);
  }
}

void reduce(std::span<const TensorView> experts, std::span<const TensorView> replicated, Mesh& mesh,
            const GradientAxes& axes) {
  const auto same_layers =
      axes_where(mesh, [&](const auto& name) { return !is_among(axes.pipeline, name); });
  const auto same_experts = axes_where(mesh, [&](const auto& name) {
    return !is_among(axes.pipeline, name) && !is_among(axes.experts, name);
  });
  if (num_ranks_along(mesh, same_layers) == 1) return;
  // Groups are made by the whole world: before a check that may fail in a part of it.
  Communicator& layers_group = mesh.group(same_layers);
  const bool experts_are_copied = num_ranks_along(mesh, same_experts) > 1;
  Communicator* experts_group = experts_are_copied ? &mesh.group(same_experts) : nullptr;
  int place = 0;
  for (const auto& axis : same_layers) {
    if (is_among(axes.experts, axis)) place = place * mesh.size(axis) + mesh.coordinate(axis);
  }
  require_alike(experts, replicated, place, layers_group);
  if (experts_group != nullptr) sum(experts, *experts_group);
  sum(replicated, layers_group);
}

}  // namespace

void reduce_gradients(const MoeGradients& gradients, Mesh& mesh, const GradientAxes& axes) {
  std::vector<TensorView> experts;
  for (const auto& expert : gradients.experts) append(experts, expert);
  std::vector<TensorView> replicated{gradients.router.gate, gradients.router.gate_bias};
  append(replicated, gradients.shared);
  reduce(given_of(experts), given_of(replicated), mesh, axes);
}

void reduce_replicated(std::span<const TensorView> gradients, Mesh& mesh,
                       const GradientAxes& axes) {
  reduce({}, given_of(gradients), mesh, axes);
}

}  // namespace switchyard
