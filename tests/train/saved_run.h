// SPDX-License-Identifier: Apache-2.0
// Checkpoints of small runs, and changes to them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoints/checkpoints.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"
#include "train/small_run.h"

namespace switchyard::train {

class SavedRun : public ::testing::Test {
 protected:
  static constexpr const char* kTwo = "step-00000002.safetensors";
  static constexpr const char* kFour = "step-00000004.safetensors";

  // Steps of a run over ranks, with a checkpoint after every second.
  void train(const TrainConfig& config, int ranks, int steps) const {
    run_ranks(ranks, [&](Communicator& world) {
      SmallRun run(world, config);
      for (int i = 1; i <= steps; ++i) {
        run.trainer.step();
        run.trainer.history().held_out.push_back({i, 1.0 / i});
        run.trainer.history().loads.push_back({i, run.trainer.take_load()});
        if (i % 2 == 0) save(run.trainer, folder_.path(), 3);
      }
    });
  }

  // Returns the error of loading it, which must be the same on all ranks, with DIR for the folder.
  std::string load_error(const std::filesystem::path& path, int ranks = 2) const {
    std::string first;
    run_ranks(ranks, [&](Communicator& world) {
      SmallRun run(world, small_config());
      const auto error =
          testing::error_of<InvalidArgument>([&] { load(run.trainer, read_header(path)); });
      if (world.rank() == 0) first = error;
      world.barrier();
      EXPECT_EQ(error, first) << "on rank " << world.rank();
      world.barrier();
    });
    return in_words(first);
  }
  std::string header_error(const std::filesystem::path& path) const {
    return in_words(testing::error_of<InvalidArgument>([&] { read_header(path); }));
  }
  std::string in_words(std::string text) const {
    const auto folder = folder_.path().string();
    for (auto at = text.find(folder); at != std::string::npos; at = text.find(folder)) {
      text.replace(at, folder.size(), "DIR");
    }
    return text;
  }

  std::string bytes_of(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string& name, const std::string& bytes) const {
    std::filesystem::remove(folder_ / name);
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }

  // Written again with a change to its tensors or metadata.
  void rewrite(const std::string& name,
               const std::function<void(CheckpointContents&)>& change) const {
    const auto old = Checkpoint::open(folder_ / name);
    CheckpointContents contents{.tensors = old.tensors(), .metadata = old.metadata()};
    change(contents);
    save_checkpoint(*connect(), folder_ / name, contents);
  }

  const testing::Folder folder_;
};

}  // namespace switchyard::train
