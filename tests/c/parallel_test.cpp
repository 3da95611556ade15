// SPDX-License-Identifier: Apache-2.0
// Ranks of a program's own through the C interface, and experts over them.
#include "switchyard/c/parallel.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/random.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"
#include "switchyard/placement.h"
#include "switchyard/run_ranks.h"

namespace switchyard::c_parallel_test {
namespace {

using testing::Random;

constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kIntermediate = 12;
constexpr std::int64_t kTopK = 2;
constexpr int kExperts = 5;

template <typename Work>
int told(const Work& work) {
  try {
    work();
    return switchyard_ok;
  } catch (const std::exception& error) {
    return switchyard_fail(switchyard_communication_error, error.what());
  }
}

// Moves bytes by another communicator, as a framework would. `lies` makes it fail.
struct Framework {
  Communicator& comm;
  std::string given_up = {};
  bool fails = false;

  static Framework& of(void* context) { return *static_cast<Framework*>(context); }
  static TensorView bytes(const void* data, std::int64_t count) {
    return {static_cast<std::byte*>(const_cast<void*>(data)), Dtype::bf16, Shape{count / 2}, 1};
  }

  static int all_to_all(void* context, const void* send, const std::int64_t* send_bytes, void* recv,
                        const std::int64_t* recv_bytes) {
    Framework& own = of(context);
    std::vector<std::int64_t> sent;
    std::vector<std::int64_t> received;
    std::int64_t all_sent = 0;
    std::int64_t all_received = 0;
    for (int r = 0; r < own.comm.size(); ++r) {
      sent.push_back(send_bytes[r] / 2);
      received.push_back(recv_bytes[r] / 2);
      all_sent += send_bytes[r];
      all_received += recv_bytes[r];
    }
    return told([&] {
      own.comm.all_to_all(bytes(send, all_sent), sent, bytes(recv, all_received), received);
    });
  }
  static int all_gather(void* context, const void* send, void* recv, std::int64_t count) {
    Framework& own = of(context);
    if (own.fails) return switchyard_fail(switchyard_communication_error, "the link is down");
    return told(
        [&] { own.comm.all_gather(bytes(send, count), bytes(recv, count * own.comm.size())); });
  }
  static int broadcast(void* context, void* data, std::int64_t count, std::int64_t root) {
    return told([&] { of(context).comm.broadcast(bytes(data, count), static_cast<int>(root)); });
  }
  static int barrier(void* context) {
    return told([&] { of(context).comm.barrier(); });
  }
  static void give_up(void* context, const char* reason) { of(context).given_up = reason; }
};

constexpr switchyard_comm_functions kFunctions{Framework::all_to_all, Framework::all_gather,
                                               Framework::broadcast, Framework::barrier,
                                               Framework::give_up};

struct ForeignRank {
  explicit ForeignRank(Communicator& comm) : framework{comm} {
    EXPECT_EQ(
        switchyard_comm_foreign(comm.rank(), comm.size(), 20000, &kFunctions, &framework, &handle),
        switchyard_ok);
  }
  ~ForeignRank() { switchyard_comm_free(handle); }
  ForeignRank(const ForeignRank&) = delete;
  ForeignRank& operator=(const ForeignRank&) = delete;

