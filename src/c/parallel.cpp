// SPDX-License-Identifier: Apache-2.0
// C interface: experts over the ranks of a framework.
#include "switchyard/c/parallel.h"

#include <limits>
#include <optional>
#include <vector>

#include "c/foreign_communicator.h"
#include "c/ranks.h"
#include "c/views.h"
#include "comm/agreement.h"
#include "device/plan_words.h"
#include "moe/dispatch/mover.h"
#include "moe/plan/plan_data.h"
#include "switchyard/dispatcher.h"

struct switchyard_dispatcher {
  ~switchyard_dispatcher() { rank->retire(std::move(dispatcher)); }

  std::shared_ptr<switchyard::c::RankState> rank;
  switchyard::Device device;
  std::int64_t num_experts;          // owned by this rank
  std::int64_t words_without_picks;  // size of its plans without the tables of picks
  std::shared_ptr<switchyard::Dispatcher> dispatcher;
};

namespace switchyard::c {
namespace {

template <typename Work>
int on_dispatcher(switchyard_dispatcher* dispatcher, void* stream, const Work& work) {
  return guarded([&] {
    const RankLock lock({at(dispatcher, "dispatcher").rank.get()});
    if (dispatcher->device.memory() == Memory::gpu) dispatcher->device.set_stream({stream});
    work();
  });
}

std::int64_t plan_words(const switchyard_dispatcher& of, std::int64_t num_tokens,
                        std::int64_t top_k) {
  return words_of_plan(of.words_without_picks, num_tokens, top_k);
}

// Checks the numbers of a form, which shapes are made of, and returns plan_words(). Aborts the
// communicator if this rank's are invalid.
std::int64_t checked_plan_words(const switchyard_dispatcher& of, const PlanForm& form) {
  return or_abort({&of.dispatcher->communicator()}, "plan", [&] {
    for (const auto& [name, number] :
         {std::pair("num_tokens", form.num_tokens), std::pair("top_k", form.top_k),
          std::pair("hidden", form.hidden), std::pair("num_rows", form.num_rows),
          std::pair("num_received", form.num_received)}) {
      require(number >= 0, "{} ({}) must not be negative", name, number);
    }
    return plan_words(of, form.num_tokens, form.top_k);
  });
}

// The plan of a call, and views of the call's shapes. An invalid pointer on this rank aborts the
// communicator, because the other ranks would wait for this one.
struct Shared {
  Shared(const switchyard_dispatcher& of, const switchyard_shared_form& in_form, const void* data,
         std::int64_t hidden_size, Dtype row_dtype)
      : device(of.device),
        dispatcher(*of.dispatcher),
        form{.num_tokens = in_form.num_tokens,
             .top_k = in_form.top_k,
             .hidden = hidden_size,
             .dtype = row_dtype,
             .num_rows = in_form.num_rows,
             .num_received = in_form.num_received},
        plan(dispatcher.plan_in(
            view(const_cast<void*>(data), Dtype::i32, {checked_plan_words(of, form)}, "the plan"),
            form)) {}

  TensorView view(const void* data, Dtype dtype, const Shape& shape, std::string_view name) const {
    return or_abort({&dispatcher.communicator()}, name,
                    [&] { return view_of(const_cast<void*>(data), dtype, shape, device, name); });
  }
  TensorView tokens(const void* data, std::string_view name) const {
    return view(data, form.dtype, {form.num_tokens, form.hidden}, name);
  }
  TensorView rows(const void* data, std::string_view name) const {
    return view(data, form.dtype, {form.num_rows, form.hidden}, name);
  }
  TensorView picks(const void* data, std::string_view name) const {
    return view(data, Dtype::f32, {form.num_tokens, form.top_k}, name);
  }
  std::optional<ConstTensorView> picks_if_given(const void* data, std::string_view name) const {
    return data == nullptr ? std::nullopt : std::optional<ConstTensorView>(picks(data, name));
  }

