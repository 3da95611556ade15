#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the Python tests with a library built by CMake, in the environment made by scripts/test.sh.
# usage: scripts/python_tests.sh build/dev/lib/libswitchyard.so [pytest's arguments, or tests]
library=$(realpath -e -- "$1") || exit 2
. "$(dirname "$0")/lib.sh"

if [ ! -f build/python/requirements-test.txt ]; then
  echo "SKIPPED [1] python_tests: build/python is not finished; scripts/test.sh makes it, from PyPI"
  exit 77
fi
# One thread per test: ctest runs other tests at the same time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=$root/python SWITCHYARD_LIBRARY=$library PYTHONDONTWRITEBYTECODE=1
tests=tests/python
for argument in "${@:2}"; do
  case $argument in tests/*) tests= ;; esac  # the caller names the tests
done
exec build/python/bin/python -m pytest -q -rs --show-capture=stdout "${@:2}" $tests
