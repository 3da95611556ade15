// SPDX-License-Identifier: Apache-2.0
// C interface: layers.
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <stdexcept>

#include "c/ranks.h"
#include "c/views.h"
#include "comm/agreement.h"
#include "core/require.h"
#include "switchyard/moe_layer.h"

struct switchyard_layer {
  ~switchyard_layer() {
    if (rank != nullptr) rank->retire(std::move(layer));
  }

  std::shared_ptr<switchyard::c::RankState> rank;
  std::shared_ptr<switchyard::c::RankState> batch;  // null if it is the same as `rank`
  switchyard::Device device = {};
  std::shared_ptr<switchyard::MoeLayer> layer = {};
  std::string json = {};
};

struct switchyard_saved {
  ~switchyard_saved() {
    if (rank != nullptr) rank->retire(std::move(saved));
  }

  std::shared_ptr<switchyard::c::RankState> rank;
  switchyard::Device device;
  std::shared_ptr<switchyard::SavedForBackward> saved;
};

namespace switchyard::c {
namespace {

template <typename Enum>
Enum choice_of(std::int64_t value, Enum last, std::string_view name) {
  require(0 <= value && value <= static_cast<std::int64_t>(last), "there is no {} {}", name, value);
  return static_cast<Enum>(value);
}

Sizing sizing_of(const switchyard_layer_form& form) {
  require(form.row_capacity >= 0 && form.token_capacity >= 0,
          "row_capacity ({}) and token_capacity ({}) must not be negative", form.row_capacity,
          form.token_capacity);
  if (form.row_capacity == 0) return Sizing::exact();
  return Sizing::bounded(form.row_capacity, form.drop != 0 ? Overflow::drop : Overflow::fail,
                         form.token_capacity);
}

MoeLayerOptions layer_options(const switchyard_layer_form& form) {
  const ExpertsOptions experts = experts_options(form.experts);
  auto shared = form.experts;
  shared.activation = form.shared_activation;
  return {.hidden = experts.hidden,
          .intermediate = experts.intermediate,
          .router = router_options(form.router),
          .dtype = experts.dtype,
          .activation = experts.activation,
          .weight_stage = choice_of(form.weight_stage, WeightStage::input, "weight_stage"),
          .clamp_limit = experts.clamp_limit,
          .gate_alpha = experts.gate_alpha,
          .up_offset = experts.up_offset,
          .shared_intermediate = form.shared_intermediate,
          .shared_activation = experts_options(shared).activation,
          .losses = {.balance = form.balance_loss != 0 ? BalanceLoss::batch : BalanceLoss::none,
                     .scores = form.share_scores != 0 ? LossScores::shares : LossScores::as_routed,
                     .z = form.z_loss != 0,
                     .scope = form.losses_by_rank != 0 ? LossScope::rank : LossScope::global},
          .capacity = {.factor = form.capacity_factor,
                       .rule = choice_of(form.capacity_rule, CapacityRule::highest_weight,
                                         "capacity_rule")},
          .gradient_scale = choice_of(form.gradient_scale, GradientScale::global, "gradient_scale"),
          .sizing = sizing_of(form),
          .alignment = form.alignment,
          .mover = choice_of(form.mover, MoverKind::peer, "mover"),
          .combine = choice_of(form.combine, CombineMode::pre_reduced, "combine"),
          .keep = choice_of(form.keep, Keep::nothing, "keep"),
          .sentinel_ids = form.sentinels != 0 ? SentinelIds::allow : SentinelIds::reject};
}

// Runs `work` while holding the locks of the layer's communicators.
template <typename Work>
int on_layer(const switchyard_layer* layer, const Work& work) {
  return guarded([&] {
    at(layer, "layer");
    const RankLock lock({layer->rank.get(), layer->batch.get()});
    work(*layer->layer);
  });
}

void use_stream(const Device& device, void* stream) {
  if (device.memory() == Memory::gpu) device.set_stream({stream});
}

std::vector<Communicator*> comms_of(const switchyard_layer& layer) {
  std::vector<Communicator*> comms{layer.rank->comm.get()};
  if (layer.batch != nullptr) comms.push_back(layer.batch->comm.get());
  return comms;
}

MoeViews views_for(const switchyard_layer& layer, const switchyard_layer_weights& weights) {
  const MoeLayerOptions& options = layer.layer->options();
  return views_of(weights, {options.activation, options.shared_activation}, layer.device.memory());
}

MoeWeights weights_for(const switchyard_layer& layer, const switchyard_layer_weights& weights) {
  return MoeParameters::of(views_for(layer, weights), layer.device).weights();
}

LayerInput input_of(const switchyard_layer_input& input, Memory memory) {
  const auto view = [&](const switchyard_tensor& tensor, std::string_view name) {
    return is_given(tensor) ? std::optional<ConstTensorView>(tensor_of(tensor, memory, name))
                            : std::nullopt;
  };
  return {.x = tensor_of(input.x, memory, "x"),
          .expert_ids = view(input.expert_ids, "expert_ids"),
          .expert_weights = view(input.expert_weights, "expert_weights"),
          .valid = view(input.valid, "valid")};
}

// Makes the arguments of a collective call. If this rank cannot make them, the other ranks are
// told.
template <typename Make>
auto arguments(const switchyard_layer& layer, std::string_view operation, Make make) {
  return or_abort(comms_of(layer), operation, make);
}

nlohmann::json stages_in(const std::vector<LayerStats::Stage>& stages) {
  auto list = nlohmann::json::array();
  for (const auto& stage : stages) list.push_back({stage.name, stage.seconds});
  return list;
}

nlohmann::json json_of(const LayerStats& stats) {
  return {{"rows_by_expert", stats.rows_by_expert},
          {"rows_by_rank", stats.rows_by_rank},
          {"bytes_by_expert", stats.bytes_by_expert},
          {"bytes_by_rank", stats.bytes_by_rank},
          {"dropped_by_rank", stats.dropped_by_rank},
          {"over_capacity", stats.over_capacity},
          {"overflow", stats.overflow},
          {"bytes_on_wire", stats.bytes_on_wire},
          {"forward", stages_in(stats.forward)},
          {"backward", stages_in(stats.backward)},
          {"waited_for", stats.waited_for}};
}

nlohmann::json json_of(const PlanStatus& status) {
  return {{"overflow", status.overflow},
          {"bad_ids", status.bad_ids},
          {"bad_ids_message", status.bad_ids_message},
          {"non_finite", status.non_finite},
          {"non_finite_message", status.non_finite_message},
          {"available_rows", status.available_rows},
          {"needed_rows", status.needed_rows},
          {"dropped", status.dropped},
          {"available_tokens", status.available_tokens},
          {"needed_tokens", status.needed_tokens}};
}

// Turns an error code that a callback passed on back into the exception it came from.
[[noreturn]] void throw_again(int kind, const std::string& message) {
  switch (kind) {
    case switchyard_invalid_argument:
      throw InvalidArgument(message);
    case switchyard_unsupported:
      throw Unsupported(message);
    case switchyard_communication_error:
      throw CommunicationError(message);
    case switchyard_storage_error:
      throw StorageError(message);
    case switchyard_device_error:
      throw DeviceError(message);
    case switchyard_internal_error:
      throw InternalError(message);
    default:
      throw std::runtime_error(message);
  }
}

using RouterPreset = RouterOptions (*)(int, std::int64_t);
RouterPreset router_preset(std::string_view name) {
  static const std::map<std::string_view, RouterPreset> presets{
      {"mixtral", &RouterOptions::mixtral},
      {"qwen3_moe", &RouterOptions::qwen3_moe},
      {"olmoe", &RouterOptions::olmoe},
      {"deepseek_v3", &RouterOptions::deepseek_v3},
      {"torchtitan", &RouterOptions::torchtitan},
      {"kempner_forge_softmax", &RouterOptions::kempner_forge_softmax},
      {"kempner_forge_sigmoid", &RouterOptions::kempner_forge_sigmoid}};
  const auto found = presets.find(name);
  require(found != presets.end(), "there is no router \"{}\"; there are: {}", name,
          fmt::join(std::views::keys(presets), ", "));
  return found->second;
}

}  // namespace
}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::on_layer;

