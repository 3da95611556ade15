// SPDX-License-Identifier: Apache-2.0
// C functions for gpu_compare.py: movement and experts of one rank on a GPU, with a given routing.
// The caller owns all tensors, which are contiguous and on the GPU.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;

struct Sizes {
  std::int64_t num_tokens, hidden, intermediate, num_experts, top_k, alignment;
  std::int64_t portable;    // 1: use the kernels that run on every GPU
  std::int64_t form;        // a Form
  std::int64_t is_exact;    // 1: exact sizing; otherwise bounded
  std::int64_t makes_rows;  // 1: dispatch makes rows even if the experts could read tokens
};
enum Form : std::int64_t {
  kSwiglu,
  kGptOss,  // biases and gpt-oss's clamped SwiGLU
};

// The tensors of a step. Inference needs none of the gradients.
struct Tensors {
  void* x;        // [T, H] bf16
  void* ids;      // [T, K] i32
  void* weights;  // [T, K] f32
  void* gate_up;  // [E, 2I, H] bf16
  void* down;     // [E, H, I] bf16
  void* y;        // out [T, H] bf16
  void* d_y;      // [T, H] bf16
  void* d_x;      // out, like all that follow
  void* d_weights;
  void* d_gate_up;
  void* d_down;
  // For kGptOss.
  void* gate_up_bias;  // [E, 2I] bf16
  void* down_bias;     // [E, H] bf16
  void* d_gate_up_bias;
  void* d_down_bias;
};

struct Numbers {
  std::int64_t host_syncs;
  std::int64_t bytes_held;  // GPU memory, in use or kept for reuse
  // Bytes kept from a training forward to its backward: first x (by reference) and the experts'
  // inner values, then the plan.
  std::int64_t saved_activations = 0;
  std::int64_t saved_integers = 0;
};

// Experts of packed tensors, unpacked only once so that the host stays ahead of the GPU at small
// batches.
template <typename Expert>
struct Unpacked {
  void* gate_up = nullptr;
  void* down = nullptr;
  std::vector<Expert> experts;
};

struct Layer {
  explicit Layer(const Sizes& sizes, void* stream)
      : s(sizes),
        device(
            Device::cuda({.stream = {stream},
                          .kernels = s.portable != 0 ? CudaKernels::portable : CudaKernels::best})),
        comm(connect({.backend = "threads"})),
        dispatcher(
            *comm, ExpertPlacement::contiguous(static_cast<int>(s.num_experts), 1),
            {.plan = {.hidden = s.hidden,
                      .dtype = Dtype::bf16,
                      .alignment = s.alignment,
                      .sizing = s.is_exact != 0 ? Sizing::exact() : Sizing::bounded(most_rows())}},
            device),
        experts({.hidden = s.hidden,
                 .intermediate = s.intermediate,
                 .dtype = Dtype::bf16,
                 .activation = has_biases() ? Activation::clamped_swiglu : Activation::swiglu,
                 .clamp_limit = 7.0F,
                 .gate_alpha = 1.702F,
                 .up_offset = 1.0F},
                device) {}

  bool has_biases() const { return s.form == kGptOss; }

  bool reads_tokens() const { return s.makes_rows == 0 && experts.reads_tokens(); }

  // Returns enough rows for any routing.
  std::int64_t most_rows() const {
    const auto rows = s.num_tokens * s.top_k + s.num_experts * (s.alignment - 1);
    return (rows + s.alignment - 1) / s.alignment * s.alignment;
  }

  static TensorView bf16(void* data, const Shape& shape) {
    return {static_cast<Bfloat16*>(data), shape, Memory::gpu};
  }
  TensorView tokens(void* data) const { return bf16(data, {s.num_tokens, s.hidden}); }
  TensorView scalars(void* data) const {
    return {static_cast<float*>(data), {s.num_tokens, s.top_k}, Memory::gpu};
  }
  Tensor take_rows(std::int64_t width) const {
    return device.empty({plan->row_capacity(), width}, Dtype::bf16);
  }
  TokenRows token_rows(const Tensors& t) const {
    return {.x = tokens(t.x), .row_sources = plan->row_sources(), .top_k = s.top_k};
  }

  // The packed tensors of the experts, or of their gradients.
  struct Pointers {
    void *gate_up, *down, *gate_up_bias, *down_bias;
  };
  template <typename Packed, typename Expert>
  const std::vector<Expert>& unpacked(const Pointers& p, Unpacked<Expert>& kept) const {
    if (kept.gate_up != p.gate_up || kept.down != p.down) {
      Packed packed{.gate_up = bf16(p.gate_up, {s.num_experts, 2 * s.intermediate, s.hidden}),
                    .down = bf16(p.down, {s.num_experts, s.hidden, s.intermediate})};
      if (has_biases()) {
        packed.gate_up_bias = bf16(p.gate_up_bias, {s.num_experts, 2 * s.intermediate});
        packed.down_bias = bf16(p.down_bias, {s.num_experts, s.hidden});
      }
      kept = {p.gate_up, p.down, unpack(packed, experts.options().activation)};
    }
    return kept.experts;
  }
  const std::vector<ExpertWeights>& weights_of(const Tensors& t) {
    return unpacked<PackedExperts>(Pointers{t.gate_up, t.down, t.gate_up_bias, t.down_bias},
                                   weights);
  }
  const std::vector<ExpertGradients>& gradients_of(const Tensors& t) {
    return unpacked<PackedExpertViews>(
        Pointers{t.d_gate_up, t.d_down, t.d_gate_up_bias, t.d_down_bias}, gradients);
  }

  void forward(const Tensors& t, bool training);
  void backward(const Tensors& t);
  void backward_of_tokens(const Tensors& t);
  void backward_of_rows(const Tensors& t);
  Numbers numbers() const;

