// SPDX-License-Identifier: Apache-2.0
// Moves rows over all_to_all: packs them by destination, exchanges them and unpacks them into
// slots. Rows that stay on this rank are never packed.
#include <algorithm>
#include <array>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/dispatch/mover.h"
#include "moe/dispatch/packed_route.h"
#include "moe/plan/plan_data.h"

namespace switchyard {
namespace {

// Scratch memory that is reused from call to call and only grows.
class Scratch {
 public:
  TensorView get(const Shape& shape, Dtype dtype) {
    const auto bytes = shape.num_elements() * size_of(dtype);
    if (bytes > memory_.bytes()) memory_ = Tensor({(bytes + 3) / 4}, Dtype::f32);
    return {memory_.data(), dtype, shape, shape.row_elements(), memory_.view().owner()};
  }

 private:
  Tensor memory_;
};

class PackedMover final : public Mover {
 public:
  PackedMover(Communicator& comm, CombineMode combine, const Device& device)
      : comm_(comm), combine_(combine), device_(device) {}

  MoverKind kind() const override { return MoverKind::packed; }

  void prepare(PlanData& plan) override {
    const auto before = comm_.bytes_sent();
    plan.route = std::make_shared<const PackedRoute>(make_packed_route(comm_, plan));
    bytes_on_wire_ += comm_.bytes_sent() - before;
  }

  std::int64_t bytes_on_wire() const override { return bytes_on_wire_; }
  bool receives(const Plan& /*plan*/) const override { return false; }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return backend_of(device_).take(shape, dtype);
  }

  void scatter(const Plan& plan, const Scatter& args) override {
    const auto before = comm_.bytes_sent();
    const PackedRoute& route = *data_of(plan).route;
    const auto received = exchange_tokens(plan, args.tokens);
    if (args.dots) fetch_dots(plan, args, received);
    const float* scale = nullptr;
    if (args.scale) scale = send_scalars(plan, *args.scale).span<float>().data();
    const std::array<std::byte*, 1> rows{args.rows.data()};
    backend_of(device_).scatter_rows(
        {.from = received, .scale = scale, .to = received_table(route, rows)});
    backend_of(device_).scatter_rows({.from = args.tokens,
                                      .scale = floats_of(args.scale),
                                      .to = local_table(plan, rows),
                                      .pads = pads_of(plan, args.rows, args.row_scalars)});
    if (args.token_scalars) scatter_scalars(plan, *args.token_scalars, *args.row_scalars);
    bytes_on_wire_ += comm_.bytes_sent() - before;
  }

  void gather(const Plan& plan, const Gather& args) override {
    const auto before = comm_.bytes_sent();
    if (combine_ == CombineMode::pre_reduced) {
      gather_partials(plan, args);
    } else {
      gather_assignments(plan, args);
    }
    if (args.token_scalars) gather_scalars(plan, *args.row_scalars, *args.token_scalars);
    bytes_on_wire_ += comm_.bytes_sent() - before;
  }

 private:
  static RowTable received_table(const PackedRoute& route, std::span<std::byte* const> bases) {
    return {route.num_received(), route.width, indices(route.received_slots), nullptr, bases};
  }
  static RowTable local_table(const Plan& plan, std::span<std::byte* const> bases) {
    return {plan.num_tokens(), plan.top_k(), indices(data_of(plan).route->local_slots), nullptr,
            bases};
  }
  static std::byte* read_only(const ConstTensorView& view) {
    return const_cast<std::byte*>(view.data());
  }

  // Sends each token once to every rank that needs it. Returns the received tokens, [N, H].
  TensorView exchange_tokens(const Plan& plan, const ConstTensorView& tokens) {
    const PackedRoute& route = *data_of(plan).route;
    const auto hidden = plan.options().hidden;
    const auto sent = send_rows_.get({route.num_sent(), hidden}, tokens.dtype());
    auto received = recv_rows_.get({route.num_received(), hidden}, tokens.dtype());
    const std::array<std::byte*, 1> base{sent.data()};
    backend_of(device_).scatter_rows(
        {tokens,
         nullptr,
         {plan.num_tokens(), plan.top_k(), indices(route.send_positions), nullptr, base}});
    comm_.all_to_all(sent, route.sent_tokens, received, route.received_tokens);
    return received;
  }

  // Sends the scalars of assignments, [T, K], to their owners. Returns the received table, [N, W].
  TensorView send_scalars(const Plan& plan, const ConstTensorView& scalars) {
    const PackedRoute& route = *data_of(plan).route;
    const auto sent = send_scalars_.get({route.num_sent(), route.width}, Dtype::f32);
    auto received = recv_scalars_.get({route.num_received(), route.width}, Dtype::f32);
    const auto out = sent.span<float>();
    const auto in = scalars.span<float>();
    const auto entries = route.send_entries.span<std::int32_t>();
    std::ranges::fill(out, 0.0F);
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (entries[i] >= 0) out[static_cast<std::size_t>(entries[i])] = in[i];
    }
    comm_.all_to_all(sent, route.sent_tokens, received, route.received_tokens);
    return received;
  }

