# SPDX-License-Identifier: Apache-2.0
# Functions shared by the scripts. Sourced, not run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# By default mpirun refuses to run as root, or with more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1

build_packages=(g++ cmake ninja-build libfmt-dev libdnnl-dev libopenmpi-dev openmpi-bin
  libcli11-dev nlohmann-json3-dev)
test_packages=(libgtest-dev libbenchmark-dev python3-venv iproute2)
check_packages=(patch rsync clang-format-14 clang-tidy-16 clang-16 libclang-rt-16-dev python3
  doxygen)

say() { printf '\n== %s\n' "$*"; }

# Installs missing packages. If none are missing, it takes a moment and needs no network.
ensure_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
      missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      { echo "missing: ${missing[*]}; install them as root, or install sudo" >&2; exit 1; }
    as_root=(sudo)
  fi
  say "Installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# timed STAGE COMMAND…: runs the command, and appends its time in seconds to the file
# $SWITCHYARD_TIMES, if set. The subshell keeps `set -e` active in the command;
# `COMMAND || status=$?` would disable it.
timed() {
  local stage=$1 begin=$SECONDS status
  shift
  set +e
  (set -e && "$@")
  status=$?
  set -e
  [ -z "${SWITCHYARD_TIMES:-}" ] ||
    printf '%-13s %5d\n' "$stage" "$((SECONDS - begin))" >>"$SWITCHYARD_TIMES"
  return "$status"
}

# make_python FOLDER: makes a virtual environment with the dependencies of the Python tests, from
# PyPI. torch is installed first, as python/requirements-test.txt explains.
make_python() {
  local requirements=python/requirements-test.txt
  python3 -m venv "$1" &&
    "$1/bin/pip" install --progress-bar off "$(grep '^torch==' "$requirements")" &&
    "$1/bin/pip" install --progress-bar off -r "$requirements"
}

# Makes build/python unless it already has the dependencies of the Python tests. Without PyPI it
# stays unfinished, and scripts/python_tests.sh skips the tests.
ensure_python() {
  local finished=build/python/requirements-test.txt
  ! cmp -s python/requirements-test.txt "$finished" || return 0
  say "Installing what the Python tests need in build/python"
  rm -f "$finished"
  if make_python build/python; then
    cp python/requirements-test.txt "$finished"
  else
    echo "build/python could not be made: the Python tests will be skipped" >&2
  fi
}

# Configures a preset if needed, then builds what has changed.
build_preset() {
  local preset=$1
  shift
  if [ ! -f "build/$preset/build.ninja" ]; then
    say "Configuring $preset"
    cmake --preset "$preset" "$@"
  fi
  say "Building $preset"
  cmake --build --preset "$preset"
}

# Runs a preset's tests, then prints ctest's summary and the skipped tests with their reasons. A
# skip that is not listed in tests/known_skips.txt is a failure; Cuda… tests are listed by their
# reason.
run_tests() {
  local preset=$1
  shift
  local log="build/$preset/Testing/Temporary/LastTest.log" status=0
  say "Testing $preset"
  ctest --preset "$preset" -j "$(nproc)" "$@" || status=$?
  local skips
  skips=$(list_skips "$log")
  if [ -z "$skips" ]; then
    printf '\nNo test was skipped.\n'
  else
    printf '\nSkipped, and why:\n'
    grep -v '^  Cuda' <<<"$skips" || true
    grep '^  Cuda' <<<"$skips" | sed 's/^[^:]*: //' | sort | uniq -c |
      sed 's/^ *\([0-9]*\)/  \1 tests of a GPU:/' || true
    local unknown
    unknown=$(cut -d: -f1 <<<"$skips" | sed 's/^ *//' | grep -v '^Cuda' |
      grep -vxFf <(sed 's/ *#.*//' tests/known_skips.txt) || true)
    if [ -n "$unknown" ]; then
      printf '\nNot in tests/known_skips.txt, so this is a failure:\n%s\n' "$unknown" >&2
      status=1
    fi
  fi
  return "$status"
}

# Prints "  test: reason" for every test in ctest's log that GoogleTest skipped, and
# "  file: reason" for those that pytest skipped. Python's GPU tests are named Cuda here, too.
list_skips() {
  awk '
    /^\[ RUN      \] / { test = $4 }
    /: Skipped$/ { getline reason; printf "  %s: %s\n", test, reason }
    match($0, /^SKIPPED \[[0-9]+\] /) {
      count = substr($2, 2) + 0
      skip = substr($0, RLENGTH + 1)
      sub(/:[0-9]+: /, ": ", skip)
      if (skip ~ /: there is no GPU$/) while (count-- > 0) printf "  Cuda %s\n", skip
      else printf "  %s\n", skip
    }
  ' "$1"
}
