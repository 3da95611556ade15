// SPDX-License-Identifier: Apache-2.0
#include "run/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/random.h"

namespace switchyard::train {
namespace {

// Returns one sequence, cut over "sp", on the ranks with dp = ep = 0. All other ranks get no
// tokens.
TokenBatch only_sequence(Mesh& mesh, std::string_view window) {
  const auto length = static_cast<std::int64_t>(window.size());
  const bool has_it = mesh.coordinate("dp") == 0 && mesh.coordinate("ep") == 0;
  const SequenceShard shard(has_it ? 1 : 0, length, mesh.size("sp"), mesh.coordinate("sp"));
  TokenBatch batch{.shard = shard, .tokens = {}, .targets = {}, .total_tokens = length};
  if (has_it) {
    const auto part = window.substr(static_cast<std::size_t>(shard.offset()),
                                    static_cast<std::size_t>(shard.count()));
    batch.tokens.assign(part.begin(), part.end());
  }
  batch.targets.resize(batch.tokens.size());
  return batch;
}

bool has_last_token(const TokenBatch& batch) {
  const auto& shard = batch.shard;
  return shard.num_tokens() > 0 && shard.offset() + shard.count() == shard.length();
}

}  // namespace

std::uint8_t pick_byte(std::span<const float> logits, float temperature, double u) {
  const auto likeliest = std::ranges::max_element(logits);
  const auto best = static_cast<std::uint8_t>(likeliest - logits.begin());
  if (temperature <= 0.0F) return best;
  std::array<double, kVocabulary> up_to{};  // cumulative, not normalised
  double sum = 0.0;
  for (std::size_t i = 0; i < up_to.size(); ++i) {
    const double above = static_cast<double>(logits[i]) - static_cast<double>(*likeliest);
    up_to[i] = sum += std::exp(above / static_cast<double>(temperature));
  }
  const auto picked = std::ranges::upper_bound(up_to, u * sum);
  return picked == up_to.end() ? best : static_cast<std::uint8_t>(picked - up_to.begin());
}

std::string sample(Transformer& model, std::string_view prompt, const SampleOptions& options) {
  std::string text(prompt.empty() ? "\n" : prompt);
  const auto begin = text.size();
  const auto context = static_cast<std::size_t>(model.config().context);
  const auto seed = seed_of("sample", options.seed);
  for (std::int64_t i = 0; i < options.bytes; ++i) {
    const auto seen = std::string_view(text).substr(text.size() - std::min(text.size(), context));
    const auto batch = only_sequence(model.mesh(), seen);
    const Tensor logits = model.logits(batch);
    std::int32_t byte = -1;  // set on the one rank that has the last token
    if (has_last_token(batch)) {
      const auto last = logits.view().slice(logits.rows() - 1, logits.rows());
      byte = pick_byte(last.span<float>(), options.temperature,
                       random_unit(seed, static_cast<std::uint64_t>(i)));
    }
    model.mesh().world().all_reduce(TensorView(&byte, {1}), ReduceOp::max);
    text.push_back(static_cast<char>(byte));
    if (options.on_byte) options.on_byte(text.back());
  }
  return text.substr(begin);
}

}  // namespace switchyard::train
