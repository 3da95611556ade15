#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# strict_nvcc.sh COMPILER ARGUMENT…: compiles, and fails if ptxas serialises wgmma instructions. The
# results would be right, but products would wait for each other. ptxas reports this as information
# only, so -Werror does not find it. The usual causes are too many registers, or a branch between
# the fence and the products.
if messages=$("$@" 2>&1); then status=0; else status=$?; fi
[ -z "$messages" ] || printf '%s\n' "$messages" >&2
case $messages in
  *"wgmma.mma_async instructions are serialized"*)
    echo "strict_nvcc.sh: see the message of ptxas above: the kernel it names would be slow" >&2
    exit 1 ;;
esac
exit "$status"
