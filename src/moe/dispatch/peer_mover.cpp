// SPDX-License-Identifier: Apache-2.0
// Moves rows through peer memory: devices write to and read from each other's heaps and meet there,
// without their hosts. A token crosses to a rank once, into that rank's receive buffer, and its
// rows are read or filled from there. Results return as one row per assignment.
//
// All ranks meet before any of them writes to a buffer, and again before any of them reads it.
// There is no meeting after a read: the next meeting shows that it is done, and until then no rank
// writes to memory that it gave back to its heap.
#include <array>
#include <utility>
#include <vector>

#include "device/device_backend.h"
#include "moe/dispatch/mover.h"
#include "moe/plan/plan_data.h"
#include "peer/peer_memory.h"

namespace switchyard {
namespace {

// The movement that a meeting belongs to. It must be the same on all ranks.
enum class Movement : std::uint32_t { receive = 1, receive_again, scatter, gather, dots };

// Packs the low 20 bits of the plan number, the movement and the scalar flag into 24 bits for ranks
// to compare. The plan number is included because buffer sizes depend on the plan.
std::uint32_t detail_of(const Plan& plan, Movement movement, bool has_scalars) {
  const auto number = static_cast<std::uint32_t>(data_of(plan).plan_number) & 0xfffffU;
  return number << 4 | static_cast<std::uint32_t>(movement) << 1 | (has_scalars ? 1U : 0U);
}

class PeerMover final : public Mover {
 public:
  PeerMover(std::shared_ptr<PeerMeetings> meetings, Device device)
      : meetings_(std::move(meetings)), device_(std::move(device)) {}

  MoverKind kind() const override { return MoverKind::peer; }
  std::int64_t bytes_on_wire() const override { return bytes_on_wire_; }
  bool receives(const Plan& plan) const override { return data_of(plan).crosses_once(); }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return meetings_->memory().take(shape, dtype);
  }
  void spoil(std::span<const TensorView> views) const override {
    backend().spoil(meetings_->memory().failed(), views);
  }
  void check() const override { meetings_->check(); }

  ReceivedTokens receive(const Plan& plan, const ConstTensorView& tokens,
                         const ConstTensorView& weights) override {
    return receive_all(plan, tokens, weights);
  }

  ConstTensorView receive(const Plan& plan, const ConstTensorView& tokens) override {
    check();
    const TensorView received = take_tokens(plan);
    const auto detail = detail_of(plan, Movement::receive_again, false);
    const TensorView lent = meetings_->lend(std::array{received}, detail);
    backend().scatter_rows(
        {.from = tokens, .to = table(plan, data_of(plan).places, bases_of(lent, 0))});
    finish(plan, detail);
    count_tokens(plan, tokens.row_bytes());
    return received;
  }

  void scatter(const Plan& plan, const Scatter& args) override {
    check();
    if (args.dots) find_dots(plan, args);
    if (receives(plan) && !args.scale) {
      const ReceivedTokens received = receive_all(plan, args.tokens, args.token_scalars);
      backend().fill_rows(rows_of(plan, received, args.rows, args.row_scalars));
    } else {
      write_rows(plan, args);
    }
    spoil_given({args.rows, args.row_scalars, args.dots});
  }

  void gather(const Plan& plan, const Gather& args) override {
    check();
    std::vector<TensorView> lent = in_heap({args.rows, args.row_scalars});
    const bool has_scalars = args.row_scalars.has_value();
    // The table has entries for scalars by row and by source; each rank lends one of them. Ranks
    // may differ: a rank without experts does not know which form the others use.
    if (has_scalars) lent.insert(lent.begin() + (args.scalars_by_source ? 1 : 2), TensorView());
    const TensorView bases = meetings_->lend(lent, detail_of(plan, Movement::gather, has_scalars));
    backend().gather_rows({.from = table(plan, data_of(plan).slots, bases_of(bases, 0)),
                           .weights = floats_of(args.weights),
                           .to = args.tokens,
                           .peer_scalar_bases = has_scalars ? bases_of(bases, 1) : nullptr,
                           .peer_source_bases = has_scalars ? bases_of(bases, 2) : nullptr,
                           .sources = indices(data_of(plan).sent_sources),
                           .scalars = floats_of(args.token_scalars)});
    spoil_given({args.tokens, args.token_scalars});
    count_rows(plan, args.tokens.row_bytes() + (has_scalars ? kScalarBytes : 0));
  }

 private:
  static constexpr std::int64_t kScalarBytes = sizeof(float);

  const DeviceBackend& backend() const { return backend_of(device_); }

  TensorView take_tokens(const Plan& plan) const {
    return take({data_of(plan).token_capacity(), plan.options().hidden}, plan.options().dtype);
  }

  ReceivedTokens receive_all(const Plan& plan, const ConstTensorView& tokens,
                             const std::optional<ConstTensorView>& weights) {
    check();
    const PlanData& data = data_of(plan);
    const std::array lent{take_tokens(plan), take({data.token_capacity(), data.top_k}, Dtype::f32),
                          take({data.row_capacity()}, Dtype::i32)};
    const auto detail = detail_of(plan, Movement::receive, weights.has_value());
    const TensorView bases = meetings_->lend(lent, detail);
    backend().scatter_rows({.from = tokens,
                            .to = table(plan, data.places, bases_of(bases, 0)),
                            .beside = Beside{.weights = floats_of(weights),
                                             .weight_bases = bases_of(bases, 1),
                                             .sources = indices(data.sent_sources),
                                             .source_slots = indices(data.slots),
                                             .source_bases = bases_of(bases, 2)}});
    finish(plan, detail);
    count_tokens(plan, tokens.row_bytes() + (weights ? data.top_k * kScalarBytes : 0));
    return {lent[0], lent[1], lent[2]};
  }

