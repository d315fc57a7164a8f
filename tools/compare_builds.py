#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""compare_builds.py BEFORE AFTER [--starts N] [--out DIR] [--fail-if-slower PERCENT] -- COMMAND...

Measures two builds with the same command, and compares them: BEFORE and AFTER are their ep_bench, and COMMAND has {} in its place.
The builds take turns, N starts of each (6 by default), so that what drifts on the machine is the same for both. The two files,
before.json and after.json, go to DIR, by default the current folder; files that are there already are not overwritten. The exit
status is that of ep_bench compare, or 2 where a start failed.

    tools/compare_builds.py ../before/build/tools/ep_bench/ep_bench build/tools/ep_bench/ep_bench -- mpirun -n 4 {} --transport nccl
"""
import argparse
import pathlib
import subprocess
import sys

FAILURE = 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", type=pathlib.Path)
    parser.add_argument("after", metavar="AFTER", type=pathlib.Path)
    parser.add_argument("--starts", type=int, default=6, help="of each build")
    parser.add_argument("--out", metavar="DIR", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--fail-if-slower", metavar="PERCENT")
    parser.add_argument("--limit-s", type=float, default=600, help="of one start")
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        arguments, command = arguments[:arguments.index("--")], arguments[arguments.index("--") + 1:]
    options = parser.parse_args(arguments)
    options.command = command
    if "{}" not in command:
        parser.error("COMMAND has no {}, the place of ep_bench")
    if options.starts < 1:
        parser.error(f"--starts is {options.starts}; it must be at least 1")
    options.files = {build: options.out / f"{name}.json" for name, build in (("before", options.before), ("after", options.after))}
    if len(options.files) != 2:
        parser.error(f"BEFORE and AFTER are both {options.before}")
    for file in options.files.values():
        if file.exists():
            parser.error(f"{file} is there already; move it away, or give another --out")
    return options


def main():
    options = parse_arguments()
    for start in range(options.starts):
        for build, file in options.files.items():
            command = [str(build) if word == "{}" else word for word in options.command]
            subprocess.run([*command, "--json", file] + ["--append"] * (start > 0), timeout=options.limit_s,
                           stdout=subprocess.DEVNULL, check=True)
    threshold = [] if options.fail_if_slower is None else [f"--fail-if-slower={options.fail_if_slower}"]
    return subprocess.run([options.after, "compare", *options.files.values(), *threshold], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, subprocess.SubprocessError) as error:
        print(f"compare_builds.py: {error}", file=sys.stderr)
        sys.exit(FAILURE)
