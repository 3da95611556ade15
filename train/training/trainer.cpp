// SPDX-License-Identifier: Apache-2.0
#include "training/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "common/random.h"
#include "common/sum_over_ranks.h"
#include "data/batch.h"
#include "data/bigram.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double total(const StageTimes& times) {
  double sum = 0.0;
  for (const StageTime& stage : times.stages()) sum += stage.seconds;
  return sum;
}

// Returns the rows of the fullest expert divided by the mean, for the layer where this is worst.
double worst_balance(const std::vector<PickCounts>& layers) {
  double worst = 1.0;
  for (const PickCounts& layer : layers) {
    std::int64_t sum = 0;
    for (const auto picks : layer.picks) sum += picks;
    if (sum == 0) continue;
    const auto most = *std::ranges::max_element(layer.picks);
    worst = std::max(
        worst, static_cast<double>(most * std::ssize(layer.picks)) / static_cast<double>(sum));
  }
  return worst;
}

WindowOrder order_of(const TrainConfig& config, const Corpus& corpus) {
  const auto need = config.model.context + 1;
  for (const auto part : {corpus.training(), corpus.held_out()}) {
    if (std::ssize(part) >= need) continue;
    throw InvalidArgument(fmt::format(
        "{} is too short: its {} bytes of training text and {} bytes of held-out text must each be "
        "at least --context {} + 1; give more text, or a smaller --context",
        corpus.name(), corpus.training().size(), corpus.held_out().size(), config.model.context));
  }
  return {corpus.training(), config.model.context, seed_of("data", config.seed)};
}

}  // namespace

Trainer::Trainer(const TrainConfig& config, Mesh& mesh, const Device& device, const Corpus& corpus)
    : config_(config),
      mesh_(mesh),
      corpus_(corpus),
      order_(order_of(config, corpus)),
      held_out_(held_out_windows(corpus.held_out(), config.model.context, config.data.held_out)),
      model_(config.model, config.mesh, mesh, device, seed_of("model", config.seed)),
      optimizer_(config.optimizer, model_.values()),
      load_(model_.values().blocks().size(),
            std::vector<std::int64_t>(static_cast<std::size_t>(config.model.experts))) {
  if (config.model.balance != Balance::bias) return;
  for (std::size_t i = 0; i < load_.size(); ++i) {
    balancers_.emplace_back(config.model.experts,
                            LoadBalancerOptions{.rate = config.model.balance_rate});
  }
}

Trainer::Meters Trainer::read_meters() {
  Communicator& everyone = mesh_.comm({"dp", "ep", "sp"});
  return {.products = model_.product_seconds(),
          .moe = total(model_.moe_times()),
          .moe_bytes = model_.moe_bytes(),
          .gradient_bytes = everyone.bytes_sent() + copies_of_experts().bytes_sent(),
          .sequence_bytes = mesh_.comm({"sp"}).bytes_sent()};
}

Communicator& Trainer::copies_of_experts() {
  std::vector<std::string> axes;
  for (const MeshAxis& axis : mesh_.axes()) {
    if (std::ranges::find(config_.mesh.expert_axes, axis.name) == config_.mesh.expert_axes.end()) {
      axes.push_back(axis.name);
    }
  }
  return mesh_.comm(axes);
}

StepRecord Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  const Meters before = read_meters();
  const TokenBatch batch = next_batch();
  const ModelLosses losses = model_.loss_and_gradients(batch);
  model_.reduce_gradients();
  StepRecord record;
  record.learning_rate = learning_rate(config_.optimizer, progress_.step, config_.steps);
  update_parameters(record);
  record.balance = balance_experts();
  ++progress_.step;
  ++steps_made_;
  record.step = progress_.step;
  record.balance_loss = losses.balance;
  record.z_loss = losses.z;
  record.ran_again = losses.ran_again ? 1 : 0;
  finish(record, losses.cross_entropy, before, begin);
  history_.add(record);
  return record;
}

void Trainer::update_parameters(StepRecord& record) {
  const auto begin = std::chrono::steady_clock::now();
  record.gradient_norm = gradient_norm(model_.gradients(), mesh_.comm(config_.mesh.expert_axes));
  if (!std::isfinite(record.gradient_norm)) throw_diverged();
  optimizer_.update(model_.compute(), model_.values(), model_.gradients(), progress_.step,
                    record.learning_rate, static_cast<float>(clip_scale(record.gradient_norm)));
  model_.add_time("optimizer", seconds_since(begin));
}

