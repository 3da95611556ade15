// SPDX-License-Identifier: Apache-2.0
// Formats numbers for people. Values that are not finite become a dash.
#pragma once

#include <cstdint>
#include <string>

namespace switchyard::train {

// Three digits after the point: "1.642".
std::string loss_text(double loss);
// Two digits after the point: "1.15".
std::string ratio_text(double ratio);
// Rounded, with thousands separators: "12,050".
std::string whole_text(double value);
// In full below 10,000, otherwise three significant digits: "4,096", "1.64 M".
std::string count_text(double count);
// In powers of 1000: "12.3 MB".
std::string bytes_text(double bytes);
// "820 ms", "9.4 s", "1 min 58 s", "2 h 3 min".
std::string duration_text(double seconds);
// In UTC, of seconds since 1970: "2026-11-18 11:02 UTC". A dash for 0, which stands for no time.
std::string time_text(std::int64_t seconds);
// Three significant digits: "0.0124", "29.5".
std::string short_text(double value);
// "12.3 %".
std::string percent_text(double share);
// Machine-readable, for attributes. Returns "0" if the value is not finite.
std::string plain_text(double value);

}  // namespace switchyard::train
