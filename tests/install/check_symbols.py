#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what a shared library exports with what its header declares EPX_API, and checks its SONAME and its needs."""
import argparse
import re
import subprocess
import sys


def declared_functions(header):
    with open(header, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return set(re.findall(r"\bEPX_API\b[^;(]*?(\w+)\s*\(", text))


def exported_symbols(library):
    """The dynamic symbols that the library defines, as {name: version node}."""
    symbols = {}
    output = subprocess.run(["readelf", "--dyn-syms", "--wide", library], check=True, capture_output=True, text=True)
    for line in output.stdout.splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit() or fields[6] in ("UND", "ABS"):
            continue
        name, _, version = fields[7].partition("@")
        symbols[name] = version.lstrip("@")
    return symbols


def dynamic_entries(library, tag):
    output = subprocess.run(["readelf", "--dynamic", "--wide", library], check=True, capture_output=True, text=True)
    return re.findall(rf"\({tag}\).*\[(.*)\]", output.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--header", required=True)
    parser.add_argument("--soname", required=True)
    parser.add_argument("--version-node", required=True)
    parser.add_argument("--may-need-mpi", action="store_true")
    arguments = parser.parse_args()

    declared = declared_functions(arguments.header)
    exported = exported_symbols(arguments.library)
    soname = dynamic_entries(arguments.library, "SONAME")
    needed = dynamic_entries(arguments.library, "NEEDED")

    problems = []
    if not declared:
        problems.append(f"no EPX_API function found in {arguments.header}")
    problems += [f"{name} is declared but not exported" for name in sorted(declared - exported.keys())]
    problems += [f"{name} is exported but not declared" for name in sorted(exported.keys() - declared)]
    problems += [f"{name} has version '{version}', not {arguments.version_node}"
                 for name, version in sorted(exported.items()) if name in declared and version != arguments.version_node]
    if soname != [arguments.soname]:
        problems.append(f"SONAME is {soname}, not {arguments.soname}")
    if not arguments.may_need_mpi:
        problems += [f"the library needs {name}" for name in needed if "mpi" in name]

    problems += [f"the library needs {name}, which it is to load when a group needs it" for name in needed if "nccl" in name]

    print(f"{arguments.library}: {len(exported)} symbols exported, {len(declared)} functions declared, needs {needed}")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