  Sizes s;
  Device device;
  std::unique_ptr<Communicator> comm;
  Dispatcher dispatcher;
  Experts experts;
  Unpacked<ExpertWeights> weights;
  Unpacked<ExpertGradients> gradients;
  // Kept from forward to backward.
  std::optional<Plan> plan;
  std::optional<Tensor> inner;
  std::optional<CapturedGraph> graph;
};

void Layer::forward(const Tensors& t, bool training) {
  plan.reset();  // this step reuses their memory
  inner.reset();
  const Shape picks{s.num_tokens, s.top_k};
  plan = dispatcher.plan(TensorView(static_cast<std::int32_t*>(t.ids), picks, Memory::gpu));
  std::optional<TensorView> kept;
  if (training) kept = inner.emplace(take_rows(2 * s.intermediate));
  const auto& matrices = weights_of(t);
  const auto groups = RowGroups::of(*plan);
  Tensor rows;
  if (reads_tokens()) {
    rows = take_rows(s.hidden);
    experts.forward(matrices, groups, {.tokens = token_rows(t)}, {.out = rows, .inner = kept});
  } else {
    rows = dispatcher.dispatch(*plan, tokens(t.x));
    experts.forward(matrices, groups, {.rows = rows}, {.out = rows, .inner = kept});
  }
  dispatcher.combine(*plan, {.rows = rows, .weights = scalars(t.weights)}, tokens(t.y));
}

void Layer::backward(const Tensors& t) {
  if (reads_tokens()) {
    backward_of_tokens(t);
  } else {
    backward_of_rows(t);
  }
  inner.reset();
}

void Layer::backward_of_tokens(const Tensors& t) {
  Tensor d_rows = take_rows(s.hidden);
  const TensorView d_weights = scalars(t.d_weights);
  device.set_zero(d_weights);  // picks without a row keep zero
  experts.backward(weights_of(t), RowGroups::of(*plan),
                   {.row_weights = scalars(t.weights),
                    .inner = *inner,
                    .d_out = tokens(t.d_y),
                    .tokens = token_rows(t)},
                   {.d_rows = d_rows, .d_row_weights = d_weights, .gradients = gradients_of(t)});
  dispatcher.dispatch_backward(*plan, {.d_rows = d_rows}, {.d_x = tokens(t.d_x)});
}

void Layer::backward_of_rows(const Tensors& t) {
  Tensor d_out = take_rows(s.hidden);
  Tensor row_weights = device.empty({plan->row_capacity()}, Dtype::f32);
  dispatcher.dispatch(*plan, {.x = tokens(t.d_y), .weights = scalars(t.weights)},
                      {.rows = d_out, .row_weights = row_weights});
  Tensor d_rows = take_rows(s.hidden);
  Tensor d_row_weights = device.empty({plan->row_capacity()}, Dtype::f32);
  experts.backward(
      weights_of(t), RowGroups::of(*plan),
      {.rows = dispatcher.dispatch(*plan, tokens(t.x)),
       .row_weights = row_weights,
       .inner = *inner,
       .d_out = d_out},
      {.d_rows = d_rows, .d_row_weights = d_row_weights, .gradients = gradients_of(t)});
  dispatcher.dispatch_backward(*plan, {.d_rows = d_rows, .d_row_weights = d_row_weights},
                               {.d_x = tokens(t.d_x), .d_weights = scalars(t.d_weights)});
}

Numbers Layer::numbers() const {
  Numbers result{.host_syncs = device.host_syncs(), .bytes_held = device.bytes_held()};
  if (!inner) return result;
  result.saved_activations = s.num_tokens * s.hidden * size_of(Dtype::bf16) + inner->bytes();
  // sources() would wait for the device. It holds as many numbers as slots().
  result.saved_integers = 2 * plan->slots().bytes() + plan->target_ranks().bytes() +
                          plan->row_sources().bytes() + plan->source_offsets().bytes() +
                          plan->row_offsets().bytes() + plan->group_rows().bytes();
  return result;
}

// Returns 0, or prints the error and returns 1.
template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "switchyard: %s\n", error.what());
    return 1;
  }
}

template <typename Work>
int call(void* layer, const Work& work) {
  return guarded([&] { work(*static_cast<Layer*>(layer)); });
}

}  // namespace

extern "C" {

// Returns null on failure.
void* switchyard_make(const Sizes* sizes, void* stream) {
  void* layer = nullptr;
  guarded([&] { layer = new Layer(*sizes, stream); });
  return layer;
}

void switchyard_free(void* layer) { delete static_cast<Layer*>(layer); }

int switchyard_numbers(void* layer, Numbers* numbers) {
  return call(layer, [&](Layer& l) { *numbers = l.numbers(); });
}

// Computes y = Σ_k weights · expert(x). `training` keeps what backward needs.
int switchyard_forward(void* layer, const Tensors* tensors, int training) {
  return call(layer, [&](Layer& l) { l.forward(*tensors, training != 0); });
}

// Must follow a training forward with the same tensors.
int switchyard_backward(void* layer, const Tensors* tensors) {
  return call(layer, [&](Layer& l) { l.backward(*tensors); });
}

// Captures a forward, or a forward and backward if `training` is set, that has just run with these
// tensors. A replay uses whatever the tensors hold then. Fails on CUDA's default stream.
int switchyard_capture(void* layer, const Tensors* tensors, int training) {
  return call(layer, [&](Layer& l) {
    l.graph.emplace(l.device, [&] {
      l.forward(*tensors, training != 0);
      if (training != 0) l.backward(*tensors);
    });
  });
}

int switchyard_replay(void* layer) {
  return call(layer, [](Layer& l) { l.graph->replay(); });
}

}  // extern "C"