  // Writes rows straight to their slots.
  void write_rows(const Plan& plan, const Scatter& args) {
    const bool has_scalars = args.row_scalars.has_value();
    const std::vector<TensorView> lent = in_heap({args.rows, args.row_scalars});
    const auto detail = detail_of(plan, Movement::scatter, has_scalars);
    const TensorView bases = meetings_->lend(lent, detail);
    const auto scalars = has_scalars ? std::optional(lent[1]) : std::nullopt;
    backend().scatter_rows({.from = args.tokens,
                            .scale = floats_of(args.scale),
                            .to = table(plan, data_of(plan).slots, bases_of(bases, 0)),
                            .scalars = floats_of(args.token_scalars),
                            .peer_scalar_bases = has_scalars ? bases_of(bases, 1) : nullptr,
                            .pads = pads_of(plan, lent[0], scalars)});
    finish(plan, detail);
    copy_back(lent[0], args.rows);
    if (has_scalars) copy_back(lent[1], *args.row_scalars);
    count_rows(plan, args.tokens.row_bytes() + (has_scalars ? kScalarBytes : 0));
  }

  void find_dots(const Plan& plan, const Scatter& args) {
    const std::vector<TensorView> lent = in_heap({args.dot_rows});
    const TensorView bases = meetings_->lend(lent, detail_of(plan, Movement::dots, false));
    backend().dot_rows(
        {args.tokens, table(plan, data_of(plan).slots, bases_of(bases, 0)), floats_of(args.dots)});
    count_rows(plan, args.tokens.row_bytes());
  }

  // Returns memory in the heap for each given view: the view itself if it is in the heap, otherwise
  // a copy. Copies keep the values of rows that a movement does not write. Meets before the first
  // copy, since peers may still use that memory.
  std::vector<TensorView> in_heap(const std::vector<std::optional<ConstTensorView>>& views) {
    std::vector<TensorView> lent;
    bool has_met = false;
    for (const auto& view : views) {
      if (!view) continue;
      if (meetings_->memory().holds(*view)) {
        lent.emplace_back(const_cast<std::byte*>(view->data()), view->dtype(), view->shape(),
                          view->row_stride(), std::const_pointer_cast<std::byte>(view->owner()),
                          view->memory());
        continue;
      }
      if (!std::exchange(has_met, true)) meetings_->close();
      lent.push_back(take(view->shape(), view->dtype()));
      backend().copy(*view, lent.back());
    }
    return lent;
  }

  void copy_back(const TensorView& from, const TensorView& to) const {
    if (from.data() != to.data()) backend().copy(from, to);
  }

  void finish(const Plan& plan, std::uint32_t detail) {
    meetings_->finish(data_of(plan).groups.all, detail);
  }

  // Fills the caller's views with NaN if a movement has failed. Views in the heap are skipped: they
  // are intermediates, and the result gets the NaN.
  void spoil_given(const std::vector<std::optional<TensorView>>& views) const {
    std::vector<TensorView> given;
    for (const auto& view : views) {
      if (view && !meetings_->memory().holds(*view)) given.push_back(*view);
    }
    if (!given.empty()) spoil(given);
  }

  static RowTable table(const Plan& plan, const TensorView& slots, std::byte* const* bases) {
    return {.count = plan.num_tokens(),
            .width = plan.top_k(),
            .slots = indices(slots),
            .buffers = indices(data_of(plan).target_ranks),
            .bases = {},
            .peer_bases = bases};
  }

  void count_tokens(const Plan& plan, std::int64_t bytes_each) {
    if (data_of(plan).is_known) bytes_on_wire_ += num_sent(data_of(plan)) * bytes_each;
  }
  // Counts the tokens sent to other ranks. On a GPU the host knows only exact plans, in which every
  // token has room.
  static std::int64_t num_sent(const PlanData& data) {
    std::int64_t sent = 0;
    if (data.places.memory() == Memory::host) {
      const auto places = data.places.span<std::int32_t>();
      const auto targets = data.target_ranks.span<std::int32_t>();
      for (std::size_t i = 0; i < places.size(); ++i) {
        sent += places[i] >= 0 && targets[i] != data.rank ? 1 : 0;
      }
      return sent;
    }
    const auto ranks = static_cast<std::size_t>(data.placement->num_ranks());
    const auto rank = static_cast<std::size_t>(data.rank);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (r != rank) sent += data.known.distinct_tokens[rank * ranks + r];
    }
    return sent;
  }
  void count_rows(const Plan& plan, std::int64_t bytes_each) {
    if (data_of(plan).is_known) bytes_on_wire_ += data_of(plan).known.num_remote * bytes_each;
  }

  std::shared_ptr<PeerMeetings> meetings_;
  Device device_;
  std::int64_t bytes_on_wire_ = 0;
};

}  // namespace

std::unique_ptr<Mover> make_peer_mover(std::shared_ptr<PeerMeetings> meetings,
                                       const Device& device) {
  return std::make_unique<PeerMover>(std::move(meetings), device);
}

}  // namespace switchyard
