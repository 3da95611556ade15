// What the ranks of an operation must have alike: numbers are compared, and where those differ the
// words behind them, so that an error names what differs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe/plan/plan_record.h"
#include "switchyard/communicator.h"
#include "switchyard/tensor.h"

namespace switchyard {

// A list that is compared by its hash. Its texts must tell apart whatever its hash does; they are
// asked for only where hashes differ.
struct ComparedList {
  std::string_view all = {};  // "tensors"
  std::string_view one =
      {};  // "tensor", of which an error names the first that differs: "tensor 2"
  std::int64_t hash = 0;
  std::size_t size = 0;
  std::function<std::string(std::size_t)> text_of = {};
};

// Of words; they must outlive the list.
ComparedList list_of(std::string_view all, std::string_view one,
                     std::span<const std::string> texts);
// "f32 [2,4]"
std::string form_text(const ConstTensorView& tensor);

class Agreement {
 public:
  Agreement(std::string_view operation, Communicator& comm) : operation_(operation), comm_(comm) {}

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
  int name_of_rank(int rank) const;

  std::string_view operation_;
  Communicator& comm_;
  std::vector<ComparedList> items_;  // fields have no texts: their hash is their value
  std::string objection_;
  std::vector<std::vector<std::int64_t>> values_of_rank_;
};

}  // namespace switchyard
