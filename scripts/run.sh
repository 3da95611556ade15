#!/usr/bin/env bash
# Installs what is missing, builds, and runs `switchyard ARGS…`; without arguments the main job.
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" >&2
build_preset release >&2

[ $# -gt 0 ] || set -- train --report build/report.html
exec build/release/cli/switchyard "$@"
