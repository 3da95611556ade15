// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/checkpoints.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <map>
#include <string_view>
#include <system_error>

#include "checkpoints/checkpoint_folder.h"
#include "checkpoints/checkpoint_header.h"
#include "checkpoints/checkpoint_sets.h"
#include "checkpoints/content_sum.h"
#include "checkpoints/history_tensors.h"
#include "switchyard/agreement.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

namespace fs = std::filesystem;

std::array<NamedSet, 2> moments_of(Trainer& trainer) {
  const std::string prefix(kOptimizerPrefix);
  return {{{prefix + "first.", trainer.optimizer().first_moment()},
           {prefix + "second.", trainer.optimizer().second_moment()}}};
}

std::map<std::string, TensorView> balancer_tensors(Trainer& trainer) {
  std::map<std::string, TensorView> tensors;
  auto& balancers = trainer.balancers();
  for (std::size_t i = 0; i < balancers.size(); ++i) {
    tensors.emplace(fmt::format("balancer.{}.moving_average", i), balancers[i].moving_average());
  }
  return tensors;
}

// Sums over everything that only training needs, with rank 0's `history` tensors. Collective.
std::uint64_t training_sum(Trainer& trainer,
                           const std::map<std::string, ConstTensorView>& history) {
  ContentSum sum(trainer.mesh().world());
  for (const auto& named : moments_of(trainer)) sum.add(named);
  for (const auto& [name, view] : balancer_tensors(trainer)) sum.add_whole(name, view);
  for (const auto& [name, view] : history) sum.add_whole(name, view);
  return sum.total();
}

std::uint64_t parameters_sum(Transformer& model) {
  ContentSum sum(model.mesh().world());
  sum.add({"", model.values()});
  return sum.total();
}

// Runs `work` and reports its errors as damage to the checkpoint, since the trainer accepted these
// tensors when they were saved. Collective.
void or_damaged(Communicator& world, const CheckpointHeader& header,
                const std::function<void()>& work) {
  agree(world, [&] {
    try {
      work();
    } catch (const StorageError&) {  // not damage: the file was intact when it was opened
      throw;
    } catch (const Error& error) {
      throw InvalidArgument(words_for_damage(header.path, error.what()));
    }
  });
}

void require_sum(Communicator& world, const CheckpointHeader& header, bool is_right,
                 std::string_view what) {
  or_damaged(world, header, [&] {
    if (!is_right) throw InvalidArgument(fmt::format("{} do not match their checksum", what));
  });
}

// Returns a copy. Reading through a view of the file is unsafe, as the file may be truncated.
Tensor loaded(const Checkpoint& checkpoint, const std::string& name) {
  const auto view = checkpoint.tensor(name);
  Tensor copy(view.shape(), view.dtype());
  load_tensor(checkpoint, name, copy);
  return copy;
}

bool is_same_on_all(Communicator& world, std::int64_t number) {
  std::array<std::int64_t, 2> greatest{number, -number};
  world.all_reduce(TensorView(greatest.data(), {2}), ReduceOp::max);
  return greatest[0] == -greatest[1];
}

Checkpoint file_of(const CheckpointHeader& header) {
  return header.file ? *header.file : Checkpoint::open(header.path);
}

}  // namespace

CheckpointHeader read_header(Communicator& world, const fs::path& path) {
  CheckpointHeader header;
  constexpr int kMostTries = 16;
  // Another run may be saving here, so ranks can see different newest checkpoints for a moment.
  for (int tries = 0; tries < kMostTries; ++tries) {
    agree(world, [&] { header = read_header(path); });
    if (is_same_on_all(world, header.progress.step)) break;
  }
  require_equal(world, fmt::format("the newest checkpoint of {} (its hash)", path.string()),
                static_cast<std::int64_t>(header.parameters_sum ^ header.training_sum));
  return header;
}

void save(Trainer& trainer, const fs::path& folder, std::int64_t keep) {
  auto& world = trainer.mesh().world();
  const auto step = trainer.progress().step;
  CheckpointContents contents;
  add_set(contents, {"", trainer.model().values()});
  for (const auto& named : moments_of(trainer)) add_set(contents, named);
  for (const auto& [name, view] : balancer_tensors(trainer)) contents.tensors.emplace(name, view);
  std::map<std::string, ConstTensorView> history;
  for (auto& [name, tensor] : to_tensors(trainer.history(), trainer.config().model)) {
    history.emplace(name, tensor.view());
  }
  if (world.rank() == 0) contents.tensors.insert(history.begin(), history.end());
  contents.metadata = to_metadata({.path = {},
                                   .config = trainer.config(),
                                   .progress = trainer.progress(),
                                   .corpus = trainer.corpus().name(),
                                   .corpus_hash = trainer.corpus().hash(),
                                   .parameters_sum = parameters_sum(trainer.model()),
                                   .training_sum = training_sum(trainer, history)});
  std::error_code ignored;  // if this fails, saving reports the error
  if (world.rank() == 0) fs::create_directories(folder, ignored);
  try {
    save_checkpoint(world, checkpoint_path(folder, step), contents);
  } catch (const StorageError& error) {
    throw StorageError(fmt::format("{}; {}", error.what(), words_for_last_good(folder, step)));
  }
  agree(world, [&] {
    if (world.rank() == 0) prune_checkpoints(folder, step, keep);
  });
}

void load(Trainer& trainer, const CheckpointHeader& header) {
  auto& world = trainer.mesh().world();
  load_values(trainer.model(), header);
  std::map<std::string, Tensor> history;
  or_damaged(world, header, [&] {
    const auto checkpoint = file_of(header);
    for (const auto& named : moments_of(trainer)) load_set(checkpoint, named);
    for (const auto& [name, view] : balancer_tensors(trainer)) load_tensor(checkpoint, name, view);
    for (const auto& name : checkpoint.names("history.")) {
      history.emplace(name, loaded(checkpoint, name));
    }
    trainer.history() = history_from(history, trainer.config().model);
  });
  const std::map<std::string, ConstTensorView> views(history.begin(), history.end());
  require_sum(world, header, training_sum(trainer, views) == header.training_sum,
              "the bytes of the optimizer's state");
  or_damaged(world, header, [&] { require_sound(trainer.history(), header.progress.step); });
  trainer.progress() = header.progress;
}

void load_values(Transformer& model, const CheckpointHeader& header) {
  auto& world = model.mesh().world();
  const NamedSet named{"", model.values()};
  or_damaged(world, header, [&] { load_set(file_of(header), named); });
  require_sum(world, header, parameters_sum(model) == header.parameters_sum,
              "the bytes of the parameters");
}

}  // namespace switchyard::train
