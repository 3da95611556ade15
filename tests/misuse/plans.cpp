// SPDX-License-Identifier: Apache-2.0
// Plans, planners, dispatchers, and plans in tensors.
#include <array>

#include "misuse/misuse.h"
#include "switchyard/dispatcher.h"
#include "switchyard/experts.h"
#include "switchyard/local_plan.h"
#include "switchyard/router.h"

namespace switchyard::misuse {
namespace {

constexpr std::int64_t kHidden = 4;
constexpr std::int64_t kTokens = 3;

// A rank alone, with a plan of three tokens that all pick expert 0.
struct Moving {
  std::unique_ptr<Communicator> comm = connect();
  ExpertPlacement placement = ExpertPlacement::contiguous(2, 1);
  Dispatcher dispatcher{*comm, placement, {.plan = {.hidden = kHidden}}};
  Planner planner{*comm, placement, {.hidden = kHidden}};
  Plan plan = dispatcher.plan(ints({kTokens, 1}));
  Tensor x = floats({kTokens, kHidden});
  Tensor rows = floats({kTokens, kHidden});
  Tensor weights = floats({kTokens, 1});
};

std::function<void()> moving(const std::function<void(Moving&)>& call) {
  return [call] {
    Moving one;
    call(one);
  };
}

// After the dispatcher and the planner were moved away.
std::function<void()> moved_away(const std::function<void(Moving&)>& call) {
  return moving([call](Moving& one) {
    const Dispatcher dispatcher = std::move(one.dispatcher);
    const Planner planner = std::move(one.planner);
    call(one);
  });
}

struct Local {
  LocalPlanOptions options{.num_tokens = kTokens, .top_k = 1, .num_experts = 2};
  Tensor memory = ints({options.num_words()});
  LocalPlan plan{Device(), options, memory};
  Tensor x = floats({kTokens, kHidden});
  Tensor rows = floats({kTokens, kHidden});

