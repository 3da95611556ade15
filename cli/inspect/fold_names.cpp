// SPDX-License-Identifier: Apache-2.0
#include "inspect/fold_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace switchyard::cli {
namespace {

constexpr int kMostFolds = 4;  // per name: a layer, an expert, and some to spare

using Ids = std::set<std::int64_t>;

struct Item {
  std::size_t unfolded = 0;  // this many characters, from the left, may still fold
  std::string kind;
  FoldedName result;
};

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

std::string_view digits_at(std::string_view text, std::size_t at) {
  const auto end =
      std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(at), text.end(), is_digit);
  auto digits = text.substr(at, static_cast<std::size_t>(end - text.begin()) - at);
  digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
  return digits;
}

// Orders numbers by value: layers.2 comes before layers.10.
bool natural_less(std::string_view a, std::string_view b) {
  const auto at = static_cast<std::size_t>(
      std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  if (at == a.size() || at == b.size()) return a.size() < b.size();
  auto begin = at;
  while (begin > 0 && is_digit(a[begin - 1])) --begin;
  if (!is_digit(a[begin]) || !is_digit(b[begin])) return a < b;
  const auto x = digits_at(a, begin);
  const auto y = digits_at(b, begin);
  return x == y ? a < b : std::pair(x.size(), x) < std::pair(y.size(), y);
}

// Formats ids as "{0…3,7}", or a single one as the number itself.
std::string ranges_of(const Ids& ids) {
  if (ids.size() == 1) return std::to_string(*ids.begin());
  std::vector<std::string> ranges;
  for (auto at = ids.begin(); at != ids.end();) {
    const auto first = *at;
    auto last = first;
    for (++at; at != ids.end() && *at == last + 1; ++at) last = *at;
    const auto* format = first == last ? "{}" : first + 1 == last ? "{},{}" : "{}…{}";
    ranges.push_back(fmt::format(fmt::runtime(format), first, last));
  }
  return fmt::format("{{{}}}", fmt::join(ranges, ","));
}

struct Part {
  std::size_t begin = 0;
  std::size_t size = 0;
};

// Returns the last part of the item that may still fold and is a number.
std::optional<Part> last_number(const Item& item) {
  std::string_view rest = std::string_view(item.result.name).substr(0, item.unfolded);
  for (;;) {
    const auto dot = rest.rfind('.');
    const auto begin = dot == std::string_view::npos ? 0 : dot + 1;
    if (number_in(rest.substr(begin)) >= 0) return Part{begin, rest.size() - begin};
    if (begin == 0) return std::nullopt;
    rest = rest.substr(0, dot);
  }
}

// Folds the last number of each item that may still fold. Returns false if there was none.
bool fold_once(std::vector<Item>& items) {
  struct Fold {
    Item item;
    Ids ids;
  };
  using Key = std::tuple<std::string, std::size_t, std::string>;
  std::map<Key, Fold> folds;
  std::vector<Item> rest;
  for (Item& item : items) {
    const auto part = last_number(item);
    if (!part) {
      item.unfolded = 0;
      rest.push_back(std::move(item));
      continue;
    }
    auto& name = item.result.name;
    const auto id = number_in(std::string_view(name).substr(part->begin, part->size));
    name.erase(part->begin, part->size);
    item.unfolded = part->begin;
    const auto [at, is_new] = folds.try_emplace(Key{name, part->begin, item.kind});
    Fold& fold = at->second;
    const auto count = item.result.count + (is_new ? 0 : fold.item.result.count);
    if (is_new || id < *fold.ids.begin()) fold.item = std::move(item);
    fold.item.result.count = count;
    fold.ids.insert(id);
  }
  items = std::move(rest);
  for (auto& [key, fold] : folds) {
    fold.item.result.name.insert(fold.item.unfolded, ranges_of(fold.ids));
    items.push_back(std::move(fold.item));
  }
  return !folds.empty();
}

std::vector<FoldedName> in_order(std::vector<FoldedName> names) {
  std::ranges::sort(names, natural_less, &FoldedName::first);
  return names;
}

}  // namespace

std::int64_t number_in(std::string_view part) {
  constexpr std::size_t kMostDigits = 9;
  const bool is_number = !part.empty() && part.size() <= kMostDigits &&
                         std::all_of(part.begin(), part.end(), is_digit) &&
                         (part[0] != '0' || part.size() == 1);
  return is_number ? std::stoll(std::string(part)) : -1;
}

std::vector<FoldedName> list_names(const std::map<std::string, std::string>& kinds) {
  std::vector<FoldedName> result;
  for (const auto& [name, kind] : kinds) result.push_back({name, name});
  return in_order(std::move(result));
}

std::vector<FoldedName> fold_names(const std::map<std::string, std::string>& kinds) {
  std::vector<Item> items;
  for (const auto& [name, kind] : kinds) items.push_back({name.size(), kind, {name, name}});
  for (int i = 0; i < kMostFolds && fold_once(items); ++i) {
  }
  std::vector<FoldedName> result;
  for (Item& item : items) result.push_back(std::move(item.result));
  return in_order(std::move(result));
}

}  // namespace switchyard::cli
