// SPDX-License-Identifier: Apache-2.0
#include "support/failing_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <string_view>
#include <system_error>

namespace switchyard::testing {
namespace {

std::atomic<bool> g_is_armed = false;
thread_local bool t_is_counted = true;
std::atomic<int> g_calls_left = 0;
std::atomic<const char*> g_failed = nullptr;
std::string g_folder;
Fault g_fault = Fault::no_space;
bool g_can_exchange_names = true;

int number_of(Fault fault) {
  return fault == Fault::no_space ? ENOSPC : fault == Fault::io_error ? EIO : EINTR;
}

bool is_ours(std::string_view path) { return g_is_armed && path.starts_with(g_folder); }

bool is_ours(int descriptor) {
  if (!g_is_armed) return false;
  std::array<char, 4096> path{};
  const auto link = "/proc/self/fd/" + std::to_string(descriptor);
  const auto size = ::readlink(link.c_str(), path.data(), path.size());
  return size > 0 && is_ours(std::string_view(path.data(), static_cast<std::size_t>(size)));
}

// Counts the call. If it is the one to fail, sets errno and returns true.
bool fails(const char* name) {
  if (!t_is_counted) return false;
  if (g_calls_left.fetch_sub(1) != 0) return false;
  g_failed = name;
  errno = number_of(g_fault);
  return true;
}

bool fails(const char* name, std::string_view path) {
  return is_ours(path) && g_fault != Fault::short_write && fails(name);
}

bool fails(const char* name, int descriptor) {
  return is_ours(descriptor) && g_fault != Fault::short_write && fails(name);
}

}  // namespace

std::string words_for(Fault fault) { return std::generic_category().message(number_of(fault)); }

FailingCalls::FailingCalls(std::string folder, Fault fault, int n, bool can_exchange_names) {
  g_folder = std::move(folder);
  g_fault = fault;
  g_calls_left = n;
  g_failed = nullptr;
  g_can_exchange_names = can_exchange_names;
  g_is_armed = true;
}

FailingCalls::~FailingCalls() { g_is_armed = false; }

void FailingCalls::count_this_thread(bool is_counted) { t_is_counted = is_counted; }

std::string FailingCalls::failed() {
  const char* const name = g_failed;
  return name == nullptr ? "" : name;
}

}  // namespace switchyard::testing

using switchyard::testing::fails;
using switchyard::testing::is_ours;

extern "C" {

int open(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  const bool writes = (flags & (O_WRONLY | O_RDWR | O_DIRECTORY)) != 0;
  if (writes && fails("open", path)) return -1;
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

ssize_t pwrite(int descriptor, const void* data, std::size_t size, off_t offset) {
  using switchyard::testing::Fault;
  const bool is_counted =
      is_ours(descriptor) && (switchyard::testing::g_fault != Fault::short_write || size > 1);
  if (is_counted && fails("pwrite")) {
    if (switchyard::testing::g_fault != Fault::short_write) return -1;
    size /= 2;
  }
  return ::syscall(SYS_pwrite64, descriptor, data, size, offset);
}

int fallocate(int descriptor, int mode, off_t offset, off_t size) {
  if (fails("fallocate", descriptor)) return -1;
  return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, size));
}

int fsync(int descriptor) {
  if (fails("fsync", descriptor)) return -1;
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

int mkdir(const char* path, mode_t mode) {
  if (fails("mkdir", path)) return -1;
  return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

int link(const char* from, const char* to) {
  if (fails("link", from)) return -1;
  return static_cast<int>(::syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
}

int rename(const char* from, const char* to) {
  if (fails("rename", from)) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (is_ours(from) && !switchyard::testing::g_can_exchange_names) {
    errno = EINVAL;
    return -1;
  }
  if (fails("renameat2", from)) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

}  // extern "C"
