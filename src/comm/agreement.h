// How ranks agree, and what of it the library keeps to itself. Whatever can be compared or checked
// before a collective is agreed on, and the communicator stays usable; what fails later on one rank
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

// Aborts every communicator that has other ranks. With an error that names ranks, those are blamed
// instead of this one.
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

// Not collective. Runs what may fail on this rank alone, and returns what it returns. The ranks of
// these communicators must not wait for a rank that failed: they learn why, and the communicators
// are unusable. A rank that is alone keeps its own: nobody waits, and it may try again.
template <typename Error = std::exception, typename Work>
auto or_abort(const std::vector<Communicator*>& comms, std::string_view operation, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    abort_all(comms, std::string(operation) + ": " + error.what(), &error);
    throw;
  } catch (...) {  // of a caller's own
    if constexpr (std::is_same_v<Error, std::exception>) {
      abort_all(comms, std::string(operation) + ": an exception that is not a std::exception");
    }
    throw;
  }
}

// The same for collective work whose other errors all ranks have: for want of memory, and when its
// device fails, a rank is alone.
template <typename Work>
auto or_abort_alone(const std::vector<Communicator*>& comms, std::string_view operation,
                    Work work) {
  return or_abort<DeviceError>(comms, operation,
                               [&] { return or_abort<std::bad_alloc>(comms, operation, work); });
}

// The same for checks of this rank's arguments to an operation, which this rank's error names, too.
template <typename Checks>
void check_arguments(const std::vector<Communicator*>& comms, std::string_view operation,
                     Checks checks) {
  try {
    or_abort(comms, operation, checks);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(std::string(operation) + ": " + error.what());
  }
}

// A number that all ranks must have alike, and what an error calls it.
struct Field {
  std::string_view name;
  std::int64_t value = 0;
};
// Collective. Throws what require_equal() does for the first field that differs.
void require_equal_fields(Communicator& comm, std::span<const Field> fields);

// A list that is compared by its hash. Its texts must tell apart whatever its hash does; they are
// asked for only where hashes differ.
struct ComparedList {
  std::string_view all = {};  // "tensors"
  std::string_view one = {};  // "tensor": an error names the first that differs, "tensor 2"
  std::int64_t hash = 0;
  std::size_t size = 0;
  std::function<std::string(std::size_t)> text_of = {};
};

// Of words; they must outlive the list.
ComparedList list_of(std::string_view all, std::string_view one,
                     std::span<const std::string> texts);
// "f32 [2,4]"
std::string form_text(const ConstTensorView& tensor);

// What the ranks of an operation must have alike: numbers are compared, and where those differ the
// words behind them, so that an error names what differs.
class Agreement {
 public:
  // Messages begin with the operation, if it is not empty.
  Agreement(Communicator& comm, std::string_view operation) : comm_(comm), operation_(operation) {}

  // Before gather(). Names must outlive this.
  void add(const Field& field);
  void add(ComparedList list);
  // This rank's own objection, if not empty.
  void object(std::string objection) { objection_ = std::move(objection); }

  // Collective. Throws if any rank objects. Messages call this rank `rank`, its number elsewhere.
  void gather(int rank);
  void gather() { gather(comm_.rank()); }
  // Of a rank of the communicator, in the order of add().
  std::span<const std::int64_t> values_of(int rank) const;

  // Collective, after gather(). Throws the same InvalidArgument on every rank of the communicator
  // if one of these ranks differs from the first of them in one of the first `count` that were
  // added.
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
  std::vector<ComparedList> items_;  // fields have no texts: their hash is their value
  std::string objection_;
  Tensor values_of_rank_;  // [ranks, items, then the rank's name and whether it objects]
};

// Tells apart objects that are made over one communicator in the same order everywhere: the number
// is equal on all ranks that have asked for one equally often.
struct ObjectIds {
  static std::int64_t next(Communicator& comm) { return comm.num_objects_++; }
};

}  // namespace switchyard
