// SPDX-License-Identifier: Apache-2.0
// Times each grouped product of an MoE layer on a GPU, called as the layer calls it, next to a
// dense product with the same reduction length and to its floor:
// gpu_products [--only PART_OF_NAME] [--even] [SHAPE …]
// With --even the row counts of experts differ by at most one.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bench/gpu_ceiling.h"
#include "bench/layer_shapes.h"
#include "bench/random_rows.h"
#include "bench/routing.h"
#include "core/require.h"
#include "device/cuda/backend.h"
#include "device/cuda/experts/row_passes.h"
#include "device/cuda/grouped_gemm.h"
#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;
using cuda::MatrixRef;
using cuda::Rows;
using cuda::SourceRows;
using Side = cuda::WeightGradientGemm::Side;

using cli::LayerShape;

// The dense products to compare with, by what they reduce over: H, I, 2I or the rows of an expert.
// They have as many FLOPs as the layer's own product, and the weight gradient's also has its
// output.
enum Dense { kUp, kDown, kUpBackward, kGradient, kNumDense };
constexpr std::array<const char*, kNumDense> kDenseNames = {
    "dense, as up", "dense, as down", "dense, as up backward", "dense, as up gradient"};
cli::DenseProduct dense_product(const LayerShape& s, Dense dense) {
  const auto rows = s.num_tokens * s.top_k;
  const auto inner = 2 * s.intermediate;
  switch (dense) {
    case kUp:
      return {rows, inner, s.hidden};
    case kDown:
      return {rows, s.hidden, s.intermediate};
    case kUpBackward:
      return {rows, s.hidden, inner};
    default:
      return {s.num_experts * inner, s.hidden,
              std::max<std::int64_t>(rows / s.num_experts, 8) / 8 * 8};
  }
}

// The speed of the GPU, measured in the same run.
struct Ceilings {
  std::array<cli::CoolAndHot, kNumDense> dense = {};  // FLOP/s; 0 without cuBLAS
  cli::CoolAndHot copy = {};                          // bytes/s, read and written
};

// The work that one product cannot avoid.
struct Work {
  double thirds;  // FLOPs, in thirds of the forward's
  Dense dense;
  double elements;  // bf16 numbers that are read or written, each once
};

// The tensors of one layer, filled with random numbers, and its products.
class Products {
 public:
  Products(const LayerShape& shape, cli::RoutingKind routing, const Device& device)
      : s_(shape),
        device_(device),
        context_(cuda::context_of(device)),
        options_{.hidden = s_.hidden, .intermediate = s_.intermediate, .dtype = Dtype::bf16},
        comm_(connect({.backend = "threads"})),
        planner_(*comm_, ExpertPlacement::contiguous(static_cast<int>(s_.num_experts), 1),
                 {.hidden = s_.hidden, .dtype = Dtype::bf16}, device),
        plan_(planner_.plan(
            device.copy_of(cli::make_routing({.kind = routing,
                                              .num_tokens = s_.num_tokens,
                                              .top_k = s_.top_k,
                                              .num_experts = static_cast<int>(s_.num_experts)})))) {
    const auto rows = plan_.row_capacity();
    tokens_ = make({s_.num_tokens, s_.hidden});
    weights_ = device.copy_of(cli::random_rows({s_.num_tokens, s_.top_k}, Dtype::f32, 2));
    d_weights_ = device.empty({s_.num_tokens, s_.top_k}, Dtype::f32);
    wide_ = make({rows, s_.hidden});
    out_ = make({rows, s_.hidden});
    inner_rows_ = make({rows, 2 * s_.intermediate});
    activated_ = make({rows, s_.intermediate});
    gate_up_ = make({s_.num_experts, 2 * s_.intermediate, s_.hidden});
    down_ = make({s_.num_experts, s_.hidden, s_.intermediate});
    zeros_ = device.empty({2}, Dtype::i32);
    device.set_zero(zeros_);
    groups_ = {.row_offsets = reinterpret_cast<const std::int32_t*>(plan_.row_offsets().data()),
               .group_rows = reinterpret_cast<const std::int32_t*>(plan_.group_rows().data()),
               .count = static_cast<int>(s_.num_experts),
               .row_capacity = rows,
               .tickets = reinterpret_cast<std::int32_t*>(zeros_.data())};
    order_ = device.empty({s_.num_experts}, Dtype::i32);
    auto* const order = reinterpret_cast<std::int32_t*>(order_.data());
    cuda::hopper::order_groups(groups_, order, context_);
    groups_.order = order;
    inner_ = refs_to(gate_up_, 2, s_.intermediate, s_.hidden);
    outer_ = refs_to(down_, 1, s_.hidden, s_.intermediate);
  }

