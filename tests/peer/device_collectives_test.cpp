// SPDX-License-Identifier: Apache-2.0
#include "peer/device_collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "support/compare.h"
#include "support/device/pretend_gpu.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::device_collectives_test {
namespace {

using testing::error_of;
using testing::PretendGpu;
using testing::Random;
using testing::same_bits;
using Way = DeviceCollectives::Way;

// One row of staging for each rank; some; all that there are.
constexpr std::array<std::int64_t, 3> kStagingBytes{2048, 3 * 4 * 2048,
                                                    DeviceCollectives::kStagingBytes};

// Elements of each rank, by turns: none, one, a row of staging, more of them and a little.
std::int64_t size_of_rank(int rank, int round) {
  constexpr std::array<std::int64_t, 5> kSizes{5000, 0, 1, 1024, 2801};
  return kSizes[static_cast<std::size_t>(rank + round) % kSizes.size()];
}

template <typename T>
T random_value(Random& random, std::int64_t exponent) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random.next());
  } else {
    // Magnitudes differ by rank, so that sums in another order have other bits; some are −0.
    const float value =
        exponent == 3 ? -0.0F : std::ldexp(random.uniform(), static_cast<int>(-8 * exponent));
    if constexpr (std::is_same_v<T, float>) {
      return value;
    } else {
      return to_bfloat16(value);
    }
  }
}

template <typename T>
Tensor values_of(int rank, std::int64_t count) {
  Tensor values({count}, DtypeOf<T>::value);
  Random random(static_cast<std::uint64_t>(40 + rank));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto exponent = i % 7 == 0 ? 3 : (i + rank) % 3;
    values.span<T>()[static_cast<std::size_t>(i)] = random_value<T>(random, exponent);
  }
  return values;
}

Tensor values_of(int rank, std::int64_t count, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return values_of<float>(rank, count);
    case Dtype::bf16:
      return values_of<Bfloat16>(rank, count);
    case Dtype::i32:
      return values_of<std::int32_t>(rank, count);
    default:
      return values_of<std::int64_t>(rank, count);
  }
}

// These values in rows of so many columns, with zeros between them.
struct Apart {
  Apart(const Device& device, const Tensor& values, std::int64_t columns)
      : wide(device.empty({values.rows() / columns, columns + 3}, values.dtype())),
        view(wide.data(), values.dtype(), {wide.rows(), columns}, columns + 3, wide.view().owner(),
             wide.memory()) {
    device.set_zero(wide);
    device.copy(ConstTensorView(values.data(), values.dtype(), view.shape(), columns), view);
  }

  Tensor wide;
  TensorView view;
};

// Returns this rank's results of every collective, copied to the host.
std::vector<Tensor> results_of(Communicator& comm, const Device& device,
                               const DeviceCollectives& collectives, Dtype dtype) {
  std::vector<Tensor> results;
  const auto keep = [&](const ConstTensorView& view) { results.push_back(device.to_host(view)); };
  for (int round = 0; round < 5; ++round) {
    const auto mine = size_of_rank(comm.rank(), round);
    const Tensor own = device.copy_of(values_of(comm.rank(), mine, dtype));
    std::vector<std::vector<TensorView>> all;
    std::vector<std::vector<ConstTensorView>> parts;
    for (int r = 0; r < comm.size(); ++r) {  // in two tensors each
      const auto size = size_of_rank(r, round);
      all.push_back({device.empty({size / 3}, dtype), device.empty({size - size / 3}, dtype)});
      const Tensor part = device.copy_of(values_of(comm.rank() * 10 + r, size, dtype));
      parts.push_back({part.view().slice(0, size / 2), part.view().slice(size / 2, size)});
    }
    collectives.all_gather(own, all);
    for (const auto& list : all) {
      for (const auto& view : list) keep(view);
    }
    Tensor sum = device.empty({mine}, dtype);
    collectives.reduce_scatter(parts, sum);
    keep(sum);
    Tensor first = device.copy_of(values_of(comm.rank(), size_of_rank(0, round), dtype));
    Tensor second = device.copy_of(values_of(comm.rank() + 4, 3, dtype));
    collectives.all_reduce(std::vector<TensorView>{first, second});
    keep(first);
    keep(second);
    const Apart rows(device, values_of(comm.rank(), 19 * 150, dtype), round == 0 ? 19 : 150);
    collectives.all_reduce({&rows.view, 1});
    keep(rows.wide);
  }
  return results;
}

// By the communicator, in the host's memory.
std::vector<Tensor> expected_of(Communicator& comm, Dtype dtype) {
  const Device cpu;
  return results_of(comm, cpu, DeviceCollectives(comm, cpu), dtype);
}

void expect_same(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << "result " << i;
  }
}

class DeviceCollectivesTest : public ::testing::TestWithParam<std::tuple<int, Dtype>> {
 protected:
  static Dtype dtype() { return std::get<1>(GetParam()); }
  static void on_ranks(const std::function<void(Communicator&)>& body) {
    run_ranks(std::get<0>(GetParam()), body, {.timeout = testing::kTestTimeout});
  }
};

TEST_P(DeviceCollectivesTest, PeerMemoryGivesTheBitsOfTheCommunicator) {
  on_ranks([](Communicator& comm) {
    const auto expected = expected_of(comm, dtype());
    const Device cpu;
    for (const auto bytes : kStagingBytes) {
      SCOPED_TRACE(bytes);
      expect_same(results_of(comm, cpu, {comm, cpu, Way::peer_memory, bytes}, dtype()), expected);
    }
  });
}