  const Device& device;
  Dispatcher& dispatcher;
  PlanForm form;
  Plan plan;
};

// Dereferences a caller's pointer. If it is null, the other ranks are told.
template <typename T>
T& at_on_all(const switchyard_dispatcher& dispatcher, T* pointer, std::string_view name) {
  return *or_abort({&dispatcher.dispatcher->communicator()}, name,
                   [&] { return &at(pointer, name); });
}

Shared moved_of(const switchyard_dispatcher* dispatcher, const switchyard_shared_moved* moved) {
  const auto& given = at_on_all(*dispatcher, moved, "moved");
  const auto dtype = or_abort({&dispatcher->dispatcher->communicator()}, "moved",
                              [&] { return dtype_of(given.dtype); });
  return {*dispatcher, given.form, given.plan, given.hidden, dtype};
}

// One call of a whole layer. Tokens are received into memory that the ranks share; whatever
// backward needs is copied to the caller's memory.
struct SharedMoe {
  SharedMoe(const switchyard_dispatcher& of, const switchyard_shared_moe& args)
      : call(of, args.plan_form, args.plan, args.form.hidden,
             or_abort({&of.dispatcher->communicator()}, "experts",
                      [&] { return dtype_of(args.form.dtype); })),
        experts(or_abort({&of.dispatcher->communicator()}, "experts",
                         [&] { return Experts(experts_options(args.form), of.device); })),
        weights(or_abort({&call.dispatcher.communicator()}, "experts",
                         [&] {
                           return weights_of(experts.options(), of.num_experts, args.weights,
                                             of.device);
                         })),
        given(args) {}

  ReceivedTokens kept() const {
    return {call.view(given.tokens, call.form.dtype, {call.form.num_received, call.form.hidden},
                      "tokens"),
            call.view(given.token_weights, Dtype::f32, {call.form.num_received, call.form.top_k},
                      "token_weights"),
            call.view(given.row_sources, Dtype::i32, {call.form.num_rows}, "row_sources")};
  }
  TensorView inner() const {
    return call.view(given.inner, call.form.dtype,
                     {call.form.num_rows, experts.options().inner_width()}, "inner");
  }
  TokenRows rows_from(const ReceivedTokens& received) const {
    return {.x = received.tokens, .row_sources = received.row_sources, .top_k = call.form.top_k};
  }
  void fill_rows(const ReceivedTokens& received, const TensorView& rows,
                 const std::optional<TensorView>& row_weights) const {
    backend_of(call.device).fill_rows(rows_of(call.plan, received, rows, row_weights));
  }

  void forward(const TensorView& y) const;
  void backward(const switchyard_moe_gradients& out, std::span<const ExpertGradients> gradients);

