// SPDX-License-Identifier: Apache-2.0
#include "model/transformer.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "model/cross_entropy.h"
#include "model/embedding.h"
#include "model/rms_norm.h"
#include "model/transformer_saved.h"

namespace switchyard::train {

Transformer::Transformer(const ModelConfig& config, const MeshConfig& mesh_config, Mesh& mesh,
                         const Device& device, std::uint64_t seed)
    : config_(config),
      mesh_config_(mesh_config),
      mesh_(mesh),
      compute_(device),
      values_(ParameterSet::random(config, seed, mesh, mesh_config.expert_axes)),
      gradients_(values_.like()),
      attention_({.hidden = config.hidden, .heads = config.heads}, mesh.comm({"sp"})),
      dense_({.hidden = config.hidden, .intermediate = config.dense_intermediate}, device) {
  moe_.reserve(values_.blocks().size());
  for (const MoeBlock& block : values_.blocks()) {
    moe_.emplace_back(LayerComms{.experts = *block.comm, .batch = &mesh.world()}, block.placement,
                      moe_options(config), device);
  }
}

Transformer::~Transformer() = default;

std::vector<MoeLayer*> Transformer::moe_layers() {
  std::vector<MoeLayer*> layers;
  for (MoeLayer& layer : moe_) layers.push_back(&layer);
  return layers;
}

bool Transformer::run(const std::function<void()>& step) {
  if (config_.sizing == BufferSizing::bounded && !moe_.empty()) return run_step(moe_layers(), step);
  step();
  return false;
}

Tensor Transformer::logits(const TokenBatch& batch) {
  Tensor result;
  const StageTimes training = times_;
  run([&] {
    Tensor x = embed_tokens(batch);
    for (int layer = 0; layer < config_.layers; ++layer) {
      LayerSaved discarded;
      forward_layer(layer, batch, x, discarded, Keeping::nothing);
    }
    Saved saved;
    result = head(std::move(x), saved);
  });
  times_ = training;
  return result;
}

double Transformer::loss(const TokenBatch& batch) {
  const Tensor all = logits(batch);
  return cross_entropy(compute_, all, batch.targets) / static_cast<double>(batch.total_tokens);
}

ModelLosses Transformer::loss_and_gradients(const TokenBatch& batch) {
  ModelLosses losses;
  losses.ran_again = run([&] {
    losses = {};
    Saved saved;
    Tensor logits = forward(batch, saved, losses);
    const float scale = 1.0F / static_cast<float>(batch.total_tokens);
    losses.cross_entropy = times_.timed("loss", [&] {
      return cross_entropy_with_gradient(compute_, logits, batch.targets, scale) /
             static_cast<double>(batch.total_tokens);
    });
    backward(batch, saved, logits);
  });
  return losses;
}

Tensor Transformer::forward(const TokenBatch& batch, Saved& saved, ModelLosses& losses) {
  Tensor x = embed_tokens(batch);
  saved.layers.resize(static_cast<std::size_t>(config_.layers));
  for (int layer = 0; layer < config_.layers; ++layer) {
    LayerSaved& kept = saved.layers[static_cast<std::size_t>(layer)];
    forward_layer(layer, batch, x, kept, Keeping::for_backward);
    if (config_.has_experts(layer)) {
      const auto share = 1.0 / static_cast<double>(moe_.size());
      losses.balance += share * kept.moe.losses().balance;
      losses.z += share * kept.moe.losses().z;
    }
  }
  return head(std::move(x), saved);
}

void Transformer::backward(const TokenBatch& batch, Saved& saved, const Tensor& d_logits) {
  Tensor d_x = head_backward(saved, d_logits);
  for (int layer = config_.layers - 1; layer >= 0; --layer) {
    backward_layer(layer, batch, saved.layers[static_cast<std::size_t>(layer)], d_x);
  }
  times_.timed("embedding", [&] {
    // If the head is tied to the embedding, the buffer already holds the gradient of the head.
    if (!config_.tied) std::ranges::fill(gradients_.embedding().span<float>(), 0.0F);
    embed_backward(compute_, batch.tokens, d_x, gradients_.embedding());
  });
}

void Transformer::reduce_gradients() {
  const GradientAxes axes{.experts = mesh_config_.expert_axes};
  times_.timed("gradients", [&] {
    const TensorView dense = gradients_.dense();
    reduce_replicated({&dense, 1}, mesh_, axes);
    for (MoeBlock& block : gradients_.blocks()) {
      switchyard::reduce_gradients(block.parameters.views(), mesh_, axes);
    }
  });
}

double Transformer::product_seconds() const {
  const auto dense = dense_.seconds_spent();  // summed over all threads
  const double share = dense.gemm > 0.0 ? dense.gemm / (dense.gemm + dense.other) : 0.0;
  return compute_.product_seconds() + times_.seconds_of(kMoeExperts) +
         times_.seconds_of(kMoeShared) + share * times_.seconds_of(kDenseFeedForward);
}

Tensor Transformer::embed_tokens(const TokenBatch& batch) {
  Tensor x = floats({batch.shard.num_tokens(), config_.hidden});
  times_.timed("embedding", [&] { embed(compute_, values_.embedding(), batch.tokens, x); });
  return x;
}

Tensor Transformer::norm(const Tensor& x, const TensorView& weight, Tensor& rms) {
  Tensor y = floats(x.shape());
  rms = floats({x.rows()});
  times_.timed("norm",
               [&] { rms_norm(compute_, {.x = x, .weight = weight, .y = y, .inverse_rms = rms}); });
  return y;
}

void Transformer::norm_backward(const NormBackward& args, Tensor& d_x) {
  times_.timed("norm", [&] {
    rms_norm_backward(compute_, {.x = args.x,
                                 .weight = args.weight,
                                 .inverse_rms = args.rms,
                                 .d_y = args.d_y,
                                 .d_x = d_x,
                                 .d_weight = args.d_weight});
  });
}

Tensor Transformer::head(Tensor x, Saved& saved) {
  saved.normed = norm(x, values_.final_norm(), saved.rms);
  saved.x = std::move(x);
  Tensor logits = floats({saved.x.rows(), kVocabulary});
  times_.timed("head", [&] {
    compute_.multiply({.a = saved.normed,
                       .b = values_.head(),
                       .c = logits,
                       .b_layout = MatrixLayout::transposed});
  });
  return logits;
}

Tensor Transformer::head_backward(const Saved& saved, const Tensor& d_logits) {
  Tensor d_normed = floats(saved.x.shape());
  times_.timed("head", [&] {
    compute_.multiply({.a = d_logits, .b = values_.head(), .c = d_normed});
    compute_.multiply({.a = d_logits,
                       .b = saved.normed,
                       .c = gradients_.head(),
                       .a_layout = MatrixLayout::transposed});
  });
  Tensor d_x = Tensor::zeros(saved.x.shape(), Dtype::f32);
  norm_backward({saved.x, values_.final_norm(), saved.rms, d_normed, gradients_.final_norm()}, d_x);
  return d_x;
}

}  // namespace switchyard::train
