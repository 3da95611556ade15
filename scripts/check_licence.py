#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every source file names the project's licence on its first line, or on its second
after a #! line.
check_licence.py [--fix] [ROOT]     --fix inserts missing lines
                                    ROOT: a Git checkout; without it, the one that this file is in

Sources are C, C++, CUDA, Python, shell and CMake files, and templates (.in) of them. Data of the
tests is not checked."""
import pathlib
import re
import subprocess
import sys

LICENCE = "Apache-2.0"
TAG = f"SPDX-License-Identifier: {LICENCE}"
SOURCE = re.compile(r"(.*/)?(CMakeLists\.txt|[^/]+\.(c|h|inl|cpp|cu|cuh|py|sh|cmake)(\.in)?)")
DATA = ("tests/data/", "tests/fuzz/corpus/")


def comment_for(path):
    if re.search(r"\.(py|sh|cmake)(\.in)?$|CMakeLists\.txt$|^\.ci/", path):
        return f"# {TAG}\n"
    # Headers of the C interface, and C sources, have C's comments.
    return f"/* {TAG} */\n" if re.search(r"include/switchyard/c/|\.c$", path) else f"// {TAG}\n"


def sources(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, text=True,
                            capture_output=True).stdout.split("\0")
    return [path for path in listed if (root / path).is_file() and not path.startswith(DATA)
            and (SOURCE.fullmatch(path) or path == ".ci/run")]


def with_line(text, line):
    """Inserts the line at the top, but after a #! line."""
    if not text.startswith("#!"):
        return line + text
    first, _, rest = text.partition("\n")
    return f"{first}\n{line}{rest}"


def has_line(text, line):
    first_two = text.splitlines(keepends=True)[:2]
    return first_two[:1] == [line] or (text.startswith("#!") and first_two[1:] == [line])


def main():
    arguments = [a for a in sys.argv[1:] if a != "--fix"]
    fixes = len(arguments) + 1 < len(sys.argv)
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parents[1])
    if "Apache License" not in (root / "LICENSE").read_text(encoding="utf-8"):
        sys.exit(f"{root / 'LICENSE'} is not the {LICENCE} licence")
    paths, lacking = sources(root), []
    for path in paths:
        text, line = (root / path).read_text(encoding="utf-8"), comment_for(path)
        if not has_line(text, line):
            lacking.append(path)
            if fixes:
                (root / path).write_text(with_line(text, line), encoding="utf-8")
    if lacking and not fixes:
        print("\n".join(f"{path}: the first line must be: {comment_for(path)}"[:-1]
                        for path in lacking))
        print(f"{len(lacking)} of {len(paths)} files lack it; insert it with --fix")
        return 1
    print(f"{len(paths)} files name {LICENCE}" + (f"; {len(lacking)} were changed" if fixes else ""))
    return 0


sys.exit(main())
