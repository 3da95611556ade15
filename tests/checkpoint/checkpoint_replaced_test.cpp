// SPDX-License-Identifier: Apache-2.0
// Opening a folder while it is replaced gives one version, the old or the new.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "support/folder.h"
#include "switchyard/checkpoint.h"
#include "switchyard/run_ranks.h"

namespace switchyard::testing::checkpoint_replaced_test {
namespace {

constexpr int kRanks = 4;
constexpr int kVersions = 100;

// One after the other; true once the first is there, and false again after the last.
void save_versions(const std::filesystem::path& path, std::atomic<bool>& is_saving) {
  run_ranks(kRanks, [&](Communicator& comm) {
    for (int version = 0; version < kVersions; ++version) {
      save_checkpoint(comm, path,
                      {.tensors = {{"of_rank_" + std::to_string(comm.rank()),
                                    Tensor::from<std::int32_t>({1}, {version})}}},
                      CheckpointForm::file_per_rank);
      is_saving = true;
    }
  });
  is_saving = false;
}

void expect_one_version(const Checkpoint& checkpoint) {
  EXPECT_EQ(checkpoint.names().size(), static_cast<std::size_t>(kRanks));
  std::set<std::int32_t> versions;
  for (const auto& [name, view] : checkpoint.tensors()) {
    versions.insert(view.span<std::int32_t>()[0]);
  }
  EXPECT_EQ(versions.size(), 1U);
}

void expect_one_version_while_saving(const std::string& opened) {
  const Folder folder;
  std::atomic<bool> is_saving{false};
  std::thread saver([&] { save_versions(folder / "model", is_saving); });
  while (!is_saving) std::this_thread::yield();
  while (is_saving) {
    EXPECT_NO_THROW(expect_one_version(Checkpoint::open(folder / opened)));
  }
  saver.join();
}

TEST(CheckpointReplaced, AFolderIsOpenedAsOneVersion) { expect_one_version_while_saving("model"); }

TEST(CheckpointReplaced, AnIndexIsOpenedAsOneVersionWithItsFiles) {
  expect_one_version_while_saving("model/model.safetensors.index.json");
}

}  // namespace
}  // namespace switchyard::testing::checkpoint_replaced_test
