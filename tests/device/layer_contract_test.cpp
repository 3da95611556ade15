// SPDX-License-Identifier: Apache-2.0
// The whole layer on every device: each output and gradient against differences of the reference.
#include <gtest/gtest.h>

#include "support/device/devices.h"
#include "support/layer/layer_cases.h"

namespace switchyard::layer_contract_test {
namespace {

using testing::CaseInput;
using testing::LayerCase;
using testing::LayerOutcome;

class LayerContract : public testing::OnDevices {
 protected:
  LayerOutcome run(const LayerCase& c, const CaseInput& in) const {
    return testing::run_case(c, in, device);
  }
};
SWITCHYARD_ON_DEVICES(LayerContract);

TEST_P(LayerContract, RoutersEqualTheReference) {
  for (const LayerCase& c : testing::router_cases()) {
    SCOPED_TRACE(c.name);
    const CaseInput in(c);
    expect_reference(c, in, run(c, in), 1e-5);
  }
}

TEST_P(LayerContract, ExpertsEqualTheReference) {
  for (const LayerCase& c : testing::expert_cases()) {
    SCOPED_TRACE(c.name);
    const CaseInput in(c);
    expect_reference(c, in, run(c, in), 1e-5);
  }
}

TEST_P(LayerContract, PlansEqualTheReference) {
  for (const LayerCase& c : testing::plan_cases()) {
    SCOPED_TRACE(c.name);
    const CaseInput in(c);
    expect_reference(c, in, run(c, in), 1e-5);
  }
}

TEST_P(LayerContract, TrainingEqualsTheReference) {
  for (const LayerCase& c : testing::training_cases()) {
    SCOPED_TRACE(c.name);
    const CaseInput in(c);
    expect_reference(c, in, run(c, in), 1e-5);
  }
}

TEST_P(LayerContract, Bf16IsNearTheReference) {
  for (const LayerCase& c : testing::bf16_cases()) {
    const CaseInput in(c);
    expect_reference(c, in, run(c, in), 8e-3);
  }
}

TEST_P(LayerContract, BitsAreTheSameInEveryRun) {
  for (const auto& cases : {testing::expert_cases(), testing::training_cases()}) {
    for (const LayerCase& c : cases) {
      SCOPED_TRACE(c.name);
      const CaseInput in(c);
      expect_same_bits(run(c, in), run(c, in));
    }
  }
}

}  // namespace
}  // namespace switchyard::layer_contract_test
