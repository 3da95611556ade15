// SPDX-License-Identifier: Apache-2.0
#include "support/layer/mesh_model.h"

#include <string>

#include "support/random.h"

namespace switchyard::testing {
namespace {

Tensor sum_of(const Tensor& a, const Tensor& b) {
  Tensor result = a.clone();
  for (std::size_t i = 0; i < result.span<float>().size(); ++i) {
    result.span<float>()[i] += b.span<float>()[i];
  }
  return result;
}

MoeBlock whole_block(int id, const MoeLayerOptions& options) {
  const auto whole = ExpertPlacement::contiguous(options.router.num_experts, 1);
  return {"layers." + std::to_string(id),
          MoeParameters::random(options, whole, 0, static_cast<std::uint64_t>(id), Biases::all),
          whole};
}

}  // namespace

MeshModel::Layer::Layer(int layer_id, const MoeLayerOptions& layer_options)
    : id(layer_id), options(layer_options), block(whole_block(layer_id, layer_options)) {}

MeshModel::MeshModel(Mesh& mesh, const GradientAxes& axes,
                     const std::vector<MoeLayerOptions>& options)
    : mesh_(mesh), axes_(axes) {
  const int each = static_cast<int>(options.size()) / mesh.size("pp");
  for (int i = 0; i < each; ++i) {
    const int id = mesh.coordinate("pp") * each + i;
    layers_.emplace_back(id, options[static_cast<std::size_t>(id)]);
  }
  apply_expert_parallel(*this, &mesh, axes.experts);
  Communicator& batch = mesh.comm({"dp", "ep", "sp"});
  for (auto& l : layers_) {
    l.layer.emplace(LayerComms{.experts = *l.block.comm, .batch = &batch}, l.block.placement,
                    l.options);
    l.gradients.emplace(l.options, l.block.placement, l.block.rank(), Biases::all);
  }
  scale_ = Random(40).tensor({options[0].hidden}, Dtype::f32);
  d_scale_ = Tensor::zeros(scale_.shape(), Dtype::f32);
}

std::vector<MoeBlock*> MeshModel::moe_blocks() {
  std::vector<MoeBlock*> blocks;
  for (auto& l : layers_) blocks.push_back(&l.block);
  return blocks;
}

void MeshModel::step(const Tensor& x, const Tensor& d_out) {
  Tensor value = x.clone();
  for (int stage = 0; stage < mesh_.size("pp"); ++stage) {
    if (stage == mesh_.coordinate("pp")) value = forward(std::move(value));
    mesh_.comm({"pp"}).broadcast(value, stage);
  }
  Tensor d_value = scale_backward(value, d_out);
  for (int stage = mesh_.size("pp"); stage-- > 0;) {
    if (stage == mesh_.coordinate("pp")) d_value = backward(std::move(d_value));
    mesh_.comm({"pp"}).broadcast(d_value, stage);
  }
  d_x_ = std::move(d_value);
  for (auto& l : layers_) reduce_gradients(l.gradients->views(), mesh_, axes_);
  const std::vector<TensorView> rest{d_scale_};
  reduce_replicated(rest, mesh_, axes_);
}

Tensor MeshModel::forward(Tensor value) {
  for (auto& l : layers_) {
    l.x = std::move(value);
    value = sum_of(l.x, l.layer->forward(l.block.parameters.weights(), {.x = l.x}, l.saved));
  }
  return value;
}

Tensor MeshModel::backward(Tensor d_value) {
  for (auto l = layers_.rbegin(); l != layers_.rend(); ++l) {
    Tensor through(d_value.shape(), Dtype::f32);
    const LossOptions& losses = l->options.losses;
    l->losses = l->saved.losses();
    l->layer->backward(l->block.parameters.weights(), l->saved,
                       {.d_y = d_value,
                        .d_losses = {.balance = losses.balance == BalanceLoss::none ? 0.0F : 0.5F,
                                     .z = losses.z ? 0.25F : 0.0F}},
                       {.d_x = through, .gradients = l->gradients->views()});
    d_value = sum_of(d_value, through);
  }
  return d_value;
}

Tensor MeshModel::scale_backward(const Tensor& value, const Tensor& d_out) {
  const auto hidden = scale_.span<float>().size();
  Tensor d_value = d_out.clone();
  for (std::size_t i = 0; i < value.span<float>().size(); ++i) {
    d_scale_.span<float>()[i % hidden] += d_out.span<float>()[i] * value.span<float>()[i];
    d_value.span<float>()[i] *= scale_.span<float>()[i % hidden];
  }
  return d_value;
}

}  // namespace switchyard::testing
