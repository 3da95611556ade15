// SPDX-License-Identifier: Apache-2.0
// Writes a palette picture as an uncompressed PNG file: simple, and scripts can read the pixels
// too.
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

// Encodes `pixels`: one palette index per byte, rows from the top, at most 256 colours. Needs at
// least one pixel and at most 65535 bytes per row.
std::string png_file(std::span<const std::uint8_t> pixels, std::uint32_t width,
                     std::span<const Colour> palette);

std::string base64(std::string_view bytes);

}  // namespace switchyard::train