  Framework framework;
  switchyard_comm* handle = nullptr;
};

switchyard_tensor tensor_of(Tensor& tensor) {
  switchyard_tensor view{
      tensor.data(), static_cast<std::int64_t>(tensor.dtype()), tensor.shape().rank(), {}};
  for (int i = 0; i < tensor.shape().rank(); ++i) view.extents[i] = tensor.shape()[i];
  return view;
}

// A rank whose arguments are bad tells the others, which would wait for it until the deadline.
TEST(ThreadRanks, ABadArgumentOnOneRankEndsTheCallOnAll) {
  const auto run = [](const std::function<int(switchyard_comm*, bool is_bad)>& call) {
    std::array<switchyard_comm*, 2> comms{};
    ASSERT_EQ(switchyard_comm_threads(2, 60000, comms.data()), switchyard_ok);
    const auto begin = std::chrono::steady_clock::now();
    int waiting = switchyard_ok;
    std::string words;
    std::thread other([&] {
      waiting = call(comms[1], false);
      words = switchyard_last_error();
    });
    EXPECT_EQ(call(comms[0], true), switchyard_invalid_argument);
    other.join();
    EXPECT_EQ(waiting, switchyard_communication_error);
    EXPECT_NE(words.find("rank 0 gave up"), std::string::npos) << words;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    for (switchyard_comm* comm : comms) switchyard_comm_free(comm);
  };
  run([](switchyard_comm* comm, bool is_bad) {
    std::array<float, 2> values{};
    const switchyard_tensor own{values.data(), switchyard_f32, 1, {2, 0, 0, 0}};
    return switchyard_comm_all_reduce(comm, is_bad ? nullptr : &own, 0);
  });
  run([](switchyard_comm* comm, bool is_bad) {
    switchyard_comm* group = nullptr;
    return switchyard_comm_split(comm, is_bad ? INT64_MAX : 0, 0, &group);
  });
  run([](switchyard_comm* comm, bool is_bad) {
    const std::array<std::int32_t, 2> owners{0, 1};
    const switchyard_placement placement{owners.data(), 2, 2};
    switchyard_device* device = nullptr;
    EXPECT_EQ(switchyard_device_cpu(1, &device), switchyard_ok);
    const int status = switchyard_reshard(comm, device, nullptr, is_bad ? nullptr : &placement,
                                          &placement, 0, nullptr, nullptr);
    switchyard_device_free(device);
    return status;
  });
}

TEST(ForeignCommunicator, CallsTheProgramsCollectives) {
  run_ranks(3, [](Communicator& comm) {
    const ForeignRank rank(comm);
    Tensor one = Tensor::from<std::int64_t>({1}, {comm.rank() + 5});
    Tensor all({3}, Dtype::i64);
    const auto send = tensor_of(one);
    const auto recv = tensor_of(all);
    ASSERT_EQ(switchyard_comm_all_gather(rank.handle, &send, &recv), switchyard_ok);
    EXPECT_EQ(all.span<std::int64_t>()[2], 7);
    ASSERT_EQ(switchyard_comm_all_reduce(rank.handle, &send, 0), switchyard_ok);
    EXPECT_EQ(one.span<std::int64_t>()[0], 18);
    one.span<std::int64_t>()[0] = comm.rank();
    ASSERT_EQ(switchyard_comm_broadcast(rank.handle, &send, 2), switchyard_ok);
    EXPECT_EQ(one.span<std::int64_t>()[0], 2);
    ASSERT_EQ(switchyard_comm_barrier(rank.handle), switchyard_ok);
    // Rank r has r rows for every rank.
    Tensor rows({3 * comm.rank(), 1}, Dtype::i32);
    std::ranges::fill(rows.span<std::int32_t>(), comm.rank());
    Tensor got({3, 1}, Dtype::i32);
    const std::array<std::int64_t, 3> sent{comm.rank(), comm.rank(), comm.rank()};
    const std::array<std::int64_t, 3> received{0, 1, 2};
    const auto from = tensor_of(rows);
    const auto to = tensor_of(got);
    ASSERT_EQ(switchyard_comm_all_to_all(rank.handle, &from, sent.data(), &to, received.data()),
              switchyard_ok)
        << switchyard_last_error();
    EXPECT_EQ(got.span<std::int32_t>()[0], 1);
    EXPECT_EQ(got.span<std::int32_t>()[2], 2);
  });
}

TEST(ForeignCommunicator, ErrorsOfTheProgramAreReported) {
  run_ranks(2, [](Communicator& comm) {
    ForeignRank rank(comm);
    rank.framework.fails = true;
    EXPECT_EQ(switchyard_comm_barrier(rank.handle), switchyard_communication_error);
    EXPECT_STREQ(switchyard_last_error(), "barrier #1: the link is down");
    EXPECT_EQ(rank.framework.given_up, "barrier #1: the link is down");
    EXPECT_EQ(switchyard_comm_barrier(rank.handle), switchyard_communication_error);
  });
}

TEST(ForeignCommunicator, DifferentCallsAreNamed) {
  run_ranks(2, [](Communicator& comm) {
    const ForeignRank rank(comm);
    Tensor one = Tensor::from<std::int64_t>({1}, {1});
    const auto view = tensor_of(one);
    const int result = comm.rank() == 0 ? switchyard_comm_barrier(rank.handle)
                                        : switchyard_comm_broadcast(rank.handle, &view, 0);
    EXPECT_EQ(result, switchyard_communication_error);
    EXPECT_NE(std::string(switchyard_last_error()).find("rank 0 in barrier #1"), std::string::npos)
        << switchyard_last_error();
    EXPECT_NE(std::string(switchyard_last_error()).find("rank 1 in broadcast #1"),
              std::string::npos)
        << switchyard_last_error();
  });
}

TEST(ForeignCommunicator, InvalidRanksAreRefused) {
  switchyard_comm* comm = nullptr;
  EXPECT_EQ(switchyard_comm_foreign(2, 2, 1000, &kFunctions, nullptr, &comm),
            switchyard_invalid_argument);
  EXPECT_STREQ(switchyard_last_error(), "rank (2) must be one of 2");
  switchyard_comm_functions none = kFunctions;
  none.barrier = nullptr;
  EXPECT_EQ(switchyard_comm_foreign(0, 2, 1000, &none, nullptr, &comm),
            switchyard_invalid_argument);
}

// Tokens of all ranks, and all experts.
struct Problem {
  explicit Problem(int num_ranks) {
    Random random(11);
    for (int r = 0; r < num_ranks; ++r) first.push_back(first.back() + (r == 1 ? 0 : 6 + r));
    const std::int64_t total = first.back();
    x = random.tensor({total, kHidden}, Dtype::f32);
    d_y = random.tensor({total, kHidden}, Dtype::f32);
    weights = random.tensor({total, kTopK}, Dtype::f32);
    ids = random.expert_ids({total, kTopK, kExperts, 0.5, 0.1});
    gate_up = random.tensor({kExperts, 2 * kIntermediate, kHidden}, Dtype::f32);
    down = random.tensor({kExperts, kHidden, kIntermediate}, Dtype::f32);
  }
  std::vector<std::int64_t> first{0};
  Tensor x, d_y, weights, ids, gate_up, down;
};

std::byte* row(const Tensor& tensor, std::int64_t index) {
  return const_cast<std::byte*>(tensor.data()) + index * tensor.view().row_bytes();
}

bool same(const Tensor& ours, const Tensor& alone, std::int64_t first) {
  return std::equal(ours.data(), ours.data() + ours.bytes(), row(alone, first));
}

// The results of a forward and a backward.
struct Results {
  Results(std::int64_t num_tokens, std::int64_t num_experts)
      : y({num_tokens, kHidden}, Dtype::f32),
        d_x({num_tokens, kHidden}, Dtype::f32),
        d_weights({num_tokens, kTopK}, Dtype::f32),
        d_gate_up({num_experts, 2 * kIntermediate, kHidden}, Dtype::f32),
        d_down({num_experts, kHidden, kIntermediate}, Dtype::f32) {}
  switchyard_moe_gradients gradients(const void* d_y) {
    return {
        d_y, d_x.data(), d_weights.data(), {d_gate_up.data(), d_down.data(), nullptr, nullptr}, 0};
  }
  Tensor y, d_x, d_weights, d_gate_up, d_down;
};

switchyard_experts_form experts_form() {
  return {kHidden, kIntermediate, switchyard_f32, 0, 7.0, 1.702, 1.0};
}

Results alone(const Problem& problem, switchyard_device* device) {
  const std::int64_t total = problem.first.back();
  const switchyard_plan_form form{total, kTopK, kExperts, 1, 0};
  Tensor plan({switchyard_plan_words(&form)}, Dtype::i32);
  EXPECT_EQ(
      switchyard_plan_make(device, nullptr, &form, problem.ids.data(), switchyard_i32, plan.data()),
      switchyard_ok);
  Tensor inner({total * kTopK, 2 * kIntermediate}, Dtype::f32);
  Results results(total, kExperts);
  const switchyard_moe moe{form,
                           experts_form(),
                           {row(problem.gate_up, 0), row(problem.down, 0), nullptr, nullptr},
                           plan.data(),
                           total * kTopK,
                           problem.x.data(),
                           problem.weights.data(),
                           inner.data()};
  EXPECT_EQ(switchyard_moe_forward(device, nullptr, &moe, results.y.data()), switchyard_ok);
  const auto gradients = results.gradients(problem.d_y.data());
  EXPECT_EQ(switchyard_moe_backward(device, nullptr, &moe, &gradients), switchyard_ok);
  return results;
}

class SharedMoeTest : public ::testing::TestWithParam<int> {};

TEST_P(SharedMoeTest, HasTheBitsOfOneRank) {
  const Problem problem(GetParam());
  switchyard_device* device = nullptr;
  ASSERT_EQ(switchyard_device_cpu(1, &device), switchyard_ok);
  const Results expected = alone(problem, device);
  run_ranks(GetParam(), [&](Communicator& comm) {
    const ForeignRank rank(comm);
    const auto owners = ExpertPlacement::contiguous(kExperts, comm.size());
    const switchyard_placement placement{owners.owners().data(), kExperts, comm.size()};
    switchyard_dispatcher* dispatcher = nullptr;
    ASSERT_EQ(switchyard_dispatcher_make(rank.handle, &placement, 1, 0, device, &dispatcher),
              switchyard_ok)
        << switchyard_last_error();
    const std::int64_t first = problem.first[static_cast<std::size_t>(comm.rank())];
    const std::int64_t num_tokens =
        problem.first[static_cast<std::size_t>(comm.rank()) + 1] - first;
    const auto own = owners.experts_of(comm.rank());
    const std::int64_t first_expert = own.empty() ? 0 : own.front();
    switchyard_shared_form form{num_tokens, kTopK, 0, 0};
    Tensor plan({switchyard_shared_plan_words(&placement, comm.rank(), num_tokens, kTopK)},
                Dtype::i32);
    ASSERT_EQ(switchyard_shared_plan_make(dispatcher, nullptr, &form, row(problem.ids, first),
                                          switchyard_i32, plan.data()),
              switchyard_ok)
        << switchyard_last_error();
    ASSERT_EQ(switchyard_shared_plan_sizes(dispatcher, nullptr, &form, plan.data()), switchyard_ok);
    Tensor tokens({form.num_received, kHidden}, Dtype::f32);
    Tensor token_weights({form.num_received, kTopK}, Dtype::f32);
    Tensor row_sources({form.num_rows}, Dtype::i32);
    Tensor inner({form.num_rows, 2 * kIntermediate}, Dtype::f32);
    Results results(num_tokens, static_cast<std::int64_t>(own.size()));
    const switchyard_shared_moe moe{
        form,
        experts_form(),
        {row(problem.gate_up, first_expert), row(problem.down, first_expert), nullptr, nullptr},
        plan.data(),
        row(problem.x, first),
        row(problem.weights, first),
        1,
        tokens.data(),
        token_weights.data(),
        row_sources.data(),
        inner.data()};
    ASSERT_EQ(switchyard_shared_moe_forward(dispatcher, nullptr, &moe, results.y.data()),
              switchyard_ok)
        << switchyard_last_error();
    const auto gradients = results.gradients(row(problem.d_y, first));
    ASSERT_EQ(switchyard_shared_moe_backward(dispatcher, nullptr, &moe, &gradients), switchyard_ok)
        << switchyard_last_error();
    EXPECT_TRUE(same(results.y, expected.y, first));
    EXPECT_TRUE(same(results.d_x, expected.d_x, first));
    EXPECT_TRUE(same(results.d_weights, expected.d_weights, first));
    EXPECT_TRUE(same(results.d_gate_up, expected.d_gate_up, first_expert));
    EXPECT_TRUE(same(results.d_down, expected.d_down, first_expert));
    switchyard_dispatcher_free(dispatcher);
  });
  switchyard_device_free(device);
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedMoeTest, ::testing::Values(2, 3, 7),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace switchyard::c_parallel_test
