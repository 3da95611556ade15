#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_functions.py LIBRARY PROGRAM LIST: every function that the shared library exports is in the
table of misuses, which `PROGRAM --functions` prints, or in LIST: functions that no argument can be
wrong for, or that callers cannot reach. Neither may have a function that is not exported."""
import re
import subprocess
import sys

# Type names as nm prints them, and the shorter names that the headers use.
ABBREVIATIONS = [
    (r"\[abi:cxx11\]", ""),
    (r"std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> ?>", "string"),
    (r"std::basic_string_view<char, std::char_traits<char> ?>", "string_view"),
    (r"std::filesystem::__cxx11::path", "path"),
    (r"switchyard::BasicTensorView<std::byte const>", "ConstTensorView"),
    (r"switchyard::BasicTensorView<std::byte>", "TensorView"),
    (r", std::allocator<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*> ?>", ">"),
    (r", 18446744073709551615ul>", ">"),
    (r"switchyard::|std::", ""),
    (r"function<void \(([^()]*)\)>", r"function"),
    (r"BasicMoeTensors<TensorView ?>", "MoeViews"),
    (r"BasicMoeTensors<ConstTensorView ?>", "MoeWeights"),
    (r"BasicRouterTensors<ConstTensorView ?>", "RouterWeights"),
    (r"BasicExpertTensors<ConstTensorView ?>", "ExpertWeights"),
    (r"BasicExpertTensors<TensorView ?>", "ExpertViews"),
    (r"BasicPackedExperts<ConstTensorView ?>", "PackedExperts"),
    (r"BasicPackedExperts<TensorView ?>", "PackedExpertViews"),
    (r"unsigned long", "size_t"),
    (r"\blong\b", "int64"),
    (r" const(?=[ &>*,)]|$)| ?(?<!&)&(?!&)", ""),
]


def shortened(name):
    for pattern, words in ABBREVIATIONS:
        name = re.sub(pattern, words, name)
    return name.replace(" >", ">").removesuffix("()") if name.endswith("()") else name.replace(" >", ">")


def exported(library):
    output = subprocess.run(["nm", "-DC", "--defined-only", library], check=True,
                            capture_output=True, text=True).stdout
    # T: functions; weak symbols are inline ones and the standard library's.
    names = re.findall(r"^[0-9a-f]+ T (.*)$", output, re.MULTILINE)
    return {shortened(name) for name in names if re.match(r"switchyard(::|_)", name)}


def main():
    library, program, exempt_file = sys.argv[1:]
    functions = exported(library)
    if library.endswith(".a") or len(functions) < 100:
        sys.exit(f"{library} exports {len(functions)} functions only")
    table = set(subprocess.run([program, "--functions"], check=True, capture_output=True,
                               text=True).stdout.split("\n")) - {""}
    lines = [line.strip() for line in open(exempt_file, encoding="utf-8")]
    exempt = {line for line in lines if line and not line.startswith("#")}
    complaints = [f"{name}: exported, but neither in the table nor in {exempt_file}"
                  for name in sorted(functions - table - exempt)]
    complaints += [f"{name}: in the table or the list, but not exported"
                   for name in sorted((table | exempt) - functions)]
    complaints += [f"{name}: in the table and in the list" for name in sorted(table & exempt)]
    print("\n".join(complaints) or f"all {len(functions)} functions: {len(table)} in the table, "
          f"{len(exempt)} in the list")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
