#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the API reference documents what needs words.
check_api_docs.py XML     XML: the folder of Doxygen's XML output; its paths are relative to the
                          current folder

Headers, classes, enumerations, types and functions need a comment. It may stand above a group of
declarations without a blank line between them. These may rely on their names: data members,
enumerators, functions without parameters, constructors, operators, and functions that free."""
import functools
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def is_documented(element):
    return any("".join(element.find(part).itertext()).strip()
               for part in ("briefdescription", "detaileddescription"))


def place(element):
    location = element.find("location")
    return f"{location.get('file')}:{location.get('line')}"


@functools.cache
def lines_of(path):
    return pathlib.Path(path).read_text(encoding="utf-8").splitlines()


def shares_a_comment(member):
    """Whether a comment stands above the group of declarations that this one is in."""
    location = member.find("location")
    for line in reversed(lines_of(location.get("file"))[:int(location.get("line")) - 1]):
        if line.lstrip().startswith(("//", "/*", "*")):
            return True
        if not line.strip() or line.rstrip().endswith(("{", ":")):
            return False
    return False


def speaks_for_itself(member, owner):
    name, kind = member.findtext("name"), member.get("kind")
    return (kind in ("variable", "friend") or name.startswith(("operator", "~"))
            or name.endswith("_free") or name == owner.findtext("compoundname").split("::")[-1]
            or (kind == "function" and member.find("param") is None)
            or (kind in ("function", "typedef") and shares_a_comment(member)))


def undocumented(owner):
    """Yields the members of a class, a namespace or a file that lack words."""
    for member in owner.iter("memberdef"):
        if member.get("prot") == "public" and not is_documented(member) \
                and not speaks_for_itself(member, owner):
            yield f"{place(member)}: {member.get('kind')} {member.findtext('name')} has no comment"


def main():
    complaints, count = set(), 0
    for path in pathlib.Path(sys.argv[1]).glob("*.xml"):
        for owner in ElementTree.parse(path).getroot().iter("compounddef"):
            kind = owner.get("kind")
            if kind not in ("class", "struct", "namespace", "file") \
                    or owner.findtext("compoundname").endswith(".md"):
                continue
            count += 1
            if kind != "namespace" and owner.get("prot", "public") == "public" \
                    and not is_documented(owner):
                where = place(owner) if kind != "file" else owner.find("location").get("file")
                complaints.add(f"{where}: {kind} {owner.findtext('compoundname')} has no comment")
            complaints |= set(undocumented(owner))
    if not count:
        complaints.add(f"{sys.argv[1]} holds no output of Doxygen")
    print("\n".join(sorted(complaints))
          or f"{count} headers, classes and namespaces are documented.")
    return 1 if complaints else 0


sys.exit(main())
