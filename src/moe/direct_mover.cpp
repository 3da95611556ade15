// Movement through mapped memory: a row is written straight into its slot, and read from there.
#include <algorithm>
#include <optional>
#include <vector>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/mover.h"
#include "moe/plan_data.h"

namespace switchyard {
namespace {

// map() lends mutable views; what is lent as constant here is only read by the peers.
TensorView lend(const ConstTensorView& view) {
  return {const_cast<std::byte*>(view.data()), view.dtype(), view.shape(), view.row_stride(),
          std::const_pointer_cast<std::byte>(view.owner())};
}

std::optional<TensorView> lend(const std::optional<ConstTensorView>& view) {
  return view ? std::optional(lend(*view)) : std::nullopt;
}

class DirectMover final : public Mover {
 public:
  DirectMover(Communicator& comm, const Device& device)
      : comm_(comm), buffers_(*comm.mapped_buffers()), device_(device) {}

  MoverKind kind() const override { return MoverKind::direct; }
  void prepare(Plan::Data& /*plan*/) override {}
  std::int64_t bytes_on_wire() const override { return bytes_on_wire_; }

  void scatter(const Plan& plan, const Scatter& args) override {
    const Loan loan = borrow(plan, {args.rows, args.row_scalars, lend(args.dot_rows)});
    in_phase([&] {
      if (args.dots) {
        device_.backend().dot_rows(
            {args.tokens, table(plan, loan.bases[2]), args.dots->span<float>().data()});
        count_bytes(plan, args.tokens.row_bytes());
      }
      device_.backend().scatter_rows(
          {args.tokens, floats_of(args.scale), table(plan, loan.bases[0])});
      count_bytes(plan, args.tokens.row_bytes());
      if (args.token_scalars) {
        for_each_assignment(plan, [&](std::size_t assignment, std::size_t rank, std::int32_t slot) {
          reinterpret_cast<float*>(loan.bases[1][rank])[slot] =
              floats_of(args.token_scalars)[assignment];
        });
        count_bytes(plan, sizeof(float));
      }
      zero_pads(plan, args.rows, args.row_scalars);
    });
  }

  void gather(const Plan& plan, const Gather& args) override {
    const Loan loan = borrow(plan, {lend(args.rows), lend(args.row_scalars)});
    in_phase([&] {
      device_.backend().gather_rows(
          {table(plan, loan.bases[0]), floats_of(args.weights), args.tokens});
      count_bytes(plan, args.tokens.row_bytes());
      if (args.token_scalars) {
        const auto out = args.token_scalars->span<float>();
        std::ranges::fill(out, 0.0F);
        for_each_assignment(plan, [&](std::size_t assignment, std::size_t rank, std::int32_t slot) {
          out[assignment] = reinterpret_cast<const float*>(loan.bases[1][rank])[slot];
        });
        count_bytes(plan, sizeof(float));
      }
    });
  }

 private:
  // Every rank's memory: bases[view][rank]. The views keep it alive.
  struct Loan {
    std::vector<std::vector<TensorView>> views;
    std::vector<std::vector<std::byte*>> bases;
  };

  // Collective. All ranks must lend memory for the same plan, and the same kinds of it.
  Loan borrow(const Plan& plan, const std::vector<std::optional<TensorView>>& lent) {
    std::vector<TensorView> own;
    std::int64_t kinds = 0;
    for (const auto& view : lent) {
      own.push_back(view.value_or(TensorView()));
      kinds = 2 * kinds + (view ? 1 : 0);
    }
    Tensor call = Tensor::from<std::int64_t>({2}, {plan.data().plan_number, kinds});
    own.push_back(call);
    Loan loan{buffers_.map(own), {}};
    try {
      require_same_call(loan.views);
    } catch (const InvalidArgument&) {  // the same on all ranks
      buffers_.phase_barrier();
      throw;
    }
    loan.bases.resize(own.size());
    for (const auto& rank_views : loan.views) {
      for (std::size_t i = 0; i < own.size(); ++i) {
        loan.bases[i].push_back(rank_views[i].data());
      }
    }
    return loan;
  }

  // Between map and phase_barrier the ranks use each other's memory: one that fails here must not
  // let go of its own before the others know.
  template <typename Body>
  void in_phase(Body body) {
    try {
      body();
    } catch (const std::exception& error) {
      comm_.abort(error.what());
      throw;
    }
    buffers_.phase_barrier();
  }

  static void require_same_call(const std::vector<std::vector<TensorView>>& views_of_rank) {
    const auto first = views_of_rank[0].back().span<std::int64_t>();
    for (std::size_t r = 1; r < views_of_rank.size(); ++r) {
      const auto other = views_of_rank[r].back().span<std::int64_t>();
      require(other[0] == first[0],
              "ranks use different plans: rank 0 its plan number {}, rank {} number {}", first[0],
              r, other[0]);
      require(other[1] == first[1], "ranks 0 and {} differ in the optional arguments they give", r);
    }
  }

  static RowTable table(const Plan& plan, std::span<std::byte* const> bases) {
    return {plan.num_tokens(), plan.top_k(), plan.data().slots.span<std::int32_t>().data(),
            plan.data().target_ranks.span<std::int32_t>().data(), bases};
  }

  template <typename Visit>
  static void for_each_assignment(const Plan& plan, Visit visit) {
    const auto slots = plan.data().slots.span<std::int32_t>();
    const auto ranks = plan.data().target_ranks.span<std::int32_t>();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] >= 0) visit(i, static_cast<std::size_t>(ranks[i]), slots[i]);
    }
  }

  void count_bytes(const Plan& plan, std::int64_t bytes_each) {
    const auto counts = plan.counts(plan.rank());
    for (int e = 0; e < plan.placement().num_experts(); ++e) {
      if (plan.placement().owner(e) == plan.rank()) continue;
      bytes_on_wire_ += counts[static_cast<std::size_t>(e)] * bytes_each;
    }
  }

  Communicator& comm_;
  MappedBuffers& buffers_;
  Device device_;
  std::int64_t bytes_on_wire_ = 0;
};

}  // namespace

std::unique_ptr<Mover> make_direct_mover(Communicator& comm, const Device& device) {
  return std::make_unique<DirectMover>(comm, device);
}

}  // namespace switchyard
