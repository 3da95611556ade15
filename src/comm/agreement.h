// SPDX-License-Identifier: Apache-2.0
// Agreement between ranks, for use inside the library. Ranks agree on anything that can be compared
// or checked before a collective, and the communicator stays usable. A later failure on one rank
// alone aborts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "comm/failure_listener.h"
#include "switchyard/agreement.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Aborts every communicator that has other ranks. If `error` names ranks, they are blamed instead
// of this one.
inline void abort_all(const std::vector<Communicator*>& comms, const std::string& reason,
                      const std::exception* error = nullptr) {
  for (Communicator* comm : comms) {
    if (comm->size() == 1) continue;
    if (error == nullptr) {
      comm->abort(reason);
    } else {
      FailureListeners::abort_for(*comm, reason, *error);
    }
  }
}

// Not collective. Runs `work`, which may fail on this rank alone, and returns its result. If it
// throws an `Error`, aborts `comms` and rethrows: peers learn the reason instead of waiting, and
// the communicators are unusable. A single-rank communicator stays usable: no peer is waiting, so
// the caller may retry.
template <typename Error = std::exception, typename Work>
auto or_abort(const std::vector<Communicator*>& comms, std::string_view operation, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    abort_all(comms, std::string(operation) + ": " + error.what(), &error);
    throw;
  } catch (...) {  // any other type, e.g. one of the caller's own
    if constexpr (std::is_same_v<Error, std::exception>) {
      abort_all(comms, std::string(operation) + ": an exception that is not a std::exception");
    }
    throw;
  }
}

// or_abort() for collective work. Only running out of memory or a device failure can hit one rank
// alone, so only these abort; all ranks see any other error.
template <typename Work>
auto or_abort_alone(const std::vector<Communicator*>& comms, std::string_view operation,
                    Work work) {
  return or_abort<DeviceError>(comms, operation,
                               [&] { return or_abort<std::bad_alloc>(comms, operation, work); });
}

// or_abort() for checks of this rank's arguments. An InvalidArgument names the operation on this
// rank too.
template <typename Checks>
void check_arguments(const std::vector<Communicator*>& comms, std::string_view operation,
                     Checks checks) {
  try {
    or_abort(comms, operation, checks);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(std::string(operation) + ": " + error.what());
  }
}

// A number that must be equal on all ranks, and its name in errors.
struct Field {
  std::string_view name;
  std::int64_t value = 0;
};
// Collective. Throws the error of require_equal() for the first field that differs.
void require_equal_fields(Communicator& comm, std::span<const Field> fields);

// A list compared by its hash. Lists with different hashes must have different texts; `text_of` is
// called only if hashes differ.
struct ComparedList {
  std::string_view all = {};  // "tensors"
  std::string_view one = {};  // "tensor": an error names the first that differs, as in "tensor 2"
  std::int64_t hash = 0;
  std::size_t size = 0;
  std::function<std::string(std::size_t)> text_of = {};
};

// Makes a ComparedList of `texts`, which must outlive it.
ComparedList list_of(std::string_view all, std::string_view one,
                     std::span<const std::string> texts);
// Returns dtype and shape, as in "f32 [2,4]".
std::string form_text(const ConstTensorView& tensor);

// Compares values on which all ranks of an operation must agree. It gathers numbers first; only
// where hashes differ does it gather the texts behind them, so that the error names the difference.
class Agreement {
 public:
  // Messages begin with `operation` unless it is empty.
  Agreement(Communicator& comm, std::string_view operation) : comm_(comm), operation_(operation) {}

  // Call before gather(). Names must outlive this object.
  void add(const Field& field);
  void add(ComparedList list);
  // Sets this rank's own objection; empty means none.
  void object(std::string objection) { objection_ = std::move(objection); }

  // Collective. Throws if any rank objects. Messages refer to this rank as `rank`, for example its
  // number in a larger group.
  void gather(int rank);
  void gather() { gather(comm_.rank()); }
  // Returns the values gathered from a rank of the communicator, in the order of add().
  std::span<const std::int64_t> values_of(int rank) const;

  // Collective, after gather(). Throws the same InvalidArgument on every rank of the communicator
  // if one of `ranks` differs from the first of them in one of the first `count` items added.
  void require_equal(std::size_t count, std::span<const int> ranks);
  void require_equal(std::size_t count);  // among all ranks
  void require_equal() { require_equal(items_.size()); }

 private:
  [[noreturn]] void refuse_list(const ComparedList& list, int first, int other);
  [[noreturn]] void refuse(const std::string& what, int first, const std::string& has, int other,
                           const std::string& other_has) const;
  std::span<const std::int64_t> all_values_of(int rank) const;
  int name_of_rank(int rank) const;

  Communicator& comm_;
  std::string_view operation_;
  std::vector<ComparedList> items_;  // a field has no texts: its hash is its value
  std::string objection_;
  Tensor values_of_rank_;  // [ranks, items + 2]: the items, the rank's name, whether it objects
};

// Numbers the objects made over one communicator. Ranks that have called next() equally often get
// the same number, so objects must be made in the same order everywhere.
struct ObjectIds {
  static std::int64_t next(Communicator& comm) { return comm.num_objects_++; }
};

}  // namespace switchyard
