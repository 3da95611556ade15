// SPDX-License-Identifier: Apache-2.0
// Experts, routers and load balancers.
#include "switchyard/experts.h"

#include <array>
#include <cmath>

#include "misuse/misuse.h"
#include "switchyard/load_balancer.h"
#include "switchyard/router.h"

namespace switchyard::misuse {
namespace {

constexpr ExpertsOptions kRowExperts{.hidden = 4, .intermediate = 3};

// Two rows for one expert.
struct Rows {
  Experts experts{kRowExperts};
  Tensor up = floats({1, 6, 4});
  Tensor down = floats({1, 4, 3});
  std::vector<ExpertWeights> weights = unpack(PackedExperts{.gate_up = up, .down = down});
  Tensor offsets = Tensor::from<std::int32_t>({2}, {0, 2});
  Tensor counts = Tensor::from<std::int32_t>({1}, {2});
  RowGroups groups{.row_offsets = offsets, .group_rows = counts};
  Tensor rows = floats({2, 4});
  Tensor out = floats({2, 4});
  Tensor inner = floats({2, 6});

  void forward(const ExpertsInput& in, const ExpertsOutput& results) const {
    experts.forward(weights, groups, in, results);
  }
  void backward(const ExpertsBackwardInput& in, const ExpertsBackwardOutput& results) const {
    experts.backward(weights, groups, in, results);
  }
};

std::function<void()> rows(const std::function<void(Rows&)>& call) {
  return [call] {
    Rows one;
    call(one);
  };
}

struct Tokens {
  Router router{RouterOptions::mixtral(2, 1)};
  Tensor gate = floats({2, 4});
  Tensor x = floats({3, 4});
  Tensor ids = ints({3, 1});
  Tensor d_weights = floats({3, 1});
  Tensor d_x = floats({3, 4});
  Tensor d_gate = floats({2, 4});
};

std::function<void()> tokens(const std::function<void(Tokens&)>& call) {
  return [call] {
    Tokens one;
    call(one);
  };
}

void update(const std::vector<std::int64_t>& counts, const TensorView& bias) {
  LoadBalancer(2).update(counts, 0, bias);
}

}  // namespace

std::vector<Misuse> of_experts() {
  return {
      {"Experts::Experts(ExpertsOptions, Device)", Kind::out_of_range,
       [] { Experts({.hidden = 0, .intermediate = 1}); }, "hidden (0)"},
      {"Experts::Experts(ExpertsOptions, Device)", Kind::huge,
       [] { Experts({.hidden = kHuge, .intermediate = kHuge}); }, "1099511627776"},
      {"Experts::Experts(ExpertsOptions, Device)", Kind::dtype,
       [] { Experts({.hidden = 1, .intermediate = 1, .dtype = Dtype::i64}); }, "not i64"},
      {"Experts::Experts(ExpertsOptions, Device)", Kind::out_of_range,
       [] { Experts({.hidden = 1, .intermediate = 1, .activation = static_cast<Activation>(99)}); },
       "no activation 99"},
      {"Experts::forward(span<ExpertWeights>, RowGroups, ExpertsInput, ExpertsOutput)", Kind::shape,
       rows([](auto& one) {
         one.forward({.rows = floats({1, 4})}, {.out = one.out});
       }),
       "rows is f32 [1,4]"},
      {"Experts::forward(span<ExpertWeights>, RowGroups, ExpertsInput, ExpertsOutput)", Kind::empty,
       rows([](auto& one) { one.forward({}, {}); }), "[0]"},
      {"Experts::forward(span<ExpertWeights>, RowGroups, ExpertsInput, ExpertsOutput)",
       Kind::overlapping, rows([](auto& one) {
         Tensor all = floats({3, 4});
         one.forward({.rows = all.view().slice(0, 2)}, {.out = all.view().slice(1, 3)});
       }),
       "rows and out"},
      {"Experts::forward(span<ExpertWeights>, RowGroups, ExpertsInput, ExpertsOutput)",
       Kind::out_of_range, rows([](auto& one) {
         one.offsets.template span<std::int32_t>()[1] = 1;
         one.forward({.rows = one.rows}, {.out = one.out});
       }),
       "has 2 rows, but begins at 0 and the next at 1"},
      {"Experts::backward(span<ExpertWeights>, RowGroups, ExpertsBackwardInput, "
       "ExpertsBackwardOutput)",
       Kind::overlapping, rows([](auto& one) {
         one.backward({.rows = one.rows, .inner = one.inner, .d_out = one.out},
                      {.d_rows = one.out, .gradients = {}});
       }),
       "d_out and d_rows must not overlap"},
      {"Experts::backward(span<ExpertWeights>, RowGroups, ExpertsBackwardInput, "
       "ExpertsBackwardOutput)",
       Kind::device, rows([](auto& one) {
         one.backward({.rows = on_a_gpu(one.rows), .inner = one.inner, .d_out = one.out},
                      {.d_rows = floats({2, 4}), .gradients = {}});
       }),
       "rows [2,4] is in gpu memory"},
      {"Experts::check(span<ExpertWeights>)", Kind::empty, rows([](auto& one) {
         const std::array<ExpertWeights, 1> none{};
         one.experts.check(none);
       }),
       "is missing"},
      {"Experts::check(span<ExpertWeights>, span<ExpertViews>)", Kind::shape,
       rows([](auto& one) { one.experts.check(one.weights, std::vector<ExpertGradients>(2)); }),
       "1 experts, but gradients for 2"},
      {"unpack(PackedExperts, Activation)", Kind::shape, rows([](auto& one) {
         (void)unpack(PackedExperts{.gate_up = one.up, .down = floats({1, 4, 9})});
       }),
       "do not belong together"},
      {"unpack(PackedExpertViews, Activation)", Kind::empty,
       [] { (void)unpack(PackedExpertViews{}); }, "do not belong together"},
      {"unpack(PackedExpertViews, Activation)", Kind::huge,
       [] {
         (void)unpack(PackedExpertViews{.gate_up = at_a_null_pointer({kHuge, 1, 1})});
       },
       "null pointer"},

      {"Router::Router(RouterOptions, Device)", Kind::out_of_range,
       [] { Router(RouterOptions::mixtral(0, 1)); }, "num_experts (0)"},
      {"Router::Router(RouterOptions, Device)", Kind::huge,
       [] { Router(RouterOptions::mixtral(2, kHuge)); }, "top_k (1099511627776)"},
      {"Router::check(RouterWeights, int64)", Kind::empty,
       tokens([](auto& one) { one.router.check({}, 4); }), "gate [2,4] is missing"},
      {"Router::check(RouterWeights, int64)", Kind::out_of_range,
       tokens([](auto& one) { one.router.check({.gate = one.gate}, -1); }), "-1"},
      {"Router::route(RouterWeights, RouterInput)", Kind::shape, tokens([](auto& one) {
         (void)one.router.route({.gate = one.gate}, floats({3, 5}));
       }),
       "gate is f32 [2,4]"},
      {"Router::route(RouterWeights, RouterInput)", Kind::dtype, tokens([](auto& one) {
         (void)one.router.route({.gate = one.gate}, ints({3, 4}));
       }),
       "x is i32"},
      {"Router::route(RouterWeights, RouterInput)", Kind::device,
       tokens([](auto& one) { (void)one.router.route({.gate = one.gate}, on_a_gpu(one.x)); }),
       "x [3,4] is in gpu memory"},
      {"Router::route(RouterWeights, RouterInput)", Kind::empty,
       tokens([](auto& one) { (void)one.router.route({.gate = one.gate}, ConstTensorView()); }),
       "x is f32 [0]"},
      {"Router::backward(RouterWeights, RouterBackwardInput, RouterBackwardOutput)",
       Kind::out_of_range, tokens([](auto& one) {
         one.ids.template span<std::int32_t>()[1] = 5;
         one.router.backward({.gate = one.gate},
                             {.x = one.x, .expert_ids = one.ids, .d_weights = one.d_weights},
                             {.d_x = one.d_x, .gradients = {.gate = one.d_gate}});
       }),
       "expert_ids[1,0] is 5"},
      {"Router::backward(RouterWeights, RouterBackwardInput, RouterBackwardOutput)",
       Kind::overlapping, tokens([](auto& one) {
         one.router.backward({.gate = one.gate},
                             {.x = one.x, .expert_ids = one.ids, .d_weights = one.d_weights},
                             {.d_x = one.x, .gradients = {.gate = one.d_gate}});
       }),
       "x and d_x must not overlap"},

      {"LoadBalancer::LoadBalancer(int, LoadBalancerOptions)", Kind::out_of_range,
       [] { LoadBalancer(0); }, "num_experts (0)"},
      {"LoadBalancer::LoadBalancer(int, LoadBalancerOptions)", Kind::out_of_range,
       [] { LoadBalancer(2, {.rate = NAN}); }, "rate (nan)"},
      {"LoadBalancer::rate(int64)", Kind::out_of_range, [] { (void)LoadBalancer(2).rate(-1); },
       "step (-1)"},
      {"LoadBalancer::update(span<int64>, int64, TensorView, Device)", Kind::empty,
       [] { update({}, floats({2})); }, "0 counts for 2 experts"},
      {"LoadBalancer::update(span<int64>, int64, TensorView, Device)", Kind::huge,
       [] {
         update({INT64_MAX, INT64_MAX}, floats({2}));
       },
       "9223372036854775807"},
      {"LoadBalancer::update(span<int64>, int64, TensorView, Device)", Kind::dtype,
       [] {
         update({1, 2}, ints({2}));
       },
       "score_bias is i32"},
      {"LoadBalancer::update(span<int64>, int64, TensorView, Device)", Kind::moved_from,
       [] {
         LoadBalancer balancer(2);
         const LoadBalancer taken = std::move(balancer);
         balancer.update(std::vector<std::int64_t>{1, 2}, 0,  // NOLINT(bugprone-use-after-move)
                         floats({2}));
       },
       "2 counts for 0 experts"},
  };
}

}  // namespace switchyard::misuse