int switchyard_router_preset(const char* name, int64_t num_experts, int64_t top_k,
                             switchyard_router_form* form) {
  return c::guarded([&] {
    c::at(form, "form") = {.num_experts = num_experts,
                           .top_k = top_k,
                           .sigmoid = 0,
                           .score_bias = 0,
                           .normalise = 0,
                           .scale = 1.0,
                           .num_expert_groups = 1,
                           .kept_expert_groups = 1};
    const int experts = c::router_options(*form).num_experts;
    const RouterOptions options = c::router_preset(c::text_of(name))(experts, top_k);
    form->sigmoid = options.score == ScoreFunction::sigmoid ? 1 : 0;
    form->score_bias = static_cast<std::int64_t>(options.score_bias);
    form->normalise = options.normalise == Normalise::chosen ? 1 : 0;
    form->scale = options.scale;
    form->num_expert_groups = options.num_expert_groups;
    form->kept_expert_groups = options.kept_expert_groups;
  });
}

int switchyard_layer_make(switchyard_comm* comm, switchyard_comm* batch,
                          const switchyard_placement* placement, const switchyard_layer_form* form,
                          switchyard_device* device, switchyard_layer** layer) {
  return c::guarded([&] {
    const auto rank = c::at(comm, "comm").rank;
    c::at(layer, "layer");
    const auto other = batch == nullptr || batch->rank == rank ? nullptr : batch->rank;
    const c::RankLock lock({rank.get(), other.get()});
    std::unique_ptr<switchyard_layer> made(new switchyard_layer{.rank = rank, .batch = other});
    std::optional<ExpertPlacement> where;
    MoeLayerOptions options;
    c::arguments(*made, "MoeLayer", [&] {
      made->device = rank->device_like(c::at(device, "device"));
      where = c::placement_of(c::at(placement, "placement"));
      options = c::layer_options(c::at(form, "form"));
    });
    const LayerComms comms{.experts = *rank->comm,
                           .batch = other == nullptr ? nullptr : other->comm.get()};
    made->layer = std::make_shared<MoeLayer>(comms, *where, options, made->device);
    *layer = made.release();
  });
}

