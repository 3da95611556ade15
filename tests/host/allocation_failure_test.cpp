// SPDX-License-Identifier: Apache-2.0
// Every allocation of one rank's step fails once. A program of its own, since it replaces the
// operators that allocate.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <new>

#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/error.h"
#include "switchyard/moe_layer.h"
#include "switchyard/run_ranks.h"

namespace {

thread_local std::int64_t allocations_left = -1;  // before one fails; negative: none does

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) return nullptr;
  void* memory = nullptr;
  return ::posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) == 0 ? memory
                                                                                   : nullptr;
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

constexpr std::size_t kDefault = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

void* operator new(std::size_t bytes) { return allocate_or_throw(bytes, kDefault); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes, kDefault); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, kDefault);
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace switchyard::allocation_failure_test {
namespace {

constexpr int kRanks = 3;
constexpr int kFailing = 1;

// How a rank's step ended.
enum class End { well, lacked_memory, told };

struct Outcome {
  std::array<End, kRanks> ends{};
  std::array<std::string, kRanks> messages;
  std::array<std::vector<int>, kRanks> named;
  bool did_fail = false;  // an allocation
};

void run_step(Communicator& comm, MoeLayer& layer, const MoeWeights& weights,
              const MoeGradients& gradients, const ConstTensorView& x, const TensorView& d_x) {
  SavedForBackward saved;
  const Tensor y = layer.forward(weights, {.x = x}, saved);
  layer.backward(weights, saved, y, {.d_x = d_x, .gradients = gradients});
  comm.barrier();
}

Outcome fail_allocation(std::int64_t number, const MoeLayerOptions& options) {
  Outcome outcome;
  run_ranks(kRanks,
            [&](Communicator& comm) {
              const auto placement = ExpertPlacement::contiguous(6, kRanks);
              MoeLayer layer(comm, placement, options);
              const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
              const auto gradients = testing::gradients_for(weights);
              const Tensor x = testing::Random(5).tensor({4, options.hidden}, options.dtype);
              Tensor d_x({4, options.hidden}, options.dtype);
              run_step(comm, layer, weights, gradients, x, d_x);  // the group works
              const auto rank = static_cast<std::size_t>(comm.rank());
              if (comm.rank() == kFailing) allocations_left = number;
              try {
                run_step(comm, layer, weights, gradients, x, d_x);
              } catch (const CommunicationError& error) {
                outcome.ends[rank] = End::told;
                outcome.named[rank] = error.ranks();
                outcome.messages[rank] = error.what();
              } catch (const std::exception& error) {
                outcome.ends[rank] = End::lacked_memory;
                outcome.messages[rank] = error.what();
                comm.abort(error.what());  // as run_ranks does for what is not caught
              }
              if (comm.rank() == kFailing) outcome.did_fail = allocations_left < 0;
              allocations_left = -1;
            },
            {.timeout = std::chrono::seconds(30)});
  return outcome;
}

void walk(const MoeLayerOptions& options) {
  std::int64_t number = 0;
  for (bool did_fail = true; did_fail; ++number) {
    SCOPED_TRACE("allocation " + std::to_string(number));
    const Outcome outcome = fail_allocation(number, options);
    did_fail = outcome.did_fail;
    const bool is_well = outcome.ends[kFailing] == End::well;
    EXPECT_TRUE(did_fail || is_well);
    if (is_well) {  // the library could do without it
      for (const End end : outcome.ends) EXPECT_EQ(end, End::well);
      continue;
    }
    EXPECT_EQ(outcome.ends[kFailing], End::lacked_memory) << outcome.messages[kFailing];
    for (std::size_t r = 0; r < kRanks; ++r) {
      if (r == kFailing) continue;
      EXPECT_EQ(outcome.ends[r], End::told) << outcome.messages[r];
      EXPECT_EQ(outcome.named[r], std::vector<int>{kFailing}) << outcome.messages[r];
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(number, 50);
  ::testing::Test::RecordProperty("allocations", static_cast<int>(number));
}

TEST(AllocationFailure, InAStepIsAnErrorOnEveryRank) { walk(testing::tiny_layer_options()); }

TEST(AllocationFailure, InAStepOfThePackedMoverIsAnErrorOnEveryRank) {
  auto options = testing::tiny_layer_options();
  options.mover = MoverKind::packed;
  options.keep = Keep::nothing;
  walk(options);
}

TEST(AllocationFailure, InAStepOfThePeerMoverIsAnErrorOnEveryRank) {
  auto options = testing::tiny_layer_options();
  options.mover = MoverKind::peer;
  walk(options);
}

}  // namespace
}  // namespace switchyard::allocation_failure_test
