#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs CI's checks beyond the tests: includes, format, the API reference, lint, fuzzers, and tests
# under sanitizers.
#   check.sh [includes] [format] [docs] [lint] [fuzz] [asan] [tsan]    without arguments: all of them
#   check.sh separate    compiles every source separately; CI does that for the library only
#   check.sh wheel       builds and installs the Python package, and runs the Python tests with it;
#                        CI does so only for changes to the packaging
#   check.sh faults      breaks every collective of a training step in every way, kills MPI ranks at
#                        every call, and runs the long forms of other tests; takes an hour
#   check.sh emulation   runs all tests of the CUDA kernels on the emulated GPU, in several orders;
#                        CI runs the quick ones in one order
#   check.sh mutants     breaks each promise once, and expects its test to fail; takes minutes
#   SWITCHYARD_FUZZ_SECONDS=300 check.sh fuzz     300 s per fuzzer instead of 7
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" "${test_packages[@]}" "${check_packages[@]}"

check_includes() {
  say "Includes"
  python3 scripts/check_includes.py
  python3 scripts/check_licence.py
}

check_format() {
  say "Format"
  git ls-files '*.h' '*.cpp' '*.inl' '*.cu' '*.cuh' | xargs clang-format-14 --dry-run --Werror
}

# Makes the API reference in build/dev/docs/html. Fails on a warning of Doxygen, and on a public
# declaration without a comment.
check_docs() {
  say "API reference"
  [ -f build/dev/docs/Doxyfile ] || cmake --preset dev
  cmake --build build/dev --target docs
}

# Lints the library, the model and the command. Each layer is linted as one unit, as it is compiled,
# so that a header is parsed once per layer. Kernels, which compile from one source for several
# instruction sets, are linted for one of them. The analyzer explores fewer paths than by default,
# which halves the time.
check_lint() {
  say "Lint"
  [ -f build/dev/compile_commands.json ] || cmake --preset dev
  python3 - build/dev/compile_commands.json <<'LIST' |
import json, re, sys
for entry in json.load(open(sys.argv[1])):
    unit = entry["file"]
    if re.search(r"/switchyard_(objects|train|cli)\.dir/Unity/.*\.cxx$|_kernels_baseline\.cpp$", unit):
        print(unit)
LIST
    xargs -P "$(nproc)" -n 1 clang-tidy-16 -p build/dev --quiet --warnings-as-errors='*' \
      --extra-arg={-Wno-unknown-warning-option,-Xclang,-analyzer-config,-Xclang,max-nodes=20000}
}

# Compiles every source separately.
check_separate() {
  build_preset separate
}

# Fuzzes the file readers with hostile input. Inputs found beyond the corpus stay in build/fuzz,
# where the next run starts. A failing input is left there as crash-…; add it to the corpus once the
# bug is fixed.
check_fuzz() {
  build_preset fuzz
  say "Fuzzing what reads files, ${SWITCHYARD_FUZZ_SECONDS:-7} s for each target"
  local target other status=0
  for target in safetensors:index config:training golden:; do
    other=
    [ -z "${target#*:}" ] || { fuzz_target "${target#*:}" & other=$!; }
    fuzz_target "${target%:*}" || status=1
    [ -z "$other" ] || wait "$other" || status=1
  done
  return "$status"
}

fuzz_target() {
  local target=$1 log=build/fuzz/$1.log
  mkdir -p "build/fuzz/corpus/$target"
  "build/fuzz/tests/fuzz/fuzz_$target" -max_total_time="${SWITCHYARD_FUZZ_SECONDS:-7}" \
    -rss_limit_mb=2048 -malloc_limit_mb=64 -timeout=10 -max_len=8192 -print_final_stats=1 \
    -dict=tests/fuzz/json.dict -artifact_prefix=build/fuzz/ \
    "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target" >"$log" 2>&1 ||
    { tail -n 60 "$log" >&2; return 1; }
  grep -E '^#[0-9]+.DONE|^stat::number_of_executed_units|^stat::peak_rss_mb' "$log" |
    sed "s/^/$target: /"
}

# Address and undefined-behaviour sanitizers: every suite, at the numbers of ranks that
# tests/CMakeLists.txt picks, without the examples. LeakSanitizer is on except under MPI.
check_asan() {
  timed asan-compile build_preset asan
  UBSAN_OPTIONS=print_stacktrace=1 timed asan-tests run_tests asan
}

# Thread sanitizer: every suite over threads.
check_tsan() {
  timed tsan-compile build_preset tsan
  TSAN_OPTIONS="suppressions=$root/tests/tsan.supp halt_on_error=1" \
    timed tsan-tests run_tests tsan
}

# Tests the package as users get it: without the source tree's copy, and alongside torch.
check_wheel() {
  local environment=build/wheel-venv
  say "Building the wheel"
  rm -rf build/wheel "$environment"
  python3 -m venv "$environment"
  "$environment/bin/pip" wheel . --no-deps -w build/wheel
  ls -l build/wheel
  say "Installing the wheel in $environment"
  make_python "$environment"
  "$environment/bin/pip" install --no-deps build/wheel/switchyard-*.whl
  say "Testing the wheel"
  (
    unset PYTHONPATH SWITCHYARD_LIBRARY
    "$environment/bin/python" -c \
      'import switchyard.torch as s, sys; print(s.__file__); assert s.__file__.startswith(sys.prefix)'
    "$environment/bin/python" -m pytest -q -rs tests/python
  )
}

