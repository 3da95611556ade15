// This project's sources and documents, put into the library by its build.
#pragma once

#include <string_view>

namespace switchyard::train {

// Each file after a line with its name.
std::string_view embedded_text();

}  // namespace switchyard::train
