#!/usr/bin/env bash
# Installs what is missing, builds, and runs `switchyard ARGS…`; without arguments the main job.
caller=$PWD
. "$(dirname "$0")/lib.sh"

ensure_packages "${build_packages[@]}" >&2
build_preset release >&2

[ $# -gt 0 ] || exec build/release/cli/switchyard train --report build/report.html
cd "$caller"  # paths are the caller's
exec "$root/build/release/cli/switchyard" "$@"
