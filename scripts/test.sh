#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test.
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" "${test_packages[@]}"
build_preset dev
run_tests dev
