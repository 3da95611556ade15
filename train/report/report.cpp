#include "report/report.h"

#include <fmt/format.h>

#include "report/load_map.h"
#include "report/script.h"
#include "report/sections.h"
#include "report/style.h"
#include "report/text.h"

namespace switchyard::train {
namespace {

// So that a browser itself keeps the page from loading anything.
constexpr const char* kPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

std::string section(const char* id, const char* title, const std::string& html) {
  if (html.empty()) return "";
  return fmt::format("<section id=\"{}\"><h2>{}</h2>\n{}</section>\n", id, title, html);
}

}  // namespace

std::string report_html(const RunSummary& run) {
  return fmt::format(
             "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
             "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n"
             "<link rel=\"icon\" href=\"data:,\">\n"
             "<title>Switchyard training run: {}</title>\n<style>{}</style></head>\n<body><main>\n",
             kPolicy, escaped(run.title), kStyle) +
         header_html(run) + section("loss", "Loss", loss_html(run)) +
         section("load", "Load of the experts", load_map_html(run)) +
         section("stages", "Time by stage", stages_html(run)) +
         section("bytes", "Bytes moved", bytes_html(run)) +
         section("progress", "Over the steps", progress_html(run)) +
         section("sample", "Sample", sample_html(run)) +
         section("configuration", "Configuration", configuration_html(run)) +
         fmt::format(
             "<footer>Written by switchyard train. This file needs nothing else.</footer>\n"
             "</main><script>{}</script></body></html>\n",
             kScript);
}

}  // namespace switchyard::train
