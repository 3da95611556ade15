// A picture of few colours as a PNG file, uncompressed: simple, and scripts can read it too.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

struct Colour {
  std::uint8_t red = 0, green = 0, blue = 0;
  std::uint8_t opacity = 0;
};

// Of one byte a pixel, rows from the top; every pixel indexes the palette (at most 256 colours).
// At least one pixel, at most 65535 bytes a row.
std::string png_file(std::span<const std::uint8_t> pixels, std::uint32_t width,
                     std::span<const Colour> palette);

std::string base64(std::string_view bytes);

}  // namespace switchyard::train
