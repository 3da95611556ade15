// SPDX-License-Identifier: Apache-2.0
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
class FaultyCommunicator;  // used by tests
class KeptObject;
struct KeptObjects;
struct ObjectIds;

// How collectives combine the values of ranks.
enum class ReduceOp { sum, min, max };

// Options of connect().
struct ConnectOptions {
  std::string backend = "threads";
  // Time that a collective waits for the other ranks before it throws on every rank that is
  // waiting.
  std::chrono::milliseconds timeout = std::chrono::seconds(600);
  // Ends this process if MPI_Init hangs. MPI_Init waits for every process of the job, without a
  // deadline, and nothing can be thrown out of it. If set, connect() exits with status 1 and a
  // message on stderr as soon as it sees that another process has died, or when the timeout
  // expires. Meant for programs whose main() connects. Has no effect if the caller has already
  // initialised MPI.
  bool exit_if_init_hangs = false;
};

// Memory of all ranks, addressable from this one. Only backends whose ranks share memory provide
// it.
class SWITCHYARD_API MappedBuffers {
 public:
  virtual ~MappedBuffers() = default;

  // Lends this rank's views to the group and returns the views of every rank, indexed [rank][view].
  // Collective. Blocks until every rank has lent its views, so everything written to them before is
  // visible. The views may be used until the next phase_barrier(). Lent memory must stay valid
  // until then, or until abort() has returned.
  virtual std::vector<std::vector<TensorView>> map(std::span<const TensorView> views) = 0;

  // Ends the phase: everything that any rank wrote before it is visible to all ranks after it.
  // Collective.
  virtual void phase_barrier() = 0;
};

// A group of ranks and the collectives between them. Every rank of the group must make the same
// calls in the same order. A call blocks until it is complete on this rank. It throws
// CommunicationError if a rank dies, throws, makes a different call, or does not arrive within the
// timeout; if a call needs several exchanges, the timeout applies to each. After an error the
// communicator is unusable: every further call throws at once and says why.
//
// One thread at a time may use a communicator. A second thread that enters a collective gets an
// InvalidArgument, which has no other effect. A communicator of several ranks belongs to the
// process that made it: in a forked child every collective throws a CommunicationError, and the
// group is not affected.
//
// Tensors given to collectives must be contiguous and in host memory. Views that have an owner may
// be read or written without a copy; views of foreign memory may be staged.
class SWITCHYARD_API Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // The number of collectives started so far. Error messages identify a collective by this number.
  std::uint64_t sequence() const { return sequence_; }
  // The number of bytes that this rank has sent to other ranks.
  std::int64_t bytes_sent() const { return bytes_sent_; }
  // The time that this rank has waited for each rank so far, [size], which shows who is late. It is
  // the sum over all completed exchanges of max(0, arrival of that rank − arrival of this rank). It
  // is 0 for this rank itself and for ranks on other hosts, whose clocks cannot be compared. A live
  // view, valid as long as the communicator.
  std::span<const std::chrono::nanoseconds> waited_for() const { return waited_for_; }
  virtual std::string_view backend() const = 0;

  // Sends rows to every rank and receives rows from every rank. send [Σ send_rows, …] holds the
  // rows for rank 0, then those for rank 1, and so on; recv [Σ recv_rows, …] receives them ordered
  // by source rank. send_rows[d] on this rank must equal recv_rows[this rank] on rank d; counts may
  // be 0.
  void all_to_all(const ConstTensorView& send, std::span<const std::int64_t> send_rows,
                  const TensorView& recv, std::span<const std::int64_t> recv_rows);
  // Concatenates send [n, …] of all ranks, in rank order, into recv [size · n, …].
  void all_gather(const ConstTensorView& send, const TensorView& recv);
  // Replaces values [n, …] with their reduction over all ranks. Adds in rank order, in f32 for bf16
  // with one rounding at the end, so the bits do not depend on the backend. Throws Unsupported for
  // f16.
  void all_reduce(const TensorView& values, ReduceOp op = ReduceOp::sum);
  // Reduces send [size · n, …] over all ranks and stores this rank's part in recv [n, …]. Adds in
  // the same order as all_reduce.
  void reduce_scatter(const ConstTensorView& send, const TensorView& recv,
                      ReduceOp op = ReduceOp::sum);
  // Copies values from `root` to every rank.
  void broadcast(const TensorView& values, int root);
  void barrier();
  // Splits the group: ranks with the same color form a new group, ordered by (key, rank). Returns
  // null for a negative color, which joins no group.
  std::unique_ptr<Communicator> split(int color, int key);

  // Tells the other ranks that this one gives up, so that they throw an error that names this rank
  // and the reason instead of waiting for it. Not collective. The communicator is unusable
  // afterwards.
  void abort(std::string_view reason);

  // Returns null if the ranks cannot address each other's memory.
  virtual MappedBuffers* mapped_buffers() { return nullptr; }

 protected:
  // Rows and Bytes are arguments of the functions below, which a backend implements. These run
  // inside a collective: sequence() is its number, sizes have been checked, and an exception
  // poisons the communicator.
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
  // Tells the other ranks that this one gives up. `culprits` are the ranks at fault, possibly this
  // one; empty if unknown. Negative numbers stand for ranks of the world that are not in this
  // group; they are only passed on.
  virtual void do_abort(const std::string& reason, const std::vector<int>& culprits) = 0;
  // Aborts the communicator that this one wraps, with the arguments of do_abort().
  static void abort_wrapped(Communicator& inner, const std::string& reason,
                            const std::vector<int>& culprits) {
    inner.give_up(reason, culprits);
  }

  // Runs `body` as the next collective and tells the other ranks if it throws. `detail` is anything
  // else that must be equal on all ranks, such as "sum of f32".
  void run_collective(std::string_view operation, std::string detail,
                      const std::function<void()>& body);
  // Tells the ranks of this group about an error from another group of the same world that is
  // unwinding this rank. For destructors.
  void give_up_if_unwinding() noexcept;
  // Returns the name and number of the running collective, such as "all_to_all #17".
  std::string current_call() const;
  std::string_view operation() const { return operation_; }
  const std::string& detail() const { return detail_; }
  bool is_poisoned() const { return failure_.has_value(); }
  // The counters behind waited_for(), [size], for the backend to add to.
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
  std::shared_ptr<World> world_;  // shared with all communicators split off this one
  std::vector<int> world_ranks_;  // [size]: the number of each rank in the world
  int num_exceptions_;            // uncaught exceptions when this was constructed
  std::chrono::milliseconds timeout_;
  int fork_generation_;  // identifies the process that this belongs to
  std::atomic<bool> is_in_use_ = false;
  std::uint64_t sequence_ = 0;
  std::int64_t bytes_sent_ = 0;
  std::vector<std::chrono::nanoseconds> waited_for_;
  std::int64_t num_objects_ = 0;                 // objects made over this communicator
  std::shared_ptr<FailureListeners> listeners_;  // null until the first is added
  std::string_view operation_;
  std::string detail_;
  std::optional<std::string> failure_;
  std::vector<int> culprits_;                              // ranks at fault for the failure
  std::vector<std::shared_ptr<KeptObject>> kept_objects_;  // the last member, so destroyed first
};

// Joins the group that the environment defines: all processes of the job for "mpi", this process
// alone for "threads" (run_ranks makes larger groups). Blocks until all processes have joined.
// Throws InvalidArgument for an unknown backend, and Unsupported if the backend is unavailable or
// the processes run different library versions or CPU instruction sets.
SWITCHYARD_API std::unique_ptr<Communicator> connect(const ConnectOptions& options = {});

}  // namespace switchyard
