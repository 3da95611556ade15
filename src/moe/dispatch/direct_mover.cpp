// SPDX-License-Identifier: Apache-2.0
// Moves rows through mapped host memory: each row is written straight into its slot and read from
// there. A single rank maps nothing, so it may also work on a GPU.
#include <optional>
#include <vector>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/dispatch/mover.h"
#include "moe/plan/plan_data.h"

namespace switchyard {
namespace {

// map() takes mutable views. Peers only read the views that are const here.
TensorView lend(const ConstTensorView& view) {
  return {const_cast<std::byte*>(view.data()),
          view.dtype(),
          view.shape(),
          view.row_stride(),
          std::const_pointer_cast<std::byte>(view.owner()),
          view.memory()};
}

std::optional<TensorView> lend(const std::optional<ConstTensorView>& view) {
  return view ? std::optional(lend(*view)) : std::nullopt;
}

class DirectMover final : public Mover {
 public:
  DirectMover(Communicator& comm, const Device& device)
      : comm_(comm), buffers_(comm.size() > 1 ? comm.mapped_buffers() : nullptr), device_(device) {}

  MoverKind kind() const override { return MoverKind::direct; }
  std::int64_t bytes_on_wire() const override { return bytes_on_wire_; }

  // A single rank already has all tokens in place.
  bool receives(const Plan& /*plan*/) const override { return buffers_ == nullptr; }
  ReceivedTokens receive(const Plan& plan, const ConstTensorView& tokens,
                         const ConstTensorView& weights) override {
    return {tokens, weights, plan.row_sources()};
  }
  ConstTensorView receive(const Plan& /*plan*/, const ConstTensorView& tokens) override {
    return tokens;
  }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return backend_of(device_).take(shape, dtype);
  }

  void scatter(const Plan& plan, const Scatter& args) override {
    const Loan loan = borrow(plan, {args.rows, args.row_scalars, lend(args.dot_rows)});
    in_phase([&] {
      if (args.dots) {
        backend_of(device_).dot_rows(
            {args.tokens, table(plan, loan.bases[2]), floats_of(args.dots)});
        count_bytes(plan, args.tokens.row_bytes());
      }
      backend_of(device_).scatter_rows({.from = args.tokens,
                                        .scale = floats_of(args.scale),
                                        .to = table(plan, loan.bases[0]),
                                        .scalars = floats_of(args.token_scalars),
                                        .scalar_bases = loan.bases[1],
                                        .pads = pads_of(plan, args.rows, args.row_scalars)});
      count_bytes(plan, args.tokens.row_bytes() + bytes_of_scalar(args.token_scalars.has_value()));
    });
  }

  void gather(const Plan& plan, const Gather& args) override {
    const Loan loan = borrow(plan, {lend(args.rows), lend(args.row_scalars)});
    in_phase([&] {
      backend_of(device_).gather_rows({.from = table(plan, loan.bases[0]),
                                       .weights = floats_of(args.weights),
                                       .to = args.tokens,
                                       .scalar_bases = loan.bases[1],
                                       .scalars = floats_of(args.token_scalars)});
      count_bytes(plan, args.tokens.row_bytes() + bytes_of_scalar(args.token_scalars.has_value()));
    });
  }

 private:
  using Views = std::vector<std::vector<TensorView>>;

  // Every rank's memory: bases[view][rank]. The views keep it alive.
  struct Loan {
    Views views;  // [rank][view]
    std::vector<std::vector<std::byte*>> bases;
  };

  // Collective. All ranks must lend memory for the same plan and give the same optional views.
  Loan borrow(const Plan& plan, const std::vector<std::optional<TensorView>>& lent) {
    std::vector<TensorView> own;
    std::int64_t kinds = 0;
    for (const auto& view : lent) {
      own.push_back(view.value_or(TensorView()));
      kinds = 2 * kinds + (view ? 1 : 0);
    }
    Loan loan{buffers_ != nullptr ? map(own, data_of(plan).plan_number, kinds) : Views{own}, {}};
    loan.bases.resize(own.size());
    for (const auto& rank_views : loan.views) {
      for (std::size_t i = 0; i < own.size(); ++i) {
        loan.bases[i].push_back(rank_views[i].data());
      }
    }
    return loan;
  }

  Views map(std::vector<TensorView> own, std::int64_t plan_number, std::int64_t kinds) {
    Tensor call = Tensor::from<std::int64_t>({2}, {plan_number, kinds});
    own.push_back(call);
    Views views = buffers_->map(own);
    try {
      require_same_call(views);
    } catch (const InvalidArgument&) {  // thrown on every rank
      buffers_->phase_barrier();
      throw;
    }
    return views;
  }

  // Ranks access each other's memory between map and phase_barrier. A rank that fails must tell the
  // others before it releases its own memory.
  template <typename Body>
  void in_phase(Body body) {
    if (buffers_ == nullptr) return body();
    try {
      body();
    } catch (const std::exception& error) {
      comm_.abort(error.what());
      throw;
    }
    buffers_->phase_barrier();
  }

  static void require_same_call(const Views& views_of_rank) {
    const auto first = views_of_rank[0].back().span<std::int64_t>();
    for (std::size_t r = 1; r < views_of_rank.size(); ++r) {
      const auto other = views_of_rank[r].back().span<std::int64_t>();
      require(other[0] == first[0],
              "ranks use different plans: rank 0 uses its plan {}, rank {} its plan {}", first[0],
              r, other[0]);
      require(other[1] == first[1], "ranks 0 and {} pass different optional arguments", r);
    }
  }

  RowTable table(const Plan& plan, std::span<std::byte* const> bases) const {
    return {plan.num_tokens(), plan.top_k(), indices(data_of(plan).slots),
            buffers_ != nullptr ? indices(data_of(plan).target_ranks) : nullptr, bases};
  }

  static std::int64_t bytes_of_scalar(bool travels) {
    return travels ? static_cast<std::int64_t>(sizeof(float)) : 0;
  }

  void count_bytes(const Plan& plan, std::int64_t bytes_each) {
    if (buffers_ == nullptr) return;
    bytes_on_wire_ += data_of(plan).known.num_remote * bytes_each;
  }

  Communicator& comm_;
  MappedBuffers* buffers_;  // null at one rank
  Device device_;
  std::int64_t bytes_on_wire_ = 0;
};

}  // namespace

std::unique_ptr<Mover> make_direct_mover(Communicator& comm, const Device& device) {
  return std::make_unique<DirectMover>(comm, device);
}

}  // namespace switchyard
