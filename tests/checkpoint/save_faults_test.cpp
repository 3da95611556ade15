// SPDX-License-Identifier: Apache-2.0
// Every call of a save fails once: what was there stays, or what is new is whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>

#include "support/errors.h"
#include "support/failing_calls.h"
#include "support/folder.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::testing::save_faults_test {
namespace {

namespace fs = std::filesystem;

struct Way {
  CheckpointForm form = CheckpointForm::one_file;
  int ranks = 1;
  bool can_exchange_names = true;
};

class SaveFaults : public ::testing::TestWithParam<Way> {
 protected:
  // Two tensors of a rank, so that every rank writes.
  static CheckpointContents contents(int rank, float value) {
    const auto name = [&](const char* stem) { return stem + std::to_string(rank); };
    return {.tensors = {{name("a"), Tensor::from<float>({2}, {value, value})},
                        {name("b"), Tensor::from<float>({1}, {value})}}};
  }
  // The error that all ranks have.
  std::string save(float value, int failing_rank = 0) const {
    std::string first;
    run_ranks(GetParam().ranks, [&](Communicator& comm) {
      FailingCalls::count_this_thread(comm.rank() == failing_rank);
      const auto error = error_of<StorageError>(
          [&] { save_checkpoint(comm, path(), contents(comm.rank(), value), GetParam().form); });
      if (comm.rank() == 0) first = error;
      comm.barrier();
      EXPECT_EQ(error, first);
    });
    return first;
  }
  void expect_value(float value, const std::string& when) const {
    const auto checkpoint = Checkpoint::open(path());
    EXPECT_EQ(checkpoint.names().size(), 2U * static_cast<std::size_t>(GetParam().ranks));
    for (const auto& [name, tensor] : checkpoint.tensors()) {
      for (const float v : tensor.span<float>()) EXPECT_EQ(v, value) << name << ", " << when;
    }
    EXPECT_EQ(folder_.names(), std::set<std::string>{"saved"}) << when;
  }
  fs::path path() const { return folder_ / "saved"; }
  // Fails every rank's first call, then the second, … until there are no more. Returns the names of
  // them all. Only one rank's calls count at a time, since the order of two is that of chance.
  template <typename Check>
  std::multiset<std::string> walk(Fault fault, const Check& check) const {
    std::multiset<std::string> calls;
    for (int rank = 0; rank < GetParam().ranks; ++rank) calls.merge(walk(rank, fault, check));
    return calls;
  }
  template <typename Check>
  std::multiset<std::string> walk(int rank, Fault fault, const Check& check) const {
    std::multiset<std::string> calls;
    float value = 1.0F;
    save(value);
    for (int n = 0;; ++n) {
      std::string error;
      {
        const FailingCalls failing(folder_.path().string(), fault, n,
                                   GetParam().can_exchange_names);
        error = save(value + 1.0F, rank);
      }
      const auto call = FailingCalls::failed();
      const auto when =
          "rank " + std::to_string(rank) + ", call " + std::to_string(n) + ", " + call;
      check(error, call, when);
      value += error == "no error" ? 1.0F : 0.0F;
      expect_value(value, when);
      if (call.empty()) return calls;
      calls.insert(call);
      EXPECT_EQ(save(value += 1.0F), "no error") << "the next one after " << when;
      expect_value(value, "after " + when);
    }
  }

  const Folder folder_;
};

TEST_P(SaveFaults, AFaultIsNamedAndLeavesTheOldCheckpoint) {
  for (const auto fault : {Fault::no_space, Fault::io_error}) {
    const auto calls =
        walk(fault, [&](const std::string& error, const std::string& call, const auto& when) {
          if (call.empty() || (call == "link" && error == "no error")) return;  // there is a way on
          EXPECT_NE(error.find(folder_.path().string()), std::string::npos) << when << error;
          EXPECT_NE(error.find(words_for(fault)), std::string::npos) << when << error;
        });
    for (const auto* call : {"open", "pwrite", "fallocate", "fsync"}) {
      EXPECT_TRUE(calls.contains(call)) << call;
    }
    EXPECT_TRUE(calls.contains(GetParam().can_exchange_names ? "renameat2" : "rename"));
  }
}

TEST_P(SaveFaults, AnInterruptedCallIsMadeAgain) {
  const auto calls =
      walk(Fault::interrupted, [](const std::string& error, const auto&, const auto& when) {
        EXPECT_EQ(error, "no error") << when;
      });
  EXPECT_GE(calls.size(), 6U);
}

TEST_P(SaveFaults, AShortWriteIsContinued) {
  const auto calls =
      walk(Fault::short_write, [](const std::string& error, const auto&, const auto& when) {
        EXPECT_EQ(error, "no error") << when;
      });
  EXPECT_GE(calls.count("pwrite"), 2U);
}

INSTANTIATE_TEST_SUITE_P(Forms, SaveFaults,
                         ::testing::Values(Way{}, Way{.ranks = 2}, Way{.can_exchange_names = false},
                                           Way{CheckpointForm::file_per_rank, 2},
                                           Way{CheckpointForm::file_per_rank, 2, false}),
                         [](const auto& named) {
                           const Way& way = named.param;
                           return std::string(way.form == CheckpointForm::one_file ? "file"
                                                                                   : "folder") +
                                  std::to_string(way.ranks) +
                                  (way.can_exchange_names ? "" : "in_two_steps");
                         });

}  // namespace
}  // namespace switchyard::testing::save_faults_test