  struct Product {
    const char* name;
    Work work;
    std::function<void()> run;
  };
  std::vector<Product> all() {
    auto result = forward_products();
    const auto backward = backward_products();
    result.insert(result.end(), backward.begin(), backward.end());
    return result;
  }
  // Repeated products overflow, and a GPU is faster on NaNs, so inputs are refilled.
  void refill() {
    fill(inner_rows_);
    fill(activated_);
  }
  double flops_of_third() const {
    return 2.0 * static_cast<double>(s_.num_tokens * s_.top_k * s_.hidden * s_.intermediate);
  }

 private:
  Tensor make(const Shape& shape) {
    Tensor result = device_.empty(shape, Dtype::bf16);
    fill(result);
    return result;
  }
  void fill(Tensor& tensor) const {
    // Repeats a few million random numbers. A GPU's clock depends on the data, and repeats are as
    // good as new numbers for that.
    static const Tensor kNumbers = cli::random_rows({std::int64_t{1} << 23}, Dtype::bf16, 1);
    const auto count = tensor.shape().num_elements();
    for (std::int64_t first = 0; first < count; first += kNumbers.rows()) {
      const auto piece = std::min(kNumbers.rows(), count - first);
      const TensorView to(reinterpret_cast<Bfloat16*>(tensor.data()) + first, {piece}, Memory::gpu);
      device_.copy(kNumbers.view().slice(0, piece), to);
    }
  }
  std::vector<MatrixRef> refs_to(const Tensor& packed, int parts, std::int64_t rows,
                                 std::int64_t columns) const {
    std::vector<MatrixRef> refs;
    for (int part = 0; part < parts; ++part) {
      for (std::int64_t e = 0; e < s_.num_experts; ++e) {
        auto* first = reinterpret_cast<Bfloat16*>(const_cast<std::byte*>(packed.data()));
        refs.push_back({first + (e * parts + part) * rows * columns, columns});
      }
    }
    return refs;
  }

  static Rows rows_of(const Tensor& tensor) { return {tensor.data(), tensor.shape()[1]}; }
  SourceRows rows() const { return {rows_of(wide_)}; }
  SourceRows sources() const {
    return {rows_of(tokens_), row_sources(), static_cast<int>(s_.top_k), s_.num_tokens};
  }
  const std::int32_t* row_sources() const {
    return reinterpret_cast<const std::int32_t*>(plan_.row_sources().data());
  }
  template <typename Float>
  cuda::RowNumbers<Float> numbers(Tensor& tensor) const {
    return {reinterpret_cast<Float*>(tensor.data()), row_sources()};
  }
  cuda::GroupMatrices inner() const { return {inner_, 2, s_.intermediate, s_.hidden}; }
  cuda::GroupMatrices outer() const { return {outer_, 1, s_.hidden, s_.intermediate}; }

  // The numbers in tensors of the layer.
  struct Elements {
    explicit Elements(const LayerShape& s)
        : x(product(s.num_tokens, s.hidden)),
          rows(product(s.num_tokens * s.top_k, s.hidden)),
          activated(product(s.num_tokens * s.top_k, s.intermediate)),
          down(product(s.num_experts * s.hidden, s.intermediate)) {}
    static double product(std::int64_t a, std::int64_t b) { return static_cast<double>(a * b); }

