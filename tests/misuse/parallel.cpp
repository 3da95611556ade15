// SPDX-License-Identifier: Apache-2.0
// Sequences, resharding and gradients over a mesh.
#include <array>

#include "misuse/misuse.h"
#include "switchyard/moe_layer.h"
#include "switchyard/parallelize.h"
#include "switchyard/reshard.h"
#include "switchyard/run_ranks.h"
#include "switchyard/sequence.h"

namespace switchyard::misuse {
namespace {

struct OneMesh {
  std::unique_ptr<Communicator> comm = connect();
  Mesh mesh{*comm, {{"dp", 1}}};
  ExpertPlacement placement = ExpertPlacement::contiguous(2, 1);
};

std::function<void()> on_mesh(const std::function<void(OneMesh&)>& call) {
  return [call] {
    OneMesh one;
    call(one);
  };
}

std::function<void()> on_two_ranks(const std::function<void(Mesh&)>& call) {
  return [call] {
    run_ranks(2, [&](Communicator& comm) {
      Mesh mesh(comm, {{"dp", 2}});
      call(mesh);
    });
  };
}

const SequenceShard kShard(1, 2, 1, 0);

MoeLayerOptions mesh_layer_options() {
  return {.hidden = 4, .intermediate = 3, .router = RouterOptions::mixtral(2, 1)};
}

void reshard_one(OneMesh& one, const ConstTensorView& tensor, const ExpertPlacement& to) {
  const std::array<ConstTensorView, 1> shard{tensor};
  (void)reshard(shard, one.placement, to, *one.comm);
}

void reduce_on(OneMesh& one, const std::vector<TensorView>& gradients,
               const GradientAxes& axes = {}) {
  reduce_replicated(gradients, one.mesh, axes);
}

}  // namespace

std::vector<Misuse> of_parallel() {
  return {
      {"gather_sequence(Communicator, SequenceShard, ConstTensorView, Device)", Kind::shape,
       on_mesh([](auto& one) {
         (void)gather_sequence(*one.comm, kShard, floats({3, 4}));
       }),
       "local is [3,4], but the shard has 1 x 2 tokens"},
      {"gather_sequence(Communicator, SequenceShard, ConstTensorView, Device)", Kind::out_of_range,
       on_mesh([](auto& one) {
         (void)gather_sequence(*one.comm, SequenceShard(1, 2, 2, 1), floats({1, 4}));
       }),
       "rank 1 of 2, but the communicator is rank 0 of 1"},
      {"gather_sequence(Communicator, SequenceShard, ConstTensorView, Device)", Kind::device,
       on_mesh([](auto& one) {
         Tensor local = floats({2, 4});
         (void)gather_sequence(*one.comm, kShard, on_a_gpu(local));
       }),
       "local [2,4] is in gpu memory"},
      {"gather_sequence_backward_slice(SequenceShard, ConstTensorView, Device)", Kind::shape,
       [] {
         (void)gather_sequence_backward_slice(kShard, floats({2, 4}));
       },
       "d_full is [2,4]"},
      {"gather_sequence_backward_sum(Communicator, SequenceShard, ConstTensorView, Device)",
       Kind::empty,
       on_mesh([](auto& one) { (void)gather_sequence_backward_sum(*one.comm, kShard, {}); }),
       "d_full is [0]"},
      {"gather_sequence_backward_sum(Communicator, SequenceShard, ConstTensorView, Device)",
       Kind::dtype, on_mesh([](auto& one) {
         (void)gather_sequence_backward_sum(*one.comm, kShard, Tensor({1, 2, 4}, Dtype::f16));
       }),
       "f16"},
      {"combine_sequence(Dispatcher, Plan, CombineInput, Communicator, SequenceShard)", Kind::shape,
       on_mesh([](auto& one) {
         Dispatcher dispatcher(*one.comm, one.placement, {.plan = {.hidden = 4}});
         const Plan plan = dispatcher.plan(ints({5, 1}));
         (void)combine_sequence(dispatcher, plan, {.rows = floats({5, 4})}, *one.comm, kShard);
       }),
       "the plan has 5 tokens, but the shard has 1 x 2"},
      {"combine_sequence(Dispatcher, Plan, CombineInput, Communicator, SequenceShard)",
       Kind::moved_from, on_mesh([](auto& one) {
         Dispatcher dispatcher(*one.comm, one.placement, {.plan = {.hidden = 4}});
         const Plan plan = dispatcher.plan(ints({2, 1}));
         const Dispatcher taken = std::move(dispatcher);
         (void)combine_sequence(dispatcher,  // NOLINT(bugprone-use-after-move)
                                plan, {.rows = floats({2, 4})}, *one.comm, kShard);
       }),
       "this dispatcher was moved from"},

      {"reshard(span<ConstTensorView>, ExpertPlacement, ExpertPlacement, Communicator, Device)",
       Kind::shape, on_mesh([](auto& one) {
         reshard_one(one, floats({3, 4}), one.placement);
       }),
       "[3,4]"},
      {"reshard(span<ConstTensorView>, ExpertPlacement, ExpertPlacement, Communicator, Device)",
       Kind::out_of_range, on_mesh([](auto& one) {
         reshard_one(one, floats({2, 4}), ExpertPlacement::contiguous(2, 5));
       }),
       "a placement is for 5 ranks"},
      {"reshard(span<ConstTensorView>, ExpertPlacement, ExpertPlacement, Communicator, Device)",
       Kind::device, on_mesh([](auto& one) {
         Tensor tensor = floats({2, 4});
         reshard_one(one, on_a_gpu(tensor), one.placement);
       }),
       "gpu memory"},
      {"reshard(MoeParameters, ExpertPlacement, ExpertPlacement, Communicator)", Kind::moved_from,
       on_mesh([](auto& one) {
         MoeParameters parameters(mesh_layer_options(), one.placement, 0);
         const auto taken = std::move(parameters);
         (void)reshard(std::move(parameters),  // NOLINT(bugprone-use-after-move)
                       one.placement, one.placement, *one.comm);
       }),
       "2"},
      {"reshard(MoeParameters, ExpertPlacement, ExpertPlacement, Communicator)", Kind::out_of_range,
       on_mesh([](auto& one) {
         (void)reshard(MoeParameters(mesh_layer_options(), one.placement, 0), one.placement,
                       ExpertPlacement::contiguous(3, 1), *one.comm);
       }),
       "from a placement of 2 experts to one of 3"},

      {"apply_expert_parallel(span<MoeBlock*>, Mesh*, vector<string>)", Kind::null,
       on_mesh([](auto& one) {
         const std::array<MoeBlock*, 1> blocks{nullptr};
         apply_expert_parallel(blocks, &one.mesh);
       }),
       "block 0 of 1 is null"},
      {"reduce_gradients(MoeViews, Mesh, GradientAxes, Device)", Kind::device,
       on_two_ranks([](Mesh& mesh) {
         Tensor gate = floats({2, 4});
         reduce_gradients({.router = {.gate = on_a_gpu(gate)}}, mesh);
       }),
       "gpu memory"},
      {"reduce_replicated(span<TensorView>, Mesh, GradientAxes, Device)", Kind::overlapping,
       on_two_ranks([](Mesh& mesh) {
         Tensor tied = floats({4});
         const std::array<TensorView, 2> both{tied.view().slice(0, 3), tied.view().slice(2, 4)};
         reduce_replicated(both, mesh);
       }),
       "share memory"},
      {"reduce_replicated(span<TensorView>, Mesh, GradientAxes, Device)", Kind::out_of_range,
       on_mesh([](auto& one) { reduce_on(one, {floats({4})}, {.tokens = {}}); }), "dp"},
  };
}

}  // namespace switchyard::misuse
