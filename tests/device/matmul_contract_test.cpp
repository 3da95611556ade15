// SPDX-License-Identifier: Apache-2.0
// Products of matrices on every device: against double precision, and to the bit in company.
#include <gtest/gtest.h>

#include <vector>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/device/matmul_problem.h"
#include "switchyard/matmul.h"

namespace switchyard::matmul_contract_test {
namespace {

using testing::for_each_matmul_kind;
using testing::MatmulKind;
using testing::MatmulProblem;
using testing::MatmulSizes;

class MatmulContract : public testing::OnDevices {};
SWITCHYARD_ON_DEVICES(MatmulContract);

TEST_P(MatmulContract, EqualsDoublePrecision) {
  for (const MatmulSizes sizes :
       {MatmulSizes{1, 1, 1}, MatmulSizes{1, 64, 17}, MatmulSizes{17, 1, 100},
        MatmulSizes{64, 17, 1}, MatmulSizes{100, 64, 17}, MatmulSizes{300, 17, 64},
        MatmulSizes{17, 300, 100}, MatmulSizes{70, 600, 20}, MatmulSizes{136, 264, 72}}) {
    for_each_matmul_kind([&](const MatmulKind& kind) {
      for (const std::int64_t spare : {0, 5, 8}) {
        MatmulProblem(device, sizes, kind, spare).expect_double_precision();
      }
    });
  }
}

TEST_P(MatmulContract, ProductsOfNothing) {
  for_each_matmul_kind([&](const MatmulKind& kind) {
    for (const MatmulSizes sizes : {MatmulSizes{70, 3, 0}, MatmulSizes{0, 3, 4},
                                    MatmulSizes{3, 0, 4}, MatmulSizes{0, 0, 0}}) {
      for (const std::int64_t spare : {0, 2}) {
        MatmulProblem(device, sizes, kind, spare).expect_double_precision();
      }
    }
  });
  matmul(device, std::span<const Matmul>());
}

// Large enough for kernels that are worth their preparation.
TEST_P(MatmulContract, LargeProducts) {
  for_each_matmul_kind([&](const MatmulKind& kind) {
    if (kind.in == Dtype::f32 || kind.mode == GradientMode::accumulate) return;
    for (const std::int64_t spare : {0, 3}) {
      MatmulProblem(device, {1024, 1088, 1024}, kind, spare).expect_double_precision(131);
    }
  });
}

// More products than go into one launch, of one kind and of all, some with nothing to do.
TEST_P(MatmulContract, BitsDoNotDependOnOtherProducts) {
  constexpr MatmulSizes kAllSizes[] = {{300, 100, 64}, {1, 17, 300}, {130, 140, 30}, {5, 3, 0}};
  std::vector<MatmulProblem> together;
  std::vector<Tensor> alone;
  const auto add = [&](const MatmulKind& kind, std::int64_t spare) {
    const MatmulSizes& sizes = kAllSizes[together.size() / 3 % 4];
    together.emplace_back(device, sizes, kind, spare);
    MatmulProblem same(device, sizes, kind, spare);
    matmul(device, same.product());
    alone.push_back(same.c());
  };
  for (int i = 0; i < 40; ++i) add({}, 4);
  for (const std::int64_t spare : {0, 3}) {
    for_each_matmul_kind([&](const MatmulKind& kind) { add(kind, spare); });
  }
  std::vector<Matmul> products;
  for (MatmulProblem& problem : together) products.push_back(problem.product());
  matmul(device, products);
  for (std::size_t i = 0; i < products.size(); ++i) {
    ASSERT_TRUE(testing::same_bits(together[i].c(), alone[i])) << i;
  }
}

}  // namespace
}  // namespace switchyard::matmul_contract_test
