// SPDX-License-Identifier: Apache-2.0
// A checkpoint path holds one complete checkpoint, even if a process dies while it saves.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <set>

#include "support/folder.h"
#include "support/random.h"
#include "switchyard/checkpoint.h"
#include "switchyard/run_ranks.h"

namespace switchyard::checkpoint_kill_test {
namespace {

constexpr int kRanks = 2;
constexpr int kVersions = 1 << 20;
constexpr std::int64_t kElements = 300'000;

// Every element of a version is its number.
void save_version(Communicator& comm, const std::filesystem::path& path, CheckpointForm form,
                  int version) {
  Tensor values({kElements}, Dtype::i32);
  std::ranges::fill(values.span<std::int32_t>(), version);
  const auto own = "of_rank_" + std::to_string(comm.rank());
  save_checkpoint(comm, path,
                  {.tensors = {{own, values}}, .metadata = {{"version", std::to_string(version)}}},
                  form);
}

// Saves one version after the other, and tells when each is there.
[[noreturn]] void keep_saving(const std::filesystem::path& path, CheckpointForm form, int report) {
  run_ranks(kRanks, [&](Communicator& comm) {
    for (int version = 0; version < kVersions; ++version) {
      save_version(comm, path, form, version);
      if (comm.rank() == 0 && ::write(report, "x", 1) != 1) std::abort();
    }
  });
  ::_exit(0);
}

void expect_one_version(const std::filesystem::path& path) {
  const auto checkpoint = Checkpoint::open(path);
  std::set<std::int32_t> versions{std::stoi(checkpoint.metadata().at("version"))};
  ASSERT_EQ(checkpoint.tensors().size(), static_cast<std::size_t>(kRanks));
  for (const auto& [name, view] : checkpoint.tensors()) {
    ASSERT_EQ(view.rows(), kElements);
    const auto values = view.span<std::int32_t>();
    versions.insert(values.begin(), values.end());
  }
  EXPECT_EQ(versions.size(), 1U);
}

std::size_t num_temporaries(const testing::Folder& folder) {
  const auto names = folder.names();
  return static_cast<std::size_t>(
      std::ranges::count_if(names, [](const auto& name) { return name.starts_with('.'); }));
}

// Once one version is there and another has begun: at once, or a little later.
void kill_while_saving(const testing::Folder& folder, CheckpointForm form, useconds_t later) {
  const auto left_before = num_temporaries(folder);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) keep_saving(folder / "model", form, ends[1]);
  ::close(ends[1]);
  char saved = 0;
  EXPECT_EQ(::read(ends[0], &saved, 1), 1);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (num_temporaries(folder) == left_before && std::chrono::steady_clock::now() < give_up) {
  }
  ::usleep(later);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ends[0]);
}

void expect_always_whole(CheckpointForm form) {
  const testing::Folder folder;
  testing::Random random(1);
  for (int i = 0; i < 20; ++i) {
    kill_while_saving(folder, form, i % 2 == 0 ? 0 : static_cast<useconds_t>(random.below(12'000)));
    expect_one_version(folder / "model");
  }
  EXPECT_GT(num_temporaries(folder), 0U) << "none was killed in the middle";
}

TEST(CheckpointKill, AFileIsAlwaysWhole) { expect_always_whole(CheckpointForm::one_file); }

TEST(CheckpointKill, AFolderIsAlwaysWhole) { expect_always_whole(CheckpointForm::file_per_rank); }

}  // namespace
}  // namespace switchyard::checkpoint_kill_test