    double x, rows, activated, down;
    double inner = 2 * activated;
    double up = 2 * down;
  };
  std::vector<Product> forward_products() {
    const Elements n(s_);
    const double out = n.up + n.inner;
    return {
        {"up", {2, kUp, n.rows + out}, [this] { up(); }},
        {"up + activation", {2, kUp, n.rows + out + n.activated}, [this] { activated(rows()); }},
        {"up + activation, tokens",
         {2, kUp, n.x + out + n.activated},
         [this] { activated(sources()); }},
        {"down", {1, kDown, n.activated + n.down + n.rows}, [this] { down(); }}};
  }
  std::vector<Product> backward_products() {
    const Elements n(s_);
    // The activation's gradient reads gate and up, and writes their gradients and the activation.
    const double gradient = n.down + 2 * n.inner + n.activated;
    return {
        {"down backward", {1, kUp, n.rows + n.down + n.activated}, [this] { down_backward(); }},
        {"down backward + activation",
         {1, kUp, n.rows + gradient},
         [this] { activation_gradient(rows()); }},
        {"down backward + activation, tokens",
         {1, kUp, n.x + gradient},
         [this] { activation_gradient(sources()); }},
        {"up backward", {2, kUpBackward, n.inner + n.up + n.rows}, [this] { up_backward(); }},
        {"up gradient", {2, kGradient, n.inner + n.rows + n.up}, [this] { up_gradient(rows()); }},
        {"up gradient, tokens",
         {2, kGradient, n.inner + n.x + n.up},
         [this] { up_gradient(sources()); }},
        {"down gradient",
         {1, kGradient, n.activated + n.rows + n.down},
         [this] { down_gradient(rows()); }},
        {"down gradient, tokens", {1, kGradient, n.activated + n.x + n.down}, [this] {
           down_gradient(sources());
         }}};
  }

  void up() {
    cuda::grouped_gemm(cuda::ForwardGemm{.dtype = Dtype::bf16,
                                         .groups = groups_,
                                         .a = rows(),
                                         .b = inner(),
                                         .c = rows_of(inner_rows_)},
                       context_);
  }
  void activated(const SourceRows& a) {
    cuda::hopper::grouped_gemm(cuda::ActivatedGemm{.options = options_,
                                                   .groups = groups_,
                                                   .a = a,
                                                   .b = inner(),
                                                   .inner = rows_of(inner_rows_),
                                                   .activated = rows_of(activated_)},
                               context_);
  }
  void down() {
    cuda::grouped_gemm(cuda::ForwardGemm{.dtype = Dtype::bf16,
                                         .groups = groups_,
                                         .a = rows_of(activated_),
                                         .b = outer(),
                                         .c = rows_of(out_)},
                       context_);
  }
  void down_backward() {
    cuda::grouped_gemm(cuda::InputGradientGemm{.dtype = Dtype::bf16,
                                               .groups = groups_,
                                               .a = rows(),
                                               .b = outer(),
                                               .c = rows_of(activated_)},
                       context_);
  }
  void activation_gradient(const SourceRows& a) {
    cuda::hopper::grouped_gemm(
        cuda::ActivationGradientGemm{.options = options_,
                                     .groups = groups_,
                                     .a = a,
                                     .b = outer(),
                                     .inner = rows_of(inner_rows_),
                                     .activated = rows_of(activated_),
                                     .weights = numbers<const float>(weights_),
                                     .d_weights = numbers<float>(d_weights_)},
        context_);
  }
  void up_backward() {
    cuda::grouped_gemm(cuda::InputGradientGemm{.dtype = Dtype::bf16,
                                               .groups = groups_,
                                               .a = rows_of(inner_rows_),
                                               .b = inner(),
                                               .c = rows_of(out_)},
                       context_);
  }
  void up_gradient(const SourceRows& x) {
    cuda::grouped_gemm(cuda::WeightGradientGemm{.dtype = Dtype::bf16,
                                                .groups = groups_,
                                                .a = {rows_of(inner_rows_)},
                                                .b = x,
                                                .narrow = Side::b,
                                                .c = inner(),
                                                .c_dtype = Dtype::bf16},
                       context_);
  }
  void down_gradient(const SourceRows& d_out) {
    cuda::grouped_gemm(cuda::WeightGradientGemm{.dtype = Dtype::bf16,
                                                .groups = groups_,
                                                .a = d_out,
                                                .b = {rows_of(activated_)},
                                                .narrow = Side::a,
                                                .c = outer(),
                                                .c_dtype = Dtype::bf16},
                       context_);
  }

  LayerShape s_;
  Device device_;
  cuda::Context& context_;
  ExpertsOptions options_;
  std::unique_ptr<Communicator> comm_;
  Planner planner_;
  Plan plan_;
  Tensor tokens_, weights_, d_weights_, wide_, out_, inner_rows_, activated_, gate_up_, down_,
      zeros_, order_;
  cuda::Groups groups_;
  std::vector<MatrixRef> inner_, outer_;
};

