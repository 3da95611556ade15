// SPDX-License-Identifier: Apache-2.0
#include "model/parameters.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "model/model_size.h"
#include "switchyard/run_ranks.h"
#include "train/tiny_run.h"

namespace switchyard::parameters_test {
namespace {

using testing::MeshSizes;
using testing::tiny_config;
using train::ModelConfig;
using train::ParameterSet;
using train::ParameterView;

TEST(ParameterSet, ListsEveryTensorOnce) {
  ModelConfig config = tiny_config().model;
  config.moe_every = 2;
  config.tied = false;
  config.shared_intermediate = 4;
  std::set<std::string> names;
  std::int64_t elements = 0;
  for (const ParameterView& view : ParameterSet(config).views()) {
    EXPECT_TRUE(names.insert(view.name).second) << view.name;
    elements += view.values.shape().num_elements();
  }
  for (const char* name : {"embedding", "head", "final_norm", "layers.0.attention.qkv",
                           "layers.0.mlp.up_proj", "layers.1.mlp.experts.5.down_proj"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  const std::int64_t h = 16;
  const auto expected =
      2 * 256 * h + h + 2 * (2 * h + 4 * h * h) + 3 * h * 20 + 6 * h + 6 * 3 * h * 12 + 3 * h * 4;
  EXPECT_EQ(elements, expected);
  const auto size = train::size_of(config);
  EXPECT_EQ(size.parameters, expected);
  EXPECT_EQ(size.active_parameters, expected - 4 * 3 * h * 12);
}

// Initial parameters do not depend on the mesh, and differ between experts.
TEST(ParameterSet, BeginsTheSameOnEveryMesh) {
  using Values = std::map<std::string, std::vector<float>>;
  const ModelConfig config = tiny_config().model;
  Values alone;
  for (const MeshSizes& sizes : {MeshSizes{}, MeshSizes{.dp = 2, .ep = 4}}) {
    Values values;
    std::mutex mutex;
    run_ranks(sizes.ranks(), [&](Communicator& world) {
      Mesh mesh(world, sizes.axes());
      auto set = ParameterSet::random(config, 7, mesh, {"ep"});
      const std::lock_guard lock(mutex);
      for (const ParameterView& view : set.views()) {
        const auto span = view.values.span<float>();
        const std::vector<float> copy(span.begin(), span.end());
        const auto [at, is_new] = values.emplace(view.name, copy);
        if (!is_new) {
          EXPECT_EQ(at->second, copy) << view.name;
        }
      }
    });
    if (alone.empty()) alone = values;
    EXPECT_EQ(values, alone);
  }
  EXPECT_NE(alone.at("layers.0.mlp.experts.0.up_proj"), alone.at("layers.0.mlp.experts.1.up_proj"));
  EXPECT_NE(alone.at("layers.0.mlp.experts.0.up_proj"), alone.at("layers.1.mlp.experts.0.up_proj"));
}

}  // namespace
}  // namespace switchyard::parameters_test
