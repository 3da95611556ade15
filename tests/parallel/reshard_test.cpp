// SPDX-License-Identifier: Apache-2.0
#include "switchyard/reshard.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::reshard_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr int kExperts = 10;  // over four ranks: three, three, two, two

struct Form {
  Shape shape;  // of one expert: [1, …]
  Dtype dtype;
};
// Matrices, vectors and single numbers, as weights and optimizers have them.
const std::vector<Form> kForms{{{1, 3, 5}, Dtype::f32},
                               {{1, 7}, Dtype::bf16},
                               {{1}, Dtype::i64},
                               {{1, 2, 2, 2}, Dtype::i32},
                               {{1, 0}, Dtype::f32}};

// Every byte is the expert's and the tensor's own.
Tensor row_of(int expert, const Form& form) {
  Tensor row(form.shape, form.dtype);
  Random random(static_cast<std::uint64_t>(100 * expert + form.shape.rank()));
  for (std::int64_t i = 0; i < row.bytes(); ++i) {
    row.data()[i] = static_cast<std::byte>(random.below(256));
  }
  return row;
}

std::vector<std::int32_t> experts_of(const ExpertPlacement& placement, int rank) {
  if (rank >= placement.num_ranks()) return {};
  const auto ids = placement.experts_of(rank);
  return {ids.begin(), ids.end()};
}

std::vector<Tensor> shard_of(const ExpertPlacement& placement, int rank) {
  const auto ids = experts_of(placement, rank);
  std::vector<Tensor> shard;
  for (const Form& form : kForms) {
    Tensor tensor(form.shape.with_rows(static_cast<std::int64_t>(ids.size())), form.dtype);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const Tensor row = row_of(ids[i], form);
      std::copy_n(row.data(), row.bytes(), tensor.view().row(static_cast<std::int64_t>(i)));
    }
    shard.push_back(std::move(tensor));
  }
  return shard;
}

std::vector<ConstTensorView> views_of(const std::vector<Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

// Even ones over fewer and more ranks, everything on one rank, and random ones.
std::vector<ExpertPlacement> placements_for(int num_ranks) {
  std::vector<ExpertPlacement> result;
  for (const int owners : {1, 2, 4, num_ranks}) {
    if (owners <= num_ranks) result.push_back(ExpertPlacement::contiguous(kExperts, owners));
  }
  result.push_back(
      ExpertPlacement::from_owners(std::vector<std::int32_t>(kExperts, num_ranks - 1), num_ranks));
  Random random(12);
  for (int i = 0; i < 3; ++i) {
    std::vector<std::int32_t> owners;
    for (int e = 0; e < kExperts; ++e) {
      owners.push_back(static_cast<std::int32_t>(random.below(num_ranks)));
    }
    result.push_back(ExpertPlacement::from_owners(owners, num_ranks));
  }
  return result;
}

std::int64_t bytes_that_leave(const ExpertPlacement& from, const ExpertPlacement& to, int rank) {
  std::int64_t bytes = 0;
  for (const auto e : experts_of(from, rank)) {
    if (to.owner(e) == rank) continue;
    for (const Form& form : kForms) bytes += row_of(e, form).bytes();
  }
  return bytes;
}

class ReshardTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(ReshardTest, FromAnyPlacementToAnyOther) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto placements = placements_for(comm.size());
    for (const auto& from : placements) {
      const auto shard = shard_of(from, comm.rank());
      for (const auto& to : placements) {
        const auto moved = reshard(views_of(shard), from, to, comm);
        const auto expected = shard_of(to, comm.rank());
        ASSERT_EQ(moved.size(), expected.size());
        for (std::size_t i = 0; i < moved.size(); ++i) {
          EXPECT_TRUE(same_bits(moved[i], expected[i]));
        }
      }
    }
  });
}

// Each expert that leaves is sent once, and nothing else but what the checks need.
TEST_P(ReshardTest, SendsExactlyWhatMoves) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto bytes_of = [&](const ExpertPlacement& from, const ExpertPlacement& to) {
      const auto before = comm.bytes_sent();
      (void)reshard(views_of(shard_of(from, comm.rank())), from, to, comm);
      return comm.bytes_sent() - before;
    };
    const auto placements = placements_for(comm.size());
    const auto for_checks = bytes_of(placements[0], placements[0]);
    EXPECT_LE(for_checks, 1024 * (comm.size() - 1));
    for (const auto& from : placements) {
      for (const auto& to : placements) {
        EXPECT_EQ(bytes_of(from, to) - for_checks, bytes_that_leave(from, to, comm.rank()));
      }
    }
  });
}

// Two tensors cost two exchanges, and where all experts stay none.
TEST_P(ReshardTest, ExchangesOnceForEveryTensor) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto even = ExpertPlacement::contiguous(kExperts, comm.size());
    const auto one = ExpertPlacement::contiguous(kExperts, 1);
    const auto shard = shard_of(even, comm.rank());
    const auto views = views_of(shard);
    const auto calls_of = [&](std::size_t num_tensors, const ExpertPlacement& to) {
      const auto before = comm.sequence();
      (void)reshard(std::span(views).first(num_tensors), even, to, comm);
      return comm.sequence() - before;
    };
    const auto for_checks = calls_of(0, one);
    EXPECT_EQ(calls_of(2, even), for_checks);
    EXPECT_EQ(calls_of(2, one) - for_checks, comm.size() == 1 ? 0U : 2U);
  });
}