  // Reverses send_scalars: sends recv_scalars_ [N, W] back to the tokens' ranks and stores what
  // comes back in `scalars` [T, K].
  void return_scalars(const Plan& plan, const TensorView& scalars) {
    const PackedRoute& route = *data_of(plan).route;
    const auto back = recv_scalars_.get({route.num_received(), route.width}, Dtype::f32);
    const auto home = send_scalars_.get({route.num_sent(), route.width}, Dtype::f32);
    comm_.all_to_all(back, route.received_tokens, home, route.sent_tokens);
    const auto in = home.span<float>();
    const auto out = scalars.span<float>();
    const auto entries = route.send_entries.span<std::int32_t>();
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (entries[i] >= 0) out[i] = in[static_cast<std::size_t>(entries[i])];
    }
  }

  void fetch_dots(const Plan& plan, const Scatter& args, const TensorView& received) {
    const PackedRoute& route = *data_of(plan).route;
    const std::array<std::byte*, 1> rows{read_only(*args.dot_rows)};
    const auto remote = recv_scalars_.get({route.num_received(), route.width}, Dtype::f32);
    backend_of(device_).dot_rows(
        {received, received_table(route, rows), remote.span<float>().data()});
    backend_of(device_).dot_rows(
        {args.tokens, local_table(plan, rows), args.dots->span<float>().data()});
    return_scalars(plan, *args.dots);
  }

  void scatter_scalars(const Plan& plan, const ConstTensorView& from, const TensorView& to) {
    const PackedRoute& route = *data_of(plan).route;
    const auto out = to.span<float>();
    const auto place = [&](std::span<const std::int32_t> slots, std::span<const float> values) {
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] >= 0) out[static_cast<std::size_t>(slots[i])] = values[i];
      }
    };
    place(route.received_slots.span<std::int32_t>(), send_scalars(plan, from).span<float>());
    place(route.local_slots.span<std::int32_t>(), from.span<float>());
  }

  void gather_scalars(const Plan& plan, const ConstTensorView& from, const TensorView& to) {
    const PackedRoute& route = *data_of(plan).route;
    const auto in = from.span<float>();
    const auto fetch = [&](std::span<const std::int32_t> slots, std::span<float> values) {
      for (std::size_t i = 0; i < slots.size(); ++i) {
        values[i] = slots[i] >= 0 ? in[static_cast<std::size_t>(slots[i])] : 0.0F;
      }
    };
    fetch(route.received_slots.span<std::int32_t>(),
          recv_scalars_.get({route.num_received(), route.width}, Dtype::f32).span<float>());
    fetch(route.local_slots.span<std::int32_t>(), to.span<float>());
    return_scalars(plan, to);
  }

  // Owners return one row per assignment, and the token's rank adds them in k order.
  void gather_assignments(const Plan& plan, const Gather& args) {
    const PackedRoute& route = *data_of(plan).route;
    const auto hidden = plan.options().hidden;
    const auto returned = recv_rows_.get({route.returned_slots.rows(), hidden}, args.rows.dtype());
    const auto home = send_rows_.get({route.num_home(), hidden}, args.rows.dtype());
    const std::array<std::byte*, 2> bases{home.data(), read_only(args.rows)};
    backend_of(device_).gather_rows(
        {{returned.rows(), 1, indices(route.returned_slots), nullptr, std::span(bases).subspan(1)},
         nullptr,
         returned});
    comm_.all_to_all(returned, route.returned_rows, home, route.home_rows);
    backend_of(device_).gather_rows({{plan.num_tokens(), plan.top_k(), indices(route.home_slots),
                                      indices(route.home_buffers), bases},
                                     floats_of(args.weights),
                                     args.tokens});
  }

  // Each owner adds its rows of a token, and the token's rank adds these partial sums in rank
  // order.
  void gather_partials(const Plan& plan, const Gather& args) {
    const PackedRoute& route = *data_of(plan).route;
    const auto hidden = plan.options().hidden;
    const Dtype dtype = args.rows.dtype();
    const float* weights = nullptr;
    if (args.weights) weights = send_scalars(plan, *args.weights).span<float>().data();
    const auto partials = recv_rows_.get({route.num_received(), hidden}, dtype);
    const auto home = send_rows_.get({route.num_sent(), hidden}, dtype);
    const auto own = own_partials_.get({plan.num_tokens(), hidden}, dtype);
    const std::array<std::byte*, 1> rows{read_only(args.rows)};
    backend_of(device_).gather_rows({received_table(route, rows), weights, partials});
    comm_.all_to_all(partials, route.received_tokens, home, route.sent_tokens);
    backend_of(device_).gather_rows({local_table(plan, rows), floats_of(args.weights), own});
    const std::array<std::byte*, 2> bases{home.data(), own.data()};
    backend_of(device_).gather_rows({{plan.num_tokens(), plan.top_k(), indices(route.partial_slots),
                                      indices(route.partial_buffers), bases},
                                     nullptr,
                                     args.tokens});
  }

  Communicator& comm_;
  CombineMode combine_;
  Device device_;
  std::int64_t bytes_on_wire_ = 0;
  Scratch send_rows_, recv_rows_, own_partials_, send_scalars_, recv_scalars_;
};

}  // namespace

std::unique_ptr<Mover> make_packed_mover(Communicator& comm, CombineMode combine,
                                         const Device& device) {
  return std::make_unique<PackedMover>(comm, combine, device);
}

}  // namespace switchyard
