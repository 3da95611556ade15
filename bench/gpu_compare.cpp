// What gpu_compare.py calls: movement and experts of one rank on a GPU, with the routing given, as
// functions of C. The caller owns all tensors; they are contiguous and on the GPU.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;

struct Sizes {
  std::int64_t num_tokens, hidden, intermediate, num_experts, top_k;
  std::int64_t alignment;
  std::int64_t bounded;  // 1: rows for every routing, and no waiting
};

struct Layer {
  explicit Layer(const Sizes& sizes, void* stream)
      : s(sizes),
        device(Device::cuda({.stream = {stream}})),
        comm(connect({.backend = "threads"})),
        dispatcher(
            *comm, ExpertPlacement::contiguous(static_cast<int>(s.num_experts), 1),
            {.plan = {.hidden = s.hidden,
                      .dtype = Dtype::bf16,
                      .alignment = s.alignment,
                      .sizing = s.bounded != 0 ? Sizing::bounded(most_rows()) : Sizing::exact()}},
            device),
        experts({.hidden = s.hidden, .intermediate = s.intermediate, .dtype = Dtype::bf16},
                device) {}

  std::int64_t most_rows() const {
    const auto rows = s.num_tokens * s.top_k + s.num_experts * (s.alignment - 1);
    return (rows + s.alignment - 1) / s.alignment * s.alignment;
  }

  TensorView tokens(void* data) const { return rows16(data, {s.num_tokens, s.hidden}); }
  TensorView scalars(void* data) const {
    return {static_cast<float*>(data), {s.num_tokens, s.top_k}, Memory::gpu};
  }
  static TensorView rows16(void* data, const Shape& shape) {
    return {static_cast<Bfloat16*>(data), shape, Memory::gpu};
  }
  PackedExpertGradients packed(void* gate_up, void* down) const {
    return {.gate_up = rows16(gate_up, {s.num_experts, 2 * s.intermediate, s.hidden}),
            .down = rows16(down, {s.num_experts, s.hidden, s.intermediate})};
  }
  std::vector<ExpertWeights> weights(void* gate_up, void* down) const {
    const auto views = packed(gate_up, down);
    return unpack(PackedExperts{.gate_up = views.gate_up, .down = views.down});
  }

  Sizes s;
  Device device;
  std::unique_ptr<Communicator> comm;
  Dispatcher dispatcher;
  Experts experts;
  // From forward to backward.
  std::optional<Plan> plan;
  std::optional<Tensor> hidden;
};

int failed(const std::exception& error) {
  std::fprintf(stderr, "switchyard: %s\n", error.what());
  return 1;
}

}  // namespace

extern "C" {

void* switchyard_make(const std::int64_t* sizes, void* stream) {
  try {
    return new Layer({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]},
                     stream);
  } catch (const std::exception& error) {
    failed(error);
    return nullptr;
  }
}

void switchyard_free(void* layer) { delete static_cast<Layer*>(layer); }

std::int64_t switchyard_host_syncs(void* layer) {
  return static_cast<Layer*>(layer)->device.host_syncs();
}

// y = Σ_k weights · expert(x): x, y [T, H] bf16, ids [T, K] i32, weights [T, K] f32,
// gate_up [E, 2I, H], down [E, H, I] bf16. `training` keeps what backward needs.
int switchyard_forward(void* layer, void* const* tensors, int training) {
  try {
    auto& l = *static_cast<Layer*>(layer);
    const TensorView x = l.tokens(tensors[0]);
    const TensorView ids(static_cast<std::int32_t*>(tensors[1]), {l.s.num_tokens, l.s.top_k},
                         Memory::gpu);
    l.plan = l.dispatcher.plan(ids);
    Tensor rows = l.dispatcher.dispatch(*l.plan, x);
    l.hidden.reset();
    if (training != 0) {
      l.hidden = l.device.empty({l.plan->row_capacity(), 2 * l.s.intermediate}, Dtype::bf16);
    }
    std::optional<TensorView> hidden;
    if (l.hidden) hidden = *l.hidden;
    l.experts.forward(l.weights(tensors[3], tensors[4]), RowGroups::of(*l.plan), {.rows = rows},
                      {.out = rows, .hidden = hidden});
    l.dispatcher.combine(*l.plan, {.rows = rows, .weights = l.scalars(tensors[2])},
                         l.tokens(tensors[5]));
    return 0;
  } catch (const std::exception& error) {
    return failed(error);
  }
}

// After a training forward, with its x, weights, gate_up and down:
// d_y → d_x [T, H], d_weights [T, K] f32, d_gate_up, d_down bf16.
int switchyard_backward(void* layer, void* const* tensors) {
  try {
    auto& l = *static_cast<Layer*>(layer);
    const auto rows = l.plan->row_capacity();
    const auto take = [&] { return l.device.empty({rows, l.s.hidden}, Dtype::bf16); };
    Tensor d_out = take();
    Tensor row_weights = l.device.empty({rows}, Dtype::f32);
    l.dispatcher.dispatch(*l.plan, {.x = l.tokens(tensors[4]), .weights = l.scalars(tensors[1])},
                          {.rows = d_out, .row_weights = row_weights});
    Tensor x_rows = l.dispatcher.dispatch(*l.plan, l.tokens(tensors[0]));
    Tensor d_rows = take();
    Tensor d_row_weights = l.device.empty({rows}, Dtype::f32);
    const auto gradients = unpack(l.packed(tensors[7], tensors[8]));
    l.experts.backward(
        l.weights(tensors[2], tensors[3]), RowGroups::of(*l.plan),
        {.rows = x_rows, .row_weights = row_weights, .hidden = *l.hidden, .d_out = d_out},
        {.d_rows = d_rows, .d_row_weights = d_row_weights, .gradients = gradients});
    l.dispatcher.dispatch_backward(
        *l.plan, {.d_rows = d_rows, .d_row_weights = d_row_weights},
        {.d_x = l.tokens(tensors[5]), .d_weights = l.scalars(tensors[6])});
    l.hidden.reset();
    return 0;
  } catch (const std::exception& error) {
    return failed(error);
  }
}

}  // extern "C"
