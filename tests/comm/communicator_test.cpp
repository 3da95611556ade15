// SPDX-License-Identifier: Apache-2.0
// The contract of every communicator backend.
#include "switchyard/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/error.h"

namespace switchyard::communicator_test {
namespace {

using namespace std::chrono_literals;
using testing::elsewhere;
using testing::error_of;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr std::array kDtypes{Dtype::f32, Dtype::bf16, Dtype::i32, Dtype::i64};

class CommunicatorTest : public ::testing::TestWithParam<RankCase> {};

// Returns rows for rank `to` whose values identify rank `from`, in any dtype.
Tensor labelled(int from, int to, std::int64_t rows, Dtype dtype) {
  Tensor t({rows, 3}, dtype);
  const auto fill = [&](auto span, auto convert) {
    for (std::size_t i = 0; i < span.size(); ++i) {
      span[i] = convert((from * 8 + to) * 2 + static_cast<int>(i % 2));  // below 256: exact in bf16
    }
  };
  if (dtype == Dtype::f32) fill(t.span<float>(), [](int v) { return static_cast<float>(v); });
  if (dtype == Dtype::i32) fill(t.span<std::int32_t>(), [](int v) { return v; });
  if (dtype == Dtype::i64) fill(t.span<std::int64_t>(), [](int v) { return v; });
  if (dtype == Dtype::bf16) {
    fill(t.span<Bfloat16>(), [](int v) { return to_bfloat16(static_cast<float>(v)); });
  }
  return t;
}

Tensor concatenate(const std::vector<Tensor>& parts, Dtype dtype) {
  std::int64_t rows = 0;
  for (const Tensor& part : parts) rows += part.rows();
  Tensor result({rows, 3}, dtype);
  std::byte* to = result.data();
  for (const Tensor& part : parts) {
    to = std::copy_n(part.data(), part.bytes(), to);
  }
  return result;
}

// Uneven, and zero for some pairs.
std::int64_t rows_between(int from, int to) { return (from * 5 + to * 3) % 4 * 2; }

TEST_P(CommunicatorTest, AllToAllMovesAnyRowCounts) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const Dtype dtype : kDtypes) {
      std::vector<Tensor> outgoing;
      std::vector<Tensor> expected;
      std::vector<std::int64_t> send_rows;
      std::vector<std::int64_t> recv_rows;
      for (int r = 0; r < comm.size(); ++r) {
        send_rows.push_back(rows_between(comm.rank(), r));
        recv_rows.push_back(rows_between(r, comm.rank()));
        outgoing.push_back(labelled(comm.rank(), r, send_rows.back(), dtype));
        expected.push_back(labelled(r, comm.rank(), recv_rows.back(), dtype));
      }
      const Tensor want = concatenate(expected, dtype);
      Tensor got(want.shape(), dtype);
      comm.all_to_all(concatenate(outgoing, dtype), send_rows, got, recv_rows);
      EXPECT_TRUE(same_bits(got, want));
    }
  });
}

TEST_P(CommunicatorTest, AllToAllOfNothingIsFine) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const std::vector<std::int64_t> none(static_cast<std::size_t>(comm.size()), 0);
    Tensor empty({0, 3}, Dtype::f32);
    comm.all_to_all(empty, none, empty, none);
  });
}

TEST_P(CommunicatorTest, AllToAllTakesForeignMemory) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    const std::vector<std::int64_t> ones(n, 1);
    std::vector<float> send(n, static_cast<float>(comm.rank()));
    std::vector<float> recv(n, -1.0F);
    comm.all_to_all({send.data(), {comm.size(), 1}}, ones, {recv.data(), {comm.size(), 1}}, ones);
    for (std::size_t r = 0; r < n; ++r) EXPECT_EQ(recv[r], static_cast<float>(r));
  });
}

