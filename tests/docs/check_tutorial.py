#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the tutorial against the programs that it is about, which other tests compile and run.
check_tutorial.py TUTORIAL EXAMPLES PROGRAMS

Every C++ block is to be a part of the example that its section links first, and every block of
output (```text) a part of what that example prints. EXAMPLES has the sources, and PROGRAMS the
executables. The order of printed lines does not count, as ranks print when they like."""
import pathlib
import re
import subprocess
import sys
import textwrap


def is_part(block, source):
    """Whether the lines of the block are in the source one after another, indented alike."""
    wanted = textwrap.dedent(block).rstrip().splitlines()
    lines = source.splitlines()
    return any(textwrap.dedent("\n".join(lines[i:i + len(wanted)])).splitlines() == wanted
               for i in range(len(lines)))


def sections(text):
    """Yields the file name of the first linked example and the text of every section."""
    example = None
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        linked = re.search(r"\(\.\./examples/(\w+\.cpp)\)", section)
        example = linked[1] if linked else example
        yield example, section


def complaints_of(tutorial, examples, programs):
    counts = {"cpp": 0, "text": 0}
    sources = {path.name: path.read_text(encoding="utf-8") for path in examples.glob("*.cpp")}
    for example, section in sections(tutorial.read_text(encoding="utf-8")):
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", section, re.M | re.S):
            where = f"{tutorial.name}, in the section of {example}, block\n{block}"
            if language not in counts:
                yield f"{where}is neither cpp nor text"
                continue
            counts[language] += 1
            if language == "cpp":
                among = [sources[example]] if example else sources.values()
                if not all(is_part(block, source) for source in among):
                    yield f"{where}is not in the example"
            else:
                printed = subprocess.run([programs / pathlib.Path(example).stem], check=True,
                                         capture_output=True, text=True, timeout=60).stdout
                missing = {l.rstrip() for l in block.splitlines()} - \
                    {l.rstrip() for l in printed.splitlines()}
                if missing:
                    yield f"{where}is not what the example prints:\n{printed}"
    if min(counts.values()) == 0:
        yield f"{tutorial} has {counts} blocks, so this checks nothing"
    else:
        print(f"{counts['cpp']} blocks of C++ and {counts['text']} of output")


def main():
    complaints = list(complaints_of(*map(pathlib.Path, sys.argv[1:4])))
    print("\n".join(complaints))
    return 1 if complaints else 0


sys.exit(main())
