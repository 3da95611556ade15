// Arbitrary bytes as text of an HTML page.
#pragma once

#include <string>
#include <string_view>

namespace switchyard::train {

// Valid UTF-8 that stands for itself between tags and in quoted attributes: what is not UTF-8
// becomes U+FFFD, and control characters but tab and line feed become visible.
std::string escaped(std::string_view bytes);

}  // namespace switchyard::train
