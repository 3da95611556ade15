// SPDX-License-Identifier: Apache-2.0
// The small sums around a router's losses on every device, against plain loops, to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "support/device/device_tables.h"
#include "support/random.h"

namespace switchyard::losses_contract_test {
namespace {

using testing::deal;
using testing::index;
using testing::Ints;
using testing::Random;
using testing::values;
using testing::Words;

constexpr std::int64_t kTopK = 3;

// Sums as a router leaves them; every third sequence has no tokens, and others have few, so that
// the last bits of their large losses are counted too.
struct HostSums {
  std::int64_t num_experts = 1;
  std::int64_t num_sequences = 1;
  Tensor by_sequence;
  Words squares = {(1LL << 50) + 7, (1LL << 40) + 3};

  HostSums(std::int64_t experts, std::int64_t sequences, std::uint64_t seed = 0)
      : num_experts(experts),
        num_sequences(sequences),
        by_sequence(Tensor::zeros({sequences, 2 * experts + 1}, Dtype::i64)) {
    Random random(static_cast<std::uint64_t>(experts * 100 + sequences) + seed);
    const auto all = by_sequence.span<std::int64_t>();
    for (std::int64_t s = 0; s < sequences; ++s) {
      if (s % 3 == 2) continue;
      for (std::int64_t e = 0; e <= 2 * experts; ++e) {
        all[index(s * (2 * experts + 1) + e)] = random.below(e < experts ? 100000 : 1LL << 42);
      }
      all[index((s + 1) * (2 * experts + 1) - 1)] = 1 + random.below(s % 2 == 0 ? 300000 : 30);
    }
  }

