#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_version.py SOURCE COMMAND PACKAGE: the project has one version. The command, CMake's
package, the wheel, the software bill and the changelog say the same."""
import json
import pathlib
import re
import subprocess
import sys

source, command, package = map(pathlib.Path, sys.argv[1:4])


def first(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else "none"


def text_of(path):
    return path.read_text(encoding="utf-8")


# The wheel takes its version from a file, by a regular expression. tomllib needs Python 3.11.
metadata = text_of(source / "pyproject.toml").split("[tool.scikit-build.metadata.version]")[1]
wheel = first(r"^input = \"(.+)\"", metadata)
pattern = first(r"^regex = '(.+)'", metadata)
bill = json.loads(text_of(source / "docs/sbom.spdx.json"))
own = next(part for part in bill["packages"] if part["name"] == "switchyard")
versions = {
    "switchyard --version": subprocess.run([command, "--version"], check=True, text=True,
                                           capture_output=True).stdout.strip(),
    "CMake's package": first(r"set\(PACKAGE_VERSION \"(.+)\"\)", text_of(package)),
    "the wheel": re.search(pattern, text_of(source / wheel))["value"],
    "docs/sbom.spdx.json": own["versionInfo"],
    "docs/sbom.spdx.json, documentNamespace": first(r"-([0-9.]+)$", bill["documentNamespace"]),
    "CHANGELOG.md": first(r"^## \[([0-9][^\]]*)\]", text_of(source / "CHANGELOG.md")),
}
print("\n".join(f"{version:8} {name}" for name, version in versions.items()))
sys.exit(0 if len(set(versions.values())) == 1 else 1)