void switchyard_layer_free(switchyard_layer* layer) { delete layer; }
void switchyard_saved_free(switchyard_saved* saved) { delete saved; }

int64_t switchyard_saved_bytes(switchyard_saved* saved) {
  return c::number_of([&] {
    const c::RankLock lock({c::at(saved, "saved").rank.get()});
    return saved->saved->bytes();
  });
}

int switchyard_saved_routing(switchyard_saved* saved, void* stream, const switchyard_tensor* ids,
                             const switchyard_tensor* weights) {
  return c::guarded([&] {
    const c::RankLock lock({c::at(saved, "saved").rank.get()});
    c::use_stream(saved->device, stream);
    const Routing& routing = saved->saved->routing();
    const Memory memory = saved->device.memory();
    saved->device.copy(routing.expert_ids, c::tensor_of(c::at(ids, "ids"), memory, "ids"));
    saved->device.copy(routing.weights, c::tensor_of(c::at(weights, "weights"), memory, "weights"));
  });
}

int switchyard_saved_losses(switchyard_saved* saved, double* balance, double* z) {
  return c::guarded([&] {
    const c::RankLock lock({c::at(saved, "saved").rank.get()});
    const RouterLosses losses = saved->saved->losses();
    c::at(balance, "balance") = double{losses.balance};
    c::at(z, "z") = double{losses.z};
  });
}

int switchyard_layer_forward(switchyard_layer* layer, void* stream,
                             const switchyard_layer_weights* weights,
                             const switchyard_layer_input* input, const switchyard_tensor* y,
                             switchyard_saved** saved) {
  return on_layer(layer, [&](MoeLayer& moe) {
    const Memory memory = layer->device.memory();
    MoeWeights given;
    LayerInput in;
    TensorView out;
    std::unique_ptr<switchyard_saved> left;
    c::arguments(*layer, "MoeLayer::forward", [&] {
      c::use_stream(layer->device, stream);
      given = c::weights_for(*layer, c::at(weights, "weights"));
      in = c::input_of(c::at(input, "input"), memory);
      out = c::tensor_of(c::at(y, "y"), memory, "y");
      if (saved != nullptr) {
        left.reset(
            new switchyard_saved{layer->rank, layer->device, std::make_shared<SavedForBackward>()});
      }
    });
    moe.forward(given, in, out, left == nullptr ? nullptr : left->saved.get());
    if (saved != nullptr) *saved = left.release();
  });
}

