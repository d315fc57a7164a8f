#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Copies compile_commands.json without the commands that compile a source again for another library.

What is compiled once per instruction set, or for the library and for a test's copy of it, is the same to clang-tidy. Commands
that differ in another macro of epx's are kept.
"""
import json
import re
import shlex
import sys

OWN_MACRO = re.compile(r"-DEPX_(?!(ROWS|GEMM)_ISA=)")


def macros(command):
    return tuple(sorted({word for word in shlex.split(command) if OWN_MACRO.match(word)}))


def main():
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        commands = json.load(file)
    distinct = {}
    for entry in commands:
        distinct.setdefault((entry["file"], macros(entry["command"])), entry)
    with open(target, "w", encoding="utf-8") as file:
        json.dump(list(distinct.values()), file, indent=1)


if __name__ == "__main__":
    main()
