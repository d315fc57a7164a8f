#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up test results: meson's testlog.json files, and checks given as --check=NAME=passed|failed|skipped.

Prints what failed, then 'N passed, N failed[, N skipped]'. Exits with 1 when anything failed or nothing passed.
"""
import argparse
import collections
import json
import sys

# Meson's words; whatever is not here (FAIL, ERROR, TIMEOUT, INTERRUPT, UNEXPECTEDPASS) is a failure.
OUTCOMES = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}


def results_of(testlog):
    """Yields (name, outcome) of each test in a testlog.json (one JSON object per line)."""
    with open(testlog, encoding="utf-8") as lines:
        for line in lines:
            test = json.loads(line)
            yield f"{testlog}: {test['name']}", OUTCOMES.get(test["result"], "failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="append", default=[], metavar="NAME=OUTCOME")
    parser.add_argument("testlogs", nargs="*")
    arguments = parser.parse_args()

    results = [tuple(check.rsplit("=", 1)) for check in arguments.check]
    for testlog in arguments.testlogs:
        try:
            tests = list(results_of(testlog))
        except (OSError, ValueError) as error:
            print(f"{testlog}: {error}")
            tests = []
        results += tests or [(f"{testlog}: ran no test", "failed")]

    for name, outcome in results:
        if outcome != "passed":
            print(f"{outcome}: {name}")
    count = collections.Counter(outcome for _, outcome in results)
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    print(f"{count['passed']} passed, {count['failed']} failed{skipped}")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
