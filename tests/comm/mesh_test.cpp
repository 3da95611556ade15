// SPDX-License-Identifier: Apache-2.0
#include "switchyard/mesh.h"

#include <gtest/gtest.h>

#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::mesh_test {
namespace {

using testing::error_of;
using testing::RankCase;

std::vector<int> world_ranks(Communicator& world, Communicator& comm) {
  const Tensor mine = Tensor::from<std::int32_t>({1}, {world.rank()});
  Tensor all({comm.size()}, Dtype::i32);
  comm.all_gather(mine, all);
  const auto span = all.span<std::int32_t>();
  return {span.begin(), span.end()};
}

TEST(Mesh, LaysAxesOutOutermostFirst) {
  run_ranks(8, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}, {"sp", 2}});
    const int r = world.rank();
    EXPECT_EQ(mesh.coordinate("dp"), r / 4);
    EXPECT_EQ(mesh.coordinate("ep"), r / 2 % 2);
    EXPECT_EQ(mesh.coordinate("sp"), r % 2);
    EXPECT_EQ(mesh.size("ep"), 2);
    EXPECT_TRUE(mesh.has_axis("sp"));
    EXPECT_FALSE(mesh.has_axis("tp"));

    const int pair = r / 2 * 2;
    EXPECT_EQ(world_ranks(world, mesh.comm({"sp"})), (std::vector{pair, pair + 1}));
    const int four = r / 4 * 4;
    EXPECT_EQ(world_ranks(world, mesh.comm({"ep", "sp"})),
              (std::vector{four, four + 1, four + 2, four + 3}));
    EXPECT_EQ(world_ranks(world, mesh.comm({"dp"})), (std::vector{r % 4, r % 4 + 4}));
    const int low = r % 2 + r / 4 * 4;
    EXPECT_EQ(world_ranks(world, mesh.comm({"ep"})), (std::vector{low, low + 2}));
    EXPECT_EQ(mesh.comm({"dp", "ep", "sp"}).size(), 8);
    EXPECT_EQ(mesh.comm({}).size(), 1);
    EXPECT_EQ(&mesh.comm({"sp"}), &mesh.comm({"sp"}));
  });
}

class MeshTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(MeshTest, OneAxisIsTheWorld) {
  testing::on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"ep", world.size()}});
    Communicator& ep = mesh.comm({"ep"});
    EXPECT_EQ(ep.rank(), world.rank());
    EXPECT_EQ(ep.size(), world.size());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MeshTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(Mesh, NamesAxesThatDoNotFit) {
  run_ranks(4, [](Communicator& world) {
    const auto mesh_error = [&](std::vector<MeshAxis> axes) {
      return error_of<InvalidArgument>([&] { Mesh(world, std::move(axes)); });
    };
    EXPECT_EQ(mesh_error({{"dp", 3}}), "mesh (dp=3) has 3 ranks, but the world has 4");
    EXPECT_EQ(mesh_error({{"dp", 3}, {"ep", 2}}),
              "mesh (dp=3, ep=2) needs more ranks than the 4 of the world");
    EXPECT_EQ(mesh_error({{"dp", 0}}), "axis \"dp\" of mesh (dp=0) must be positive");
    EXPECT_EQ(mesh_error({{"dp", 2}, {"dp", 2}}), "mesh (dp=2, dp=2) has axis \"dp\" twice");
    EXPECT_EQ(mesh_error({{"", 4}}), "axis 0 of mesh (=4) has no name");
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    EXPECT_EQ(error_of<InvalidArgument>([&] { (void)mesh.size("tp"); }),
              "mesh (dp=2, ep=2) has no axis \"tp\"");
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                (void)mesh.comm({"ep", "dp"});
              }),
              "axes (ep, dp) must be distinct and in the order of mesh (dp=2, ep=2)");
  });
}

}  // namespace
}  // namespace switchyard::mesh_test
