// Times each grouped product of an MoE layer on a GPU, called as the layer calls it, next to a
// dense product of the same size: gpu_products [--only PART_OF_NAME] [SHAPE …]
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "bench/gpu_ceiling.h"
#include "bench/random_rows.h"
#include "bench/routing.h"
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

struct LayerShape {
  std::string name;
  std::int64_t tokens, hidden, intermediate, experts, top_k;
};
const std::vector<LayerShape> kShapes = {{"qwen3-30b", 16384, 2048, 768, 128, 8},
                                         {"olmoe", 16384, 2048, 1024, 64, 8},
                                         {"mixtral", 8192, 4096, 14336, 8, 2},
                                         {"dsv3-slice", 4096, 7168, 2048, 32, 8}};

// The tensors of one layer, filled with random numbers, and its products.
class Products {
 public:
  Products(const LayerShape& shape, const Device& device)
      : s_(shape),
        device_(device),
        context_(cuda::context_of(device)),
        options_{.hidden = s_.hidden, .intermediate = s_.intermediate, .dtype = Dtype::bf16},
        comm_(connect({.backend = "threads"})),
        planner_(*comm_, ExpertPlacement::contiguous(static_cast<int>(s_.experts), 1),
                 {.hidden = s_.hidden, .dtype = Dtype::bf16}, device),
        plan_(planner_.plan(
            device.copy_of(cli::make_routing({.num_tokens = s_.tokens,
                                              .top_k = s_.top_k,
                                              .num_experts = static_cast<int>(s_.experts)})))) {
    const auto rows = plan_.row_capacity();
    tokens_ = make({s_.tokens, s_.hidden});
    weights_ = device.copy_of(cli::random_rows({s_.tokens, s_.top_k}, Dtype::f32, 2));
    d_weights_ = device.empty({s_.tokens, s_.top_k}, Dtype::f32);
    wide_ = make({rows, s_.hidden});
    out_ = make({rows, s_.hidden});
    inner_rows_ = make({rows, 2 * s_.intermediate});
    activated_ = make({rows, s_.intermediate});
    gate_up_ = make({s_.experts, 2 * s_.intermediate, s_.hidden});
    down_ = make({s_.experts, s_.hidden, s_.intermediate});
    inner_ = refs_to(gate_up_, 2, s_.intermediate, s_.hidden);
    outer_ = refs_to(down_, 1, s_.hidden, s_.intermediate);
  }

