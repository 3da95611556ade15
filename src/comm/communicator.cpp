// SPDX-License-Identifier: Apache-2.0
// Code shared by all backends: checks, sequence numbers, poisoning, and reductions in rank order.
#include "switchyard/communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <span>
#include <type_traits>

#include "comm/failure_listener.h"
#include "comm/world_numbers.h"
#include "core/check_memory.h"
#include "core/overlap.h"
#include "core/process.h"
#include "core/require.h"
#include "core/standard_floats.h"

namespace switchyard {
namespace {

// Up to this size a reduction gathers whole tensors: one exchange instead of two, with the same
// order of additions.
constexpr std::int64_t kGatherReduceBytes = 64 * 1024;

// Requires memory that a backend can copy as one block of host bytes.
void require_bytes(const ConstTensorView& view, std::string_view what) {
  require(view.is_contiguous(), "{} {} is not contiguous (row stride {})", what, view.shape(),
          view.row_stride());
  require_host(view, what);
}

void require_same_rows(const ConstTensorView& send, const ConstTensorView& recv) {
  require(send.dtype() == recv.dtype(), "send is {} but recv is {}", name_of(send.dtype()),
          name_of(recv.dtype()));
  require(send.shape().row_elements() == recv.shape().row_elements(),
          "send {} and recv {} have rows of different length", send.shape(), recv.shape());
}

// Returns the sum of `rows`, which has one entry per rank. Throws if the view has fewer rows.
std::int64_t checked_sum(std::span<const std::int64_t> rows, std::string_view what, int size,
                         const ConstTensorView& view) {
  require(rows.size() == static_cast<std::size_t>(size), "{} has {} entries for {} ranks", what,
          rows.size(), size);
  std::int64_t sum = 0;
  for (const auto count : rows) {
    require(0 <= count && count <= view.rows() - sum,
            "{} [{}] need more rows than the tensor {} has, or one of them is negative", what,
            fmt::join(rows, ", "), view.shape());
    sum += count;
  }
  return sum;
}

std::string_view name_of(ReduceOp op) {
  return op == ReduceOp::sum ? "sum" : op == ReduceOp::min ? "min" : "max";
}

template <typename T>
auto load(T value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return to_float(value);
  } else {
    return value;
  }
}

template <typename T, typename A>
T store(A value) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return to_bfloat16(value);
  } else {
    return value;
  }
}

template <typename A>
A apply(ReduceOp op, A a, A b) {
  switch (op) {
    case ReduceOp::sum:
      if constexpr (std::is_integral_v<A>) {
        using Unsigned = std::make_unsigned_t<A>;  // wraps; signed overflow would be undefined
        return static_cast<A>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
      } else {
        return a + b;
      }
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      return std::max(a, b);
  }
  throw InternalError("unknown ReduceOp");
}

template <typename T>
void reduce(const ConstTensorView& pieces, const TensorView& result, ReduceOp op) {
  const auto in = pieces.span<T>();
  const auto out = result.span<T>();
  const auto num_pieces = static_cast<std::size_t>(pieces.rows());
  const std::size_t n = out.size();
  for (std::size_t i = 0; i < n; ++i) {
    auto total = load(in[i]);
    for (std::size_t p = 1; p < num_pieces; ++p) total = apply(op, total, load(in[p * n + i]));
    out[i] = store<T>(total);
  }
}

void require_reducible(Dtype dtype, ReduceOp op) {
  require(op == ReduceOp::sum || op == ReduceOp::min || op == ReduceOp::max,
          "there is no reduction {}", static_cast<int>(op));
  require<Unsupported>(dtype != Dtype::f16,
                       "f16 cannot be reduced: convert it to f32 or bf16 first");
}