// Returns 0 without a dense product, because the bytes alone do not say what is possible.
double floor_seconds(const Work& work, double flops, const Ceilings& ceilings) {
  const double dense = ceilings.dense[work.dense].cool;
  if (dense == 0.0) return 0.0;
  return std::max(flops / dense, size_of(Dtype::bf16) * work.elements / ceilings.copy.cool);
}

void print_product(const LayerShape& shape, const Products::Product& product, double flops,
                   const cli::CoolAndHot& seconds, const Ceilings& ceilings) {
  const auto rate = flops / seconds;
  const auto& dense = ceilings.dense[product.work.dense];
  fmt::print("{:<15} {:<35} {:>8.3f} {:>7.0f} {:>7.0f}", shape.name, product.name,
             seconds.cool * 1e3, rate.cool * 1e-12, rate.hot * 1e-12);
  if (const double floor = floor_seconds(product.work, flops, ceilings); floor > 0.0) {
    fmt::print(" {:>5.0f}% {:>5.0f}% {:>9.3f} {:>5.0f}%", rate.cool / dense.cool * 100,
               rate.hot / dense.hot * 100, floor * 1e3, floor / seconds.cool * 100);
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void measure_dense(const LayerShape& shape, void* stream, Ceilings& ceilings) {
  for (int i = 0; i < kNumDense; ++i) {
    std::string reason;
    auto& rate = ceilings.dense[i];
    rate = cli::gemm_ceiling(stream, dense_product(shape, static_cast<Dense>(i)), reason);
    if (reason.empty()) {
      fmt::print("{:<15} {:<35} {:>8} {:>7.0f} {:>7.0f}\n", shape.name, kDenseNames[i], "",
                 rate.cool * 1e-12, rate.hot * 1e-12);
    } else {
      fmt::print("{:<15} {}: {}\n", shape.name, kDenseNames[i], reason);
    }
    std::fflush(stdout);
  }
}

struct Options {
  std::string only;
  cli::RoutingKind routing = cli::RoutingKind::uniform;
  std::vector<std::string> shapes;
};
Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (auto argument = arguments.begin(); argument != arguments.end(); ++argument) {
    if (*argument == "--only" && argument + 1 != arguments.end()) {
      options.only = *++argument;
    } else if (*argument == "--even") {
      options.routing = cli::RoutingKind::balanced;
    } else {
      options.shapes.push_back(*argument);
    }
  }
  return options;
}

void time_shape(const LayerShape& shape, const Options& options, const Device& device,
                Ceilings ceilings) {
  void* const stream = device.stream().handle;
  measure_dense(shape, stream, ceilings);
  Products products(shape, options.routing, device);
  for (const auto& product : products.all()) {
    if (std::string(product.name).find(options.only) == std::string::npos) continue;
    products.refill();
    const double flops = product.work.thirds * products.flops_of_third();
    print_product(shape, product, flops, cli::time_on_gpu(stream, product.run), ceilings);
  }
}

std::vector<LayerShape> find_shapes(const std::vector<std::string>& names) {
  if (names.empty()) return {std::begin(cli::kGpuShapes), std::end(cli::kGpuShapes)};
  std::vector<LayerShape> shapes;
  for (const std::string& name : names) {
    const LayerShape* shape = cli::find_layer_shape(name);
    require(shape != nullptr, "unknown shape {}; known: {}", name, cli::layer_shape_names());
    shapes.push_back(*shape);
  }
  return shapes;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse({argv + 1, argv + argc});
    const auto shapes = find_shapes(options.shapes);
    const Device device = Device::cuda();
    void* const stream = device.stream().handle;
    const Ceilings ceilings{.copy = cli::copy_ceiling(stream, 0, [&](const auto& copy) {
                              return cli::time_on_gpu(stream, copy);
                            })};
    fmt::print("Copy: {:.0f} GB/s cool, {:.0f} hot, read and written\n\n",
               ceilings.copy.cool * 1e-9, ceilings.copy.hot * 1e-9);
    fmt::print("{:<15} {:<35} {:>8} {:>7} {:>7} {:>13} {:>9} {:>6}\n", "", "", "ms cool", "TF cool",
               "hot", "of dense", "floor, ms", "of it");
    for (const LayerShape& shape : shapes) time_shape(shape, options, device, ceilings);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_products: {}\n", error.what());
    return 1;
  }
}
