// A group of ranks and the collectives between them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/error.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

class FailureListeners;
class FaultyCommunicator;  // of tests
class KeptObject;
struct KeptObjects;
struct ObjectIds;

enum class ReduceOp { sum, min, max };

struct ConnectOptions {
  std::string backend = "threads";
  // How long a collective waits for the other ranks before it throws on every rank that waits.
  std::chrono::milliseconds timeout = std::chrono::seconds(600);
  // MPI_Init waits for every process of the job, for ever if one is missing, and nothing can be
  // thrown out of it. If set, connect() ends this process there, with status 1 and a message on
  // stderr, as soon as it sees that another has died, or when the timeout is over. Meant for
  // programs whose main() connects; it does nothing if the caller has initialised MPI.
  bool exit_if_init_hangs = false;
};

// Memory of every rank, addressable from this one. Offered by backends whose ranks share memory.
class SWITCHYARD_API MappedBuffers {
 public:
  virtual ~MappedBuffers() = default;

  // Collective. Lends this rank's views to the group and returns every rank's, indexed
  // [rank][view]. Returns once every rank has lent its own, so what a rank wrote to them before is
  // visible. They may be used until the phase barrier that follows; lent memory must stay until
  // then, or until abort() has returned.
  virtual std::vector<std::vector<TensorView>> map(std::span<const TensorView> views) = 0;

  // Collective. Ends the phase: what any rank wrote before it is visible to all after it.
  virtual void phase_barrier() = 0;
};

