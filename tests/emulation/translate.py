#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns CUDA C++ into C++ for the emulated GPU.

  translate.py FROM TO    translates a folder: name.cu and name.cpp become name.cu.cpp and
                          name.cpp.cpp; does not rewrite a translation that is the same

Kernel launches, shared variables and inline PTX are what C++ has no syntax for. A launch becomes a
call of emulation::launch, a shared variable a reference into the block's shared memory, and an asm
statement a call of the function in emulation::ptx that is named after its instructions.
"""
import pathlib
import re
import sys

LAUNCH = re.compile(r"([A-Za-z_][\w:]*(?:<[\w\s,:]*>)?)\s*<<<(.*?)>>>\s*\(", re.S)
SHARED = re.compile(r"(extern\s+)?__shared__\s+(?:__align__\(\d+\)\s+)?([^;=]*?)\s*(\w+)"
                    r"((?:\[[^\]]*\])*);")
BUILT_IN = re.compile(r"(?<![.\w])(threadIdx|blockIdx|blockDim|gridDim)\b")
ASM = re.compile(r"\basm\b(?:\s+volatile)?\s*\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
# An operand, or a macro of wgmma.cuh that stands for several accumulators.
OPERAND = re.compile(r"\"[^\"]*\"\s*\(|\b\w+_SUMS\(")
# Directives and labels of PTX, which are no instructions.
NO_INSTRUCTION = re.compile(r"^(\.|\w+%?=?:$|[{}]*$)")


def translate(text):
    text = SHARED.sub(shared_variable, text)
    text = LAUNCH.sub(lambda m: "::emulation::launch([=](const auto&... emulated_args) "
                      f"{{ {m[1]}(emulated_args...); }}, {m[2]})(", text)
    text = BUILT_IN.sub(r"::emulation::\1()", text)
    text = text.replace("cudaLaunchKernelEx(", "::emulation::launch_with_attributes(")
    return replace_asm(text)


def shared_variable(match):
    is_dynamic, kind, name, extents = match.groups()
    if is_dynamic:
        return f"{kind}* const {name} = ::emulation::dynamic_shared<{kind}>();"
    return f"auto& {name} = ::emulation::static_shared<{kind}{extents}, decltype([] {{}})>();"


def replace_asm(text):
    parts, end = [], 0
    for match in ASM.finditer(text):
        parts.append(text[end:match.start()])
        end = closing_of(text, match.end())
        parts.append(call_for(text[match.end():end]))
        end += 1
    return "".join(parts) + text[end:]


def closing_of(text, at):
    """Returns where the parenthesis that was opened before `at` is closed."""
    depth = 1
    while True:
        string = STRING.match(text, at)
        if string:
            at = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def call_for(statement):
    template, operands = sections_of(statement)
    name = name_of("".join(STRING.findall(template)).replace("\\n", "\n"))
    if not name:
        return "(void)0"
    values = []
    for match in OPERAND.finditer(operands):
        value = operands[match.end():closing_of(operands, match.end())]
        values.append(value if match[0].startswith('"') else f"sums + ({value})")
    return f"::emulation::ptx::{name}({', '.join(values)})"


def sections_of(statement):
    """Splits a statement into its template and the rest."""
    template = re.match(r'(\s*"(?:[^"\\]|\\.)*")*', statement)[0]
    return template, statement[len(template):]


def name_of(template):
    names = []
    for line in re.split(r"[;\n]", template):
        words = [word for word in line.replace("{", " { ", 1).split()
                 if not word.startswith("@") and word != "{"]
        if not words or NO_INSTRUCTION.match(words[0]):
            continue
        special = re.search(r"%%(\w+)", line)
        names.append(words[0] + ("." + special[1] if special else ""))
    return "__".join(re.sub(r"\W+", "_", name) for name in names)


def main():
    source, target = (pathlib.Path(path) for path in sys.argv[1:])
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        to = target / path.relative_to(source)
        if path.suffix in (".cu", ".cpp"):
            to = to.with_name(path.name + ".cpp")
        text = translate(path.read_text(encoding="utf-8"))
        if not to.exists() or to.read_text(encoding="utf-8") != text:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