// Reduces pieces [ranks, n] into the n elements of `result`: ((p0 ∘ p1) ∘ p2) ∘ …. bf16 is
// accumulated in f32 and rounded once.
void reduce_in_rank_order(const ConstTensorView& pieces, const TensorView& result, ReduceOp op) {
  switch (pieces.dtype()) {
    case Dtype::f32:
      return reduce<float>(pieces, result, op);
    case Dtype::bf16:
      return reduce<Bfloat16>(pieces, result, op);
    case Dtype::i32:
      return reduce<std::int32_t>(pieces, result, op);
    case Dtype::i64:
      return reduce<std::int64_t>(pieces, result, op);
    case Dtype::f16:
      throw InternalError("the checks let f16 through to a reduction");
  }
}

// Backends take both directions as mutable bytes, but only read the sending side.
std::byte* read_only(const std::byte* data) { return const_cast<std::byte*>(data); }

// Held while a collective runs. The constructor throws if another thread holds it.
class OneThread {
 public:
  OneThread(std::atomic<bool>& is_in_use, std::string_view operation) : is_in_use_(is_in_use) {
    require(!is_in_use_.exchange(true, std::memory_order_acquire),
            "{}: another thread is in a collective of this communicator; only one thread may use "
            "it at a time",
            operation);
  }
  ~OneThread() { is_in_use_.store(false, std::memory_order_release); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  std::atomic<bool>& is_in_use_;
};

}  // namespace

// The first failure that this rank has seen in any group of the world.
struct Communicator::World {
  std::optional<std::string> failure;
  std::vector<int> culprits;  // world ranks
};

