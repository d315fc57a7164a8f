#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes translation units for clang-tidy, each of several sources of one library, and compile_commands.json for them.

Most of clang-tidy's time goes into the headers that a source includes, since its checks read them too. Sources that share flags
are included in one unit, as in Meson's unity builds, and the headers are read once. HeaderFilterRegex of .clang-tidy matches
the included sources, so what is found in them is reported. A source that is compiled once per instruction set, or for a library
and for a test's copy of it, is the same to clang-tidy and is read once. Commands that differ in another macro of epx's are all
read.

    tidy_units.py build/compile_commands.json build/tidy runtime/group.cc runtime/config.cc ...

prints the units, the slowest first. With --alone each source has a unit of its own. Which sources share a unit follows from the
list, and sources whose anonymous namespaces have the same name cannot: with a short list of any sources, --alone avoids that.
"""
import argparse
import json
import os
import re
import shlex

OWN_MACRO = re.compile(r"-DEPX_(?!(ROWS|GEMM)_ISA=)")
MAX_SOURCES = 22  # more of a library have the same names in anonymous namespaces


def macros(command):
    return tuple(sorted({word for word in shlex.split(command) if OWN_MACRO.match(word)}))


def distinct(commands):
    """Leaves out the commands that compile a source again for another library."""
    found = {}
    for entry in commands:
        found.setdefault((entry["file"], macros(entry["command"])), entry)
    return list(found.values())


def units(commands, max_sources):
    """Splits the commands of each target, which have the same flags, into lists of about the same length."""
    targets = {}
    for entry in commands:
        targets.setdefault(os.path.dirname(entry["output"]), []).append(entry)
    for target, entries in targets.items():
        parts = -(-len(entries) // max_sources)
        for part in range(parts):
            yield f"{target}.{part}", entries[part * len(entries) // parts:(part + 1) * len(entries) // parts]


def path_of(entry):
    return os.path.normpath(os.path.join(entry["directory"], entry["file"]))


def write_unit(folder, name, entries):
    """Writes the source that includes those of the entries, and returns its command."""
    unit = os.path.join(folder, name.replace("/", "_") + ".cc")
    with open(unit, "w", encoding="utf-8") as file:
        for entry in entries:
            file.write(f'#include "{path_of(entry)}" // NOLINT(bugprone-suspicious-include)\n')
    words = shlex.split(entries[0]["command"])
    words[words.index("-c") + 1] = unit
    return {"directory": entries[0]["directory"], "file": unit, "arguments": words}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("database")
    parser.add_argument("folder")
    parser.add_argument("sources", nargs="+")
    args = parser.parse_args()
    folder = os.path.abspath(args.folder)
    os.makedirs(folder, exist_ok=True)
    wanted = {os.path.abspath(source) for source in args.sources}
    with open(args.database, encoding="utf-8") as file:
        commands = [entry for entry in distinct(json.load(file)) if path_of(entry) in wanted]
    missing = wanted - {path_of(entry) for entry in commands}
    if missing:
        parser.error(f"{args.database} has no command for {', '.join(sorted(missing))}")
    # The one source that includes Eigen takes as long as a unit of ten others.
    slowest_first = sorted(units(commands, 1 if args.alone else MAX_SOURCES),
                           key=lambda unit: ("gemm" not in unit[0], -len(unit[1])))
    written = [write_unit(folder, name, entries) for name, entries in slowest_first]
    with open(os.path.join(folder, "compile_commands.json"), "w", encoding="utf-8") as file:
        json.dump(written, file, indent=1)
    print("\n".join(entry["file"] for entry in written))


if __name__ == "__main__":
    main()