  Shared call;
  Experts experts;
  std::vector<ExpertWeights> weights;
  const switchyard_shared_moe& given;
};

void SharedMoe::forward(const TensorView& y) const {
  const ConstTensorView pick_weights = call.picks(given.pick_weights, "pick_weights");
  std::optional<ReceivedTokens> keep;
  ExpertsOutput out;
  if (given.keep != 0) {
    keep = kept();
    out.inner = inner();
  }
  const ReceivedTokens received =
      call.dispatcher.receive(call.plan, call.tokens(given.x, "x"), pick_weights);
  out.out = call.dispatcher.take_rows(call.plan);
  const RowGroups groups = RowGroups::of(call.plan);
  if (experts.reads_tokens()) {
    experts.forward(weights, groups, {.tokens = rows_from(received)}, out);
  } else {
    fill_rows(received, out.out, {});
    experts.forward(weights, groups, {.rows = out.out}, out);
  }
  if (keep) {
    const auto copy = [&](const ConstTensorView& from, const ConstTensorView& to) {
      call.device.copy(from, {const_cast<std::byte*>(to.data()), to.dtype(), to.shape(),
                              to.row_stride(), nullptr, to.memory()});
    };
    copy(received.tokens, keep->tokens);
    copy(received.weights, keep->weights);
    copy(received.row_sources, keep->row_sources);
  }
  call.dispatcher.combine(call.plan, {.rows = out.out, .weights = pick_weights}, y);
}

void SharedMoe::backward(const switchyard_moe_gradients& out,
                         std::span<const ExpertGradients> gradients) {
  const ReceivedTokens received = kept();
  const DispatchBackwardOutput home{.d_x = call.tokens(out.d_x, "d_x"),
                                    .d_weights = call.picks(out.d_pick_weights, "d_pick_weights")};
  ExpertsBackwardInput in;
  in.inner = inner();
  in.inner_rows = out.recompute != 0 ? InnerRows::to_be_computed : InnerRows::kept;
  const TensorView d_y = call.tokens(out.d_y, "d_y");
  const ConstTensorView d_received = call.dispatcher.receive(call.plan, d_y);
  const TensorView d_rows = call.dispatcher.take_rows(call.plan);
  ExpertsBackwardOutput made{.d_rows = d_rows, .gradients = gradients};
  DispatchBackwardInput returned{.d_rows = d_rows};
  if (experts.reads_tokens()) {
    made.d_row_weights = call.dispatcher.take_received_weights(call.plan);
    returned.d_received_weights = *made.d_row_weights;
    in.row_weights = received.weights;
    in.d_out = d_received;
    in.tokens = rows_from(received);
    experts.backward(weights, RowGroups::of(call.plan), in, made);
    return call.dispatcher.dispatch_backward(call.plan, returned, home);
  }
  made.d_row_weights = call.dispatcher.take_row_weights(call.plan);
  returned.d_row_weights = *made.d_row_weights;
  const Shape shape{call.form.num_rows, call.form.hidden};
  Tensor rows = call.device.empty(shape, call.form.dtype);
  Tensor d_out = call.device.empty(shape, call.form.dtype);
  Tensor row_weights = call.device.empty({call.form.num_rows}, Dtype::f32);
  fill_rows(received, rows, row_weights.view());
  fill_rows({d_received, received.weights, received.row_sources}, d_out, {});
  in.rows = rows;
  in.row_weights = row_weights;
  in.d_out = d_out;
  experts.backward(weights, RowGroups::of(call.plan), in, made);
  call.dispatcher.dispatch_backward(call.plan, returned, home);
}

// Sets gradients that were computed from rows that never arrived to NaN.
void spoil(const Dispatcher& dispatcher, std::span<const ExpertGradients> gradients) {
  std::vector<TensorView> views;
  for (const auto& expert : gradients) {
    for (const auto& view : {expert.gate, expert.up, expert.down, expert.gate_bias, expert.up_bias,
                             expert.down_bias}) {
      if (view.data() != nullptr) views.push_back(view);
    }
  }
  dispatcher.spoil(views);
}

std::int64_t words_between(const void* memory, const void* table) {
  return (static_cast<const std::byte*>(table) - static_cast<const std::byte*>(memory)) /
         size_of(Dtype::i32);
}

}  // namespace
}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::guarded;
using c::on_dispatcher;

int switchyard_comm_foreign(int64_t rank, int64_t size, int64_t timeout_ms,
                            const switchyard_comm_functions* functions, void* context,
                            switchyard_comm** comm) {
  return guarded([&] {
    c::at(comm, "comm") =
        new switchyard_comm{std::make_shared<c::RankState>(c::make_foreign_communicator(
            c::rank_number(rank, "rank"), c::rank_number(size, "size"), c::timeout_of(timeout_ms),
            c::at(functions, "functions"), context))};
  });
}

int switchyard_dispatcher_make(switchyard_comm* comm, const switchyard_placement* placement,
                               int64_t alignment, int64_t sentinels, switchyard_device* device,
                               switchyard_dispatcher** dispatcher) {
  return c::on_rank(comm, [&](Communicator& ranks) {
    or_abort({&ranks}, "dispatcher", [&] { c::at(dispatcher, "dispatcher"); });
    require(ranks.size() > 1, "a dispatcher of tensors needs at least two ranks");
    const auto on = or_abort({&ranks}, "dispatcher",
                             [&] { return comm->rank->device_like(c::at(device, "device")); });
    const auto owners = or_abort({&ranks}, "dispatcher",
                                 [&] { return c::placement_of(c::at(placement, "placement")); });
    // A plan serves rows of any width, so `hidden` is arbitrary here. Movements compare the real
    // one.
    const DispatcherOptions options{
        .plan = {.hidden = 1,
                 .alignment = alignment,
                 .duplicate_ids = DuplicateIds::allow,
                 .sentinel_ids = sentinels != 0 ? SentinelIds::allow : SentinelIds::reject},
        .mover = MoverKind::peer};
    *dispatcher = new switchyard_dispatcher{
        .rank = comm->rank,
        .device = on,
        .num_experts = static_cast<std::int64_t>(owners.experts_of(ranks.rank()).size()),
        .words_without_picks = words_without_picks(owners, ranks.rank()),
        .dispatcher = std::make_shared<Dispatcher>(ranks, owners, options, on)};
  });
}

