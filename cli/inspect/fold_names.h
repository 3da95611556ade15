// Folds names that differ in numbers only, so that a person can read a list of thousands.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::cli {

struct FoldedName {
  std::string name;   // "layers.{0…47}.experts.{0…3,7}.up_proj.weight"
  std::string first;  // of the names in it
  std::int64_t count = 1;
};

// `kinds` has the name of everything and what it is; only what is of the same kind folds. In order
// of name, by numbers where there are numbers.
std::vector<FoldedName> fold_names(const std::map<std::string, std::string>& kinds);
// The same list, but nothing folded.
std::vector<FoldedName> list_names(const std::map<std::string, std::string>& kinds);

// A part of a name, as "17", that is a number written the usual way; −1 if it is not one.
std::int64_t number_in(std::string_view part);

}  // namespace switchyard::cli
