#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up test results: meson's testlog.json files, and checks given as --check=NAME=passed|failed|skipped.

Prints the end of what each failed test has printed, then what failed or was skipped, then 'N passed, N failed[, N skipped]'. Exits
with 1 when anything failed or nothing passed.
"""
import argparse
import collections
import json
import sys

# Meson's words; whatever is not here (FAIL, ERROR, TIMEOUT, INTERRUPT, UNEXPECTEDPASS) is a failure.
OUTCOMES = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}

LINES_OF_FAILED = 60  # of what a failed test has printed


def results_of(testlog):
    """Yields (name, outcome, what the test has printed) of each test in a testlog.json (one JSON object per line)."""
    with open(testlog, encoding="utf-8") as lines:
        for line in lines:
            test = json.loads(line)
            output = f"{test.get('stdout', '')}\n{test.get('stderr', '')}\n{test['result']} after {test['duration']:.0f} s"
            yield f"{testlog}: {test['name']}", OUTCOMES.get(test["result"], "failed"), output


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="append", default=[], metavar="NAME=OUTCOME")
    parser.add_argument("testlogs", nargs="*")
    arguments = parser.parse_args()

    results = [(*check.rsplit("=", 1), "") for check in arguments.check]
    for testlog in arguments.testlogs:
        try:
            tests = list(results_of(testlog))
        except (OSError, ValueError) as error:
            print(f"{testlog}: {error}")
            tests = []
        results += tests or [(f"{testlog}: ran no test", "failed", "")]

    for name, outcome, output in results:
        lines = [line for line in output.splitlines() if line.strip()]
        if outcome == "failed" and lines:
            print("\n".join([f"==> The last lines of {name}", *lines[-LINES_OF_FAILED:]]))
    for name, outcome, _ in results:
        if outcome != "passed":
            print(f"{outcome}: {name}")
    count = collections.Counter(outcome for _, outcome, _ in results)
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    print(f"{count['passed']} passed, {count['failed']} failed{skipped}")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