int switchyard_layer_backward(switchyard_layer* layer, void* stream,
                              const switchyard_layer_weights* weights, switchyard_saved* saved,
                              const switchyard_layer_gradients* gradients) {
  return on_layer(layer, [&](MoeLayer& moe) {
    const Memory memory = layer->device.memory();
    MoeWeights given;
    LayerBackwardInput in;
    LayerBackwardOutput out;
    c::arguments(*layer, "MoeLayer::backward", [&] {
      c::at(saved, "saved");
      c::at(gradients, "gradients");
      c::use_stream(layer->device, stream);
      given = c::weights_for(*layer, c::at(weights, "weights"));
      in = {.d_y = c::tensor_of(gradients->d_y, memory, "d_y"),
            .d_losses = {.balance = static_cast<float>(gradients->d_balance_loss),
                         .z = static_cast<float>(gradients->d_z_loss)}};
      out = {
          .d_x = c::tensor_of(gradients->d_x, memory, "d_x"),
          .gradients = c::views_for(*layer, gradients->gradients),
          .mode = gradients->accumulate != 0 ? GradientMode::accumulate : GradientMode::overwrite};
      if (c::is_given(gradients->d_expert_weights)) {
        out.d_weights = c::tensor_of(gradients->d_expert_weights, memory, "d_expert_weights");
      }
    });
    moe.backward(given, *saved->saved, in, out);
  });
}

int switchyard_run_step(switchyard_layer* const* layers, int64_t num_layers, switchyard_step step,
                        void* context, int64_t* ran_again) {
  return c::guarded([&] {
    std::vector<MoeLayer*> all;
    std::vector<c::RankState*> ranks;
    require(num_layers >= 0, "num_layers ({}) must not be negative", num_layers);
    require(step != nullptr, "step is a null pointer");
    c::at(ran_again, "ran_again");
    if (num_layers > 0) c::at(layers, "layers");
    for (std::int64_t i = 0; i < num_layers; ++i) {
      c::at(layers[i], "a layer");
      all.push_back(layers[i]->layer.get());
      ranks.push_back(layers[i]->rank.get());
      ranks.push_back(layers[i]->batch.get());
    }
    const c::RankLock lock(ranks);
    *ran_again = run_step(all, [&] {
      const int result = step(context);
      if (result != switchyard_ok) c::throw_again(result, switchyard_last_error());
    });
  });
}

int switchyard_layer_stats(switchyard_layer* layer, const char** json) {
  return on_layer(layer, [&](const MoeLayer& moe) {
    layer->json = c::json_of(moe.stats()).dump();
    c::at(json, "json") = layer->json.c_str();
  });
}

int switchyard_layer_plan_status(switchyard_layer* layer, const char** json) {
  return on_layer(layer, [&](const MoeLayer& moe) {
    layer->json = c::json_of(moe.plan_status()).dump();
    c::at(json, "json") = layer->json.c_str();
  });
}

int switchyard_layer_check(switchyard_layer* layer) {
  return on_layer(layer, [](const MoeLayer& moe) { moe.check(); });
}

int64_t switchyard_layer_row_capacity(switchyard_layer* layer) {
  return c::number_of([&] {
    const c::RankLock lock({c::at(layer, "layer").rank.get()});
    const Sizing& sizing = layer->layer->options().sizing;
    return sizing.is_bounded() ? sizing.capacity() : 0;
  });
}

int switchyard_layer_pick_counts(switchyard_layer* layer, int64_t take, int64_t* picks,
                                 int64_t* num_tokens) {
  return on_layer(layer, [&](MoeLayer& moe) {
    c::at(picks, "picks");
    c::at(num_tokens, "num_tokens");
    const PickCounts counts = take != 0 ? moe.take_pick_counts() : moe.pick_counts();
    std::ranges::copy(counts.picks, picks);
    *num_tokens = counts.num_tokens;
  });
}
