#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the program on a page of docs/ with the one that is compiled, and runs it: the output is the same on 1, 2 and 3 ranks."""
import argparse
import re
import subprocess
import sys

LIMIT_S = 60


def program_on(page):
    with open(page, encoding="utf-8") as file:
        return re.search(r"^```c\n(.*?)^```$", file.read(), flags=re.DOTALL | re.MULTILINE).group(1)


def code_lines(program):
    """Lines that are neither blank, nor an include, nor only a comment."""
    return [line for line in program.splitlines() if line.strip() and not line.strip().startswith(("#include", "/*"))]


def output_of(mpirun, program, num_ranks):
    run = subprocess.run([mpirun, "--oversubscribe", "-n", str(num_ranks), program], check=True, timeout=LIMIT_S,
                         capture_output=True, text=True)
    print(run.stdout, end="")
    ranks, _, rest = run.stdout.partition(" ranks")
    if int(ranks) != num_ranks:
        sys.exit(f"{num_ranks} ranks ran, but it says {ranks}")
    return rest


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--page", "--source", "--program", "--mpirun"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    on_page = program_on(arguments.page)
    with open(arguments.source, encoding="utf-8") as file:
        source = file.read()
    if on_page != source:
        sys.exit(f"the program in {arguments.page} is not {arguments.source}")
    if len(code_lines(source)) > 60:
        sys.exit(f"{arguments.source} has {len(code_lines(source))} lines of code; the page promises 60")
    outputs = {output_of(arguments.mpirun, arguments.program, num_ranks) for num_ranks in (1, 2, 3)}
    if len(outputs) != 1 or " mean " not in outputs.pop():
        sys.exit("the output depends on the number of ranks")


if __name__ == "__main__":
    main()
