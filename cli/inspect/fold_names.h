// SPDX-License-Identifier: Apache-2.0
// Folds names that differ only in numbers, so that a list of thousands stays readable.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::cli {

struct FoldedName {
  std::string name;   // such as "layers.{0…47}.experts.{0…3,7}.up_proj.weight"
  std::string first;  // the first of the names folded into it
  std::int64_t count = 1;
};

// `kinds` maps each name to its kind; only names of the same kind are folded together. Returns them
// ordered by name, with numbers in numeric order.
std::vector<FoldedName> fold_names(const std::map<std::string, std::string>& kinds);
// Returns the same list without folding anything.
std::vector<FoldedName> list_names(const std::map<std::string, std::string>& kinds);

// Returns the value of a part of a name that is a plain number, such as "17", or −1 if it is not
// one.
std::int64_t number_in(std::string_view part);

}  // namespace switchyard::cli
