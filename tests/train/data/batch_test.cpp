// SPDX-License-Identifier: Apache-2.0
#include "data/batch.h"

#include <gtest/gtest.h>

#include <string>

#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/tensor.h"

namespace switchyard::train::batch_test {
namespace {

using testing::error_of;
using testing::on_ranks;
using testing::RankCase;

class CutBatch : public ::testing::TestWithParam<RankCase> {};

// Meshes of so many ranks, some without an axis.
std::vector<std::vector<MeshAxis>> meshes_of(int ranks) {
  std::vector<std::vector<MeshAxis>> meshes{
      {{"ep", ranks}}, {{"dp", ranks}}, {{"ep", 1}, {"sp", ranks}}};
  if (ranks % 2 == 0) {
    meshes.push_back({{"dp", 2}, {"ep", ranks / 2}, {"sp", 1}});
    meshes.push_back({{"dp", 1}, {"ep", 2}, {"sp", ranks / 2}});
  }
  if (ranks == 8) meshes.push_back({{"dp", 2}, {"ep", 2}, {"sp", 2}});
  return meshes;
}

// Windows whose bytes tell where they are from: 16 · window + place.
std::vector<std::string> make_windows(int num_windows, int length) {
  std::vector<std::string> windows;
  for (int w = 0; w < num_windows; ++w) {
    windows.emplace_back();
    for (int i = 0; i <= length; ++i) windows.back() += static_cast<char>(16 * w + i);
  }
  return windows;
}

// The windows that this rank's share of dp × ep has, counted in the order of shares.
void expect_tokens(Mesh& mesh, const TokenBatch& batch, std::int64_t num_windows,
                   std::int64_t first_window) {
  const auto& shard = batch.shard;
  ASSERT_EQ(static_cast<std::int64_t>(batch.tokens.size()), shard.num_tokens());
  ASSERT_EQ(static_cast<std::int64_t>(batch.targets.size()), shard.num_tokens());
  EXPECT_EQ(batch.total_tokens, num_windows * shard.length());
  EXPECT_EQ(shard.sp_size(), mesh.has_axis("sp") ? mesh.size("sp") : 1);
  EXPECT_EQ(shard.sp_rank(), mesh.has_axis("sp") ? mesh.coordinate("sp") : 0);
  for (std::int64_t t = 0; t < shard.num_tokens(); ++t) {
    const auto window = first_window + t / shard.count();
    const auto place = shard.offset() + t % shard.count();
    EXPECT_EQ(batch.tokens[static_cast<std::size_t>(t)], 16 * window + place);
    EXPECT_EQ(batch.targets[static_cast<std::size_t>(t)], 16 * window + place + 1);
  }
}

// How often each token is on some rank.
std::vector<std::int64_t> count_tokens(Communicator& world, const TokenBatch& batch) {
  auto counts = Tensor::zeros({256}, Dtype::i64);
  const auto values = counts.span<std::int64_t>();
  for (const auto token : batch.tokens) ++values[token];
  world.all_reduce(counts.view());
  return {values.begin(), values.end()};
}

TEST_P(CutBatch, GivesEveryTokenToOneRank) {
  on_ranks(GetParam(), [](Communicator& world) {
    for (const auto& axes : meshes_of(world.size())) {
      Mesh mesh(world, axes);
      // As many sequences as shares, fewer, and a number that divides by none.
      for (const auto& [num_windows, length] :
           {std::pair(8, 6), std::pair(1, 7), std::pair(13, 3)}) {
        const auto texts = make_windows(num_windows, length);
        const std::vector<std::string_view> windows(texts.begin(), texts.end());
        const auto batch = cut_batch(mesh, windows, length);
        const std::int64_t ep = mesh.has_axis("ep") ? mesh.size("ep") : 1;
        const std::int64_t dp = mesh.has_axis("dp") ? mesh.size("dp") : 1;
        const auto share = (mesh.has_axis("dp") ? mesh.coordinate("dp") : 0) * ep +
                           (mesh.has_axis("ep") ? mesh.coordinate("ep") : 0);
        expect_tokens(mesh, batch, num_windows, num_windows * share / (dp * ep));
        const auto counts = count_tokens(world, batch);
        for (int b = 0; b < 256; ++b) {
          const bool is_token = b / 16 < num_windows && b % 16 < length;
          EXPECT_EQ(counts[static_cast<std::size_t>(b)], is_token ? 1 : 0) << b;
        }
      }
    }
  });
}

TEST_P(CutBatch, ChecksWindows) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"ep", world.size()}});
    const std::vector<std::string_view> windows{"12345", "1234"};
    EXPECT_EQ(error_of<InvalidArgument>([&] { cut_batch(mesh, windows, 4); }),
              "a window has 4 bytes instead of length + 1 (5)");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CutBatch, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::train::batch_test
