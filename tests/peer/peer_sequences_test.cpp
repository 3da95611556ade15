// SPDX-License-Identifier: Apache-2.0
// Sequences of forwards and backwards whose ranks, delayed at random, exchange tokens through peer
// memory: whoever is late, results have the bits of one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <thread>

#include "support/compare.h"
#include "support/device/forwarding_device.h"
#include "support/device/token_reading_device.h"
#include "support/layer/layer_step.h"
#include "support/layer/moe_tensors.h"
#include "support/ranks.h"
#include "switchyard/dispatcher.h"
#include "switchyard/run_ranks.h"

namespace switchyard::peer_sequences_test {
namespace {

using namespace std::chrono_literals;
using testing::copy_of;
using testing::ForwardingDevice;
using testing::gradients_for;
using testing::kTestTimeout;
using testing::LayerResults;
using testing::part_of;
using testing::Piece;
using testing::Random;
using testing::same_bits;
using testing::same_part;
using testing::StepInput;

#ifdef SWITCHYARD_SANITIZED
constexpr int kRounds = 6;
#else
constexpr int kRounds = 10;
#endif
constexpr int kExperts = 8;
constexpr std::int64_t kTopK = 3;
constexpr std::int64_t kHidden = 16;
// Tokens of all ranks together; the last are the most.
constexpr std::array<std::int64_t, 4> kBatches{40, 3, 0, 90};

// Sleeps now and then before and after what ranks do to each other's memory.
class DelayedDevice final : public ForwardingDevice {
 public:
  DelayedDevice(Device base, int rank)
      : ForwardingDevice(std::move(base)), random_(static_cast<std::uint64_t>(100 + rank)) {}

  void scatter_rows(const ScatterRows& args) const override {
    delay();
    base().scatter_rows(args);
  }
  void gather_rows(const GatherRows& args) const override {
    delay();
    base().gather_rows(args);
  }
  void experts_forward(const ExpertsForward& args) const override {
    delay();
    base().experts_forward(args);
  }
  void experts_backward(const ExpertsBackward& args) const override {
    delay();
    base().experts_backward(args);
  }
  void meet(const Meet& args) const override {
    delay();
    base().meet(args);
    delay();
  }

 private:
  // Most of the time is then spent at work; 2 ms are many times what a movement takes.
  void delay() const {
    if (random_.below(24) == 0) std::this_thread::sleep_for(random_.below(2000) * 1us);
  }

  mutable Random random_;  // of the rank's own thread
};

Device delayed(int rank, bool reads_tokens) {
  const Device base =
      reads_tokens ? testing::token_reading_device() : Device::cpu({.num_threads = 1});
  return Device(std::make_shared<const DelayedDevice>(base, rank));
}

// Larger and larger pieces; of few tokens, the first are empty.
Piece piece_of(const Communicator& comm, std::int64_t num_tokens) {
  const auto begin = [&](std::int64_t r) { return num_tokens * r * r / comm.size() / comm.size(); };
  return {begin(comm.rank()), begin(comm.rank() + 1)};
}

// A forward, and what it leaves for its backward.
struct Pass {
  StepInput in;
  SavedForBackward saved = {};
  LayerResults results = {};
};

void forward(MoeLayer& layer, const MoeWeights& weights, Pass& pass) {
  pass.results.y = layer.forward(weights, {.x = pass.in.x, .expert_ids = pass.in.ids}, pass.saved);
}

void backward(MoeLayer& layer, const MoeWeights& weights, Pass& pass) {
  LayerResults& results = pass.results;
  results.d_x = Tensor(pass.in.x.shape(), Dtype::f32);
  results.d_weights = Tensor(pass.in.ids.shape(), Dtype::f32);
  const auto gradients = gradients_for(weights);
  layer.backward(weights, pass.saved, pass.in.d_y,
                 {.d_x = results.d_x, .gradients = gradients, .d_weights = results.d_weights});
  const auto mine = layer.placement().experts_of(layer.communicator().rank());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    results.experts[mine[i]] = gradients.experts[i];
  }
}

MoeLayerOptions options_with(Sizing sizing = {}, Keep keep = Keep::rows) {
  MoeLayerOptions options{
      .hidden = kHidden, .intermediate = 12, .router = RouterOptions::mixtral(kExperts, kTopK)};
  options.sizing = sizing;
  options.keep = keep;
  options.alignment = 4;
  options.mover = MoverKind::peer;
  return options;
}

// Two layers' weights, the batches, and what one rank makes of them.
class Problem {
 public:
  Problem() {
    const auto world = connect();
    for (const std::uint64_t seed : {1, 2}) {
      Random random(seed);
      weights_.push_back(random_layer(random, options_with(), Biases::none));
      MoeLayer layer(*world, ExpertPlacement::contiguous(kExperts, 1), options_with());
      for (std::size_t b = 0; b < kBatches.size(); ++b) {
        Pass pass{.in = input(b)};
        forward(layer, weights_.back(), pass);
        backward(layer, weights_.back(), pass);
        expected_[{weights_.size() - 1, b}] = std::move(pass.results);
      }
    }
  }

