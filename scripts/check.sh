#!/usr/bin/env bash
# What CI checks beyond the tests: includes, format, lint, fuzzers, and the tests under sanitizers.
#   check.sh [includes] [format] [lint] [fuzz] [asan] [tsan]     without: all of them
#   SWITCHYARD_FUZZ_SECONDS=300 check.sh fuzz     so long for each fuzzer, instead of 20
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" "${test_packages[@]}" "${check_packages[@]}"

check_includes() {
  say "Includes"
  python3 scripts/check_includes.py
}

check_format() {
  say "Format"
  git ls-files '*.h' '*.cpp' '*.inl' '*.cu' '*.cuh' | xargs clang-format-14 --dry-run --Werror
}

# Lints the library, the model and the command; headers are linted through the sources that include
# them. The analyzer looks at fewer paths than by default, which halves the time.
check_lint() {
  say "Lint"
  [ -f build/dev/compile_commands.json ] || cmake --preset dev
  git ls-files 'src/*.cpp' 'train/*.cpp' 'cli/*.cpp' | grep -v unavailable.cpp |
    xargs -P "$(nproc)" -n 4 clang-tidy-16 -p build/dev --quiet --warnings-as-errors='*' \
      --extra-arg={-Xclang,-analyzer-config,-Xclang,max-nodes=20000}
}

# Hostile files. What is found beyond the corpus stays in build/fuzz, and is where the next run
# begins; an input that fails is left there as crash-…, and belongs into the corpus once mended.
check_fuzz() {
  build_preset fuzz
  local target log
  for target in safetensors index; do
    say "Fuzzing $target for ${SWITCHYARD_FUZZ_SECONDS:-20} s"
    log=build/fuzz/$target.log
    mkdir -p "build/fuzz/corpus/$target"
    "build/fuzz/tests/fuzz/fuzz_$target" -max_total_time="${SWITCHYARD_FUZZ_SECONDS:-20}" \
      -rss_limit_mb=2048 -malloc_limit_mb=64 -timeout=10 -max_len=8192 -print_final_stats=1 \
      -dict=tests/fuzz/json.dict -artifact_prefix=build/fuzz/ \
      "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target" >"$log" 2>&1 ||
      { tail -n 60 "$log" >&2; return 1; }
    grep -E '^#[0-9]+.DONE|^stat::number_of_executed_units|^stat::peak_rss_mb' "$log"
  done
}

# Tests that need gigabytes would need several times as many under a sanitizer.
without_large=(-E BeyondInt32)

# Address and undefined behaviour: every suite. LeakSanitizer is on but for runs under MPI.
check_asan() {
  timed asan-compile build_preset asan
  UBSAN_OPTIONS=print_stacktrace=1 timed asan-tests run_tests asan "${without_large[@]}"
}

# Data races: every suite over threads.
check_tsan() {
  timed tsan-compile build_preset tsan
  TSAN_OPTIONS="suppressions=$root/tests/tsan.supp halt_on_error=1" \
    timed tsan-tests run_tests tsan "${without_large[@]}"
}

[ $# -gt 0 ] || set -- includes format lint fuzz asan tsan
for check in "$@"; do
  case $check in
    asan | tsan) "check_$check" ;;  # of two stages
    *) timed "$check" "check_$check" ;;
  esac
done
