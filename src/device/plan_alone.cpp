// SPDX-License-Identifier: Apache-2.0
// The plan of a rank that is alone, step by step.
#include <array>
#include <span>

#include "device/device_backend.h"

namespace switchyard {

void DeviceBackend::plan_alone(const PlanAlone& args) const {
  CountAssignments count = args.count;
  AssignSlots slots = args.slots;
  count.expert_ids = args.expert_ids;
  if (args.expert_ids.dtype() != Dtype::i32 || args.first_sentinel) {
    const TensorView narrow = take(args.expert_ids.shape(), Dtype::i32);
    narrow_ids({.from = args.expert_ids, .first_sentinel = args.first_sentinel, .to = narrow});
    count.expert_ids = narrow;
  }
  slots.expert_ids = count.expert_ids;
  set_problems(args.problems, count.problems);
  count_assignments(count);
  lay_out(args.layout);
  assign_slots(slots);
}

void DeviceBackend::set_problems(const RouterProblems& problems, const TensorView& words) const {
  if (problems.words) return copy(*problems.words, words);
  const std::array<std::int64_t, kProblemWords> found{problems.first_non_finite_token, -1};
  upload(std::as_bytes(std::span(found)), words);
}

}  // namespace switchyard