// Rows with something between them, as of a packed gate in [e, 2I, H].
TEST_P(ReshardTest, TakesStridedTensors) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto from = ExpertPlacement::contiguous(kExperts, comm.size());
    const auto to = placements_for(comm.size()).back();
    const auto shard = shard_of(from, comm.rank());
    Tensor wide({shard[0].rows(), 6, 5}, Dtype::f32);
    testing::poison(wide);
    const TensorView left(wide.data(), Dtype::f32, shard[0].shape(), 30, wide.view().owner());
    for (std::int64_t r = 0; r < left.rows(); ++r) {
      std::copy_n(shard[0].view().row(r), left.row_bytes(), left.row(r));
    }
    const std::vector<ConstTensorView> views{left};
    EXPECT_TRUE(same_bits(reshard(views, from, to, comm)[0], shard_of(to, comm.rank())[0]));
    EXPECT_TRUE(same_bits(reshard(views, from, from, comm)[0], shard[0]));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReshardTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

// The error of every rank of three; afterwards the communicator must work still.
void expect_error(const std::function<void(Communicator&)>& call, const std::string& expected) {
  run_ranks(3,
            [&](Communicator& comm) {
              EXPECT_EQ(error_of<InvalidArgument>([&] { call(comm); }), expected);
              comm.barrier();
            },
            {.timeout = testing::kTestTimeout});
}

TEST(ReshardErrors, AreTheSameOnEveryRank) {
  const auto even = ExpertPlacement::contiguous(6, 3);
  const auto call = [](const ExpertPlacement& from, const ExpertPlacement& to, const Shape& shape,
                       Dtype dtype, Communicator& comm) {
    const std::vector<ConstTensorView> shard{Tensor(shape, dtype)};
    (void)reshard(shard, from, to, comm);
  };
  const auto with = [&](const ExpertPlacement& from, const ExpertPlacement& to) {
    return [&, from, to](Communicator& comm) { call(from, to, {2, 4}, Dtype::f32, comm); };
  };
  expect_error(with(even, ExpertPlacement::contiguous(7, 3)),
               "reshard: rank 0: experts cannot move from a placement of 6 experts to one of 7");
  expect_error(with(even, ExpertPlacement::contiguous(6, 4)),
               "reshard: rank 0: a placement is for 4 ranks, but the communicator has 3");
  expect_error(
      [&](Communicator& comm) {
        call(even, even, {comm.rank() == 1 ? 3 : 2, 4}, Dtype::f32, comm);
      },
      "reshard: rank 1: tensor 0 is [3,4], but this rank has 2 experts");
  expect_error(
      [&](Communicator& comm) {
        const Tensor tensor({2, 4}, Dtype::f32);
        const std::vector<ConstTensorView> shard(comm.rank() == 2 ? 2 : 1, tensor);
        (void)reshard(shard, even, even, comm);
      },
      "reshard: ranks disagree about the number of tensors: rank 0 has 1, rank 2 has 2");
}

TEST(ReshardErrors, AGpusMemoryIsNotRead) {
  const auto even = ExpertPlacement::contiguous(6, 3);
  expect_error(
      [&](Communicator& comm) {
        Tensor tensor({2, 4}, Dtype::f32);
        const std::vector<ConstTensorView> shard{comm.rank() == 1 ? elsewhere(tensor)
                                                                  : tensor.view()};
        (void)reshard(shard, even, even, comm);
      },
      "reshard: rank 1: tensor 0 [2,4]" + std::string(testing::kGivenToTheCpu));
}

TEST(ReshardErrors, PlacementsWithoutExperts) {
  const ExpertPlacement none;
  const auto call = [&](const auto& shard) {
    expect_error([&](Communicator& comm) { (void)reshard(shard, none, none, comm); },
                 "reshard: rank 0: the placements have no experts");
  };
  call(std::vector<ConstTensorView>{});
  call(MoeParameters::of({}));
}

TEST(ReshardErrors, NameWhatRanksDisagreeAbout) {
  const auto even = ExpertPlacement::contiguous(6, 3);
  const auto odd = ExpertPlacement::from_owners({0, 1, 2, 0, 1, 2}, 3);
  struct Case {
    ExpertPlacement from;
    ExpertPlacement to;
    Shape shape = {2, 4};
    Dtype dtype = Dtype::f32;
  };
  const auto expect = [&](const Case& last, const std::string& expected) {  // of rank 2
    expect_error(
        [&](Communicator& comm) {
          const Case mine = comm.rank() == 2 ? last : Case{even, even};
          const std::vector<ConstTensorView> shard{Tensor(mine.shape, mine.dtype)};
          (void)reshard(shard, mine.from, mine.to, comm);
        },
        "reshard: ranks disagree about " + expected);
  };
  expect(
      {ExpertPlacement::from_owners({0, 1, 2, 0, 1, 2, 0}, 3), ExpertPlacement::contiguous(7, 3)},
      "num_experts: rank 0 has 6, rank 2 has 7");
  expect({odd, even}, "the old owner of expert 1: rank 0 has 0, rank 2 has 1");
  expect({even, odd}, "the new owner of expert 1: rank 0 has 0, rank 2 has 1");
  const std::string part = "an expert's part of tensor 0: rank 0 has f32 [1,4], rank 2 has ";
  expect({even, even, {2, 5}}, part + "f32 [1,5]");
  expect({even, even, {2, 2, 2}}, part + "f32 [1,2,2]");
  expect({even, even, {2, 4}, Dtype::i32}, part + "i32 [1,4]");
}

}  // namespace
}  // namespace switchyard::reshard_test
