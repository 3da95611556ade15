#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows Doxygen a file as it expects it; lines keep their numbers.
doxygen_filter.py FILE

Headers: plain comments become documentation. Comments directly above a declaration become /// or
/**, comments behind one become ///< or /**<, and the comment at the head of a file becomes the
file's. Other comments stay as they are.
Pages (.md): links to files of the repository become plain text, as the reference lacks the files."""
import re
import sys

LINE = re.compile(r"\s*//(?!/)")  # a line that is only a comment
BEHIND = re.compile(r"(\s*[^\s/#}].*?\S)\s+(//(?!/)|/\*(?!\*))(.*)")


def block_at(lines, first):
    """Returns the end of the comment block that begins at line `first`; `first` if there is none."""
    end = first
    if lines[first].lstrip().startswith("/*"):
        while "*/" not in lines[end]:
            end += 1
        return end + 1
    while end < len(lines) and LINE.match(lines[end]):
        end += 1
    return end


def as_documentation(block):
    if block[0].lstrip().startswith("/*"):
        return [block[0].replace("/*", "/**", 1)] + block[1:]
    return [line.replace("//", "///", 1) if "NOLINT" not in line else "" for line in block]


def as_head(block, following):
    """The head of a file, and the line after it, which becomes @file after // comments."""
    shown = as_documentation(block)
    if following == "#pragma once":
        return shown, "/// @file"
    shown[-1] = shown[-1].replace(" */", " @file */")
    return shown, following


def show_behind(line):
    behind = BEHIND.fullmatch(line)
    if not behind or behind[1].lstrip().startswith(("class ", "struct switchyard", "extern")):
        return line
    mark = "///<" if behind[2] == "//" else "/**<"
    return f"{behind[1]} {mark}{behind[3]}"


def show(lines):
    at = head = 0
    if "SPDX-License-Identifier" in lines[0]:
        yield ""
        at = head = 1
    while at < len(lines):
        end = block_at(lines, at)
        following = lines[end] if end < len(lines) else ""
        if end == at:
            yield show_behind(lines[at])
            at += 1
        elif at == head:
            shown, after = as_head(lines[at:end], following)
            yield from shown + [after]
            at = end + 1
        else:
            yield from as_documentation(lines[at:end]) if following.strip() else lines[at:end]
            at = end


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        text = file.read()
    if sys.argv[1].endswith(".md"):
        print(re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text), end="")
    else:
        print("\n".join(show(text.splitlines())))


main()
