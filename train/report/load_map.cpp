// SPDX-License-Identifier: Apache-2.0
// The report's load pictures.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "report/load_cells.h"
#include "report/numbers.h"
#include "report/png.h"
#include "report/sections.h"

namespace switchyard::train {
namespace {

// Pixel values: 0 is the least, kEven an even load, 2 kEven the most, and kNothing stands for no
// picks. The tooltip script in report.cpp relies on them.
constexpr int kEven = 64;
constexpr std::uint8_t kNothing = 2 * kEven + 1;
constexpr Colour kUnder{46, 124, 214, 255};
constexpr Colour kOver{226, 96, 24, 255};
constexpr Colour kNoPicks{128, 128, 128, 90};

// An even load is transparent, so that one picture works on light and dark pages.
std::array<Colour, kNothing + 1> palette() {
  std::array<Colour, kNothing + 1> colours{};
  for (int i = 0; i <= 2 * kEven; ++i) {
    Colour& colour = colours[static_cast<std::size_t>(i)];
    colour = i < kEven ? kUnder : kOver;
    colour.opacity = static_cast<std::uint8_t>(std::abs(i - kEven) * 255 / kEven);
  }
  colours[kNothing] = kNoPicks;
  return colours;
}

std::uint8_t pixel_of(double share, double strongest) {
  if (std::isnan(share)) return kNothing;
  if (share <= 0.0) return 0;
  const double t = std::clamp(std::log(share) / std::log(strongest), -1.0, 1.0);
  return static_cast<std::uint8_t>(std::lround(kEven + t * kEven));
}

std::string picture_of(const LoadCells& cells, std::size_t columns, double strongest) {
  std::vector<std::uint8_t> pixels;
  for (const double share : cells.shares) pixels.push_back(pixel_of(share, strongest));
  return base64(png_file(pixels, static_cast<std::uint32_t>(columns), palette()));
}

std::string strip_html(const LoadCells& cells, int layer, const std::string& picture) {
  const auto at_end = std::isnan(cells.last_greatest)
                          ? std::string("no picks")
                          : "fullest " + ratio_text(cells.last_greatest) + "×";
  const int height = cells.num_rows * std::clamp(120 / cells.num_rows, 2, 12);  // pixels
  return fmt::format(
      "<figure class=\"strip\"><figcaption><b>Layer {0}</b><span>{1}</span></figcaption>"
      "<div class=\"experts\"><span>0</span><span>{2}</span></div>"
      "<div class=\"cells\" data-layer=\"{0}\" data-rows=\"{3}\" data-each=\"{4}\" "
      "data-experts=\"{5}\"><img style=\"height:{6}px\" alt=\"Load of the experts of layer {0} "
      "over time; {1}\" src=\"data:image/png;base64,{7}\"></div></figure>\n",
      layer, at_end, cells.num_experts > 1 ? std::to_string(cells.num_experts - 1) : "",
      cells.num_rows, cells.experts_a_row, cells.num_experts, height, picture);
}

std::string key_html(double strongest) {
  return fmt::format(
      "<p class=\"key\"><span class=\"ramp\"><i></i><span><span>≤ {}</span><span>even</span>"
      "<span>≥ {}</span></span></span><span class=\"of\">× of an even share</span></p>\n",
      fmt::format("{:.2g}", 1.0 / strongest), short_text(strongest));
}

std::string note_html(const LoadTable& table, std::int64_t first_step) {
  int most_in_row = 1;
  for (const LoadCells& cells : table.layers) {
    most_in_row = std::max(most_in_row, cells.experts_a_row);
  }
  std::string note = fmt::format(
      "Rows are experts, columns are time: steps {} to {}, from left to right. Beside "
      "a layer is the share of its fullest expert in the last column.",
      whole_text(static_cast<double>(first_step)),
      whole_text(static_cast<double>(table.last_steps.back())));
  if (most_in_row > 1) {
    note += fmt::format(" A row shows the most uneven of up to {} neighbours.", most_in_row);
  }
  return "<p class=\"note\">" + note + "</p>\n";
}

std::string joined(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? "" : " ") + std::to_string(value);
  return text;
}

}  // namespace

std::string load_map_html(const RunSummary& run) {
  const auto table = load_table(run.history.loads);
  if (table.layers.empty()) return "";
  const double strongest = strongest_share(table);
  const auto first_step = std::min(run.history.steps.empty() ? 1 : run.history.steps.front().step,
                                   table.last_steps.front());
  std::string html = note_html(table, first_step) + key_html(strongest);
  constexpr std::size_t kMostWide = 4;  // up to this many layers get half the page width each
  html += fmt::format(
      "<div class=\"strips{}\" data-first=\"{}\" data-last=\"{}\" data-strongest=\"{}\">\n",
      table.layers.size() > kMostWide ? " many" : "", first_step, joined(table.last_steps),
      plain_text(strongest));
  for (std::size_t l = 0; l < table.layers.size(); ++l) {
    const LoadCells& cells = table.layers[l];
    if (cells.num_rows == 0) continue;
    const int layer = l < run.moe_layers.size() ? run.moe_layers[l] : static_cast<int>(l);
    html += strip_html(cells, layer, picture_of(cells, table.last_steps.size(), strongest));
  }
  return html + "</div>\n";
}

}  // namespace switchyard::train