  struct Product {
    const char* name;
    double parts;  // its FLOPs, in thirds of the forward's
    std::function<void()> run;
  };
  std::vector<Product> all() {
    return {{"up", 2, [this] { up(); }},
            {"up + activation", 2, [this] { activated(rows()); }},
            {"up + activation, tokens", 2, [this] { activated(sources()); }},
            {"down", 1, [this] { down(); }},
            {"down backward", 1, [this] { down_backward(); }},
            {"down backward + activation", 1, [this] { activation_gradient(rows()); }},
            {"down backward + activation, tokens", 1, [this] { activation_gradient(sources()); }},
            {"up backward", 2, [this] { up_backward(); }},
            {"up gradient", 2, [this] { up_gradient(rows()); }},
            {"up gradient, tokens", 2, [this] { up_gradient(sources()); }},
            {"down gradient", 1, [this] { down_gradient(rows()); }},
            {"down gradient, tokens", 1, [this] { down_gradient(sources()); }}};
  }
  // Repeated products overflow, and a GPU is faster on NaNs, so inputs are refilled.
  void refill() {
    fill(inner_rows_);
    fill(activated_);
  }
  double flops_of_part() const {
    return 2.0 * static_cast<double>(s_.tokens * s_.top_k * s_.hidden * s_.intermediate);
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
      for (std::int64_t e = 0; e < s_.experts; ++e) {
        auto* first = reinterpret_cast<Bfloat16*>(const_cast<std::byte*>(packed.data()));
        refs.push_back({first + (e * parts + part) * rows * columns, columns});
      }
    }
    return refs;
  }

  cuda::Groups groups() const {
    return {reinterpret_cast<const std::int32_t*>(plan_.row_offsets().data()),
            reinterpret_cast<const std::int32_t*>(plan_.group_rows().data()),
            static_cast<int>(s_.experts), plan_.row_capacity()};
  }
  static Rows rows_of(const Tensor& tensor) { return {tensor.data(), tensor.shape()[1]}; }
  SourceRows rows() const { return {rows_of(wide_)}; }
  SourceRows sources() const {
    return {rows_of(tokens_), row_sources(), static_cast<int>(s_.top_k), s_.tokens};
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

  void up() {
    cuda::grouped_gemm(cuda::ForwardGemm{.dtype = Dtype::bf16,
                                         .groups = groups(),
                                         .a = rows(),
                                         .b = inner(),
                                         .c = rows_of(inner_rows_)},
                       context_);
  }
  void activated(const SourceRows& a) {
    cuda::hopper::grouped_gemm(cuda::ActivatedGemm{.options = options_,
                                                   .groups = groups(),
                                                   .a = a,
                                                   .b = inner(),
                                                   .inner = rows_of(inner_rows_),
                                                   .activated = rows_of(activated_)},
                               context_);
  }
  void down() {
    cuda::grouped_gemm(cuda::ForwardGemm{.dtype = Dtype::bf16,
                                         .groups = groups(),
                                         .a = rows_of(activated_),
                                         .b = outer(),
                                         .c = rows_of(out_)},
                       context_);
  }
  void down_backward() {
    cuda::grouped_gemm(cuda::InputGradientGemm{.dtype = Dtype::bf16,
                                               .groups = groups(),
                                               .a = rows(),
                                               .b = outer(),
                                               .c = rows_of(activated_)},
                       context_);
  }
  void activation_gradient(const SourceRows& a) {
    cuda::hopper::grouped_gemm(
        cuda::ActivationGradientGemm{.options = options_,
                                     .groups = groups(),
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
                                               .groups = groups(),
                                               .a = rows_of(inner_rows_),
                                               .b = inner(),
                                               .c = rows_of(out_)},
                       context_);
  }
  void up_gradient(const SourceRows& x) {
    cuda::grouped_gemm(cuda::WeightGradientGemm{.dtype = Dtype::bf16,
                                                .groups = groups(),
                                                .a = {rows_of(inner_rows_)},
                                                .b = x,
                                                .narrow = Side::b,
                                                .c = inner(),
                                                .c_dtype = Dtype::bf16},
                       context_);
  }
  void down_gradient(const SourceRows& d_out) {
    cuda::grouped_gemm(cuda::WeightGradientGemm{.dtype = Dtype::bf16,
                                                .groups = groups(),
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
  Tensor tokens_, weights_, d_weights_, wide_, out_, inner_rows_, activated_, gate_up_, down_;
  std::vector<MatrixRef> inner_, outer_;
};

void time_shape(const LayerShape& shape, const std::string& only, const Device& device) {
  void* const stream = device.stream().handle;
  std::string reason;
  const auto rows = shape.tokens * shape.top_k;
  const auto print = [&](const std::string& name, const cli::CoolAndHot& rate) {
    fmt::print("{:<11} {:<36} {:>6.0f} {:>6.0f}\n", shape.name, name, rate.cool * 1e-12,
               rate.hot * 1e-12);
    std::fflush(stdout);
  };
  if (only.empty()) {
    print("dense, as up",
          cli::gemm_ceiling(stream, {rows, 2 * shape.intermediate, shape.hidden}, reason));
    print("dense, as down",
          cli::gemm_ceiling(stream, {rows, shape.hidden, shape.intermediate}, reason));
  }
  Products products(shape, device);
  for (const auto& product : products.all()) {
    if (std::string(product.name).find(only) == std::string::npos) continue;
    products.refill();
    const auto seconds = cli::time_on_gpu(stream, product.run);
    const double flops = product.parts * products.flops_of_part();
    print(product.name, {flops / seconds.cool, flops / seconds.hot});
  }
}

void require_shape(const std::string& name) {
  std::string known;
  for (const LayerShape& shape : kShapes) {
    if (shape.name == name) return;
    known += " " + shape.name;
  }
  throw InvalidArgument(fmt::format("there is no shape {}, only{}", name, known));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<std::string> names(argv + 1, argv + argc);
    std::string only;
    if (names.size() >= 2 && names[0] == "--only") {
      only = names[1];
      names.erase(names.begin(), names.begin() + 2);
    }
    for (const std::string& name : names) require_shape(name);
    const Device device = Device::cuda();
    fmt::print("{:<11} {:<36} {:>6} {:>6}\n", "", "TFLOP/s", "cool", "hot");
    for (const LayerShape& shape : kShapes) {
      const bool wanted =
          names.empty() || std::find(names.begin(), names.end(), shape.name) != names.end();
      if (wanted) time_shape(shape, only, device);
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_products: {}\n", error.what());
    return 1;
  }
}