  static StepInput input(std::size_t batch) {
    Random random(50 + batch);
    const auto n = kBatches.at(batch);
    return {random.tensor({n, kHidden}, Dtype::f32), random.tensor({n, kHidden}, Dtype::f32),
            random.expert_ids({n, kTopK, kExperts, 0.4})};
  }
  const MoeWeights& weights(std::size_t layer) const { return weights_[layer]; }
  const LayerResults& expected(std::size_t layer, std::size_t batch) const {
    return expected_.at({layer, batch});
  }

 private:
  std::vector<MoeWeights> weights_;
  std::map<std::pair<std::size_t, std::size_t>, LayerResults> expected_;
};

const Problem& problem() {
  static const Problem made;
  return made;
}

// One rank's two layers over a device and a communicator, which runs and compares.
class Rank {
 public:
  Rank(Communicator& comm, const MoeLayerOptions& options, bool reads_tokens)
      : comm_(comm),
        random_(static_cast<std::uint64_t>(comm.rank())),
        device_(delayed(comm.rank(), reads_tokens)) {
    const auto placement = ExpertPlacement::contiguous(kExperts, comm.size());
    for (std::size_t l = 0; l < 2; ++l) {
      weights_.push_back(part_of(problem().weights(l), placement, comm.rank()));
      layers_.push_back(std::make_unique<MoeLayer>(comm, placement, options, device_));
    }
  }
  ~Rank() { EXPECT_EQ(num_wrong_, 0) << "of rank " << comm_.rank(); }

  void forward(std::size_t layer, std::size_t batch) {
    const Piece piece = piece_of(comm_, kBatches.at(batch));
    const StepInput whole = Problem::input(batch);
    Pass& pass = open_[{layer, batch}];
    pass = {.in = {copy_of(piece.of(whole.x)), copy_of(piece.of(whole.d_y)),
                   copy_of(piece.of(whole.ids))}};
    peer_sequences_test::forward(*layers_[layer], weights_[layer], pass);
    count(same_bits(pass.results.y, piece.of(problem().expected(layer, batch).y)));
  }
  void backward(std::size_t layer, std::size_t batch) {
    const auto found = open_.find({layer, batch});
    Pass& pass = found->second;
    peer_sequences_test::backward(*layers_[layer], weights_[layer], pass);
    count(same_part(pass.results, piece_of(comm_, kBatches.at(batch)),
                    problem().expected(layer, batch)));
    let_go(std::move(pass.saved));
    open_.erase(found);
  }
  void infer(std::size_t layer, std::size_t batch) {
    const Piece piece = piece_of(comm_, kBatches.at(batch));
    const StepInput in = Problem::input(batch);
    const Tensor y = layers_[layer]->forward(
        weights_[layer], {.x = piece.of(in.x), .expert_ids = copy_of(piece.of(in.ids))});
    count(same_bits(y, piece.of(problem().expected(layer, batch).y)));
  }
  // Without a backward.
  void drop(std::size_t layer, std::size_t batch) {
    const auto found = open_.find({layer, batch});
    let_go(std::move(found->second.saved));
    open_.erase(found);
  }

  bool lets_go_late = false;  // at times of its own, not when the backward has ended

 private:
  void let_go(SavedForBackward saved) {
    if (!lets_go_late) return;
    late_.push_back(std::move(saved));
    for (auto n = random_.below(4); n > 0 && !late_.empty(); --n) late_.pop_front();
  }
  void count(bool is_right) { num_wrong_ += is_right ? 0 : 1; }

