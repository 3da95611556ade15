// SPDX-License-Identifier: Apache-2.0
// The C interface's first part: devices, plans, movement, experts and routers.
#include <array>
#include <limits>

#include "misuse/misuse.h"
#include "misuse/told.h"
#include "switchyard/c/layers.h"

namespace switchyard::misuse {
namespace {

constexpr switchyard_plan_form kPlan{
    .num_tokens = 3, .top_k = 1, .num_experts = 2, .alignment = 1, .sentinels = 0};
constexpr switchyard_plan_form kHugePlan{
    .num_tokens = kHuge, .top_k = kHuge, .num_experts = 2, .alignment = 1, .sentinels = 0};
constexpr switchyard_experts_form kExperts{.hidden = 4,
                                           .intermediate = 3,
                                           .dtype = switchyard_f32,
                                           .activation = 0,
                                           .clamp_limit = 7,
                                           .gate_alpha = 1,
                                           .up_offset = 0};
constexpr switchyard_router_form kRouter{.num_experts = 2,
                                         .top_k = 1,
                                         .sigmoid = 0,
                                         .score_bias = 0,
                                         .normalise = 1,
                                         .scale = 1,
                                         .num_expert_groups = 1,
                                         .kept_expert_groups = 1};

// A device, a plan for three tokens that pick expert 0, and memory enough for all of them.
struct Calls {
  switchyard_device* device = nullptr;
  std::array<std::int32_t, 3> ids{};
  alignas(16) std::array<std::int32_t, 256> plan{};
  std::array<float, 64> memory{};
  std::array<float, 64> other{};
  std::array<float, 64> weights{};
  std::int64_t number = 0;
  switchyard_moved moved{
      .form = kPlan, .plan = plan.data(), .dtype = switchyard_f32, .hidden = 4, .num_rows = 3};
  switchyard_experts packed{
      .gate_up = weights.data(), .down = weights.data(), .gate_up_bias = {}, .down_bias = {}};
  switchyard_moe moe{.plan_form = kPlan,
                     .form = kExperts,
                     .weights = packed,
                     .plan = plan.data(),
                     .num_rows = 3,
                     .x = memory.data(),
                     .pick_weights = weights.data(),
                     .inner = nullptr};
  switchyard_rows rows{.plan_form = kPlan,
                       .form = kExperts,
                       .weights = packed,
                       .plan = plan.data(),
                       .num_rows = 3,
                       .rows = memory.data(),
                       .inner = other.data()};
  switchyard_router router{.form = kRouter,
                           .num_tokens = 3,
                           .hidden = 4,
                           .dtype = switchyard_f32,
                           .gate_dtype = switchyard_f32,
                           .x = memory.data(),
                           .gate = weights.data(),
                           .gate_bias = nullptr,
                           .score_bias = nullptr};