// Every rank of the group must make the same calls in the same order. A call blocks until it is
// complete on this rank, and throws CommunicationError when a rank dies, throws, makes another call
// or does not arrive within the timeout, which each exchange of a call has to itself. After an
// error the communicator is unusable: every further call throws at once and says why. A
// communicator is used by one thread at a time: a second one in a collective gets an
// InvalidArgument, and nothing else happens. It belongs to the process that made it: in one that
// was forked off, every collective throws a CommunicationError, of which the group hears nothing.
//
// Tensors given to collectives are contiguous, in host memory only. A view with an owner may be
// moved from or into without a copy; a view of foreign memory may be staged.
class SWITCHYARD_API Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Collectives begun so far; errors name them by this number.
  std::uint64_t sequence() const { return sequence_; }
  // Bytes that this rank has handed over for other ranks.
  std::int64_t bytes_sent() const { return bytes_sent_; }
  // By rank [size], how long this one has waited for it so far, which tells who is late: the sum
  // over all completed exchanges of max(0, its arrival − this rank's). 0 for this rank itself, and
  // for ranks on other hosts, whose clocks cannot be compared. A live view, valid as long as this.
  std::span<const std::chrono::nanoseconds> waited_for() const { return waited_for_; }
  virtual std::string_view backend() const = 0;

  // send [Σ send_rows, …]: the rows for rank 0, then those for rank 1, …; recv [Σ recv_rows, …]
  // likewise by source. send_rows[d] here equals recv_rows[this rank] at d; zeros are fine.
  void all_to_all(const ConstTensorView& send, std::span<const std::int64_t> send_rows,
                  const TensorView& recv, std::span<const std::int64_t> recv_rows);
  // send [n, …] on every rank → recv [size · n, …], by rank.
  void all_gather(const ConstTensorView& send, const TensorView& recv);
  // values [n, …] becomes the reduction over ranks, added in rank order (in f32 for bf16, rounded
  // once), so that the bits do not depend on the backend.
  void all_reduce(const TensorView& values, ReduceOp op = ReduceOp::sum);
  // send [size · n, …] → recv [n, …]: this rank's part of the reduction, same order of addition.
  void reduce_scatter(const ConstTensorView& send, const TensorView& recv,
                      ReduceOp op = ReduceOp::sum);
  // values on every rank become those of root.
  void broadcast(const TensorView& values, int root);
  void barrier();
  // The ranks with the same color form a group, ordered by (key, rank). A negative color joins no
  // group and gets null.
  std::unique_ptr<Communicator> split(int color, int key);

  // Not collective. Tells the other ranks that this one gives up: they throw an error that names
  // this rank and the reason, instead of waiting for it. The communicator is unusable afterwards.
  void abort(std::string_view reason);

  // Null where ranks cannot address each other's memory.
  virtual MappedBuffers* mapped_buffers() { return nullptr; }

 protected:
  // The byte movers below are what a backend implements. They run inside a collective: sequence()
  // is its number, sizes are checked, and a throw poisons the communicator.
  struct Rows {
    std::byte* data = nullptr;
    std::span<const std::int64_t> rows;  // [size]
    std::shared_ptr<const void> owner;
  };
  struct Bytes {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    std::shared_ptr<const void> owner;
  };

  Communicator(int rank, int size, std::chrono::milliseconds timeout);

  virtual void do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) = 0;
  virtual void do_all_gather(const Bytes& send, const Bytes& recv) = 0;
  virtual void do_broadcast(const Bytes& values, int root) = 0;
  virtual void do_barrier() = 0;
  virtual std::unique_ptr<Communicator> do_split(int color, int key) = 0;
  // `culprits` are the ranks whose fault it is, which may be this one; none: it is not known. Ranks
  // of the world that are not in this group are negative numbers, which only travel.
  virtual void do_abort(const std::string& reason, const std::vector<int>& culprits) = 0;

  // Runs `body` as the next collective; an error of its own is made known to the other ranks. The
  // detail is whatever else must be equal on all ranks: "sum of f32".
  void run_collective(std::string_view operation, std::string detail,
                      const std::function<void()>& body);
  // For destructors: if an error ends this rank that came from another group of the same world, the
  // others learn of it here, too.
  void give_up_if_unwinding() noexcept;
  // "all_to_all #17": the collective that is running.
  std::string current_call() const;
  std::string_view operation() const { return operation_; }
  const std::string& detail() const { return detail_; }
  bool is_poisoned() const { return failure_.has_value(); }
  // What waited_for() shows [size]; the backend adds to it.
  std::span<std::chrono::nanoseconds> waits() { return waited_for_; }

 private:
  friend class FailureListeners;
  friend class FaultyCommunicator;
  friend struct KeptObjects;
  friend struct ObjectIds;

  void give_up(std::string_view reason, const std::vector<int>& culprits);
  void give_up_for(const std::string& reason, const std::exception& error);
  std::vector<int> ranks_here(const std::vector<int>& world_ranks) const;
  CommunicationError make_error(std::string what, const std::vector<int>& ranks) const;
  void reduce_pieces(const ConstTensorView& send, const TensorView& recv, ReduceOp op);

  int rank_;
  int size_;
  struct World;
  std::shared_ptr<World> world_;  // shared by a communicator and all that were split off it
  std::vector<int> world_ranks_;  // by rank: its number there
  int num_exceptions_;            // in flight when this was made
  std::chrono::milliseconds timeout_;
  int fork_generation_;  // of the process that it belongs to
  std::atomic<bool> is_in_use_ = false;
  std::uint64_t sequence_ = 0;
  std::int64_t bytes_sent_ = 0;
  std::vector<std::chrono::nanoseconds> waited_for_;
  std::int64_t num_objects_ = 0;                 // made over this
  std::shared_ptr<FailureListeners> listeners_;  // null: none yet
  std::string_view operation_;
  std::string detail_;
  std::optional<std::string> failure_;
  std::vector<int> culprits_;                              // of the failure
  std::vector<std::shared_ptr<KeptObject>> kept_objects_;  // the last member: they go first
};

// Joins the group that the environment defines: all processes of the job for "mpi", this process
// alone for "threads" (run_ranks makes larger groups). Blocks until all have joined.
SWITCHYARD_API std::unique_ptr<Communicator> connect(const ConnectOptions& options = {});

}  // namespace switchyard
