#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that includes point one way, that they name existing files, and that folders stay small.
check_includes.py [ROOT]     without ROOT: the repository that this file is in"""
import os
import re
import sys

MOST_FILES = 30
DATA = {"tests/data", "tests/fuzz/corpus"}  # data files, unlimited in number
# For each folder, where the compiler searches for "…" after the including file's own folder.
SEARCHED = {"include": ["include"], "src": ["src", "include"], "train": ["train", "include"],
            "cli": ["cli", "train", "include"],
            "tests": ["tests", "src", "cli", "train", "include"],
            "bench": ["cli", "src", "include"], "examples": ["include"]}
# Lowest first. Layers in the same list may not include each other.
LAYERS = [["src/core"], ["src/io"], ["src/comm", "src/device"], ["src/peer"], ["src/moe"],
          ["src/checkpoint", "src/parallel"], ["src/c"], ["train"], ["cli"]]
LEVELS = {layer: level for level, line in enumerate(LAYERS) for layer in line}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)', re.MULTILINE)


def layer_of(path):
    return next((layer for layer in LEVELS if path.startswith(layer + "/")), None)


def broken_rule(path, quote, name):
    """Returns the rule that an include in the file at `path` breaks, or None."""
    allowed = re.fullmatch(r"switchyard/.*" if quote == '"' else r"\w+|stdint\.h", name)
    if path.startswith("include/") and not allowed:
        return "public headers include switchyard/… and the standard library only"
    if quote == "<":
        return None
    places = [os.path.dirname(path)] + SEARCHED[path.split("/")[0]]
    targets = [os.path.normpath(f"{place}/{name}") for place in places]
    target = next((t for t in targets if os.path.isfile(t) or os.path.isfile(t + ".in")), None)
    if target is None:
        return "there is no such file"
    here, there = layer_of(path), layer_of(target)
    if here in ("train", "cli") and target.startswith("src/"):
        return f"{here} sees public headers only"
    if here and there and here != there and LEVELS[here] <= LEVELS[there]:
        return f"{here} may not include {there}: includes point downwards"
    return None


def find_circle(header, includes, path):
    """Returns the first include cycle that is reachable from `header` as a list, or None."""
    if header in path:
        return path[path.index(header):] + [header]
    found = (find_circle(h, includes, path + [header]) for h in includes.get(header, []))
    return next(filter(None, found), None)


def main():
    os.chdir(sys.argv[1] if sys.argv[1:] else os.path.abspath(__file__ + "/../.."))
    errors, public = [], {}
    for folder, folders, names in (step for top in SEARCHED for step in os.walk(top)):
        folders[:] = [d for d in folders if d != "__pycache__" and f"{folder}/{d}" not in DATA]
        if len(names) > MOST_FILES:
            errors.append(f"{folder}: {len(names)} files, but a folder has at most {MOST_FILES}")
        for name in (n for n in names if n.endswith((".h", ".cpp", ".inl", ".cu", ".cuh"))):
            path = f"{folder}/{name}"
            if folder.startswith("src/") and layer_of(path) is None:
                errors.append(f"{path}: is in no layer that scripts/check_includes.py knows")
            with open(path, encoding="utf-8") as file:
                includes = INCLUDE.findall(file.read())
            for quote, included in includes:
                rule = broken_rule(path, quote, included)
                if rule:
                    errors.append(f"{path}: #include of {included}: {rule}")
            if path.startswith("include/"):
                public[path.removeprefix("include/")] = [n for _, n in includes]
    circle = next(filter(None, (find_circle(h, public, []) for h in sorted(public))), None)
    if circle:
        errors.append("public headers include each other: " + " -> ".join(circle))
    print("\n".join(sorted(errors)) or "Includes point one way, and no folder is too large.")
    return 1 if errors else 0


sys.exit(main())
