// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "support/errors.h"
#include "switchyard/build_info.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"

namespace switchyard::registry_test {
namespace {

using testing::error_of;

TEST(Registry, ListsTheBackends) {
  const auto backends = communicator_backends();
  ASSERT_EQ(backends.size(), 2U);
  EXPECT_EQ(backends[0].name, "threads");
  EXPECT_TRUE(backends[0].available);
  EXPECT_EQ(backends[1].name, "mpi");
  EXPECT_FALSE(backends[1].detail.empty());
}

TEST(Registry, ThreadsAloneAreAWorldOfOne) {
  const auto world = connect();
  EXPECT_EQ(world->size(), 1);
  EXPECT_EQ(world->backend(), "threads");
  world->barrier();
}

TEST(Registry, NamesWhatThereIs) {
  EXPECT_EQ(error_of<InvalidArgument>([] { (void)connect({.backend = "carrier-pigeon"}); }),
            "communicator backend \"carrier-pigeon\" is unknown; there are: threads, mpi");
  EXPECT_EQ(error_of<InvalidArgument>([] {
              (void)connect({.backend = "threads", .timeout = std::chrono::milliseconds(0)});
            }),
            "timeout (0 ms) must be positive");
}

TEST(BuildInfo, SaysWhatCanBeUsed) {
  EXPECT_FALSE(version().empty());
  EXPECT_EQ(devices().front().name, "cpu");
  EXPECT_TRUE(devices().front().available);
  const auto features = build_features();
  EXPECT_TRUE(std::ranges::any_of(features, [](const Feature& f) { return f.name == "MPI"; }));
}

}  // namespace
}  // namespace switchyard::registry_test
