// SPDX-License-Identifier: Apache-2.0
// Hopper's products load and multiply no more than their tiles need.
#include "emulation/work.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "support/device/fused_problem.h"
#include "support/device/fused_runs.h"
#include "support/device/grouped_problem.h"

namespace switchyard::testing::work_test {
namespace {

constexpr std::uint64_t kElement = 2;  // bytes

struct Work {
  std::uint64_t products = 0;
  std::uint64_t loaded_bytes = 0;
  std::uint64_t copied_bytes = 0;
};
Work work_so_far() {
  const auto& work = emulation::work_done();
  return {work.products, work.loaded_bytes, work.copied_bytes};
}
template <typename Run>
Work work_of(const Run& run) {
  const Work before = work_so_far();
  run();
  const Work after = work_so_far();
  return {after.products - before.products, after.loaded_bytes - before.loaded_bytes,
          after.copied_bytes - before.copied_bytes};
}

class CudaWork : public CudaFusedGemm {
 protected:
  // The work of one group's product of m × n results, each a sum of `depth` terms.
  Work work_of_product(GemmForm form, std::int64_t m, std::int64_t n, std::int64_t depth) const {
    GroupedSetup setup{.form = form, .matrix_rows = n, .matrix_columns = depth};
    std::int64_t rows = m;
    if (form == GemmForm::input_gradient) {
      setup.matrix_rows = depth;
      setup.matrix_columns = n;
    } else if (form == GemmForm::weight_gradient) {
      setup.matrix_rows = m;
      setup.matrix_columns = n;
      rows = depth;
    }
    return work_of([&] { run_grouped(device, setup, {{.id = 0, .rows = rows}}); });
  }
};

// A tile is 128 × 256. A pair of tiles loads what it shares once, and the half of a tile that lies
// outside of the matrix is neither loaded nor multiplied.
TEST_F(CudaWork, ProductsLoadAndMultiplyWhatTheirTilesNeed) {
  struct Case {
    std::int64_t m, n;
    std::uint64_t lines;  // of both operands
  };
  constexpr std::int64_t kDepth = 192;
  for (const auto form : {GemmForm::forward, GemmForm::input_gradient, GemmForm::weight_gradient}) {
    for (const Case& c : {Case{256, 256, 256 + 256},             // tiles share columns
                          Case{128, 512, 128 + 512},             // tiles share rows
                          Case{128, 256, 128 + 256},             // one tile
                          Case{256, 128, 256 + 128},             // half of the columns
                          Case{256, 384, 2 * 256 + 384},         // one and a half
                          Case{128, 384, 128 + 384},             // likewise
                          Case{384, 128, 3 * 128 + 2 * 128}}) {  // a pair, and a tile by itself
      SCOPED_TRACE(::testing::Message()
                   << "form " << static_cast<int>(form) << ", " << c.m << " x " << c.n);
      const Work work = work_of_product(form, c.m, c.n, kDepth);
      EXPECT_EQ(work.products, static_cast<std::uint64_t>(c.m * c.n * kDepth));
      EXPECT_EQ(work.loaded_bytes, c.lines * kDepth * kElement);
    }
  }
}

// The second half of a tile has no rows, and is neither loaded nor multiplied.
TEST_F(CudaWork, RowsThatAreNotThereAreLeftOut) {
  for (const std::uint64_t columns : {256, 512}) {  // in a pair, the tiles share their rows
    const Work work = work_of_product(GemmForm::forward, 64, columns, 128);
    EXPECT_EQ(work.products, 64 * columns * 128);
    EXPECT_EQ(work.loaded_bytes, (64 + columns) * 128 * kElement);
  }
  // The last block of a sum has 16 rows of 64.
  EXPECT_EQ(work_of_product(GemmForm::weight_gradient, 128, 256, 4 * 64 + 16).products,
            128 * 256 * (4 * 64 + 16));
}

// As in decoding: few tokens, and many experts without any.
TEST_F(CudaWork, FewTokensReadTheirOwnExpertsOnce) {
  constexpr std::uint64_t kIntermediate = 256;
  constexpr std::uint64_t kHidden = 128;
  const FusedProblem problem(
      {.intermediate = kIntermediate, .hidden = kHidden, .group_rows = {0, 5, 0, 0, 30, 0}});
  const FusedRuns runs(device, problem);
  for (const bool from_tokens : {false, true}) {
    SCOPED_TRACE(from_tokens ? "tokens" : "rows");
    const FusedWay way{.from_tokens = from_tokens, .keeps_inner = false};
    const Work work = work_of([&] { runs.activate(way); });
    constexpr std::uint64_t kExperts = 2;
    const std::uint64_t weights = kExperts * 2 * kIntermediate * kHidden * kElement;
    // Two tiles a group. They share the 64 rows that TMA loads. Of tokens each tile copies 8 or 32
    // lines instead of 128.
    const std::uint64_t rows = kExperts * 64 * kHidden * kElement;
    EXPECT_EQ(work.loaded_bytes, from_tokens ? weights : weights + rows);
    EXPECT_EQ(work.copied_bytes, from_tokens ? 2 * (8 + 32) * kHidden * kElement : 0);
  }
}

}  // namespace
}  // namespace switchyard::testing::work_test
