#include "options/option_values.h"

namespace switchyard::train {

Option option(std::string name, std::string type, std::string help) {
  return {.name = std::move(name),
          .group = {},
          .type = std::move(type),
          .help = std::move(help),
          .set = {},
          .get = {}};
}

Option path_option(std::string name, std::string& value, const std::string& empty,
                   std::string help) {
  Option o = option(std::move(name), "PATH", std::move(help));
  o.set = [&value, empty](const std::string& text) { value = text == empty ? "" : text; };
  o.get = [&value, empty] { return value.empty() ? empty : value; };
  return o;
}

Option text_option(std::string name, std::string& value, std::string help) {
  Option o = option(std::move(name), "TEXT", std::move(help));
  o.set = [&value](const std::string& text) { value = text; };
  o.get = [&value] { return value; };
  return o;
}

}  // namespace switchyard::train
