// SPDX-License-Identifier: Apache-2.0
// Loads a rank's part of a checkpoint: from_hugging_face finds it, all of it is checked, then
// copied.
#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <span>

#include "checkpoint/block_names.h"
#include "checkpoint/block_tensors.h"
#include "checkpoint/convert_elements.h"
#include "core/check_memory.h"
#include "core/require.h"
#include "io/mapped_safetensors.h"
#include "moe/check_tensors.h"
#include "switchyard/checkpoint.h"

namespace switchyard {
namespace {

// A checkpoint's tensors under a prefix. Caches views, since each tensor is requested several times
// and one that is unaligned in its file is copied.
class CheckpointSource : public TensorSource {
 public:
  CheckpointSource(const Checkpoint& checkpoint, std::string_view prefix)
      : checkpoint_(checkpoint), names_(checkpoint.names(prefix)) {}

  bool has(const std::string& name) const override {
    return std::ranges::binary_search(names_, name);
  }
  ConstTensorView at(const std::string& name) const override {
    const auto known = views_.find(name);
    if (known != views_.end()) return known->second;
    return views_.emplace(name, checkpoint_.tensor(name)).first->second;
  }
  std::string first_under(const std::string& prefix) const override {
    const auto found = std::ranges::lower_bound(names_, prefix);
    return found != names_.end() && found->starts_with(prefix) ? *found : "";
  }

