// Graphs of every kind of layer: pad rows, padding, capacity, scaled gradients, losses of
// sequences, dropped rows, and several layers.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <tuple>

#include "device/cuda/layer_fixture.h"
#include "switchyard/captured_graph.h"

namespace switchyard::testing::cuda_graph_forms_test {
namespace {

constexpr std::int64_t kRows = kTokens * kTopK;

struct Form {
  std::string name;
  void (*set)(MoeLayerOptions&) = [](MoeLayerOptions&) {};
  bool has_padding = false;
};
std::ostream& operator<<(std::ostream& out, const Form& form) { return out << form.name; }

void align(MoeLayerOptions& options) {
  options.alignment = 16;
  options.sizing = Sizing::bounded(kRows + 4 + kExperts * 16);
}
void limit(MoeLayerOptions& options) { options.capacity = {.factor = 0.8}; }
void scale(MoeLayerOptions& options) { options.gradient_scale = GradientScale::global; }
void balance_sequences(MoeLayerOptions& options) { options.losses.balance = BalanceLoss::sequence; }
void drop(MoeLayerOptions& options) { options.sizing = Sizing::bounded(96, Overflow::drop); }
void all_at_once(MoeLayerOptions& options) {
  align(options);
  limit(options);
  scale(options);
  balance_sequences(options);
  options.sizing = Sizing::bounded(128, Overflow::drop);
}

using Parameter = std::tuple<Form, Dtype>;

class CudaGraphForms : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static MoeLayerOptions options() {
    const auto& [form, dtype] = GetParam();
    auto options = graph_options(dtype, kRows);
    form.set(options);
    return options;
  }
};

TEST_P(CudaGraphForms, ReplayedWithOtherRoutingsEqualsEager) {
  LayerFixture replayed(options());
  LayerFixture eager(options());
  if (std::get<0>(GetParam()).has_padding) {
    replayed.pad_every_third_token();
    eager.pad_every_third_token();
  }
  expect_replays_equal_eager(replayed, eager, [&] {
    EXPECT_EQ(replayed.layer.stats().dropped_by_rank, eager.layer.stats().dropped_by_rank);
    EXPECT_EQ(replayed.layer.stats().over_capacity, eager.layer.stats().over_capacity);
  });
}

// The second layer reads what the first one made.
class TwoLayers {
 public:
  explicit TwoLayers(const MoeLayerOptions& options)
      : first(options), second(options, first.device) {}

  void set(const Tensor& ids, std::uint64_t seed) {
    first.set(ids, seed);
    second.set(ids, seed + 1);
  }
  void train() {
    SavedForBackward saved_first;
    SavedForBackward saved_second;
    first.forward(saved_first);
    first.device.copy(first.y, second.x);
    second.forward(saved_second);
    second.backward(saved_second);
    first.device.copy(second.d_x, first.d_y);
    first.backward(saved_first);
  }

  LayerFixture first, second;
};

TEST_P(CudaGraphForms, TwoLayersInOneGraphEqualEager) {
  TwoLayers replayed(options());
  TwoLayers eager(options());
  const auto all = routings();
  replayed.set(all[0], 1);
  replayed.train();
  const CapturedGraph graph(replayed.first.device, [&] { replayed.train(); });
  for (std::size_t i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    replayed.set(all[2 * i + 1], 10 + i);
    eager.set(all[2 * i + 1], 10 + i);
    graph.replay();
    eager.train();
    expect_same_tensors(replayed.first.results(), eager.first.results());
    expect_same_tensors(replayed.second.results(), eager.second.results());
  }
}

INSTANTIATE_TEST_SUITE_P(
    CudaGraph, CudaGraphForms,
    ::testing::Combine(::testing::Values(Form{"pad_rows", align},
                                         Form{.name = "padding", .has_padding = true},
                                         Form{"capacity", limit}, Form{"scaled_gradients", scale},
                                         Form{"sequences", balance_sequences},
                                         Form{"dropped_rows", drop},
                                         Form{"all_at_once", all_at_once, true}),
                       ::testing::Values(Dtype::f32, Dtype::bf16)),
    [](const auto& param) {
      return std::get<0>(param.param).name + "_" + std::string(name_of(std::get<1>(param.param)));
    });

}  // namespace
}  // namespace switchyard::testing::cuda_graph_forms_test