  Communicator& comm_;
  Random random_;
  Device device_;
  std::vector<MoeWeights> weights_;
  std::vector<std::unique_ptr<MoeLayer>> layers_;
  std::map<std::pair<std::size_t, std::size_t>, Pass> open_;
  std::deque<SavedForBackward> late_;
  int num_wrong_ = 0;
};

struct Form {
  int num_ranks = 2;
  bool is_bounded = false;
  bool reads_tokens = false;  // as the experts of a GPU do
};
void PrintTo(const Form& form, std::ostream* out) {
  *out << form.num_ranks << (form.is_bounded ? "_bounded" : "_exact")
       << (form.reads_tokens ? "_reading" : "");
}

struct Way {
  int rounds = kRounds;
  Keep keep = Keep::rows;
  bool lets_go_late = false;
};

class PeerSequences : public ::testing::TestWithParam<Form> {
 protected:
  static void repeat(const Way& way, const std::function<void(Rank&)>& body) {
    const Form form = GetParam();
    (void)problem();
    const Sizing sizing = form.is_bounded ? Sizing::bounded(400) : Sizing::exact();
    run_ranks(form.num_ranks,
              [&](Communicator& comm) {
                Rank rank(comm, options_with(sizing, way.keep), form.reads_tokens);
                rank.lets_go_late = way.lets_go_late;
                for (int round = 0; round < way.rounds; ++round) body(rank);
              },
              {.timeout = kTestTimeout});
  }
};

TEST_P(PeerSequences, TwoLayersOneAfterTheOther) {
  repeat({.rounds = 2 * kRounds}, [](Rank& rank) {
    rank.forward(0, 0);
    rank.forward(1, 0);
    rank.backward(1, 0);
    rank.backward(0, 0);
  });
}

TEST_P(PeerSequences, TwoBatchesOfOneLayerInEitherOrder) {
  repeat({}, [](Rank& rank) {
    for (const std::size_t first : {0, 3}) {
      rank.forward(0, 0);
      rank.forward(0, 3);
      rank.backward(0, first);
      rank.backward(0, 3 - first);
    }
  });
}

TEST_P(PeerSequences, ForwardsAlone) {
  repeat({.rounds = 2 * kRounds}, [](Rank& rank) {
    for (const std::size_t layer : {0, 1, 1}) rank.infer(layer, 0);
    rank.infer(0, 3);
  });
}

TEST_P(PeerSequences, BackwardMayRecomputeRowsOrEverything) {
  for (const Keep keep : {Keep::activations, Keep::nothing}) {
    repeat({.keep = keep}, [](Rank& rank) {
      rank.forward(0, 0);
      rank.forward(1, 3);
      rank.backward(0, 0);
      rank.backward(1, 3);
    });
  }
}

TEST_P(PeerSequences, BatchesOfOtherSizesReuseTheMemory) {
  repeat({}, [](Rank& rank) {
    for (std::size_t batch = 0; batch < kBatches.size(); ++batch) {
      rank.forward(batch % 2, batch);
      rank.backward(batch % 2, batch);
    }
    rank.infer(0, 1);
  });
}

TEST_P(PeerSequences, RanksMayFreeSavedForBackwardAtDifferentTimes) {
  repeat({.lets_go_late = true}, [](Rank& rank) {
    rank.forward(0, 0);
    rank.forward(1, 0);
    rank.forward(0, 3);
    rank.drop(1, 0);
    rank.backward(0, 3);
    rank.backward(0, 0);
  });
}

std::vector<Form> forms() {
#ifdef SWITCHYARD_SANITIZED
  return {{3, false, true}, {3, true, false}};
#else
  return {{2, false, true}, {2, true, false}, {3, false, false}, {3, true, true},
          {4, false, true}, {4, true, false}, {8, false, false}, {8, true, true}};
#endif
}

INSTANTIATE_TEST_SUITE_P(Forms, PeerSequences, ::testing::ValuesIn(forms()),
                         ::testing::PrintToStringParamName());

// Rows that ranks do not reach are copied into memory that was another movement's: each combine
// has other rows, and the one before may still be going on elsewhere.
TEST(PeerCombines, OfRowsInMemoryOfTheCaller) {
  run_ranks(3, [](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(kExperts, comm.size()),
                          {.plan = {.hidden = kHidden}, .mover = MoverKind::peer},
                          delayed(comm.rank(), false));
    const Plan plan =
        dispatcher.plan(copy_of(piece_of(comm, kBatches[0]).of(Problem::input(0).ids)));
    Tensor ones(plan.slots().shape(), Dtype::f32);
    std::ranges::fill(ones.span<float>(), 1.0F);
    int num_wrong = 0;
    for (int round = 0; round < 20 * kRounds; ++round) {
      Tensor rows({plan.row_capacity(), kHidden}, Dtype::f32);
      std::ranges::fill(rows.span<float>(), static_cast<float>(round));
      for (const float sum : dispatcher.combine(plan, rows, ones).span<float>()) {
        num_wrong += sum != static_cast<float>(kTopK * round) ? 1 : 0;
      }
    }
    EXPECT_EQ(num_wrong, 0);
  });
}

}  // namespace
}  // namespace switchyard::peer_sequences_test
