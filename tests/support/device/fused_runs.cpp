// SPDX-License-Identifier: Apache-2.0
#include "support/device/fused_runs.h"

#include <cstring>

#include "device/cuda/backend.h"
#include "device/cuda/experts/row_passes.h"
#include "support/compare.h"

namespace switchyard::testing {
namespace {

// Views [n] as [1, n].
ConstTensorView as_row(const Tensor& numbers) {
  const ConstTensorView view = numbers.view();
  return {view.data(), view.dtype(), {1, view.rows()}, view.rows(), view.owner()};
}

const std::int32_t* ints_of(const Tensor& tensor) {
  return reinterpret_cast<const std::int32_t*>(tensor.data());
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const FusedWay& way) {
  const char* const weights[] = {"without weights", "weights of rows", "weights of assignments"};
  return out << (way.from_tokens ? "from tokens, " : "from rows, ")
             << weights[static_cast<int>(way.weights)]
             << (way.keeps_inner ? "" : ", inner not kept")
             << (way.has_d_weights ? "" : ", without gradients of weights")
             << (way.has_tickets ? ", by tickets" : "");
}

void expect_same_bits(const FusedResults& actual, const FusedResults& expected) {
  EXPECT_TRUE(same_bits(actual.inner, expected.inner)) << "inner";
  EXPECT_TRUE(same_bits(actual.activated, expected.activated)) << "activated";
  EXPECT_TRUE(same_bits(actual.d_weights, expected.d_weights)) << "d_weights";
}

FusedRuns::FusedRuns(const Device& device, const FusedProblem& problem, const Layout& layout)
    : device_(device),
      problem_(problem),
      layout_(layout),
      no_inner_(poisoned(problem.inner.shape(), Dtype::bf16)),
      no_activated_(poisoned({problem.capacity(), problem.setup.intermediate}, Dtype::bf16)),
      row_offsets_(device.copy_of(problem.row_offsets)),
      group_rows_(device.copy_of(problem.group_rows)),
      tickets_(device.copy_of(Tensor::zeros({2}, Dtype::i32))),
      sources_(place(as_row(problem.sources))),
      rows_(place(problem.rows)),
      tokens_(place(problem.tokens)),
      row_weights_(place(as_row(problem.row_weights))),
      token_weights_(place(as_row(problem.token_weights))),
      inner_(place(problem.inner)),
      gate_up_(device, problem.gate_up,
               {problem.num_groups(), 2, problem.setup.intermediate, problem.setup.hidden}, layout),
      down_(device, problem.down,
            {problem.num_groups(), 1, problem.setup.hidden, problem.setup.intermediate}, layout) {}

cuda::Groups FusedRuns::groups(int only, bool has_tickets) const {
  const int first = only < 0 ? 0 : only;
  return {.row_offsets = ints_of(row_offsets_) + first,
          .group_rows = ints_of(group_rows_) + first,
          .count = only < 0 ? problem_.num_groups() : 1,
          .row_capacity = problem_.capacity(),
          .tickets = has_tickets ? reinterpret_cast<std::int32_t*>(tickets_.data()) : nullptr};
}

cuda::SourceRows FusedRuns::source_rows(bool from_tokens) const {
  if (!from_tokens) return {rows_.rows()};
  return {tokens_.rows(), sources_.data<const std::int32_t>(),
          static_cast<int>(problem_.setup.top_k), problem_.tokens.rows()};
}

cuda::RowNumbers<const float> FusedRuns::weights(RowWeights by) const {
  if (by == RowWeights::none) return {};
  if (by == RowWeights::of_rows) return {row_weights_.data<const float>()};
  return {token_weights_.data<const float>(), sources_.data<const std::int32_t>()};
}

const float* FusedRuns::weights_of_rows(const FusedWay& way) const {
  return way.weights == RowWeights::none ? nullptr : row_weights_.data<const float>();
}

bool FusedRuns::is_run(std::int64_t row, int only) const {
  const int group = problem_.groups_of_rows[static_cast<std::size_t>(row)];
  return group >= 0 && (only < 0 || group == only);
}

Tensor FusedRuns::fetch(const ApartRows& rows, const Tensor& before, int only) const {
  Tensor now = rows.fetch();
  Tensor allowed = before.clone();
  for (std::int64_t r = 0; r < now.rows(); ++r) {
    if (!is_run(r, only)) continue;
    std::memcpy(allowed.view().row(r), now.view().row(r),
                static_cast<std::size_t>(now.view().row_bytes()));
  }
  EXPECT_TRUE(same_bits(now, allowed)) << "outside the groups";
  return now;
}

// Fetches one number per row, whether it is stored by row or by assignment.
Tensor FusedRuns::fetch_numbers(const ApartRows& numbers, const FusedWay& way) const {
  Tensor now = numbers.fetch();
  const auto floats = now.span<float>();
  const auto sources = problem_.sources.span<std::int32_t>();
  Tensor of_rows = poisoned({problem_.capacity()}, Dtype::f32);
  for (std::int64_t r = 0; r < problem_.capacity(); ++r) {
    if (!is_run(r, way.group)) continue;
    const auto row = static_cast<std::size_t>(r);
    const bool by_row = way.weights != RowWeights::of_assignments;
    float& number = floats[by_row ? row : static_cast<std::size_t>(sources[row])];
    of_rows.span<float>()[row] = number;
    std::memset(&number, 0xff, sizeof(number));
  }
  EXPECT_TRUE(same_bits(now, poisoned(now.shape(), Dtype::f32))) << "d_weights of no row";
  return of_rows;
}

struct FusedRuns::Outputs {
  ApartRows inner, activated, d_weights;
};

template <typename Launch>
FusedResults FusedRuns::run(const FusedWay& way, const Tensor& inner, const Launch& launch) const {
  const bool by_row = way.weights != RowWeights::of_assignments;
  const std::int64_t numbers = by_row ? problem_.capacity() : problem_.token_weights.rows();
  const Outputs out{place(inner), place(no_activated_), place(poisoned({1, numbers}, Dtype::f32))};
  launch(out, cuda::context_of(device_));
  FusedResults results;
  if (way.keeps_inner) results.inner = fetch(out.inner, inner, way.group);
  results.activated = fetch(out.activated, no_activated_, way.group);
  if (way.has_d_weights) results.d_weights = fetch_numbers(out.d_weights, way);
  return results;
}

FusedResults FusedRuns::activate(FusedWay way) const {
  way.has_d_weights = false;
  const auto matrices = gate_up_.refs(way.group);
  return run(way, no_inner_, [&](const Outputs& out, cuda::Context& context) {
    EXPECT_TRUE(cuda::hopper::grouped_gemm(
        cuda::ActivatedGemm{.options = problem_.options,
                            .groups = groups(way.group, way.has_tickets),
                            .a = source_rows(way.from_tokens),
                            .b = {matrices, 2, problem_.setup.intermediate, problem_.setup.hidden},
                            .inner = way.keeps_inner ? out.inner.rows() : cuda::Rows{},
                            .activated = out.activated.rows(),
                            .weights = weights(way.weights)},
        context));
  });
}

FusedResults FusedRuns::activate_in_steps(FusedWay way) const {
  way.has_d_weights = false;
  const auto matrices = gate_up_.refs(way.group);
  return run(way, no_inner_, [&](const Outputs& out, cuda::Context& context) {
    cuda::grouped_gemm(
        cuda::ForwardGemm{.dtype = Dtype::bf16,
                          .groups = groups(way.group),
                          .a = rows_.rows(),
                          .b = {matrices, 2, problem_.setup.intermediate, problem_.setup.hidden},
                          .c = out.inner.rows()},
        context);
    cuda::activate({.options = problem_.options,
                    .groups = groups(way.group),
                    .inner = out.inner.rows(),
                    .row_weights = weights_of_rows(way),
                    .activated = out.activated.rows()},
                   context);
  });
}

FusedResults FusedRuns::activate_backward(FusedWay way) const {
  way.keeps_inner = true;
  const auto matrices = down_.refs(way.group);
  return run(way, problem_.inner, [&](const Outputs& out, cuda::Context& context) {
    cuda::RowNumbers<float> d_weights;
    if (way.has_d_weights) d_weights = {out.d_weights.data<float>(), weights(way.weights).sources};
    EXPECT_TRUE(cuda::hopper::grouped_gemm(
        cuda::ActivationGradientGemm{
            .options = problem_.options,
            .groups = groups(way.group, way.has_tickets),
            .a = source_rows(way.from_tokens),
            .b = {matrices, 1, problem_.setup.hidden, problem_.setup.intermediate},
            .inner = out.inner.rows(),
            .activated = out.activated.rows(),
            .weights = weights(way.weights),
            .d_weights = d_weights},
        context));
  });
}

FusedResults FusedRuns::activate_backward_in_steps(FusedWay way) const {
  way.keeps_inner = true;
  const float* const row_weights = weights_of_rows(way);
  if (way.weights == RowWeights::of_assignments) way.weights = RowWeights::of_rows;
  const auto matrices = down_.refs(way.group);
  return run(way, problem_.inner, [&](const Outputs& out, cuda::Context& context) {
    cuda::grouped_gemm(cuda::InputGradientGemm{.dtype = Dtype::bf16,
                                               .groups = groups(way.group),
                                               .a = rows_.rows(),
                                               .b = {matrices, 1, problem_.setup.hidden,
                                                     problem_.setup.intermediate},
                                               .c = out.activated.rows()},
                       context);
    cuda::activate_backward(
        {.options = problem_.options,
         .groups = groups(way.group),
         .inner = out.inner.rows(),
         .activated = out.activated.rows(),
         .row_weights = row_weights,
         .d_row_weights = way.has_d_weights ? out.d_weights.data<float>() : nullptr},
        context);
  });
}

std::vector<ConstTensorView> FusedRuns::weight_gradients(const GradientWay& way) const {
  const StackShape shape = problem_.gradient_shape(way);
  const Tensor before = problem_.gradients_before(way);
  const ApartMatrices gradients(device_, before, shape, layout_);
  const auto matrices = gradients.refs(way.group);
  const cuda::SourceRows narrow = source_rows(way.from_tokens);
  const cuda::SourceRows wide = {inner_.rows()};
  const bool b_is_narrow = way.narrow == cuda::WeightGradientGemm::Side::b;
  EXPECT_TRUE(cuda::hopper::grouped_gemm(
      cuda::WeightGradientGemm{.dtype = Dtype::bf16,
                               .groups = groups(way.group),
                               .a = b_is_narrow ? wide : narrow,
                               .b = b_is_narrow ? narrow : wide,
                               .narrow = way.narrow,
                               .c = {matrices, way.parts, shape.rows, shape.columns},
                               .c_dtype = way.dtype,
                               .accumulate = way.accumulate},
      cuda::context_of(device_)));
  const auto results = gradients.fetch();
  const auto all_before = matrices_of(before, shape);
  for (std::size_t i = 0; way.group >= 0 && i < results.size(); ++i) {
    if (static_cast<int>(i) % shape.groups == way.group) continue;
    EXPECT_TRUE(same_bits(results[i], all_before[i])) << "of another group";
  }
  return results;
}

void CudaFusedGemm::SetUp() {
  static const std::string reason = reason_for_no_gpu();
  if (!reason.empty()) GTEST_SKIP() << reason;
  device = Device::cuda(cuda_options());
  const ExpertsOptions options{.hidden = 64, .intermediate = 64, .dtype = Dtype::bf16};
  if (!cuda::hopper::reads_tokens(options, cuda::context_of(device))) {
    GTEST_SKIP() << "the kernels of Hopper are not for this GPU, or are not in this build";
  }
}

}  // namespace switchyard::testing