// All ranks throw the same error. Parameters are still those of the previous step.
void Trainer::throw_diverged() const {
  const OptimizerConfig& o = config_.optimizer;
  const auto clip = o.clip > 0.0F ? fmt::format("a --clip below {}", o.clip) : "--clip 1";
  throw InvalidArgument(
      fmt::format("step {}: the gradients are no longer finite; a --learning-rate below {}, or {}, "
                  "may help",
                  progress_.step + 1, o.learning_rate, clip));
}

double Trainer::clip_scale(double norm) const {
  const double most = config_.optimizer.clip;
  return most > 0.0 && norm > most ? most / norm : 1.0;
}

double Trainer::balance_experts() {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<PickCounts> layers;
  const auto moe_layers = model_.moe_layers();
  for (std::size_t i = 0; i < moe_layers.size(); ++i) {
    layers.push_back(moe_layers[i]->take_pick_counts());
    const auto& picks = layers.back().picks;
    for (std::size_t e = 0; e < picks.size(); ++e) load_[i][e] += picks[e];
    if (balancers_.empty()) continue;
    balancers_[i].update(picks, progress_.step,
                         model_.values().blocks()[i].parameters.views().router.score_bias);
  }
  model_.add_time("balancing", seconds_since(begin));
  return worst_balance(layers);
}

void Trainer::finish(StepRecord& record, double loss_share, const Meters& before,
                     std::chrono::steady_clock::time_point begin) {
  Communicator& world = mesh_.world();
  const Meters now = read_meters();
  const std::array own{loss_share,
                       seconds_since(begin),
                       now.products - before.products,
                       now.moe - before.moe,
                       static_cast<double>(now.moe_bytes - before.moe_bytes),
                       static_cast<double>(now.gradient_bytes - before.gradient_bytes),
                       static_cast<double>(now.sequence_bytes - before.sequence_bytes)};
  const auto sums = sum_over_ranks(world, own);
  const double ranks = world.size();
  const ModelConfig& m = config_.model;
  const double tokens = static_cast<double>(config_.data.batch * m.context);
  record.loss = sums[0];
  record.seconds = sums[1] / ranks;
  record.tokens_per_second = tokens / record.seconds;
  record.gemm_share = sums[2] / sums[1];
  record.moe_seconds = sums[3] / ranks;
  // Three products forward, and two backward for each of them.
  const double operations = 9.0 * 2.0 * tokens * static_cast<double>(m.top_k) *
                            static_cast<double>(m.hidden * m.intermediate) *
                            static_cast<double>(load_.size());
  record.moe_gflops = load_.empty() ? 0.0 : operations / record.moe_seconds * 1e-9;
  for (std::size_t i = 4; i < sums.size(); ++i) {
    record.bytes_moved += static_cast<std::int64_t>(sums[i]);
  }
  bytes_.tokens += static_cast<std::int64_t>(sums[4]);
  bytes_.gradients += static_cast<std::int64_t>(sums[5]);
  bytes_.sequences += static_cast<std::int64_t>(sums[6]);
}

TokenBatch Trainer::next_batch() {
  std::vector<std::string_view> windows;
  for (std::int64_t i = 0; i < config_.data.batch; ++i) {
    windows.push_back(order_.window(progress_.position++));
  }
  return cut_batch(mesh_, windows, config_.model.context);
}

double Trainer::held_out_loss() {
  // Evaluates as many sequences at once as training uses.
  const auto all = std::span<const std::string_view>(held_out_);
  const auto batch = static_cast<std::size_t>(config_.data.batch);
  double share = 0.0;
  for (std::size_t first = 0; first < all.size(); first += batch) {
    const auto part = all.subspan(first, std::min(batch, all.size() - first));
    share += model_.loss(cut_batch(mesh_, part, config_.model.context)) *
             static_cast<double>(part.size());
  }
  return sum_over_ranks(mesh_.world(), {&share, 1})[0] / static_cast<double>(all.size());
}

double Trainer::bigram_loss() const { return train::bigram_loss(corpus_.training(), held_out_); }

std::vector<std::vector<std::int64_t>> Trainer::take_load() {
  auto taken = load_;
  for (auto& layer : load_) std::ranges::fill(layer, 0);
  return taken;
}

}  // namespace switchyard::train