TEST_P(CommunicatorTest, AllGatherIsByRank) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const Dtype dtype : kDtypes) {
      for (const std::int64_t rows : {0, 1, 5, 30000}) {
        std::vector<Tensor> parts;
        for (int r = 0; r < comm.size(); ++r) parts.push_back(labelled(r, 1, rows, dtype));
        Tensor got({comm.size() * rows, 3}, dtype);
        comm.all_gather(labelled(comm.rank(), 1, rows, dtype), got);
        EXPECT_TRUE(same_bits(got, concatenate(parts, dtype)));
      }
    }
  });
}

// Values whose sum depends on the order in which they are added.
Tensor rough_values(int rank, const Shape& shape, Dtype dtype) {
  Random random(static_cast<std::uint64_t>(100 + rank));
  if (dtype == Dtype::f32 || dtype == Dtype::bf16) return random.tensor(shape, dtype);
  Tensor t(shape, dtype);
  if (dtype == Dtype::i32) {
    for (auto& v : t.span<std::int32_t>()) v = static_cast<std::int32_t>(random.below(2000) - 1000);
  } else {
    for (auto& v : t.span<std::int64_t>()) v = random.below(std::int64_t{1} << 40);
  }
  return t;
}

template <typename T>
Tensor sum_in_rank_order(int num_ranks, const Shape& shape, Dtype dtype) {
  Tensor total(shape, dtype);
  const auto out = total.span<T>();
  std::vector<Tensor> tensors;
  std::vector<std::span<const T>> parts;
  for (int r = 0; r < num_ranks; ++r) tensors.push_back(rough_values(r, shape, dtype));
  for (const Tensor& t : tensors) parts.push_back(t.span<T>());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if constexpr (std::is_same_v<T, Bfloat16>) {
      float sum = to_float(parts[0][i]);
      for (std::size_t r = 1; r < parts.size(); ++r) sum += to_float(parts[r][i]);
      out[i] = to_bfloat16(sum);
    } else {
      out[i] = parts[0][i];
      for (std::size_t r = 1; r < parts.size(); ++r) out[i] += parts[r][i];
    }
  }
  return total;
}

Tensor expected_sum(int num_ranks, const Shape& shape, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return sum_in_rank_order<float>(num_ranks, shape, dtype);
    case Dtype::bf16:
      return sum_in_rank_order<Bfloat16>(num_ranks, shape, dtype);
    case Dtype::i32:
      return sum_in_rank_order<std::int32_t>(num_ranks, shape, dtype);
    default:
      return sum_in_rank_order<std::int64_t>(num_ranks, shape, dtype);
  }
}

TEST_P(CommunicatorTest, AllReduceAddsInRankOrder) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const Dtype dtype : kDtypes) {
      for (const std::int64_t n : {0, 1, 1000, 50001}) {  // gathered whole, and in pieces
        Tensor values = rough_values(comm.rank(), {n, 1}, dtype);
        comm.all_reduce(values);
        EXPECT_TRUE(same_bits(values, expected_sum(comm.size(), {n, 1}, dtype)));
      }
    }
  });
}

TEST_P(CommunicatorTest, AllReduceFindsExtremes) {
  on_ranks(GetParam(), [](Communicator& comm) {
    Tensor low = Tensor::from<std::int32_t>({2}, {comm.rank(), -comm.rank()});
    Tensor high = low.clone();
    comm.all_reduce(low, ReduceOp::min);
    comm.all_reduce(high, ReduceOp::max);
    EXPECT_TRUE(same_bits(low, Tensor::from<std::int32_t>({2}, {0, 1 - comm.size()})));
    EXPECT_TRUE(same_bits(high, Tensor::from<std::int32_t>({2}, {comm.size() - 1, 0})));
  });
}

