#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_bill.py SOURCE FILE...: docs/sbom.spdx.json names what CMake looks for and what the
binaries need, this project's version, and nothing that it does not say where it comes from."""
import json
import pathlib
import re
import subprocess
import sys

source = pathlib.Path(sys.argv[1])
bill = json.loads((source / "docs/sbom.spdx.json").read_text(encoding="utf-8"))
packages = {package["name"]: package for package in bill["packages"]}
own = packages.pop("switchyard")
texts = " ".join(package["comment"] for package in packages.values())
complaints = []

version = re.search(r"project\(switchyard VERSION (\S+)",
                    (source / "CMakeLists.txt").read_text(encoding="utf-8")).group(1)
if own["versionInfo"] != version:
    complaints.append(f"the bill is of version {own['versionInfo']}, but the project of {version}")

# "Found by CMake as NAME" is how the bill names what the build looks for.
sought = set()
for path in [*source.glob("cmake/SwitchyardDependencies.cmake"), source / "cli/CMakeLists.txt"]:
    text = path.read_text(encoding="utf-8")
    sought |= set(re.findall(r"^find_package\((\w+)", text, re.MULTILINE))
    sought |= set(re.findall(r"^switchyard_find_headers\((\w+)", text, re.MULTILINE))
    sought |= set(re.findall(r"^switchyard_find\(\w+ \S+ (\w+)", text, re.MULTILINE))
named = set(re.findall(r"Found by CMake as (\w+)", texts))
complaints += [f"CMake looks for {name}, which the bill lacks" for name in sorted(sought - named)]
complaints += [f"the bill has {name}, which CMake does not look for"
               for name in sorted(named - sought)]

for path in sys.argv[2:]:
    dynamic = subprocess.run(["readelf", "-dW", path], check=True, capture_output=True,
                             text=True).stdout
    for library in re.findall(r"NEEDED.*\[(.*)\]", dynamic):
        if not library.startswith("libswitchyard") and library not in texts:
            complaints.append(f"{path} needs {library}, which the bill lacks")

ids = {package["SPDXID"] for package in packages.values()}
related = {relation["relatedSpdxElement"] for relation in bill["relationships"]}
complaints += [f"nothing is related to {one}" for one in sorted(ids - related)]
print("\n".join(complaints) or f"the bill of {len(packages)} packages is complete")
sys.exit(1 if complaints else 0)
