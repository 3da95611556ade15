// SPDX-License-Identifier: Apache-2.0
// Checks a layer's options, the memory of its tensors, and the inputs that only training has.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <random>

#include "comm/agreement.h"
#include "core/hash.h"
#include "core/require.h"
#include "moe/check_tensors.h"
#include "moe/layer/moe_layer_data.h"
#include "moe/plan/plan_record.h"

namespace switchyard {

void require_x(const ConstTensorView& x, const MoeLayerOptions& o, Memory memory) {
  require(x.dtype() == o.dtype && x.shape().rank() == 2 && x.shape()[1] == o.hidden,
          "x is {} {}, but must be {} [T,{}]", name_of(x.dtype()), x.shape(), name_of(o.dtype),
          o.hidden);
  require_memory(x, memory, "x");
}

void require_tokens(const ConstTensorView& view, const TokenForm& form, std::string_view name) {
  if (view.dtype() != form.dtype || view.shape() != form.shape) {
    throw InvalidArgument(fmt::format("{} is {} {}, but must be {} {}", name, name_of(view.dtype()),
                                      view.shape(), name_of(form.dtype), form.shape));
  }
  require_memory(view, form.memory, name);
}

void require_valid(const MoeLayerOptions& o, const ExpertPlacement& placement) {
  require(placement.num_experts() == o.router.num_experts,
          "the router has {} experts, but the placement {}", o.router.num_experts,
          placement.num_experts());
  require(o.shared_intermediate >= 0, "shared_intermediate ({}) must not be negative",
          o.shared_intermediate);
  require(std::isfinite(o.capacity.factor) && o.capacity.factor >= 0.0,
          "capacity.factor ({}) must be 0 or positive, and finite", o.capacity.factor);
  require(o.gradient_scale == GradientScale::off || o.weight_stage != WeightStage::input,
          "gradient_scale does not work with weight_stage {}, which applies the weights before the "
          "experts: use output or activation",
          name_of(o.weight_stage));
  require(o.alignment > 0, "alignment ({}) must be positive", o.alignment);
  if (o.sizing.is_bounded()) require_valid_capacity(o.sizing.capacity(), o.alignment);
  const Router router(o.router);
  const Experts experts(o.experts());
}

void require_sequence(const LayerInput& in, const Communicator* comm) {
  require(in.sequence.has_value(), "losses.balance is sequence, but no sequence was given");
  const SequenceShard& shard = *in.sequence;
  require(shard.num_tokens() == in.x.rows(),
          "x has {} tokens, but the sequence's shard has {} · {}", in.x.rows(), shard.batch(),
          shard.count());
  const int size = comm == nullptr ? 1 : comm->size();
  const int rank = comm == nullptr ? 0 : comm->rank();
  require(shard.sp_size() == size && shard.sp_rank() == rank,
          "the sequence is piece {} of {}, but this is rank {} of {} in the layer's sequence group",
          shard.sp_rank(), shard.sp_size(), rank, size);
}

std::vector<Communicator*> distinct_comms(const LayerComms& comms) {
  std::vector<Communicator*> result{&comms.experts};
  for (Communicator* comm : {comms.batch, comms.sequence}) {
    if (comm != nullptr && std::ranges::find(result, comm) == result.end()) {
      result.push_back(comm);
    }
  }
  return result;
}

void require_same_options(Communicator& comm, const MoeLayerOptions& o,
                          const ExpertPlacement& placement) {
  const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
  const auto bits = [](double value) { return std::bit_cast<std::int64_t>(value); };
  const RouterOptions& r = o.router;
  const std::vector<Field> fields{{"hidden", o.hidden},
                                  {"dtype", number(o.dtype)},
                                  {"alignment", o.alignment},
                                  {"whether sizing is bounded", o.sizing.is_bounded() ? 1 : 0},
                                  {"capacity", o.sizing.capacity()},
                                  {"token_capacity", o.sizing.token_capacity()},
                                  {"the overflow policy", number(o.sizing.overflow())},
                                  {"mover", number(o.mover)},
                                  {"combine", number(o.combine)},
                                  {"the placement (its hash)", hash_of(placement.owners())},
                                  {"intermediate", o.intermediate},
                                  {"activation", number(o.activation)},
                                  {"weight_stage", number(o.weight_stage)},
                                  {"clamp_limit (its bits)", bits(o.clamp_limit)},
                                  {"gate_alpha (its bits)", bits(o.gate_alpha)},
                                  {"up_offset (its bits)", bits(o.up_offset)},
                                  {"shared_intermediate", o.shared_intermediate},
                                  {"shared_activation", number(o.shared_activation)},
                                  {"keep", number(o.keep)},
                                  {"sentinel_ids", number(o.sentinel_ids)},
                                  {"losses.balance", number(o.losses.balance)},
                                  {"losses.scores", number(o.losses.scores)},
                                  {"losses.z", number(o.losses.z)},
                                  {"losses.scope", number(o.losses.scope)},
                                  {"capacity.factor (its bits)", bits(o.capacity.factor)},
                                  {"capacity.rule", number(o.capacity.rule)},
                                  {"gradient_scale", number(o.gradient_scale)},
                                  {"num_experts", r.num_experts},
                                  {"top_k", r.top_k},
                                  {"the router's score", number(r.score)},
                                  {"score_bias", number(r.score_bias)},
                                  {"normalise", number(r.normalise)},
                                  {"the router's scale (its bits)", bits(r.scale)},
                                  {"num_expert_groups", r.num_expert_groups},
                                  {"kept_expert_groups", r.kept_expert_groups},
                                  {"choice", number(r.choice)}};
  require_equal_fields(comm, fields);
}

void require_within_batch(const LayerComms& comms) {
  if (comms.batch == nullptr && comms.sequence == nullptr) return;
  Communicator& batch = comms.batch == nullptr ? comms.experts : *comms.batch;
  // A random number that identifies the batch: two batches are very unlikely to draw the same.
  Tensor name =
      Tensor::from<std::int64_t>({1}, {static_cast<std::int64_t>(std::random_device()())});
  batch.broadcast(name, 0);
  const std::array<Field, 1> fields{
      {{"the number of their batch (experts and sequences must be divided within one batch)",
        name.span<std::int64_t>()[0]}}};
  for (Communicator* comm : {&comms.experts, comms.sequence}) {
    if (comm != nullptr && comm != &batch) {
      require_equal_fields(*comm, fields);
    }
  }
}

void require_ids(const LayerInput& in, const MoeLayerOptions& o, Memory memory) {
  const ConstTensorView& ids = *in.expert_ids;
  const Shape expected{in.x.rows(), o.router.top_k};
  require(are_ids(ids.dtype()) && ids.shape() == expected,
          "expert_ids is {} {}, but must be i32 or i64 {}", name_of(ids.dtype()), ids.shape(),
          expected);
  require_memory(ids, memory, "expert_ids");
}

void require_given_weights(const LayerInput& in, const MoeLayerOptions& o, Memory memory) {
  require(in.expert_ids.has_value(), "expert_weights were given without expert_ids: give both");
  require_tokens(*in.expert_weights, {{in.x.rows(), o.router.top_k}, Dtype::f32, memory},
                 "expert_weights");
  require(o.losses.balance == BalanceLoss::none && !o.losses.z,
          "expert_weights were given, so there are no router logits for the layer's losses: make "
          "the layer without losses");
}

void require_loss_gradients(const RouterLosses& given, const LossOptions& options) {
  require(std::isfinite(given.balance) && std::isfinite(given.z),
          "d_losses.balance ({}) and d_losses.z ({}) must be finite", given.balance, given.z);
  require(given.balance == 0.0F || options.balance != BalanceLoss::none,
          "d_losses.balance is {}, but the layer's options have losses.balance = none",
          given.balance);
  require(given.z == 0.0F || options.z,
          "d_losses.z is {}, but the layer's options have no losses.z", given.z);
}

}  // namespace switchyard