  Local() { plan.make(ints({kTokens, 1})); }
};

std::function<void()> local(const std::function<void(Local&)>& call) {
  return [call] {
    Local one;
    call(one);
  };
}

constexpr auto kDispatcherMovedFrom = "this dispatcher was moved from";

}  // namespace

std::vector<Misuse> of_plans() {
  return {
      {"Planner::Planner(Communicator, ExpertPlacement, PlanOptions, Device)", Kind::out_of_range,
       moving([](auto& one) { Planner(*one.comm, one.placement, {.hidden = 0}); }), "hidden (0)"},
      {"Planner::Planner(Communicator, ExpertPlacement, PlanOptions, Device)", Kind::shape,
       moving(
           [](auto& one) { Planner(*one.comm, ExpertPlacement::contiguous(4, 2), {.hidden = 4}); }),
       "2"},
      {"Planner::plan(ConstTensorView, int64)", Kind::out_of_range, moving([](auto& one) {
         (void)one.planner.plan(Tensor::from<std::int32_t>({1, 1}, {7}));
       }),
       "7"},
      {"Planner::plan(ConstTensorView, int64)", Kind::dtype, moving([](auto& one) {
         (void)one.planner.plan(floats({2, 1}));
       }),
       "f32"},
      {"Planner::plan(ConstTensorView, int64)", Kind::empty,
       moving([](auto& one) { (void)one.planner.plan(ConstTensorView()); }),
       "not f32 with 1 dimensions"},
      {"Planner::plan(ConstTensorView, int64)", Kind::moved_from, moved_away([](auto& one) {
         (void)one.planner.plan(ints({2, 1}));
       }),
       "this planner was moved from"},
      {"Planner::plan(Routing)", Kind::empty,
       moving([](auto& one) { (void)one.planner.plan(Routing{}); }), "not f32 with 1 dimensions"},
      {"Planner::plan(Routing)", Kind::shape, moving([](auto& one) {
         (void)one.planner.plan(
             Routing{.expert_ids = ints({2, 1}), .weights = floats({2, 1}), .problems = ints({3})});
       }),
       "problems is i32 [3]"},
      {"Planner::resize(Sizing)", Kind::out_of_range,
       moving([](auto& one) { one.planner.resize(Sizing::bounded(-3)); }), "-3"},
      {"Planner::resize(Sizing)", Kind::huge,
       moving([](auto& one) { one.planner.resize(Sizing::bounded(kHuge)); }), "1099511627776"},
      {"Planner::resize(Sizing)", Kind::moved_from,
       moved_away([](auto& one) { one.planner.resize({}); }), "this planner was moved from"},
      {"Plan::counts(int)", Kind::out_of_range, moving([](auto& one) { (void)one.plan.counts(1); }),
       "rank (1) must be one of the plan's 1"},
      {"Plan::distinct_tokens(int, int)", Kind::out_of_range,
       moving([](auto& one) { (void)one.plan.distinct_tokens(0, -1); }), "target (-1)"},

      {"Dispatcher::Dispatcher(Communicator, ExpertPlacement, DispatcherOptions, Device)",
       Kind::dtype, moving([](auto& one) {
         Dispatcher(*one.comm, one.placement, {.plan = {.hidden = 4, .dtype = Dtype::i32}});
       }),
       "i32"},
      {"Dispatcher::Dispatcher(Communicator, ExpertPlacement, DispatcherOptions, Device)",
       Kind::out_of_range, moving([](auto& one) {
         Dispatcher(*one.comm, one.placement, {.plan = {.hidden = 4, .alignment = 0}});
       }),
       "alignment (0)"},
      {"Dispatcher::plan(ConstTensorView, int64)", Kind::shape,
       moving([](auto& one) { (void)one.dispatcher.plan(ints({2})); }),
       "not i32 with 1 dimensions"},
      {"Dispatcher::plan(ConstTensorView, int64)", Kind::device, moving([](auto& one) {
         Tensor ids = ints({2, 1});
         (void)one.dispatcher.plan(on_a_gpu(ids));
       }),
       "gpu memory"},
      {"Dispatcher::plan(ConstTensorView, int64)", Kind::moved_from, moved_away([](auto& one) {
         (void)one.dispatcher.plan(ints({2, 1}));
       }),
       kDispatcherMovedFrom},
      {"Dispatcher::plan(Routing)", Kind::empty,
       moving([](auto& one) { (void)one.dispatcher.plan(Routing{}); }),
       "not f32 with 1 dimensions"},
      {"Dispatcher::plan_words(ExpertPlacement, int, int64, int64)", Kind::huge,
       [] { (void)Dispatcher::plan_words(ExpertPlacement::contiguous(2, 2), 0, kHuge, kHuge); },
       "more than 2^31 picks"},
      {"Dispatcher::plan_words(ExpertPlacement, int, int64, int64)", Kind::out_of_range,
       [] { (void)Dispatcher::plan_words(ExpertPlacement::contiguous(2, 2), 2, 1, 1); },
       "rank (2)"},
      {"Dispatcher::plan_into(ConstTensorView, TensorView)", Kind::shape, moving([](auto& one) {
         one.dispatcher.plan_into(ints({2, 1}), ints({9}));
       }),
       "the peer mover"},
      {"Dispatcher::plan_in(TensorView, PlanForm)", Kind::empty,
       moving([](auto& one) { (void)one.dispatcher.plan_in({}, {}); }), "the peer mover"},
      {"Dispatcher::plan_in(TensorView, PlanForm)", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.plan_in({}, {}); }), kDispatcherMovedFrom},
      {"Dispatcher::complete(TensorView, PlanForm)", Kind::empty,
       moving([](auto& one) { (void)one.dispatcher.complete({}, {}); }), "the peer mover"},
      {"Dispatcher::dispatch(Plan, ConstTensorView)", Kind::shape, moving([](auto& one) {
         (void)one.dispatcher.dispatch(one.plan, floats({2, 4}));
       }),
       "x is f32 [2,4]"},
      {"Dispatcher::dispatch(Plan, ConstTensorView)", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.dispatch(one.plan, one.x); }),
       kDispatcherMovedFrom},
      {"Dispatcher::dispatch(Plan, DispatchInput, DispatchOutput)", Kind::overlapping,
       moving([](auto& one) { one.dispatcher.dispatch(one.plan, {.x = one.x}, {.rows = one.x}); }),
       "x and rows must not overlap"},
      {"Dispatcher::dispatch(Plan, DispatchInput, DispatchOutput)", Kind::out_of_range,
       moving([](auto& one) {
         one.dispatcher.dispatch(one.planner.plan(ints({kTokens, 1})), {.x = one.x},
                                 {.rows = one.rows});
       }),
       "made by another dispatcher"},
      {"Dispatcher::dispatch(Plan, DispatchInput, DispatchOutput)", Kind::empty,
       moving([](auto& one) { one.dispatcher.dispatch(one.plan, {}, {}); }), "x is f32 [0]"},
      {"Dispatcher::receives_tokens(Plan)", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.receives_tokens(one.plan); }),
       kDispatcherMovedFrom},
      {"Dispatcher::receive(Plan, ConstTensorView)", Kind::shape, moving([](auto& one) {
         (void)one.dispatcher.receive(one.plan, floats({2, 4}));
       }),
       "tokens is f32 [2,4]"},
      {"Dispatcher::receive(Plan, ConstTensorView, ConstTensorView)", Kind::dtype,
       moving([](auto& one) {
         (void)one.dispatcher.receive(one.plan, one.x, ints({kTokens, 1}));
       }),
       "weights is i32"},
      {"Dispatcher::take_rows(Plan)", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.take_rows(one.plan); }),
       kDispatcherMovedFrom},
      {"Dispatcher::take_row_weights(Plan)", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.take_row_weights(one.plan); }),
       kDispatcherMovedFrom},
      {"Dispatcher::take_received_weights(Plan)", Kind::out_of_range,
       moving([](auto& one) { (void)one.dispatcher.take_received_weights(one.plan); }),
       "only with the peer mover"},
      {"Dispatcher::combine(Plan, CombineInput, TensorView)", Kind::overlapping,
       moving([](auto& one) { one.dispatcher.combine(one.plan, {.rows = one.rows}, one.rows); }),
       "rows and y must not overlap"},
      {"Dispatcher::combine(Plan, CombineInput, TensorView)", Kind::device, moving([](auto& one) {
         one.dispatcher.combine(one.plan, {.rows = on_a_gpu(one.rows)}, one.x);
       }),
       "rows [3,4] is in gpu memory"},
      {"Dispatcher::combine(Plan, ConstTensorView, ConstTensorView)", Kind::shape,
       moving([](auto& one) {
         (void)one.dispatcher.combine(one.plan, floats({2, 4}), one.weights);
       }),
       "rows is f32 [2,4]"},
      {"Dispatcher::combine_backward(Plan, CombineBackwardInput, CombineBackwardOutput)",
       Kind::overlapping, moving([](auto& one) {
         one.dispatcher.combine_backward(one.plan, {.d_y = one.x}, {.d_rows = one.x});
       }),
       "d_y and d_rows must not overlap"},
      {"Dispatcher::dispatch_backward(Plan, DispatchBackwardInput, DispatchBackwardOutput)",
       Kind::overlapping, moving([](auto& one) {
         one.dispatcher.dispatch_backward(one.plan, {.d_rows = one.rows}, {.d_x = one.rows});
       }),
       "d_rows and d_x must not overlap"},
      {"Dispatcher::dispatch_backward(Plan, DispatchBackwardInput, DispatchBackwardOutput)",
       Kind::empty, moving([](auto& one) { one.dispatcher.dispatch_backward(one.plan, {}, {}); }),
       "d_rows is f32 [0]"},
      {"Dispatcher::resize(Sizing)", Kind::huge,
       moving([](auto& one) { one.dispatcher.resize(Sizing::bounded(kHuge)); }), "1099511627776"},
      {"Dispatcher::spoil(span<TensorView>)", Kind::moved_from,
       moved_away([](auto& one) { one.dispatcher.spoil({}); }), kDispatcherMovedFrom},
      {"Dispatcher::mover", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.mover(); }), kDispatcherMovedFrom},
      {"Dispatcher::bytes_on_wire", Kind::moved_from,
       moved_away([](auto& one) { (void)one.dispatcher.bytes_on_wire(); }), kDispatcherMovedFrom},

      {"LocalPlanOptions::most_rows", Kind::huge,
       [] {
         (void)LocalPlanOptions{.num_tokens = kHuge, .top_k = kHuge, .num_experts = 1}.most_rows();
       },
       "need more than 2^31 rows"},
      {"LocalPlanOptions::most_rows", Kind::out_of_range,
       [] {
         (void)LocalPlanOptions{.num_tokens = 1, .top_k = 1, .num_experts = 1, .alignment = 0}
             .most_rows();
       },
       "alignment (0)"},
      {"LocalPlanOptions::num_words", Kind::out_of_range,
       [] { (void)LocalPlanOptions{.num_tokens = -1, .top_k = 1, .num_experts = 1}.num_words(); },
       "num_tokens (-1)"},
      {"LocalPlan::LocalPlan(Device, LocalPlanOptions, TensorView)", Kind::shape,
       local([](auto& one) { LocalPlan({}, one.options, ints({5})); }), "i32 [5], but must be"},
      {"LocalPlan::LocalPlan(Device, LocalPlanOptions, TensorView)", Kind::misaligned,
       local([](auto& one) {
         const auto words = one.options.num_words();
         LocalPlan({}, one.options, ints({words + 1}).view().slice(1, words + 1));
       }),
       "must be aligned to 8 bytes"},
      {"LocalPlan::make(ConstTensorView)", Kind::out_of_range, local([](auto& one) {
         one.plan.make(Tensor::from<std::int32_t>({3, 1}, {0, 9, 0}));
       }),
       "9"},
      {"LocalPlan::make(ConstTensorView)", Kind::dtype, local([](auto& one) {
         one.plan.make(floats({3, 1}));
       }),
       "expert_ids is f32"},
      {"LocalPlan::dispatch(DispatchInput, DispatchOutput)", Kind::overlapping,
       local([](auto& one) { one.plan.dispatch({.x = one.x}, {.rows = one.x}); }),
       "x and rows must not overlap"},
      {"LocalPlan::dispatch(DispatchInput, DispatchOutput)", Kind::shape, local([](auto& one) {
         one.plan.dispatch({.x = one.x}, {.rows = floats({2, 4})});
       }),
       "there are 2 rows, but the plan needs 3"},
      {"LocalPlan::combine(CombineInput, TensorView)", Kind::overlapping,
       local([](auto& one) { one.plan.combine({.rows = one.rows}, one.rows); }),
       "rows and y must not overlap"},
      {"LocalPlan::combine(CombineInput, TensorView)", Kind::empty,
       local([](auto& one) { one.plan.combine({}, {}); }), "y is f32 [0]"},
      {"LocalPlan::combine_backward(CombineBackwardInput, CombineBackwardOutput)",
       Kind::overlapping,
       local([](auto& one) { one.plan.combine_backward({.d_y = one.x}, {.d_rows = one.x}); }),
       "d_y and d_rows must not overlap"},
      {"LocalPlan::dispatch_backward(DispatchBackwardInput, DispatchBackwardOutput)",
       Kind::overlapping,
       local([](auto& one) { one.plan.dispatch_backward({.d_rows = one.x}, {.d_x = one.x}); }),
       "d_rows and d_x must not overlap"},
      {"LocalPlan::dispatch_backward(DispatchBackwardInput, DispatchBackwardOutput)", Kind::device,
       local([](auto& one) {
         one.plan.dispatch_backward({.d_rows = on_a_gpu(one.rows)}, {.d_x = one.x});
       }),
       "d_rows [3,4] is in gpu memory"},
  };
}

}  // namespace switchyard::misuse
