#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing packages, builds, and runs `switchyard ARGS…`; without arguments, trains a model.
caller=$PWD
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" >&2
build_preset release >&2

[ $# -gt 0 ] || exec build/release/cli/switchyard train --report build/report.html
cd "$caller"  # paths are relative to the caller's folder
exec "$root/build/release/cli/switchyard" "$@"