Communicator::Communicator(int rank, int size, std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(size),
      world_(std::make_shared<World>()),
      world_ranks_(static_cast<std::size_t>(size)),
      num_exceptions_(std::uncaught_exceptions()),
      timeout_(timeout),
      fork_generation_(fork_generation()),
      waited_for_(static_cast<std::size_t>(size)) {
  std::iota(world_ranks_.begin(), world_ranks_.end(), 0);
}

std::string Communicator::current_call() const {
  return fmt::format("{} #{}", operation_, sequence_);
}

void Communicator::run_collective(std::string_view operation, std::string detail,
                                  const std::function<void()>& body) {
  require<CommunicationError>(size_ == 1 || fork_generation_ == fork_generation(),
                              "{}: this communicator belongs to the parent process and cannot be "
                              "used after fork(); call connect() in this process first",
                              operation);
  const OneThread alone(is_in_use_, operation);
  if (failure_) {
    throw make_error(
        fmt::format("{}: this communicator failed before and can no longer be used: {}", operation,
                    *failure_),
        culprits_);
  }
  const StandardFloats standard;
  operation_ = operation;
  detail_ = std::move(detail);
  ++sequence_;
  try {
    body();
  } catch (const CommunicationError& error) {
    give_up(error.what(), error.ranks());
    throw make_error(error.what(), error.ranks());
  } catch (const std::exception& error) {
    give_up(error.what(), {rank_});
    throw;
  } catch (...) {  // the caller may catch it and go on, so peers must learn of it here
    give_up("an exception that is not a std::exception", {rank_});
    throw;
  }
}

void Communicator::abort(std::string_view reason) { give_up(reason, {rank_}); }

void Communicator::give_up(std::string_view reason, const std::vector<int>& culprits) {
  if (failure_) return;
  const CommunicationError error = make_error(std::string(reason), culprits);
  failure_ = std::string(reason);
  culprits_ = culprits;
  if (!world_->failure) {
    world_->failure = error.what();
    world_->culprits = error.world_ranks();
  }
  if (fork_generation_ != fork_generation()) return;  // the group belongs to the parent process
  FailureListeners::tell(*this, *failure_, error.world_ranks());
  do_abort(*failure_, culprits);
}

// Blames the ranks that `error` names if it comes from this world, and this rank otherwise.
void Communicator::give_up_for(const std::string& reason, const std::exception& error) {
  const auto* const failed = dynamic_cast<const CommunicationError*>(&error);
  const bool is_of_this_world = failed != nullptr && failed->world_.lock() == world_;
  give_up(reason, is_of_this_world ? ranks_here(failed->world_ranks()) : std::vector{rank_});
}

void Communicator::give_up_if_unwinding() noexcept {
  if (failure_ || !world_->failure || std::uncaught_exceptions() <= num_exceptions_) return;
  try {
    give_up(*world_->failure, ranks_here(world_->culprits));
  } catch (const std::exception&) {  // no memory for a message: peers see that this rank leaves
  }
}

std::vector<int> Communicator::ranks_here(const std::vector<int>& world_ranks) const {
  std::vector<int> ranks;
  for (const int world_rank : world_ranks) {
    ranks.push_back(number_in_group(world_ranks_, world_rank));
  }
  return ranks;
}

// Adds the world rank wherever it differs, since users know ranks by their world numbers.
CommunicationError Communicator::make_error(std::string what, const std::vector<int>& ranks) const {
  std::vector<int> here;
  std::vector<int> world_ranks;
  for (const int r : ranks) {
    if (r < 0) {
      world_ranks.push_back(number_in_world(world_ranks_, r));
      continue;
    }
    here.push_back(r);
    world_ranks.push_back(world_ranks_[static_cast<std::size_t>(r)]);
    if (world_ranks.back() == r) continue;
    what += fmt::format("; rank {} of this group is rank {} of the world", r, world_ranks.back());
  }
  CommunicationError error(what, std::move(here));
  error.world_ranks_ = std::move(world_ranks);
  error.world_ = world_;
  return error;
}

void Communicator::all_to_all(const ConstTensorView& send, std::span<const std::int64_t> send_rows,
                              const TensorView& recv, std::span<const std::int64_t> recv_rows) {
  run_collective("all_to_all", std::string(name_of(send.dtype())), [&] {
    require_bytes(send, "send");
    require_bytes(recv, "recv");
    require_same_rows(send, recv);
    const auto sent = checked_sum(send_rows, "send_rows", size_, send);
    checked_sum(recv_rows, "recv_rows", size_, recv);
    require_apart(send, recv, "send and recv");
    const auto self = static_cast<std::size_t>(rank_);
    require(send_rows[self] == recv_rows[self],
            "rank {} sends itself {} rows but expects {} from itself", rank_, send_rows[self],
            recv_rows[self]);
    do_all_to_all({read_only(send.data()), send_rows, send.owner()},
                  {recv.data(), recv_rows, recv.owner()}, send.row_bytes());
    bytes_sent_ += (sent - send_rows[self]) * send.row_bytes();
  });
}

void Communicator::all_gather(const ConstTensorView& send, const TensorView& recv) {
  run_collective("all_gather", std::string(name_of(send.dtype())), [&] {
    require_bytes(send, "send");
    require_bytes(recv, "recv");
    require_same_rows(send, recv);
    require_apart(send, recv, "send and recv");
    require(recv.rows() == size_ * send.rows(), "recv {} must hold {} times the rows of send {}",
            recv.shape(), size_, send.shape());
    do_all_gather({read_only(send.data()), send.bytes(), send.owner()},
                  {recv.data(), recv.bytes(), recv.owner()});
    bytes_sent_ += send.bytes() * (size_ - 1);
  });
}

void Communicator::all_reduce(const TensorView& values, ReduceOp op) {
  run_collective("all_reduce", fmt::format("{} of {}", name_of(op), name_of(values.dtype())), [&] {
    require_bytes(values, "values");
    require_reducible(values.dtype(), op);
    const auto num_elements = values.shape().num_elements();
    const Dtype dtype = values.dtype();
    if (size_ == 1 || num_elements == 0) return do_barrier();
    if (values.bytes() <= kGatherReduceBytes) {
      Tensor all({size_, num_elements}, dtype);
      do_all_gather({values.data(), values.bytes(), values.owner()},
                    {all.data(), all.bytes(), all.view().owner()});
      reduce_in_rank_order(all, values, op);
      bytes_sent_ += values.bytes() * (size_ - 1);
      return;
    }
    const auto piece = (num_elements + size_ - 1) / size_;
    Tensor padded({size_, piece}, dtype);
    const auto bytes = static_cast<std::size_t>(values.bytes());
    std::memcpy(padded.data(), values.data(), bytes);
    std::memset(padded.data() + bytes, 0, static_cast<std::size_t>(padded.bytes()) - bytes);
    Tensor mine({1, piece}, dtype);
    reduce_pieces(padded, mine, op);
    do_all_gather({mine.data(), mine.bytes(), mine.view().owner()},
                  {padded.data(), padded.bytes(), padded.view().owner()});
    bytes_sent_ += mine.bytes() * (size_ - 1);
    std::memcpy(values.data(), padded.data(), bytes);
  });
}

void Communicator::reduce_scatter(const ConstTensorView& send, const TensorView& recv,
                                  ReduceOp op) {
  run_collective("reduce_scatter", fmt::format("{} of {}", name_of(op), name_of(send.dtype())),
                 [&] {
                   require_bytes(send, "send");
                   require_bytes(recv, "recv");
                   require_same_rows(send, recv);
                   require_reducible(send.dtype(), op);
                   require(send.rows() == size_ * recv.rows(),
                           "send {} must hold {} times the rows of recv {}", send.shape(), size_,
                           recv.shape());
                   require_apart(send, recv, "send and recv");
                   reduce_pieces(send, recv, op);
                 });
}

// `send` holds one piece for each rank. Writes to `recv` the reduction of all ranks' pieces for
// this rank.
void Communicator::reduce_pieces(const ConstTensorView& send, const TensorView& recv, ReduceOp op) {
  const std::vector<std::int64_t> one_each(static_cast<std::size_t>(size_), 1);
  Tensor pieces({size_, recv.shape().num_elements()}, recv.dtype());
  do_all_to_all({read_only(send.data()), one_each, send.owner()},
                {pieces.data(), one_each, pieces.view().owner()}, recv.bytes());
  reduce_in_rank_order(pieces, recv, op);
  bytes_sent_ += recv.bytes() * (size_ - 1);
}

void Communicator::broadcast(const TensorView& values, int root) {
  run_collective("broadcast", fmt::format("{} from {}", name_of(values.dtype()), root), [&] {
    require_bytes(values, "values");
    require(0 <= root && root < size_, "root ({}) must be a rank of {}", root, size_);
    do_broadcast({values.data(), values.bytes(), values.owner()}, root);
    if (root == rank_) bytes_sent_ += values.bytes() * (size_ - 1);
  });
}

void Communicator::barrier() {
  run_collective("barrier", "", [&] { do_barrier(); });
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  std::unique_ptr<Communicator> part;
  run_collective("split", "", [&] {
    const std::array<int, 2> own{color, key};
    std::vector<std::array<int, 2>> all(static_cast<std::size_t>(size_));
    const auto bytes = [](auto values) {
      const auto of = std::as_bytes(values);
      return Bytes{read_only(of.data()), std::ssize(of), nullptr};
    };
    do_all_gather(bytes(std::span(&own, 1)), bytes(std::span(all)));
    part = do_split(color, key);
    if (part == nullptr) return;
    std::vector<int> members;
    for (int r = 0; r < size_; ++r) {
      if (all[static_cast<std::size_t>(r)][0] == color) members.push_back(r);
    }
    std::ranges::stable_sort(members, {},
                             [&](int r) { return all[static_cast<std::size_t>(r)][1]; });
    part->world_ = world_;
    std::ranges::transform(members, part->world_ranks_.begin(),
                           [&](int r) { return world_ranks_[static_cast<std::size_t>(r)]; });
  });
  if (part != nullptr) FailureListeners::split_off(*this, *part);
  return part;
}

}  // namespace switchyard
