// Movement through mapped memory: a row is written straight into its slot, and read from there.
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

class DirectMover final : public Mover {
 public:
  explicit DirectMover(Communicator& comm) : buffers_(*comm.mapped_buffers()) {}

  MoverKind kind() const override { return MoverKind::direct; }
  void prepare(Plan::Data& /*plan*/) override {}
  std::int64_t bytes_on_wire() const override { return bytes_on_wire_; }

  void scatter(const Plan& plan, const Scatter& args) override {
    const Loan loan = borrow({args.rows, optional_view(args.row_scalars),
                              args.dot_rows ? lend(*args.dot_rows) : TensorView()});
    if (args.dots) {
      cpu_device().dot_rows(
          {args.tokens, table(plan, loan.bases[2]), args.dots->span<float>().data()});
      count_bytes(plan, args.tokens.row_bytes());
    }
    cpu_device().scatter_rows({args.tokens, floats_of(args.scale), table(plan, loan.bases[0])});
    count_bytes(plan, args.tokens.row_bytes());
    if (args.token_scalars) {
      for_each_assignment(plan, [&](std::size_t assignment, std::size_t rank, std::int32_t slot) {
        reinterpret_cast<float*>(loan.bases[1][rank])[slot] =
            floats_of(args.token_scalars)[assignment];
      });
      count_bytes(plan, sizeof(float));
    }
    zero_pads(plan, args.rows, args.row_scalars);
    buffers_.phase_barrier();
  }

  void gather(const Plan& plan, const Gather& args) override {
    const Loan loan =
        borrow({lend(args.rows), args.row_scalars ? lend(*args.row_scalars) : TensorView()});
    cpu_device().gather_rows({table(plan, loan.bases[0]), floats_of(args.weights), args.tokens});
    count_bytes(plan, args.tokens.row_bytes());
    if (args.token_scalars) {
      const auto out = args.token_scalars->span<float>();
      std::ranges::fill(out, 0.0F);
      for_each_assignment(plan, [&](std::size_t assignment, std::size_t rank, std::int32_t slot) {
        out[assignment] = reinterpret_cast<const float*>(loan.bases[1][rank])[slot];
      });
      count_bytes(plan, sizeof(float));
    }
    buffers_.phase_barrier();
  }

 private:
  // Every rank's memory: bases[view][rank]. The views keep it alive.
  struct Loan {
    std::vector<std::vector<TensorView>> views;
    std::vector<std::vector<std::byte*>> bases;
  };

  static TensorView optional_view(const std::optional<TensorView>& view) {
    return view.value_or(TensorView());
  }

  Loan borrow(std::initializer_list<TensorView> own) {
    Loan loan{buffers_.map(std::span(own.begin(), own.size())), {}};
    loan.bases.resize(own.size());
    for (const auto& rank_views : loan.views) {
      for (std::size_t i = 0; i < own.size(); ++i) {
        loan.bases[i].push_back(rank_views[i].data());
      }
    }
    return loan;
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

  MappedBuffers& buffers_;
  std::int64_t bytes_on_wire_ = 0;
};

}  // namespace

std::unique_ptr<Mover> make_direct_mover(Communicator& comm) {
  return std::make_unique<DirectMover>(comm);
}

}  // namespace switchyard