 private:
  const Checkpoint& checkpoint_;
  std::vector<std::string> names_;
  mutable NamedTensors views_;
};

// A range of bytes that is contiguous on both sides.
struct Run {
  const std::byte* from = nullptr;
  std::byte* into = nullptr;
  std::int64_t bytes = 0;
  Memory memory = Memory::host;  // where `into` is
};

// Copies from a checkpoint's files by reading them, not through their mapping, so that a file that
// was shortened is an error and not a fault.
class Copier {
 public:
  explicit Copier(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  void copy(const std::byte* from, std::span<std::byte> into) {
    for (const auto& file : checkpoint_.files()) {
      const MappedFile& mapping = mapping_of(file);
      const auto* const begin = mapping.data.get();
      const std::less<> is_before;
      if (is_before(from, begin) || !is_before(from, begin + mapping.bytes)) continue;
      const auto& reader = reader_of(file);
      reader.read_ahead(from - begin, static_cast<std::int64_t>(into.size()));
      reader.read(from - begin, into);
      return;
    }
    std::memcpy(into.data(), from, into.size());  // not in any file's mapping
  }

 private:
  // Keeps the last reader, since runs come in file order.
  const FileReader& reader_of(const SafetensorsFile& file) {
    const auto* const data = mapping_of(file).data.get();
    if (!reader_ || data != reader_of_) {
      reader_.emplace(mapping_of(file), file.path().string());
      reader_of_ = data;
    }
    return *reader_;
  }

  const Checkpoint& checkpoint_;
  std::optional<FileReader> reader_;
  const std::byte* reader_of_ = nullptr;
};

void add_runs(std::vector<Run>& runs, const ConstTensorView& from, const TensorView& into) {
  if (from.is_contiguous() && into.is_contiguous()) {
    runs.push_back({from.data(), into.data(), from.bytes(), into.memory()});
    return;
  }
  for (std::int64_t r = 0; r < from.rows(); ++r) {
    runs.push_back({from.row(r), into.row(r), from.row_bytes(), into.memory()});
  }
}

// Sorts the runs by file position and merges adjacent ones, so that packed experts become a few
// large copies.
std::vector<Run> joined(std::vector<Run> runs) {
  std::ranges::sort(runs, std::less<>(), &Run::from);
  std::vector<Run> result;
  for (const auto& run : runs) {
    if (!result.empty() && result.back().from + result.back().bytes == run.from &&
        result.back().into + result.back().bytes == run.into &&
        result.back().memory == run.memory) {
      result.back().bytes += run.bytes;
    } else {
      result.push_back(run);
    }
  }
  return result;
}

// A copy to make, and the name of its tensor in errors.
struct Copy {
  std::string name;
  ConstTensorView from;
  TensorView into;
};

void require_fit(const Copy& copy, const Checkpoint& checkpoint, const Device& device) {
  const auto& [name, from, into] = copy;
  require(from.shape() == into.shape() && can_become(from.dtype(), into.dtype()),
          "{} of {} is {} {}, which cannot be loaded into {} {}", name, checkpoint.path().string(),
          name_of(from.dtype()), from.shape(), name_of(into.dtype()), into.shape());
  require_reached(into, device.memory(), name);
}

// Both sides must have the tensor, or neither: nothing is skipped silently.
void require_both(const Copy& copy, const Checkpoint& checkpoint) {
  const auto& [name, from, into] = copy;
  require(is_given(from) || !is_given(into), "{} has no {}", checkpoint.path().string(), name);
  require(is_given(into) || !is_given(from), "{} has {} {}, but there is nothing to load it into",
          checkpoint.path().string(), name, from.shape());
}

void copy_run(const Run& run, Copier& copier, const Device& device) {
  if (run.memory == Memory::host) {
    copier.copy(run.from, {run.into, static_cast<std::size_t>(run.bytes)});
    return;
  }
  // Copies as bf16, which has the smallest element size. The values do not matter here.
  const Shape shape{run.bytes / size_of(Dtype::bf16)};
  device.copy(ConstTensorView(run.from, Dtype::bf16, shape, 1),
              TensorView(run.into, Dtype::bf16, shape, 1, nullptr, run.memory));
}

// Converts some rows at a time, so that they stay in the cache.
void convert_read(Copier& copier, const ConstTensorView& from, const TensorView& into) {
  constexpr std::int64_t kStagedBytes = 1 << 18;
  const auto row_bytes = from.row_bytes();
  const auto most = std::clamp<std::int64_t>(kStagedBytes / row_bytes, 1, from.rows());
  Tensor staged({most, from.shape().row_elements()}, from.dtype());
  for (std::int64_t first = 0; first < from.rows(); first += most) {
    const auto count = std::min(most, from.rows() - first);
    const TensorView rows = staged.view().slice(0, count);
    const auto bytes = static_cast<std::size_t>(row_bytes);
    if (from.is_contiguous()) {
      copier.copy(from.row(first), {rows.data(), bytes * static_cast<std::size_t>(count)});
    } else {
      for (std::int64_t r = 0; r < count; ++r) {
        copier.copy(from.row(first + r), {rows.row(r), bytes});
      }
    }
    convert(rows, into.slice(first, first + count));
  }
}

void convert_on(const Device& device, Copier& copier, const ConstTensorView& from,
                const TensorView& into) {
  if (into.memory() == Memory::host) return convert_read(copier, from, into);
  Tensor staged(into.shape(), into.dtype());
  convert_read(copier, from, staged);
  device.copy(staged, into);
}

void copy_all(const Checkpoint& checkpoint, std::span<const Copy> copies, const Device& device) {
  Copier copier(checkpoint);
  std::vector<Run> runs;
  for (const auto& [name, from, into] : copies) {
    if (from.bytes() == 0) continue;
    from.dtype() == into.dtype() ? add_runs(runs, from, into)
                                 : convert_on(device, copier, from, into);
  }
  for (const auto& run : joined(std::move(runs))) copy_run(run, copier, device);
}

template <typename View>
NamedViews<View> named_tensors(const std::string& prefix, const BasicMoeTensors<View>& block,
                               std::span<const std::int32_t> ids, std::string_view shared_stem) {
  auto all = replicated_tensors(prefix, block, shared_stem);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    append(all, expert_stem(prefix, ids[i]), block.experts[i]);
  }
  return all;
}

}  // namespace

void load_block(const Checkpoint& checkpoint, std::string_view prefix,
                const ExpertPlacement& placement, int rank, const MoeViews& into,
                const Device& device) {
  const CheckpointSource source(checkpoint, prefix);
  const auto found = from_hugging_face_source(source, prefix, placement, rank, Device());
  const auto ids = placement.experts_of(rank);
  require(into.experts.size() == ids.size(),
          "there are {} experts to load into, but rank {} owns {}", into.experts.size(), rank,
          ids.size());
  const std::string name(prefix);
  const bool is_one = !source.first_under(name + "shared_expert.").empty();
  const std::string_view shared_stem = is_one ? "shared_expert." : "shared_experts.";
  const auto sources = named_tensors(name, found, ids, shared_stem);
  const auto targets = named_tensors(name, into, ids, shared_stem);
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    copies.push_back({sources[i].first, sources[i].second, targets[i].second});
    require_both(copies.back(), checkpoint);
    require_fit(copies.back(), checkpoint, device);
  }
  copy_all(checkpoint, copies, device);
}

void load_tensor(const Checkpoint& checkpoint, std::string_view name, const TensorView& into,
                 const Device& device) {
  const Copy only{std::string(name), checkpoint.tensor(name), into};
  require_fit(only, checkpoint, device);
  copy_all(checkpoint, {&only, 1}, device);
}

}  // namespace switchyard