void switchyard_dispatcher_free(switchyard_dispatcher* dispatcher) { delete dispatcher; }

int64_t switchyard_dispatcher_host_syncs(switchyard_dispatcher* dispatcher) {
  return c::number_of([&] {
    const c::RankLock lock({c::at(dispatcher, "dispatcher").rank.get()});
    return dispatcher->device.host_syncs();
  });
}

int64_t switchyard_shared_plan_words(const switchyard_placement* placement, int64_t rank,
                                     int64_t num_tokens, int64_t top_k) {
  return c::number_of([&] {
    return Dispatcher::plan_words(c::placement_of(c::at(placement, "placement")),
                                  c::rank_number(rank, "rank"), num_tokens, top_k);
  });
}

int switchyard_shared_plan_make(switchyard_dispatcher* dispatcher, void* stream,
                                const switchyard_shared_form* form, const void* expert_ids,
                                int64_t id_dtype, void* plan) {
  return on_dispatcher(dispatcher, stream, [&] {
    Dispatcher& ranks = *dispatcher->dispatcher;
    or_abort({&ranks.communicator()}, "plan", [&] {
      c::at(form, "form");
      ranks.resize(form->num_rows == 0
                       ? Sizing::exact()
                       : Sizing::bounded(form->num_rows, Overflow::fail, form->num_received));
    });
    const auto view = [&](void* data, Dtype dtype, const Shape& shape, std::string_view name) {
      return or_abort({&ranks.communicator()}, "plan",
                      [&] { return c::view_of(data, dtype, shape, dispatcher->device, name); });
    };
    const Dtype ids =
        or_abort({&ranks.communicator()}, "plan", [&] { return c::dtype_of(id_dtype); });
    const auto words = c::checked_plan_words(*dispatcher, {.num_tokens = form->num_tokens,
                                                           .top_k = form->top_k,
                                                           .num_rows = form->num_rows,
                                                           .num_received = form->num_received});
    ranks.plan_into(
        view(const_cast<void*>(expert_ids), ids, {form->num_tokens, form->top_k}, "expert_ids"),
        view(plan, Dtype::i32, {words}, "the plan"));
  });
}

int switchyard_shared_plan_sizes(switchyard_dispatcher* dispatcher, void* stream,
                                 switchyard_shared_form* form, const void* plan) {
  return on_dispatcher(dispatcher, stream, [&] {
    c::at(form, "form");
    const auto memory = c::view_of(const_cast<void*>(plan), Dtype::i32,
                                   {c::plan_words(*dispatcher, form->num_tokens, form->top_k)},
                                   dispatcher->device, "the plan");
    const PlanForm complete = dispatcher->dispatcher->complete(
        memory, {.num_tokens = form->num_tokens, .top_k = form->top_k, .hidden = 1});
    form->num_rows = complete.num_rows;
    form->num_received = complete.num_received;
  });
}

int switchyard_shared_plan_check(switchyard_dispatcher* dispatcher, void* stream,
                                 const switchyard_shared_form* form, const void* plan) {
  return on_dispatcher(dispatcher, stream, [&] {
    c::Shared(*dispatcher, c::at(form, "form"), plan, 1, Dtype::f32).plan.check();
  });
}