TEST_P(CommunicatorTest, ReduceScatterAddsInRankOrder) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const Dtype dtype : kDtypes) {
      const Shape shape{comm.size() * 5, 7};
      Tensor mine({5, 7}, dtype);
      comm.reduce_scatter(rough_values(comm.rank(), shape, dtype), mine);
      const Tensor all = expected_sum(comm.size(), shape, dtype);
      EXPECT_TRUE(same_bits(mine, all.view().slice(comm.rank() * 5, comm.rank() * 5 + 5)));
    }
  });
}

TEST_P(CommunicatorTest, BroadcastComesFromAnyRoot) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (int root = 0; root < comm.size(); ++root) {
      Tensor values = labelled(comm.rank(), 2, 4, Dtype::bf16);
      comm.broadcast(values, root);
      EXPECT_TRUE(same_bits(values, labelled(root, 2, 4, Dtype::bf16)));
    }
  });
}

TEST_P(CommunicatorTest, BarriersCountAsCollectives) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto before = comm.sequence();
    for (int i = 0; i < 50; ++i) comm.barrier();
    EXPECT_EQ(comm.sequence(), before + 50);
  });
}

TEST_P(CommunicatorTest, SplitsByColorAndKey) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const int color = comm.rank() % 2;
    const auto group = comm.split(color, -comm.rank());  // reversed
    const int expected_size = (comm.size() + 1 - color) / 2;
    ASSERT_EQ(group->size(), expected_size);
    EXPECT_EQ(group->rank(), expected_size - 1 - comm.rank() / 2);
    Tensor sum = Tensor::from<std::int32_t>({1}, {comm.rank()});
    group->all_reduce(sum);
    std::int32_t expected = 0;
    for (int r = color; r < comm.size(); r += 2) expected += r;
    EXPECT_EQ(sum.span<std::int32_t>()[0], expected);

    const auto nested = group->split(0, 0);
    nested->barrier();
    comm.barrier();
  });
}

TEST_P(CommunicatorTest, NegativeColorJoinsNoGroup) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto group = comm.split(comm.rank() == 0 ? -1 : 3, 0);
    EXPECT_EQ(group == nullptr, comm.rank() == 0);
    if (group) {
      EXPECT_EQ(group->size(), comm.size() - 1);
    }
  });
}

TEST_P(CommunicatorTest, CountsTheBytesForOthers) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    const std::vector<std::int64_t> twos(n, 2);
    Tensor rows({2 * comm.size(), 4}, Dtype::bf16);
    Tensor got({2 * comm.size(), 4}, Dtype::bf16);
    const auto before = comm.bytes_sent();
    comm.all_to_all(rows, twos, got, twos);
    EXPECT_EQ(comm.bytes_sent() - before, (comm.size() - 1) * 2 * 4 * 2);
  });
}

std::vector<std::chrono::nanoseconds> waits_of(const Communicator& comm) {
  return {comm.waited_for().begin(), comm.waited_for().end()};
}

// Makes a call to which one rank, in the middle, comes late.
void expect_late_rank_is_told(Communicator& comm, const std::function<void()>& call) {
  const auto late = static_cast<std::size_t>(comm.size() / 2);
  const auto self = static_cast<std::size_t>(comm.rank());
  comm.barrier();
  const auto before = waits_of(comm);
  if (self == late) std::this_thread::sleep_for(100ms);
  call();
  auto waited = waits_of(comm);
  ASSERT_EQ(waited.size(), static_cast<std::size_t>(comm.size()));
  EXPECT_EQ(waited[self], 0ns);
  for (std::size_t r = 0; r < waited.size(); ++r) {
    waited[r] -= before[r];
    EXPECT_GE(waited[r], 0ns);
  }
  if (self == late) return;
  EXPECT_GE(waited[late], 40ms);
  EXPECT_EQ(std::ranges::max_element(waited) - waited.begin(), comm.size() / 2);
}

