// SPDX-License-Identifier: Apache-2.0
#include "report/bars.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/text.h"

namespace switchyard::train {

std::string bars_html(BarTable table) {
  for (Bar& bar : table.bars) {
    if (!std::isfinite(bar.amount) || bar.amount < 0.0) bar.amount = 0.0;
  }
  std::stable_sort(table.bars.begin(), table.bars.end(),
                   [](const Bar& a, const Bar& b) { return a.amount > b.amount; });
  const double longest = table.bars.empty() ? 0.0 : table.bars.front().amount;
  std::string html = fmt::format(
      "<table class=\"bars\"><thead><tr><th>{}</th><th></th><th>{}</th><th>{}</th></tr></thead>"
      "<tbody>\n",
      escaped(table.name_title), escaped(table.first_title), escaped(table.second_title));
  for (const Bar& bar : table.bars) {
    html += fmt::format(
        "<tr><th>{}</th><td><i style=\"width:{:.2f}%\"></i></td><td>{}</td><td>{}</td></tr>\n",
        escaped(bar.name), longest > 0.0 ? bar.amount / longest * 100.0 : 0.0,
        escaped(bar.first_text), escaped(bar.second_text));
  }
  return html + "</tbody></table>\n";
}

}  // namespace switchyard::train
