// SPDX-License-Identifier: Apache-2.0
#include "common/bus_faults.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace switchyard::train {
namespace {

// Safe in a signal handler: it makes a system call and uses no heap memory.
void say(std::string_view text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

// Reads /proc/self/maps line by line. A line that does not fit is cut.
class MapLines {
 public:
  MapLines() : file_(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {}
  ~MapLines() { ::close(file_); }
  MapLines(const MapLines&) = delete;
  MapLines& operator=(const MapLines&) = delete;

  bool next(std::string_view& line) {
    std::size_t size = 0;
    for (char c = 0; read_one(c);) {
      if (c == '\n') {
        line = {line_, size};
        return true;
      }
      if (size < sizeof(line_)) line_[size++] = c;
    }
    return false;
  }

 private:
  bool read_one(char& c) {
    if (at_ == filled_) {
      filled_ = ::read(file_, buffer_, sizeof(buffer_));
      at_ = 0;
      if (filled_ <= 0) return false;
    }
    c = buffer_[at_++];
    return true;
  }

  int file_;
  char buffer_[4096];
  char line_[4096];
  ssize_t at_ = 0;
  ssize_t filled_ = 0;
};

std::uintptr_t hex_number(std::string_view& text) {
  std::uintptr_t number = 0;
  while (!text.empty()) {
    const char c = text.front();
    const bool is_digit = '0' <= c && c <= '9';
    if (!is_digit && (c < 'a' || c > 'f')) break;
    number = number * 16 + static_cast<std::uintptr_t>(is_digit ? c - '0' : c - 'a' + 10);
    text.remove_prefix(1);
  }
  return number;
}

// Prints the path in a line such as "7f00-7f10 r--p 00000000 08:01 1234   /a/path" and returns true
// if the address is in its range.
bool say_path_of(std::string_view line, std::uintptr_t address) {
  const auto first = hex_number(line);
  if (line.empty()) return false;
  line.remove_prefix(1);  // "-"
  const auto last = hex_number(line);
  if (address < first || address >= last) return false;
  const auto path = line.find('/');
  say(path == std::string_view::npos ? "?" : line.substr(path));
  return true;
}

void explain(int number, siginfo_t* info, void* /*context*/) {
  ::signal(number, SIG_DFL);  // on return the access is retried, and ends the process
  if (info->si_code != BUS_ADRERR) return;
  say("switchyard: a file was truncated while it was being read, or its disk failed: ");
  MapLines lines;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (std::string_view line; lines.next(line);) {
    if (say_path_of(line, address)) break;
  }
  say("\n");
}

}  // namespace

void explain_bus_faults() {
  struct sigaction action {};
  action.sa_sigaction = explain;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace switchyard::train
