// SPDX-License-Identifier: Apache-2.0
#include "report/png.h"

#include <array>
#include <cstddef>

namespace switchyard::train {
namespace {

void append_big_endian(std::string& bytes, std::uint32_t value) {
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift & 0xFFU);
}

void append_little_endian(std::string& bytes, std::uint16_t value) {
  bytes += static_cast<char>(value & 0xFFU);
  bytes += static_cast<char>(value >> 8U);
}

std::uint32_t crc32(std::string_view bytes) {
  std::uint32_t crc = ~0U;
  for (const char c : bytes) {
    crc ^= static_cast<std::uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1U ^ (crc & 1U ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

std::uint32_t adler32(std::string_view bytes) {
  constexpr std::uint32_t kModulus = 65521;
  std::uint32_t a = 1;
  std::uint32_t b = 0;
  for (const char c : bytes) {
    a = (a + static_cast<std::uint8_t>(c)) % kModulus;
    b = (b + a) % kModulus;
  }
  return b << 16U | a;
}

void append_chunk(std::string& file, std::string_view type, std::string_view data) {
  append_big_endian(file, static_cast<std::uint32_t>(data.size()));
  const std::string body = std::string(type) + std::string(data);
  file += body;
  append_big_endian(file, crc32(body));
}

// Returns a zlib stream with one stored (uncompressed) block per row. A filter byte of 0 precedes
// each row.
std::string image_data(std::span<const std::uint8_t> pixels, std::size_t width) {
  std::string stream = "\x78\x01";
  std::string plain;
  for (std::size_t at = 0; at < pixels.size(); at += width) {
    std::string row(1, '\0');
    for (const auto pixel : pixels.subspan(at, width)) row += static_cast<char>(pixel);
    const auto length = static_cast<std::uint16_t>(row.size());
    stream += at + width >= pixels.size() ? '\1' : '\0';
    append_little_endian(stream, length);
    append_little_endian(stream, static_cast<std::uint16_t>(~length));
    stream += row;
    plain += row;
  }
  append_big_endian(stream, adler32(plain));
  return stream;
}

}  // namespace

std::string png_file(std::span<const std::uint8_t> pixels, std::uint32_t width,
                     std::span<const Colour> palette) {
  std::string header;
  append_big_endian(header, width);
  append_big_endian(header, static_cast<std::uint32_t>(pixels.size() / width));
  header += std::string("\x08\x03\0\0\0", 5);  // 8-bit palette indices
  std::string colours;
  std::string opacities;
  for (const Colour& colour : palette) {
    for (const auto part : {colour.red, colour.green, colour.blue}) {
      colours += static_cast<char>(part);
    }
    opacities += static_cast<char>(colour.opacity);
  }
  std::string file = "\x89PNG\r\n\x1A\n";
  append_chunk(file, "IHDR", header);
  append_chunk(file, "PLTE", colours);
  append_chunk(file, "tRNS", opacities);
  append_chunk(file, "IDAT", image_data(pixels, width));
  append_chunk(file, "IEND", "");
  return file;
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const auto triple = bytes.substr(at, 3);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      bits = bits << 8U | (i < triple.size() ? static_cast<std::uint8_t>(triple[i]) : 0U);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      text += i <= triple.size() ? kDigits[bits >> (18U - 6U * i) & 63U] : '=';
    }
  }
  return text;
}

}  // namespace switchyard::train
