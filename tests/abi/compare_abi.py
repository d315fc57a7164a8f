#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the ABI of a library with the kept dump of 0.1's: what was built against 0.1 must run with today's library. Exits with
77 where libabigail's tools are not installed."""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

SKIPPED = 77  # as Meson knows it


def require_tools():
    if shutil.which("abidw") is None or shutil.which("abidiff") is None:
        print("abidw and abidiff are not installed (Debian: abigail-tools)")
        sys.exit(SKIPPED)


def dump_abi(library, headers, dump):
    """The kept dumps come from here as well: what the library exports, and of its types what a file in `headers` defines."""
    subprocess.run(["abidw", "--exported-interfaces-only", "--headers-dir", headers, "--drop-private-types", "--no-elf-needed",
                    "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--no-write-default-sizes", "--type-id-style",
                    "hash", "--out-file", dump, library], check=True, timeout=120)


def abidiff(old, new, *options):
    """What abidiff says; "" when it finds no difference. Functions may be added, and so may enumerators, which abidiff takes
    for harmless."""
    command = ["abidiff", "--no-added-syms", *options, old, new]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode == 0:
        return ""
    return f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}{result.stderr}"


def structs(tree):
    """Of struct name to its element."""
    return {each.get("name"): each for each in tree.iter("class-decl") if each.get("is-declaration-only") is None}


def first_parts(old, new, names):
    """Cuts the structs in `names` down to what 0.1 gave a meaning: up to their size in 0.1, or to where `reserved` began."""
    old_structs, new_structs = structs(old), structs(new)
    for name in names:
        if name not in old_structs or name not in new_structs:
            continue  # abidiff says so if it matters
        members = {member.find("var-decl").get("name"): int(member.get("layout-offset-in-bits"))
                   for member in old_structs[name].iter("data-member")}
        old_bits = int(old_structs[name].get("size-in-bits"))
        end = members.get("reserved", old_bits)
        for struct in (old_structs[name], new_structs[name]):
            for member in struct.findall("data-member"):
                if int(member.get("layout-offset-in-bits")) >= end:
                    struct.remove(member)
        if "reserved" not in members:
            new_structs[name].set("size-in-bits", str(old_bits))


def differences(old_dump, library, headers, suppressions, folder):
    """What stands between a program that was built against the dumped library and `library`; "" when nothing does."""
    new_dump = folder / "new.abi"
    dump_abi(library, headers, new_dump)
    found = abidiff(old_dump, new_dump, "--suppressions", suppressions)
    # A suppression that matches a struct hides all that has changed in it: fields that have moved or have other types, too. So
    # the parts that 0.1 knew are compared once more, without any.
    old, new = ElementTree.parse(old_dump), ElementTree.parse(new_dump)
    first_parts(old, new, re.findall(r"^\s*name = (\w+)$", suppressions.read_text(encoding="utf-8"), flags=re.MULTILINE))
    old.write(folder / "old_part.abi")
    new.write(folder / "new_part.abi")
    return found + abidiff(folder / "old_part.abi", folder / "new_part.abi")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("dump", "library", "headers", "suppressions"):
        parser.add_argument("--" + name, required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    require_tools()
    with tempfile.TemporaryDirectory() as folder:
        found = differences(arguments.dump, arguments.library, arguments.headers, arguments.suppressions, pathlib.Path(folder))
    print(found or f"{arguments.library}: programs built against {arguments.dump.name} run with it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