TEST_P(CommunicatorTest, TellsWhoIsWaitedFor) {
  on_ranks(GetParam(), [](Communicator& comm) {
    expect_late_rank_is_told(comm, [&] { comm.barrier(); });
    expect_late_rank_is_told(comm, [&] {
      Tensor values = Tensor::zeros({30000}, Dtype::f32);  // more than one exchange
      comm.all_reduce(values);
    });
    MappedBuffers* buffers = comm.mapped_buffers();
    if (buffers == nullptr) return;
    expect_late_rank_is_told(comm, [&] { buffers->map({}); });
    expect_late_rank_is_told(comm, [&] { buffers->phase_barrier(); });
  });
}

TEST_P(CommunicatorTest, AGroupCountsItsOwnWaits) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto group = comm.split(comm.rank() % 2, -comm.rank());
    const auto of_all = waits_of(comm);
    EXPECT_EQ(waits_of(*group), std::vector(static_cast<std::size_t>(group->size()), 0ns));
    expect_late_rank_is_told(*group, [&] { group->barrier(); });
    EXPECT_EQ(waits_of(comm), of_all);
  });
}

// Buffers of this rank beyond 2³¹ bytes, and elements beyond 2³¹ in one call: what MPI counts in
// ints. Ranks that are threads copy memory, so it runs over processes alone.
class LargeCommunicatorTest : public ::testing::TestWithParam<RankCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LargeCommunicatorTest);

TEST_P(LargeCommunicatorTest, CountsBeyondInt32) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const std::int64_t row_bytes = std::int64_t{1} << 20;
    const std::int64_t rows = 2050 / comm.size() + 1;  // in all just beyond 2³¹ bytes
    const std::vector<std::int64_t> each(static_cast<std::size_t>(comm.size()), rows);
    Tensor send({comm.size() * rows, row_bytes / 2}, Dtype::bf16);
    Tensor recv(send.shape(), Dtype::bf16);
    for (std::int64_t i = 0; i < send.rows(); ++i) {  // one mark a row, in the last element
      const auto mark = static_cast<std::uint16_t>(comm.rank() * 4096 + i);
      std::memcpy(send.view().row(i) + row_bytes - 2, &mark, 2);
    }
    comm.all_to_all(send, each, recv, each);
    for (int from = 0; from < comm.size(); ++from) {
      for (std::int64_t i = 0; i < rows; ++i) {
        std::uint16_t mark = 0;
        std::memcpy(&mark, recv.view().row(from * rows + i) + row_bytes - 2, 2);
        ASSERT_EQ(mark, from * 4096 + comm.rank() * rows + i);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

INSTANTIATE_TEST_SUITE_P(Ranks, LargeCommunicatorTest,
                         ::testing::ValuesIn(testing::under_mpirun() ? testing::rank_cases_of(2)
                                                                     : std::vector<RankCase>{}),
                         testing::rank_case_name);

TEST(CommunicatorErrors, AGpusMemoryIsNotRead) {
  Tensor values = Tensor::zeros({2}, Dtype::f32);
  Tensor other = Tensor::zeros({2}, Dtype::f32);
  const std::vector<std::int64_t> all{2};
  const auto expect = [](std::string_view name, const std::function<void(Communicator&)>& call) {
    const auto world = connect();
    EXPECT_EQ(error_of<InvalidArgument>([&] { call(*world); }),
              std::string(name) +
                  " [2] is in GPU memory, but this call needs host memory: copy it with "
                  "Device::to_host first");
  };
  expect("values", [&](Communicator& comm) { comm.all_reduce(elsewhere(values)); });
  expect("values", [&](Communicator& comm) { comm.broadcast(elsewhere(values), 0); });
  expect("send", [&](Communicator& comm) { comm.all_gather(elsewhere(values), other); });
  expect("recv", [&](Communicator& comm) { comm.reduce_scatter(other, elsewhere(values)); });
  expect("send", [&](Communicator& comm) { comm.all_to_all(elsewhere(values), all, other, all); });
}

}  // namespace
}  // namespace switchyard::communicator_test
