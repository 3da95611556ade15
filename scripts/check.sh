#!/usr/bin/env bash
# What CI checks beyond the tests: format, lint, and the tests under sanitizers.
#   check.sh [format] [lint] [asan] [tsan]     without arguments: all of them
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" "${test_packages[@]}" "${check_packages[@]}"

check_format() {
  say "Format"
  git ls-files '*.h' '*.cpp' '*.inl' '*.cu' '*.cuh' | xargs clang-format-14 --dry-run --Werror
}

# Lints the library and the command; headers are linted through the sources that include them.
check_lint() {
  say "Lint"
  [ -f build/dev/compile_commands.json ] || cmake --preset dev
  git ls-files 'src/*.cpp' 'cli/*.cpp' | grep -v unavailable.cpp |
    xargs -P "$(nproc)" -n 4 clang-tidy-16 -p build/dev --quiet --warnings-as-errors='*'
}

# Tests that need gigabytes would need several times as many under a sanitizer.
without_large=(-E BeyondInt32)

# Address and undefined behaviour: every suite. LeakSanitizer is on but for runs under MPI.
check_asan() {
  build_preset asan
  UBSAN_OPTIONS=print_stacktrace=1 run_tests asan "${without_large[@]}"
}

# Data races: every suite over threads.
check_tsan() {
  build_preset tsan
  TSAN_OPTIONS="suppressions=$root/tests/tsan.supp halt_on_error=1" \
    run_tests tsan "${without_large[@]}"
}

[ $# -gt 0 ] || set -- format lint asan tsan
for check in "$@"; do "check_$check"; done
