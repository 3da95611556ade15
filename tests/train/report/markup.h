// SPDX-License-Identifier: Apache-2.0
// Reads the HTML that reports are written in: strictly, where browsers would forgive.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::testing {

struct Element {
  std::string name;
  std::map<std::string, std::string> attributes;
};

struct Markup {
  std::vector<Element> elements;  // in order
  std::string text;               // between them; none of scripts and styles
  std::string problem;            // the first; empty: it is well formed
  std::size_t count(const std::string& name) const {
    std::size_t found = 0;
    for (const Element& element : elements) found += element.name == name ? 1 : 0;
    return found;
  }
};

class MarkupReader {
 public:
  explicit MarkupReader(std::string_view html) : rest_(html) {}

  Markup read() {
    if (!take("<!DOCTYPE html>")) fail("no doctype");
    while (!rest_.empty() && markup_.problem.empty()) {
      if (rest_[0] == '<') {
        tag();
      } else {
        markup_.text += before("<");
      }
    }
    if (!open_.empty()) fail(open_.back() + " is not closed");
    return markup_;
  }

 private:
  void fail(const std::string& problem) {
    if (markup_.problem.empty()) {
      markup_.problem = problem + " before: " + std::string(rest_.substr(0, 80));
    }
  }
  bool take(std::string_view text) {
    if (rest_.substr(0, text.size()) != text) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  std::string before(std::string_view end) {
    const auto at = std::min(rest_.find(end), rest_.size());
    std::string text(rest_.substr(0, at));
    rest_.remove_prefix(at);
    return text;
  }
  std::string name() {
    const auto at = std::min(rest_.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-BARV"),
                             rest_.size());  // also of viewBox and preserveAspectRatio
    std::string text(rest_.substr(0, at));
    rest_.remove_prefix(at);
    if (text.empty()) fail("a name is missing");
    return text;
  }
  void attribute(Element& element) {
    const auto key = name();
    if (!take("=\"")) return fail(key + " has no value in quotes");
    const auto value = before("\"");
    if (value.find('<') != std::string::npos) fail(key + " has a < in its value");
    if (!take("\"")) fail(key + " does not end");
    if (!element.attributes.emplace(key, value).second) fail(key + " is there twice");
  }
  void tag() {
    if (take("</")) {
      const auto closed = name();
      if (!take(">")) fail("an end tag does not end");
      if (open_.empty() || open_.back() != closed) return fail(closed + " is not open");
      open_.pop_back();
      return;
    }
    take("<");
    Element element{.name = name(), .attributes = {}};
    while (take(" ") && markup_.problem.empty()) attribute(element);
    const bool is_closed = take("/");
    if (!take(">")) fail(element.name + " does not end");
    markup_.elements.push_back(element);
    static const std::set<std::string> kEmpty{"meta", "link", "img"};
    if (is_closed || kEmpty.count(element.name) != 0) return;
    open_.push_back(element.name);
    if (element.name == "style" || element.name == "script") before("</" + element.name + ">");
  }

  std::string_view rest_;
  Markup markup_;
  std::vector<std::string> open_;
};

inline Markup markup_of(std::string_view html) { return MarkupReader(html).read(); }

}  // namespace switchyard::testing
