#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that a library compiled for one instruction set shares no inline function with code for another.

The linker keeps one copy of each inline function (a weak symbol) of a program, and it may be the copy that old processors
cannot run. So all weak functions of such a library must have the instruction set in their names.
"""
import argparse
import subprocess
import sys


def weak_functions(library):
    output = subprocess.run(["nm", "--demangle", library], check=True, capture_output=True, text=True)
    for line in output.stdout.splitlines():
        kind, _, name = line[17:].partition(" ")
        if kind in ("W", "u"):
            yield name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--own", required=True, help="what the names of its own inline functions contain")
    parser.add_argument("--may-have-none", action="store_true", help="the compiler may inline all functions")
    arguments = parser.parse_args()
    names = list(weak_functions(arguments.library))
    shared = [name for name in names if arguments.own not in name]
    print(f"{arguments.library}: {len(names)} weak functions, {len(names) - len(shared)} of its own")
    for name in shared:
        print(f"shared with other code: {name}")
    return 1 if shared or not (names or arguments.may_have_none) else 0


if __name__ == "__main__":
    sys.exit(main())
