// SPDX-License-Identifier: Apache-2.0
// Every decision uses gathered values alone, so that all ranks reach the same one.
#include "comm/agreement.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "comm/gather_numbers.h"
#include "comm/gather_strings.h"
#include "core/hash.h"
#include "core/require.h"

namespace switchyard {
namespace {

// A rank reports an error as one letter for its kind, followed by its message.
constexpr char kStorageError = 'S';
constexpr char kUnsupported = 'U';
constexpr char kInvalidArgument = 'I';

std::string told(char kind, std::string_view words) {
  return kind + std::string(words.empty() ? "an error without a message" : words);
}

// Runs `work` and returns its error in that form, or an empty string if it succeeds. Lets a
// CommunicationError pass.
std::string error_of(const std::function<void()>& work) {
  try {
    require(work != nullptr, "work is empty: pass a function");
    work();
  } catch (const CommunicationError&) {
    throw;
  } catch (const StorageError& error) {
    return told(kStorageError, error.what());
  } catch (const Unsupported& error) {
    return told(kUnsupported, error.what());
  } catch (const std::exception& error) {
    return told(kInvalidArgument, error.what());
  } catch (...) {  // any other type, e.g. one of the engine's own
    return told(kInvalidArgument, {});
  }
  return {};
}

[[noreturn]] void throw_error(char kind, const std::string& message) {
  if (kind == kStorageError) throw StorageError(message);
  if (kind == kUnsupported) throw Unsupported(message);
  throw InvalidArgument(message);
}

constexpr char kSeparator = '\0';
constexpr std::size_t kOwnFields = 2;  // after the items: the rank's name, whether it objects

std::vector<std::string_view> split(std::string_view joined) {
  std::vector<std::string_view> parts;
  while (!joined.empty()) {
    const auto end = joined.find(kSeparator);
    parts.push_back(joined.substr(0, end));
    joined.remove_prefix(end + 1);
  }
  return parts;
}

// Returns "operation: ", or an empty string if there is no operation.
std::string prefix_of(std::string_view operation) {
  return operation.empty() ? std::string() : std::string(operation) + ": ";
}

}  // namespace

void agree(Communicator& comm, std::string_view operation, const std::function<void()>& work) {
  const auto errors = gather_strings(comm, error_of(work));
  const auto first = std::ranges::find_if_not(errors, &std::string::empty);
  if (first == errors.end()) return;
  const auto message = first->substr(1);
  throw_error(first->front(), operation.empty() ? message
                                                : fmt::format("{}: rank {}: {}", operation,
                                                              first - errors.begin(), message));
}

void agree(Communicator& comm, const std::function<void()>& work) { agree(comm, {}, work); }

void require_equal_fields(Communicator& comm, std::span<const Field> fields) {
  Agreement agreement(comm, {});
  for (const Field& field : fields) agreement.add(field);
  agreement.gather();
  agreement.require_equal();
}

void require_equal(Communicator& comm, std::string_view what, std::int64_t value) {
  const std::array<Field, 1> fields{{{what, value}}};
  require_equal_fields(comm, fields);
}

ComparedList list_of(std::string_view all, std::string_view one,
                     std::span<const std::string> texts) {
  std::vector<std::int64_t> hashes;
  for (const auto& text : texts) hashes.push_back(hash_of(std::span<const char>(text)));
  return {all, one, hash_of(std::span<const std::int64_t>(hashes)), texts.size(),
          [texts](std::size_t i) { return texts[i]; }};
}

std::string form_text(const ConstTensorView& tensor) {
  return fmt::format("{} {}", name_of(tensor.dtype()), tensor.shape());
}

void Agreement::add(const Field& field) {
  items_.push_back({.all = field.name, .hash = field.value});
}

void Agreement::add(ComparedList list) { items_.push_back(std::move(list)); }

void Agreement::gather(int rank) {
  std::vector<std::int64_t> own(items_.size() + kOwnFields);
  std::ranges::transform(items_, own.begin(), &ComparedList::hash);
  own[items_.size()] = rank;
  own.back() = objection_.empty() ? 0 : 1;
  values_of_rank_ = gather_numbers(comm_, own);
  for (int r = 0; r < comm_.size(); ++r) {
    if (all_values_of(r).back() == 0) continue;
    const auto objections = gather_strings(comm_, objection_);
    throw InvalidArgument(fmt::format("{}rank {}: {}", prefix_of(operation_), name_of_rank(r),
                                      objections[static_cast<std::size_t>(r)]));
  }
}

std::span<const std::int64_t> Agreement::all_values_of(int rank) const {
  return values_of_rank_.view().slice(rank, rank + 1).span<std::int64_t>();
}

std::span<const std::int64_t> Agreement::values_of(int rank) const {
  return all_values_of(rank).first(items_.size());
}

int Agreement::name_of_rank(int rank) const {
  return static_cast<int>(all_values_of(rank)[items_.size()]);
}

void Agreement::require_equal(std::size_t count, std::span<const int> ranks) {
  for (std::size_t i = 0; i < count; ++i) {
    for (const int rank : ranks) {
      const auto [first, other] = std::pair(values_of(ranks.front())[i], values_of(rank)[i]);
      if (other == first) continue;
      if (items_[i].text_of) refuse_list(items_[i], ranks.front(), rank);
      refuse(std::string(items_[i].all), ranks.front(), std::to_string(first), rank,
             std::to_string(other));
    }
  }
}

void Agreement::require_equal(std::size_t count) {
  std::vector<int> ranks(static_cast<std::size_t>(comm_.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  require_equal(count, ranks);
}

// Every rank gets here for the same list, since all compared the same values.
void Agreement::refuse_list(const ComparedList& list, int first, int other) {
  std::string joined;
  for (std::size_t i = 0; i < list.size; ++i) joined += list.text_of(i) + kSeparator;
  const auto lists = gather_strings(comm_, joined);
  const auto a = split(lists[static_cast<std::size_t>(first)]);
  const auto b = split(lists[static_cast<std::size_t>(other)]);
  if (a.size() != b.size()) {
    refuse(fmt::format("the number of {}", list.all), first, std::to_string(a.size()), other,
           std::to_string(b.size()));
  }
  const auto [x, y] = std::ranges::mismatch(a, b);
  check_invariant(x != a.end(), "the hashes of {} differ, but their entries do not", list.all);
  refuse(fmt::format("{} {}", list.one, x - a.begin()), first, std::string(*x), other,
         std::string(*y));
}

void Agreement::refuse(const std::string& what, int first, const std::string& has, int other,
                       const std::string& other_has) const {
  throw InvalidArgument(fmt::format("{}ranks disagree about {}: rank {} has {}, rank {} has {}",
                                    prefix_of(operation_), what, name_of_rank(first), has,
                                    name_of_rank(other), other_has));
}

}  // namespace switchyard
