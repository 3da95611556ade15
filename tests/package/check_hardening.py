#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_hardening.py FILE...: every binary is linked and compiled as SWITCHYARD_HARDEN says."""
import subprocess
import sys


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def complaints_about(path):
    dynamic = output_of("readelf", "-dW", path)
    segments = output_of("readelf", "-lW", path)
    symbols = output_of("nm", "-D", "--undefined-only", path)
    stack = [line for line in segments.splitlines() if "GNU_STACK" in line]
    checks = {
        "full RELRO: a segment GNU_RELRO": "GNU_RELRO" in segments,
        "BIND_NOW": "BIND_NOW" in dynamic or "NOW" in dynamic.split("FLAGS_1")[-1],
        "a stack that is not executable": bool(stack) and "RWE" not in stack[0],
        "no text relocations": "TEXTREL" not in dynamic,
        "the stack protector: __stack_chk_fail": "__stack_chk_fail" in symbols,
        "FORTIFY: a checked function of libc": any(
            name in symbols for name in ("__memcpy_chk", "__memset_chk", "__read_chk",
                                         "__memmove_chk", "__realpath_chk", "__snprintf_chk",
                                         "__fdelt_chk")),
    }
    return [f"{path} lacks {what}" for what, is_so in checks.items() if not is_so]


complaints = [complaint for path in sys.argv[1:] for complaint in complaints_about(path)]
print("\n".join(complaints) or f"{len(sys.argv) - 1} binaries are hardened")
sys.exit(1 if complaints else 0)
