// SPDX-License-Identifier: Apache-2.0
#include "model/model_size.h"

#include "common/bounded_count.h"

namespace switchyard::train {

ModelSize size_of(const ModelConfig& c) {
  const BoundedCount h = c.hidden;
  const BoundedCount layers = c.layers;
  const BoundedCount with_experts = c.layers / c.moe_every;
  const BoundedCount without = layers.value() - with_experts.value();
  const auto of_each = BoundedCount(3) * h * c.intermediate * with_experts;
  const auto experts = of_each * c.experts;
  const auto others = (c.tied ? 1 : 2) * kVocabulary * h + h + layers * (2 * h + 4 * h * h) +
                      with_experts * (c.experts * h + 3 * h * c.shared_intermediate) +
                      without * 3 * h * c.dense_intermediate;
  const auto biases = c.balance == Balance::bias ? with_experts * c.experts : BoundedCount(0);
  return {.parameters = (others + experts).value(),
          .active_parameters = (others + of_each * c.top_k).value(),
          .in_experts = experts.value(),
          .bytes = ((others + experts + biases) * sizeof(float)).value()};
}

}  // namespace switchyard::train