TEST_P(DeviceCollectivesTest, HostsStageAGpusTensorsInPieces) {
  on_ranks([](Communicator& comm) {
    const auto expected = expected_of(comm, dtype());
    const Device gpu = PretendGpu::device(PretendGpu::Peers::apart);
    for (const auto bytes : {std::int64_t{6000}, DeviceCollectives::kStagingBytes}) {
      SCOPED_TRACE(bytes);
      expect_same(results_of(comm, gpu, {comm, gpu, Way::communicator, bytes}, dtype()), expected);
    }
    expect_same(results_of(comm, gpu, {comm, gpu}, dtype()), expected);
  });
}

TEST_P(DeviceCollectivesTest, GpusThatReachEachOtherUsePeerMemory) {
  on_ranks([](Communicator& comm) {
    const auto expected = expected_of(comm, dtype());
    const auto backend = std::make_shared<PretendGpu>(PretendGpu::Peers::reached);
    const Device gpu(backend);
    for (int call = 0; call < 3; ++call) {
      expect_same(results_of(comm, gpu, {comm, gpu}, dtype()), expected);
      EXPECT_EQ(backend->num_heaps(), comm.size() == 1 ? 0 : 1) << "it is kept for the next call";
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, DeviceCollectivesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(Dtype::f32, Dtype::bf16, Dtype::i32,
                                                              Dtype::i64)),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) + "_ranks_" +
                                  std::string(name_of(std::get<1>(param.param)));
                         });

TEST(DeviceCollectives, RowsGoToTheirRanks) {
  run_ranks(
      3,
      [](Communicator& comm) {
        // Rank r has r + 1 rows for every rank, rows of 2 x 5.
        const auto rows = comm.rank() + 1;
        const Tensor sent =
            Random(static_cast<std::uint64_t>(comm.rank())).tensor({3 * rows, 2, 5}, Dtype::bf16);
        const std::vector<std::int64_t> send_rows(3, rows);
        const std::vector<std::int64_t> recv_rows{1, 2, 3};
        Tensor expected({6, 2, 5}, Dtype::bf16);
        comm.all_to_all(sent, send_rows, expected, recv_rows);
        const Device gpu = PretendGpu::device(PretendGpu::Peers::apart);
        for (const std::int64_t bytes : {1, 50, 1 << 20}) {
          Tensor received = gpu.empty({6, 2, 5}, Dtype::bf16);
          DeviceCollectives(comm, gpu, Way::communicator, bytes)
              .all_to_all(gpu.copy_of(sent), send_rows, received, recv_rows);
          EXPECT_TRUE(same_bits(gpu.to_host(received), expected)) << bytes;
        }
      },
      {.timeout = testing::kTestTimeout});
}

// A rank that comes with another device makes all ranks begin anew, and none waits for another.
TEST(DeviceCollectives, ADeviceMayBeExchanged) {
  run_ranks(3,
            [](Communicator& comm) {
              const auto expected = expected_of(comm, Dtype::f32);
              const auto make = [] { return PretendGpu::device(PretendGpu::Peers::reached); };
              const Device first = make();
              expect_same(results_of(comm, first, {comm, first}, Dtype::f32), expected);
              const Device second = comm.rank() == 1 ? make() : first;
              expect_same(results_of(comm, second, {comm, second}, Dtype::f32), expected);
            },
            {.timeout = testing::kTestTimeout});
}

TEST(DeviceCollectives, OtherSizesOnARankAreAnError) {
  for (const Way way : {Way::communicator, Way::peer_memory}) {
    const auto error = error_of<CommunicationError>([&] {
      run_ranks(2,
                [&](Communicator& comm) {
                  const Device cpu;
                  const DeviceCollectives collectives(comm, cpu, way);
                  Tensor values({comm.rank() == 0 ? 8 : 9}, Dtype::f32);
                  const TensorView view = values;
                  collectives.all_reduce({&view, 1});
                },
                {.timeout = testing::kTestTimeout});
    });
    EXPECT_NE(error, "no error");
    EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
  }
}

// A GPU's host does not wait, so it learns of a rank that is missing by the next call.
TEST(DeviceCollectives, AFailureLeavesNoResultAndIsTheErrorOfTheNextCall) {
  using namespace std::chrono_literals;
  const auto is_nan = [](const Tensor& tensor) {
    return std::ranges::all_of(tensor.span<float>(), [](float v) { return std::isnan(v); });
  };
  run_ranks(2,
            [&](Communicator& comm) {
              const Device gpu = PretendGpu::device(PretendGpu::Peers::reached);
              const DeviceCollectives collectives(comm, gpu, Way::peer_memory, 1 << 14);
              const Tensor own = gpu.copy_of(Random(1).tensor({9000}, Dtype::f32));
              Tensor values = gpu.copy_of(gpu.to_host(own));
              const TensorView view = values;
              const auto reduce = [&] { collectives.all_reduce({&view, 1}); };
              if (comm.rank() == 1) {
                std::this_thread::sleep_for(700ms);
              } else {
                reduce();
                EXPECT_TRUE(is_nan(gpu.to_host(values)));
              }
              const auto error = error_of<CommunicationError>(reduce);
              EXPECT_NE(error.find("rank 1 did not come to"), std::string::npos) << error;
            },
            {.timeout = 200ms});
}

TEST(DeviceCollectives, UnreachableMemoryIsUnsupportedIfItIsRequired) {
  run_ranks(2,
            [](Communicator& comm) {
              const Device gpu = PretendGpu::device(PretendGpu::Peers::apart);
              EXPECT_NE(error_of<Unsupported>([&] {
                          (void)DeviceCollectives(comm, gpu, Way::peer_memory);
                        }).find("no rank reaches this memory"),
                        std::string::npos);
            },
            {.timeout = testing::kTestTimeout});
}

}  // namespace
}  // namespace switchyard::device_collectives_test
