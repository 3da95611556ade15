#include "comm/agreement.h"

#include <algorithm>
#include <numeric>

#include "comm/gather_strings.h"
#include "core/hash.h"
#include "core/require.h"

namespace switchyard {
namespace {

constexpr char kSeparator = '\0';
constexpr std::size_t kOwnFields = 2;  // behind those that were added: the rank, whether it objects

std::vector<std::string_view> split(std::string_view joined) {
  std::vector<std::string_view> parts;
  while (!joined.empty()) {
    const auto end = joined.find(kSeparator);
    parts.push_back(joined.substr(0, end));
    joined.remove_prefix(end + 1);
  }
  return parts;
}

}  // namespace

ComparedList list_of(std::string_view all, std::string_view one,
                     std::span<const std::string> texts) {
  std::vector<std::int64_t> hashes;
  for (const auto& text : texts) hashes.push_back(hash_of(std::span<const char>(text)));
  return {all, one, hash_of(std::span<const std::int64_t>(hashes)), texts.size(),
          [texts](std::size_t i) { return texts[i]; }};
}

std::string form_text(const ConstTensorView& tensor) {
  return fmt::format("{} {}", name_of(tensor.dtype()), tensor.shape().to_string());
}

void Agreement::add(const Field& field) {
  items_.push_back({.all = field.name, .hash = field.value});
}

void Agreement::add(ComparedList list) { items_.push_back(std::move(list)); }

void Agreement::gather(int rank) {
  std::vector<Field> fields;
  for (const auto& item : items_) fields.push_back({item.all, item.hash});
  fields.push_back({"rank", rank});
  fields.push_back({"whether it objects", objection_.empty() ? 0 : 1});
  values_of_rank_ = gather_fields(comm_, fields);
  const auto objects = [](const auto& values) { return values.back() != 0; };
  const auto found = std::ranges::find_if(values_of_rank_, objects);
  if (found == values_of_rank_.end()) return;
  const auto first = static_cast<int>(found - values_of_rank_.begin());
  throw InvalidArgument(
      fmt::format("{}: rank {}: {}", operation_, name_of_rank(first),
                  gather_strings(comm_, objection_)[static_cast<std::size_t>(first)]));
}

std::span<const std::int64_t> Agreement::values_of(int rank) const {
  return std::span(values_of_rank_[static_cast<std::size_t>(rank)]).first(items_.size());
}

int Agreement::name_of_rank(int rank) const {
  const auto& values = values_of_rank_[static_cast<std::size_t>(rank)];
  return static_cast<int>(values[values.size() - kOwnFields]);
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
  std::vector<int> ranks(values_of_rank_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  require_equal(count, ranks);
}

// Every rank comes here for the same list, since all have compared the same values.
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
  check_invariant(x != a.end(), "{} differ in nothing but their hash", list.all);
  refuse(fmt::format("{} {}", list.one, x - a.begin()), first, std::string(*x), other,
         std::string(*y));
}

void Agreement::refuse(const std::string& what, int first, const std::string& has, int other,
                       const std::string& other_has) const {
  throw InvalidArgument(fmt::format("{}: ranks disagree about {}: rank {} has {}, rank {} has {}",
                                    operation_, what, name_of_rank(first), has, name_of_rank(other),
                                    other_has));
}

}  // namespace switchyard
