// SPDX-License-Identifier: Apache-2.0
// The layer cases that are compared on every device.
#include "support/activation_forms.h"
#include "support/layer/layer_cases.h"

namespace switchyard::testing {
namespace {

using Change = std::function<void(LayerCase&)>;

MoeLayerOptions base_options() {
  return {.hidden = 10, .intermediate = 5, .router = RouterOptions::mixtral(6, 3)};
}

LayerCase with(std::string name, const Change& change) {
  LayerCase c{.name = std::move(name), .options = base_options()};
  change(c);
  return c;
}

// Picks consecutive experts, starting at first(token), or none if that is negative.
Change picking(std::int32_t (*first)(std::int64_t token)) {
  return [first](LayerCase& c) {
    c.ids = [first](std::int64_t tokens, std::int64_t top_k) {
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < tokens * top_k; ++i) {
        const auto start = first(i / top_k);
        ids.push_back(start < 0 ? -1 : static_cast<std::int32_t>((start + i % top_k) % 6));
      }
      return ids;
    };
  };
}

}  // namespace

std::vector<LayerCase> router_cases() {
  return {
      with("mixtral", [](LayerCase&) {}),
      with("olmoe", [](LayerCase& c) { c.options.router = RouterOptions::olmoe(6, 3); }),
      with("kempner_forge_sigmoid",
           [](LayerCase& c) { c.options.router = RouterOptions::kempner_forge_sigmoid(6, 2); }),
      with("torchtitan", [](LayerCase& c) { c.options.router = RouterOptions::torchtitan(6, 3); }),
      with("deepseek_v3",
           [](LayerCase& c) {
             c.options.router = RouterOptions::deepseek_v3(16, 3);
             c.options.shared_intermediate = 6;
           }),
      with("balanced", [](LayerCase& c) { c.options.router.choice = Choice::balanced; }),
  };
}

std::vector<LayerCase> expert_cases() {
  std::vector<LayerCase> cases;
  for (const auto& form : kActivationForms) {
    for (const auto biases : {Biases::none, Biases::all}) {
      cases.push_back(with(name_of(form), [&](LayerCase& c) {
        c.options = form.in(c.options);
        c.options.shared_intermediate = 7;
        c.options.clamp_limit = 0.5F;
        c.biases = biases;
      }));
    }
  }
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      cases.push_back(with("stage " + std::string(name_of(stage)), [&](LayerCase& c) {
        c.options.weight_stage = stage;
        c.options.keep = keep;
        c.options.shared_intermediate = 3;
        c.biases = Biases::all;
      }));
    }
  }
  return cases;
}

std::vector<LayerCase> plan_cases() {
  std::vector<LayerCase> cases{
      with("all to the same", picking([](std::int64_t) { return 2; })),
      with("skewed", picking([](std::int64_t t) { return t % 7 == 0 ? 3 : 0; })),
      with("some to nobody", picking([](std::int64_t t) { return t % 2 == 0 ? -1 : 1; })),
      with("all to nobody", picking([](std::int64_t) { return -1; })),
      with("one token", [](LayerCase& c) { c.num_tokens = 1; }),
      with("no token", [](LayerCase& c) { c.num_tokens = 0; }),
      with("many tokens", [](LayerCase& c) { c.num_tokens = 70; }),
      with("padding", [](LayerCase& c) { c.has_padding = true; }),
      with("padding of a shared expert",
           [](LayerCase& c) {
             c.has_padding = true;
             c.options.shared_intermediate = 4;
             c.biases = Biases::all;
           }),
  };
  const auto plain = cases.size();
  for (std::size_t i = 0; i < plain; ++i) {
    for (const std::int64_t alignment : {1, 16, 128}) {
      LayerCase bounded = cases[i];
      bounded.name += ", bounded, aligned to " + std::to_string(alignment);
      bounded.options.alignment = alignment;
      bounded.options.sizing = Sizing::bounded(1024);
      cases.push_back(bounded);
    }
    cases[i].options.alignment = i % 2 == 0 ? 16 : 1;
  }
  for (const std::int64_t alignment : {1, 8}) {
    cases.push_back(with("more rows than there is room for", [&](LayerCase& c) {
      c.options.alignment = alignment;
      c.options.sizing = Sizing::bounded(24, Overflow::drop);
    }));
  }
  return cases;
}

std::vector<LayerCase> training_cases() {
  std::vector<LayerCase> cases;
  for (const auto rule : {CapacityRule::first_come, CapacityRule::highest_weight}) {
    cases.push_back(with("capacity", [&](LayerCase& c) {
      c.options.capacity = {.factor = 0.5, .rule = rule};
      c.num_tokens = 20;
      c.has_padding = rule == CapacityRule::highest_weight;
    }));
  }
  for (const auto rule : {GradientScale::global, GradientScale::rank}) {
    cases.push_back(with("gradient scale", [&](LayerCase& c) {
      c.options.gradient_scale = rule;
      c.options.weight_stage =
          rule == GradientScale::rank ? WeightStage::activation : WeightStage::output;
    }));
  }
  for (const auto balance : {BalanceLoss::none, BalanceLoss::batch, BalanceLoss::sequence}) {
    for (const auto scores : {LossScores::as_routed, LossScores::shares}) {
      cases.push_back(with("losses", [&](LayerCase& c) {
        c.options.router = RouterOptions::torchtitan(6, 3);
        c.options.losses = {.balance = balance, .scores = scores, .z = true};
        c.options.gradient_scale = GradientScale::global;
        c.d_losses = {.balance = balance == BalanceLoss::none ? 0.0F : 0.7F, .z = 0.3F};
      }));
    }
  }
  cases.push_back(with("losses of softmax", [&](LayerCase& c) {
    c.options.losses = {.balance = BalanceLoss::batch, .z = true, .scope = LossScope::rank};
    c.options.sizing = Sizing::bounded(64);
    c.d_losses = {.balance = 0.9F};
  }));
  return cases;
}

std::vector<LayerCase> bf16_cases() {
  std::vector<LayerCase> cases;
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    LayerCase c =
        with("bf16", picking([](std::int64_t t) { return static_cast<std::int32_t>(t % 6); }));
    c.options.dtype = Dtype::bf16;
    c.options.weight_stage = stage;
    c.options.alignment = 16;
    cases.push_back(c);
  }
  return cases;
}

}  // namespace switchyard::testing