  std::int64_t at(std::int64_t s, std::int64_t column) const {
    return by_sequence.span<std::int64_t>()[index(s * (2 * num_experts + 1) + column)];
  }
  std::int64_t tokens(std::int64_t s) const { return at(s, 2 * num_experts); }
  double loss(std::int64_t s) const {
    double sum = 0.0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const double score = std::ldexp(static_cast<double>(at(s, num_experts + e)), -32);
      const double product = static_cast<double>(at(s, e)) * score;
      sum += product;
    }
    const auto length = static_cast<double>(tokens(s));
    return sum * (static_cast<double>(num_experts) / (length * length * double{kTopK}));
  }
  Words totals(BalanceLoss balance) const { return totals(balance, *this); }
  // For sequences that are cut over ranks; `joined` has the sums of the whole ones.
  Words totals(BalanceLoss balance, const HostSums& joined) const {
    Words all(index(2 * num_experts + 1));
    for (std::int64_t s = 0; s < num_sequences; ++s) {
      for (std::int64_t c = 0; c <= 2 * num_experts; ++c) all[index(c)] += at(s, c);
    }
    std::int64_t counted = 0;
    std::int64_t whole = 0;
    std::int64_t fractions = 0;
    for (std::int64_t s = 0; s < num_sequences; ++s) {
      if (joined.tokens(s) == 0) continue;
      ++counted;
      if (balance != BalanceLoss::sequence) continue;
      const double loss = joined.loss(s);
      whole += static_cast<std::int64_t>(std::floor(loss));
      fractions += static_cast<std::int64_t>(std::ldexp(loss - std::floor(loss), 32));
    }
    all.insert(all.end(), {squares[0], squares[1], counted, whole, fractions});
    return all;
  }
};

std::vector<HostSums> all_sums() {
  std::vector<HostSums> all;
  for (const std::int64_t experts : {1, 7, 128, 1030}) {
    for (const std::int64_t sequences : {1, 3, 16, 17, 300}) all.emplace_back(experts, sequences);
  }
  all.emplace_back(5, 2);
  for (auto& word : all.back().by_sequence.span<std::int64_t>()) word = 0;  // nothing was routed
  all.emplace_back(3, 1500);
  return all;
}

float slope(double picks, double d_loss, double tokens, double num_experts) {
  const double factor = tokens == 0.0 ? 0.0 : num_experts / (tokens * tokens * double{kTopK});
  return static_cast<float>(picks * (d_loss * factor));
}

class LossesContract : public testing::DeviceTables {
 protected:
  struct DeviceSums {
    Tensor by_sequence;
    Tensor squares;
  };
  DeviceSums put_sums(const HostSums& host) const {
    return {put(host.by_sequence), put_all(host.squares)};
  }
  static RouterSums sums_of(const HostSums& host, DeviceSums& given, BalanceLoss balance) {
    RouterSums sums;
    sums.losses.balance = balance;
    sums.losses.z = true;
    sums.num_experts = host.num_experts;
    sums.by_sequence = given.by_sequence;
    sums.squares = given.squares;
    return sums;
  }
  Words totals(LossTotals args) const {
    Tensor words = poisoned(loss_total_words(args.sums.num_experts), Dtype::i64);
    args.totals = words;
    backend_of(device).loss_totals(args);
    return values<std::int64_t>(get(words));
  }
  // by_score, then by_square.
  std::pair<std::vector<float>, float> slopes(const HostSums& host, const Words& totals,
                                              BalanceLoss balance, RouterLosses d_losses) const {
    DeviceSums given = put_sums(host);
    const Tensor totals_of_device = put_all(totals);
    Tensor unwritten({host.num_sequences, host.num_experts}, Dtype::f32);
    testing::poison(unwritten);
    Tensor by_score = put(unwritten);
    Tensor by_square = poisoned(1, Dtype::f32);
    const RouterSums sums = sums_of(host, given, balance);
    const RouterSlopes out{.by_score = by_score.view(), .by_square = by_square.view()};
    backend_of(device).loss_slopes({.sums = sums,
                                    .totals = totals_of_device,
                                    .top_k = kTopK,
                                    .d_losses = d_losses,
                                    .slopes = out});
    return {values<float>(get(by_score)), values<float>(get(by_square))[0]};
  }
};
SWITCHYARD_ON_DEVICES(LossesContract);

TEST_P(LossesContract, TotalsAddSequencesUp) {
  for (const HostSums& host : all_sums()) {
    SCOPED_TRACE(::testing::Message() << "E " << host.num_experts << " S " << host.num_sequences);
    DeviceSums given = put_sums(host);
    for (const auto balance : {BalanceLoss::none, BalanceLoss::batch, BalanceLoss::sequence}) {
      const RouterSums sums = sums_of(host, given, balance);
      Words expected = host.totals(balance);
      EXPECT_EQ(totals({.sums = sums, .top_k = kTopK, .totals = {}}), expected)
          << static_cast<int>(balance);
      std::fill(expected.end() - 3, expected.end(), 0);
      EXPECT_EQ(totals({.sums = sums, .top_k = kTopK, .counts_sequences = false, .totals = {}}),
                expected);
    }
  }
}

TEST_P(LossesContract, TotalsOfSequencesThatAreCutAreThoseOfTheWholeOnes) {
  for (const std::int64_t sequences : {1, 3, 300}) {
    const HostSums host(70, sequences);
    const HostSums whole(70, sequences, 1);
    DeviceSums given = put_sums(host);
    const Tensor joined = put(whole.by_sequence);
    const RouterSums sums = sums_of(host, given, BalanceLoss::sequence);
    EXPECT_EQ(totals({.sums = sums, .joined = joined.view(), .top_k = kTopK, .totals = {}}),
              host.totals(BalanceLoss::sequence, whole));
  }
}

TEST_P(LossesContract, StatisticsAddSequencesUp) {
  for (const HostSums& host : all_sums()) {
    SCOPED_TRACE(::testing::Message() << "E " << host.num_experts << " S " << host.num_sequences);
    DeviceSums given = put_sums(host);
    Tensor statistics = put_all(Words(index(host.num_experts + 1), 1000));
    backend_of(device).count_picks(sums_of(host, given, BalanceLoss::sequence), statistics);
    const Words all = host.totals(BalanceLoss::none);
    Words expected(all.begin(), all.begin() + host.num_experts);
    expected.push_back(all[index(tokens_word(host.num_experts))]);
    for (auto& word : expected) word += 1000;
    EXPECT_EQ(values<std::int64_t>(get(statistics)), expected);
  }
}

TEST_P(LossesContract, WordsAreTheSumOfRowsThatMayLieApart) {
  for (const std::int64_t rows : {0, 1, 2, 9, 72}) {
    for (const std::int64_t words : {1, 8, 127, 1030}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows of " << words);
      Tensor host({rows, words}, Dtype::i64);
      Random random(static_cast<std::uint64_t>(rows * 10000 + words));
      Words expected(index(words));
      const auto all = host.span<std::int64_t>();
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i] = random.below(1LL << 50) - (1LL << 49);
        expected[i % index(words)] += all[i];
      }
      for (const std::int64_t apart : {0, 3}) {
        const Tensor wide = put_apart(host, apart);
        Tensor sum = poisoned(words, Dtype::i64);
        backend_of(device).sum_words(narrow(wide, host.shape()), sum);
        EXPECT_EQ(values<std::int64_t>(get(sum)), expected);
      }
    }
  }
}