int switchyard_shared_plan_find_tables(const switchyard_placement* placement, int64_t rank,
                                       switchyard_shared_tables* tables) {
  return guarded([&] {
    const auto owners =
        std::make_shared<const ExpertPlacement>(c::placement_of(c::at(placement, "placement")));
    const int number = c::rank_number(rank, "rank");
    // Only the addresses of its tables matter.
    Tensor memory({Dispatcher::plan_words(*owners, number, 0, 0)}, Dtype::i32);
    PlanData plan{.placement = owners, .options = {}, .device = {}, .host = {}, .rank = number};
    TablePieces pieces(memory);
    take_tables(plan, PlanTables::crossing_once,
                [&](const Shape& shape, Dtype dtype) { return pieces.take(shape, dtype); });
    const auto word = [&](const void* table) { return c::words_between(memory.data(), table); };
    const auto* const layout = reinterpret_cast<const std::int64_t*>(plan.reports->layout.data());
    c::at(tables, "tables") = {
        .row_offsets = word(plan.groups.row_offsets.data()),
        .group_rows = word(plan.groups.group_rows.data()),
        .overflow = word(layout + kOverflowWord),
        .needed_rows = word(layout + needed_rows_word(owners->num_ranks(), 0)),
        .needed_tokens = word(layout + needed_tokens_word(owners->num_ranks(), 0)),
        .slots = word(plan.slots.data())};
  });
}

int switchyard_shared_dispatch(switchyard_dispatcher* dispatcher, void* stream,
                               const switchyard_shared_moved* moved, const void* x, void* rows) {
  return on_dispatcher(dispatcher, stream, [&] {
    const auto call = c::moved_of(dispatcher, moved);
    call.dispatcher.dispatch(call.plan, {.x = call.tokens(x, "x")},
                             {.rows = call.rows(rows, "rows")});
  });
}

int switchyard_shared_combine(switchyard_dispatcher* dispatcher, void* stream,
                              const switchyard_shared_moved* moved, const void* rows,
                              const void* weights, void* y) {
  return on_dispatcher(dispatcher, stream, [&] {
    const auto call = c::moved_of(dispatcher, moved);
    call.dispatcher.combine(
        call.plan,
        {.rows = call.rows(rows, "rows"), .weights = call.picks_if_given(weights, "weights")},
        call.tokens(y, "y"));
  });
}

int switchyard_shared_combine_backward(switchyard_dispatcher* dispatcher, void* stream,
                                       const switchyard_shared_moved* moved, const void* d_y,
                                       const void* weights, const void* rows, void* d_rows,
                                       void* d_weights) {
  return on_dispatcher(dispatcher, stream, [&] {
    const auto call = c::moved_of(dispatcher, moved);
    call.dispatcher.combine_backward(
        call.plan,
        {.d_y = call.tokens(d_y, "d_y"),
         .weights = call.picks(weights, "weights"),
         .rows = call.rows(rows, "rows")},
        {.d_rows = call.rows(d_rows, "d_rows"), .d_weights = call.picks(d_weights, "d_weights")});
  });
}

int switchyard_shared_moe_forward(switchyard_dispatcher* dispatcher, void* stream,
                                  const switchyard_shared_moe* moe, void* y) {
  return on_dispatcher(dispatcher, stream, [&] {
    const c::SharedMoe call(*dispatcher, c::at_on_all(*dispatcher, moe, "moe"));
    or_abort({&dispatcher->dispatcher->communicator()}, "forward",
             [&] { call.forward(call.call.tokens(y, "y")); });
  });
}

int switchyard_shared_moe_backward(switchyard_dispatcher* dispatcher, void* stream,
                                   const switchyard_shared_moe* moe,
                                   const switchyard_moe_gradients* gradients) {
  return on_dispatcher(dispatcher, stream, [&] {
    c::SharedMoe call(*dispatcher, c::at_on_all(*dispatcher, moe, "moe"));
    or_abort({&dispatcher->dispatcher->communicator()}, "backward", [&] {
      const auto views =
          c::gradients_of(call.experts.options(), dispatcher->num_experts,
                          c::at(gradients, "gradients").gradients, dispatcher->device);
      call.backward(*gradients, views);
      c::spoil(*dispatcher->dispatcher, views);
    });
  });
}
