// SPDX-License-Identifier: Apache-2.0
// C interface: plans and movement.
#include <limits>
#include <optional>

#include "c/handles.h"
#include "c/views.h"

namespace switchyard::c {

LocalPlanOptions options_of(const switchyard_plan_form& form) {
  require(0 < form.num_experts && form.num_experts <= std::numeric_limits<std::int32_t>::max(),
          "num_experts ({}) must be positive", form.num_experts);
  return {.num_tokens = form.num_tokens,
          .top_k = form.top_k,
          .num_experts = static_cast<int>(form.num_experts),
          .alignment = form.alignment,
          .duplicate_ids = DuplicateIds::allow,
          .sentinel_ids = form.sentinels != 0 ? SentinelIds::allow : SentinelIds::reject};
}

LocalPlan plan_of(const Device& device, const switchyard_plan_form& form, const void* plan) {
  const auto options = options_of(form);
  return {device, options,
          view_of(const_cast<void*>(plan), Dtype::i32, {options.num_words()}, device, "plan")};
}

namespace {

struct Moved {
  Moved(const Device& of_device, const switchyard_moved& moved)
      : device(of_device),
        plan(plan_of(device, moved.form, moved.plan)),
        dtype(dtype_of(moved.dtype)),
        token_shape{moved.form.num_tokens, moved.hidden},
        row_shape{moved.num_rows, moved.hidden},
        pick_shape{moved.form.num_tokens, moved.form.top_k} {}

  template <typename Pointer>
  auto tokens(Pointer data, std::string_view name) const {
    return view_of(data, dtype, token_shape, device, name);
  }
  template <typename Pointer>
  auto rows(Pointer data, std::string_view name) const {
    return view_of(data, dtype, row_shape, device, name);
  }
  template <typename Pointer>
  auto picks(Pointer data, std::string_view name) const {
    using View = decltype(view_of(data, Dtype::f32, pick_shape, device, name));
    return data == nullptr
               ? std::optional<View>()
               : std::optional<View>(view_of(data, Dtype::f32, pick_shape, device, name));
  }

  const Device& device;
  LocalPlan plan;
  Dtype dtype;
  Shape token_shape;
  Shape row_shape;
  Shape pick_shape;
};

}  // namespace
}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::on_stream;

int64_t switchyard_plan_words(const switchyard_plan_form* form) {
  return c::number_of([&] { return c::options_of(c::at(form, "form")).num_words(); });
}

int64_t switchyard_plan_most_rows(const switchyard_plan_form* form) {
  return c::number_of([&] {
    const auto options = c::options_of(c::at(form, "form"));
    options.num_words();  // checks the options
    return options.most_rows();
  });
}

int switchyard_plan_make(switchyard_device* device, void* stream, const switchyard_plan_form* form,
                         const void* expert_ids, int64_t id_dtype, void* plan) {
  return on_stream(device, stream, [&](const Device& on) {
    c::plan_of(on, c::at(form, "form"), plan)
        .make(c::view_of(expert_ids, c::dtype_of(id_dtype), {form->num_tokens, form->top_k}, on,
                         "expert_ids"));
  });
}

int switchyard_plan_check(switchyard_device* device, void* stream, const switchyard_plan_form* form,
                          const void* plan) {
  return on_stream(device, stream,
                   [&](const Device& on) { c::plan_of(on, c::at(form, "form"), plan).check(); });
}

int switchyard_plan_num_rows(switchyard_device* device, void* stream,
                             const switchyard_plan_form* form, const void* plan,
                             int64_t* num_rows) {
  return on_stream(device, stream, [&](const Device& on) {
    c::at(num_rows, "num_rows") = c::plan_of(on, c::at(form, "form"), plan).num_rows();
  });
}

int switchyard_plan_find_tables(const switchyard_plan_form* form, switchyard_plan_tables* tables) {
  return c::guarded([&] {
    Tensor memory({c::options_of(c::at(form, "form")).num_words()},
                  Dtype::i32);  // its contents are never read
    const LocalPlan plan = c::plan_of(Device(), *form, memory.data());
    const auto word = [&](const ConstTensorView& table) {
      return (table.data() - memory.data()) / size_of(Dtype::i32);
    };
    const RowGroups groups = plan.groups();
    c::at(tables, "tables") = {word(plan.slots()), word(groups.row_offsets),
                               word(groups.group_rows), word(plan.row_sources())};
  });
}

int switchyard_dispatch(switchyard_device* device, void* stream, const switchyard_moved* moved,
                        const void* x, void* rows) {
  return on_stream(device, stream, [&](const Device& on) {
    const c::Moved m(on, c::at(moved, "moved"));
    m.plan.dispatch({.x = m.tokens(x, "x")}, {.rows = m.rows(rows, "rows")});
  });
}

int switchyard_combine(switchyard_device* device, void* stream, const switchyard_moved* moved,
                       const void* rows, const void* weights, void* y) {
  return on_stream(device, stream, [&](const Device& on) {
    const c::Moved m(on, c::at(moved, "moved"));
    m.plan.combine({.rows = m.rows(rows, "rows"), .weights = m.picks(weights, "weights")},
                   m.tokens(y, "y"));
  });
}

int switchyard_combine_backward(switchyard_device* device, void* stream,
                                const switchyard_moved* moved, const void* d_y, const void* weights,
                                const void* rows, void* d_rows, void* d_weights) {
  return on_stream(device, stream, [&](const Device& on) {
    const c::Moved m(on, c::at(moved, "moved"));
    CombineBackwardInput in{.d_y = m.tokens(d_y, "d_y"), .weights = m.picks(weights, "weights")};
    CombineBackwardOutput out{.d_rows = m.rows(d_rows, "d_rows")};
    if (rows != nullptr && d_weights != nullptr) {
      in.rows = m.rows(rows, "rows");
      out.d_weights = m.picks(d_weights, "d_weights");
    }
    m.plan.combine_backward(in, out);
  });
}