# Runs the long forms of tests whose short forms CI runs, and prints what each did.
check_faults() {
  build_preset dev
  local tests=build/dev/tests command=build/dev/cli/switchyard
  say "Every fault at every collective of a step, over threads"
  SWITCHYARD_FAULTS=1 "$tests/switchyard_tests" --gtest_filter='*FaultWalk*'
  say "A death at every call of MPI"
  SWITCHYARD_FAULTS=1 "$tests/switchyard_mpi_failure_tests" --gtest_filter='*MpiStages*'
  say "Two hosts"
  python3 -B tests/comm/two_hosts_test.py mpirun "$tests/rank_failure"
  say "A million plans"
  SWITCHYARD_PLANS=1000000 "$tests/switchyard_tests" --gtest_filter='*PlanFuzz*'
  say "Long runs"
  SWITCHYARD_STEPS=100000 "$tests/switchyard_tests" --gtest_filter='*LongRun*'
  say "A loaded machine"
  SWITCHYARD_TEST_LOAD=8 "$tests/switchyard_tests" --gtest_filter='*LoadedMachine*'
  say "Soaking over threads and MPI"
  "$command" soak --minutes "${SWITCHYARD_SOAK_MINUTES:-10}"
  mpirun -n 4 --mca orte_allowed_exit_without_sync 1 "$command" soak --minutes "${SWITCHYARD_SOAK_MINUTES:-10}" --comm mpi
}

# Runs the device suite, with the best and with the portable kernels, on the emulated GPU. Seeds
# choose the order of threads, and when asynchronous copies and products happen.
check_emulation() {
  build_preset dev
  local seed
  for seed in 0 1 2 3; do
    emulate best "$seed"
  done
  emulate portable 1
}

# emulate KERNELS SEED
emulate() {
  local shards shard pids=() pid status=0
  shards=$(nproc)
  say "Emulated GPU, $1 kernels, seed $2"
  for ((shard = 0; shard < shards; ++shard)); do
    {
      SWITCHYARD_TEST_CUDA_KERNELS=$1 EMULATION_SEED=$2 \
        GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
        build/dev/tests/emulation/switchyard_emulated_tests \
        --gtest_filter='*Cuda*:-*Large*:*Soak*' |
        grep --line-buffered -E '^\[ +[A-Z]+ +\] .*(tests?\.|ms\))'
    } &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  return "$status"
}

# Applies each patch in tests/mutations to a copy of the sources, one at a time. Its "Test:" line
# gives a program in build/…/tests and its arguments, which must pass without the patch and fail
# with it. A "Target:" line names the build target if it differs from the program's name.
check_mutants() {
  local copy=$root/build/mutants patch patches=() missed=()
  mkdir -p "$copy"
  git ls-files -z | rsync -a --from0 --files-from=- ./ "$copy/"
  (cd "$copy" && { [ -f build/dev/build.ninja ] || cmake --preset dev; } &&
    cmake --build build/dev)
  for patch in tests/mutations/*.patch; do
    if [ -x "$copy/build/dev/tests/$(program_of "$patch")" ]; then
      patches+=("$patch")
    else
      echo "$patch is left out: its test needs CUDA's toolkit"
    fi
  done
  say "Without mutants"
  for patch in "${patches[@]}"; do
    mutant_passes "$copy" "$patch" || { echo "$patch: its test fails without it" >&2; return 1; }
  done
  for patch in "${patches[@]}"; do
    say "$(basename "$patch" .patch)"
    is_noticed "$copy" "$patch" || missed+=("$(basename "$patch")")
  done
  [ ${#missed[@]} -eq 0 ] || { printf '\nNot noticed: %s\n' "${missed[*]}" >&2; return 1; }
  printf '\nEvery mutant was noticed.\n'
}

# Prints the program that runs a patch's test.
program_of() { sed -n 's/^Test: \([^ ]*\).*/\1/p' "$1"; }

# Runs a patch's test in the copy.
mutant_passes() {
  local copy=$1 patch=$2 command
  read -r -a command < <(sed -n 's/^Test: //p' "$patch")
  (cd "$copy/build/dev/tests" && timeout 300 ./"${command[@]}") >"$copy/build/mutant.log" 2>&1
}

# Always reverts the patch, so that the next one finds the original sources.
is_noticed() {
  local copy=$1 patch=$2 log=$1/build/mutant.log target result=1
  target=$(sed -n 's/^Target: //p' "$patch")
  target=${target:-$(program_of "$patch")}
  patch -s -p1 -d "$copy" <"$patch" || return 1
  if ! cmake --build "$copy/build/dev" --target "$target" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
  elif ! mutant_passes "$copy" "$patch"; then
    grep -m 1 -E 'FAILED|^emulated GPU' "$log"
    result=0
  fi
  patch -s -R -p1 -d "$copy" <"$patch"
  return "$result"
}

[ $# -gt 0 ] || set -- includes format docs lint fuzz asan tsan
for check in "$@"; do
  case $check in
    asan | tsan) "check_$check" ;;  # these time their own two stages
    *) timed "$check" "check_$check" ;;
  esac
done