TEST_P(LossesContract, SlopesOfABatchAreThoseOfItsTotals) {
  for (const HostSums& host : all_sums()) {
    SCOPED_TRACE(::testing::Message() << "E " << host.num_experts << " S " << host.num_sequences);
    Words totals = host.totals(BalanceLoss::batch);
    for (auto& word : totals) word *= 3;  // of other ranks too
    const auto tokens = static_cast<double>(totals[index(tokens_word(host.num_experts))]);
    const auto [by_score, by_square] = slopes(host, totals, BalanceLoss::batch, {0.01F, -0.3F});
    std::vector<float> expected;
    for (std::int64_t s = 0; s < host.num_sequences; ++s) {
      for (std::int64_t e = 0; e < host.num_experts; ++e) {
        expected.push_back(slope(static_cast<double>(totals[index(e)]), 0.01F, tokens,
                                 static_cast<double>(host.num_experts)));
      }
    }
    EXPECT_TRUE(by_score == expected);
    EXPECT_EQ(by_square, tokens > 0.0 ? static_cast<float>(-0.3F / tokens) : 0.0F);
  }
}

TEST_P(LossesContract, SlopesOfSequencesAreTheirOwn) {
  for (const HostSums& host : all_sums()) {
    SCOPED_TRACE(::testing::Message() << "E " << host.num_experts << " S " << host.num_sequences);
    Words totals = host.totals(BalanceLoss::sequence);
    auto& counted = totals[index(sequences_word(host.num_experts))];
    counted *= 5;
    const double d_loss = 0.02F / static_cast<double>(std::max<std::int64_t>(counted, 1));
    const auto by_score = slopes(host, totals, BalanceLoss::sequence, {0.02F, 0.0F}).first;
    std::vector<float> expected;
    for (std::int64_t s = 0; s < host.num_sequences; ++s) {
      for (std::int64_t e = 0; e < host.num_experts; ++e) {
        expected.push_back(slope(static_cast<double>(host.at(s, e)), d_loss,
                                 static_cast<double>(host.tokens(s)),
                                 static_cast<double>(host.num_experts)));
      }
    }
    EXPECT_TRUE(by_score == expected);
  }
}

TEST_P(LossesContract, AnExpertsOutputIsScaledByTheMeanOverItsPicks) {
  for (const int num_experts : {1, 5, 128, 1030}) {
    for (const auto rule : {GradientScale::rank, GradientScale::global}) {
      SCOPED_TRACE(::testing::Message()
                   << "E " << num_experts << " rule " << static_cast<int>(rule));
      Random random(static_cast<std::uint64_t>(num_experts));
      const Ints owners = deal(num_experts, 3);
      Words picks;
      for (int e = 0; e < num_experts; ++e) picks.push_back(random.below(5) * random.below(9000));
      const Tensor picks_of_device = put_all(picks);
      const Tensor owners_of_device = put_all(owners);
      Tensor scales = poisoned(num_experts, Dtype::f32);
      backend_of(device).output_scales(
          {.rule = rule, .picks = picks_of_device, .owners = owners_of_device, .scales = scales});
      std::vector<float> expected;
      for (std::size_t e = 0; e < picks.size(); ++e) {
        std::int64_t rows = 0;
        std::int64_t experts = 0;
        for (std::size_t other = 0; other < picks.size(); ++other) {
          if (rule == GradientScale::rank && owners[other] != owners[e]) continue;
          rows += picks[other];
          ++experts;
        }
        const double mean = static_cast<double>(rows) / static_cast<double>(experts);
        expected.push_back(
            picks[e] == 0 ? 1.0F : static_cast<float>(mean / static_cast<double>(picks[e])));
      }
      EXPECT_EQ(values<float>(get(scales)), expected);
    }
  }
}

TEST_P(LossesContract, WeightsAreScaledByTheirExpertAndStayWithoutAPick) {
  for (const Random::Picks& picks :
       {Random::Picks{0, 2, 4}, Random::Picks{1, 1, 1}, Random::Picks{999, 7, 20, 0.3, 0.3}}) {
    Random random(8);
    const Tensor ids = random.expert_ids(picks);
    const Tensor weights = random.tensor({picks.num_tokens, picks.top_k}, Dtype::f32);
    const Tensor scales = random.tensor({picks.num_experts}, Dtype::f32);
    std::vector<float> expected = values<float>(weights);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto id = ids.span<std::int32_t>()[i];
      if (id >= 0) expected[i] *= scales.span<float>()[index(id)];
    }
    const Tensor ids_of_device = put(ids);
    const Tensor scales_of_device = put(scales);
    Tensor from = put(weights);
    Tensor unwritten(weights.shape(), Dtype::f32);
    testing::poison(unwritten);
    Tensor to = put(unwritten);
    ScaleByExpert args{
        .expert_ids = ids_of_device, .scales = scales_of_device, .from = from.view(), .to = to};
    backend_of(device).scale_by_expert(args);
    EXPECT_EQ(values<float>(get(to)), expected);
    EXPECT_EQ(values<float>(get(from)), values<float>(weights));
    args.to = from;  // in place
    backend_of(device).scale_by_expert(args);
    EXPECT_EQ(values<float>(get(from)), expected);
  }
}

}  // namespace
}  // namespace switchyard::losses_contract_test