  Calls() {
    switchyard_device_cpu(1, &device);
    switchyard_plan_make(device, nullptr, &kPlan, ids.data(), switchyard_i32, plan.data());
  }
  ~Calls() { switchyard_device_free(device); }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;
};

std::function<void()> calls(const std::function<int(Calls&)>& call) {
  return [call] {
    Calls one;
    told(call(one));
  };
}

}  // namespace

std::vector<Misuse> of_c_devices() {
  return {
      {"switchyard_fail", Kind::null, [] { told(switchyard_fail(1, nullptr)); }, "no message"},
      {"switchyard_device_cpu", Kind::null, [] { told(switchyard_device_cpu(1, nullptr)); },
       "device is a null pointer"},
      {"switchyard_device_cpu", Kind::out_of_range,
       calls([](auto& one) { return switchyard_device_cpu(0, &one.device); }), "num_threads (0)"},
      {"switchyard_device_cuda", Kind::out_of_range, calls([](auto& one) {
         return switchyard_device_cuda(-1, 0, nullptr, nullptr, &one.device);
       }),
       "no GPU -1"},
      {"switchyard_device_host_syncs", Kind::null,
       [] { told_number(switchyard_device_host_syncs(nullptr)); }, "device is a null pointer"},
      {"switchyard_device_bytes_held", Kind::null,
       [] { told_number(switchyard_device_bytes_held(nullptr)); }, "device is a null pointer"},

      {"switchyard_plan_words", Kind::null, [] { told_number(switchyard_plan_words(nullptr)); },
       "form is a null pointer"},
      {"switchyard_plan_words", Kind::huge, [] { told_number(switchyard_plan_words(&kHugePlan)); },
       "more than 2^31"},
      {"switchyard_plan_most_rows", Kind::huge,
       [] { told_number(switchyard_plan_most_rows(&kHugePlan)); }, "more than 2^31"},
      {"switchyard_plan_make", Kind::null, calls([](auto& one) {
         return switchyard_plan_make(one.device, nullptr, &kPlan, nullptr, switchyard_i32,
                                     one.plan.data());
       }),
       "expert_ids is a null pointer"},
      {"switchyard_plan_make", Kind::null, calls([](auto& one) {
         return switchyard_plan_make(nullptr, nullptr, &kPlan, one.ids.data(), switchyard_i32,
                                     one.plan.data());
       }),
       "device is a null pointer"},
      {"switchyard_plan_make", Kind::misaligned, calls([](auto& one) {
         return switchyard_plan_make(one.device, nullptr, &kPlan,
                                     reinterpret_cast<char*>(one.ids.data()) + 1, switchyard_i32,
                                     one.plan.data());
       }),
       "not aligned"},
      {"switchyard_plan_make", Kind::dtype, calls([](auto& one) {
         return switchyard_plan_make(one.device, nullptr, &kPlan, one.ids.data(), 99,
                                     one.plan.data());
       }),
       "no dtype 99"},
      {"switchyard_plan_check", Kind::null, calls([](auto& one) {
         return switchyard_plan_check(one.device, nullptr, nullptr, one.plan.data());
       }),
       "form is a null pointer"},
      {"switchyard_plan_num_rows", Kind::null, calls([](auto& one) {
         return switchyard_plan_num_rows(one.device, nullptr, &kPlan, one.plan.data(), nullptr);
       }),
       "num_rows is a null pointer"},
      {"switchyard_plan_find_tables", Kind::null,
       [] { told(switchyard_plan_find_tables(&kPlan, nullptr)); }, "tables is a null pointer"},

      {"switchyard_dispatch", Kind::null, calls([](auto& one) {
         return switchyard_dispatch(one.device, nullptr, nullptr, one.memory.data(),
                                    one.other.data());
       }),
       "moved is a null pointer"},
      {"switchyard_dispatch", Kind::overlapping, calls([](auto& one) {
         return switchyard_dispatch(one.device, nullptr, &one.moved, one.memory.data(),
                                    one.memory.data());
       }),
       "x and rows must not overlap"},
      {"switchyard_dispatch", Kind::out_of_range, calls([](auto& one) {
         one.moved.num_rows = -1;
         return switchyard_dispatch(one.device, nullptr, &one.moved, one.memory.data(),
                                    one.other.data());
       }),
       "is negative"},
      {"switchyard_combine", Kind::huge, calls([](auto& one) {
         one.moved.hidden = std::numeric_limits<std::int64_t>::max();
         return switchyard_combine(one.device, nullptr, &one.moved, one.memory.data(), nullptr,
                                   one.other.data());
       }),
       "too many elements"},
      {"switchyard_combine_backward", Kind::null, calls([](auto& one) {
         return switchyard_combine_backward(one.device, nullptr, &one.moved, nullptr, nullptr,
                                            nullptr, one.other.data(), nullptr);
       }),
       "d_y is a null pointer"},

      {"switchyard_inner_width", Kind::out_of_range,
       [] {
         auto form = kExperts;
         form.activation = 42;
         told_number(switchyard_inner_width(&form));
       },
       "no activation 42"},
      {"switchyard_moe_forward", Kind::null, calls([](auto& one) {
         return switchyard_moe_forward(one.device, nullptr, nullptr, one.other.data());
       }),
       "moe is a null pointer"},
      {"switchyard_moe_forward", Kind::huge, calls([](auto& one) {
         one.moe.form.intermediate = kHuge;
         one.moe.form.hidden = kHuge;
         return switchyard_moe_forward(one.device, nullptr, &one.moe, one.other.data());
       }),
       "1099511627776"},
      {"switchyard_moe_forward", Kind::overlapping, calls([](auto& one) {
         one.moe.num_rows = 1000;
         return switchyard_moe_forward(one.device, nullptr, &one.moe, one.memory.data());
       }),
       "num_rows (1000)"},
      {"switchyard_moe_backward", Kind::null, calls([](auto& one) {
         return switchyard_moe_backward(one.device, nullptr, &one.moe, nullptr);
       }),
       "gradients is a null pointer"},
      {"switchyard_rows_forward", Kind::null, calls([](auto& one) {
         return switchyard_rows_forward(one.device, nullptr, &one.rows, nullptr);
       }),
       "out is a null pointer"},
      {"switchyard_rows_backward", Kind::overlapping, calls([](auto& one) {
         return switchyard_rows_backward(one.device, nullptr, &one.rows, one.memory.data(),
                                         one.memory.data(), &one.packed, 0);
       }),
       "must not overlap"},
      {"switchyard_rows_backward", Kind::null, calls([](auto& one) {
         return switchyard_rows_backward(one.device, nullptr, nullptr, nullptr, nullptr, nullptr,
                                         0);
       }),
       "rows is a null pointer"},
      {"switchyard_route", Kind::out_of_range, calls([](auto& one) {
         one.router.form.num_experts = -2;
         return switchyard_route(one.device, nullptr, &one.router, one.ids.data(), one.other.data(),
                                 &one.number);
       }),
       "num_experts (-2)"},
      {"switchyard_route", Kind::null, calls([](auto& one) {
         return switchyard_route(one.device, nullptr, &one.router, one.ids.data(), one.other.data(),
                                 nullptr);
       }),
       "first_non_finite is a null pointer"},
      {"switchyard_route_backward", Kind::null, calls([](auto& one) {
         return switchyard_route_backward(one.device, nullptr, &one.router, nullptr);
       }),
       "gradients is a null pointer"},
      {"switchyard_router_preset", Kind::null,
       [] {
         switchyard_router_form form{};
         told(switchyard_router_preset(nullptr, 2, 1, &form));
       },
       "no router \"\""},
      {"switchyard_router_preset", Kind::null,
       [] { told(switchyard_router_preset("mixtral", 2, 1, nullptr)); }, "form is a null pointer"},

      {"switchyard_buffer_make", Kind::null, calls([](auto& one) {
         return switchyard_buffer_make(one.device, nullptr, 8, nullptr, nullptr);
       }),
       "buffer is a null pointer"},
      {"switchyard_buffer_make", Kind::huge, calls([](auto& one) {
         switchyard_buffer* buffer = nullptr;
         void* data = nullptr;
         return switchyard_buffer_make(one.device, nullptr,
                                       std::numeric_limits<std::int64_t>::max(), &buffer, &data);
       }),
       "too many elements"},
      {"switchyard_copy_in", Kind::null, calls([](auto& one) {
         return switchyard_copy_in(one.device, nullptr, nullptr, one.memory.data(), 8);
       }),
       "null pointer"},
      {"switchyard_copy_out", Kind::out_of_range, calls([](auto& one) {
         return switchyard_copy_out(one.device, nullptr, one.memory.data(), one.other.data(), -8);
       }),
       "bytes (-8)"},
      {"switchyard_copy_on", Kind::overlapping, calls([](auto& one) {
         return switchyard_copy_on(one.device, nullptr, one.memory.data(), one.memory.data() + 1,
                                   16);
       }),
       "must not overlap"},
      {"switchyard_synchronize", Kind::null, [] { told(switchyard_synchronize(nullptr, nullptr)); },
       "device is a null pointer"},
      {"switchyard_placement_contiguous", Kind::null,
       [] { told(switchyard_placement_contiguous(2, 1, nullptr)); }, "owners is a null pointer"},
      {"switchyard_placement_contiguous", Kind::huge,
       calls([](auto& one) { return switchyard_placement_contiguous(kHuge, 1, one.ids.data()); }),
       "num_experts (1099511627776)"},
      {"switchyard_placement_check", Kind::null, [] { told(switchyard_placement_check(nullptr)); },
       "placement is a null pointer"},
  };
}

}  // namespace switchyard::misuse
