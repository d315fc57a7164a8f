#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads off two files of ep_bench --json where one overtakes the other, for the entries of docs/tuning.md.

crossings.py A.json B.json [--over tokens|num_comm_sms] [--same PERCENT]

Points of the two files pair by all of their config. For each line of ep_bench's table, one sentence says which file is faster in which
range of --over, and where they cross: between two points, on the straight line through the logarithms of the ratios. Points whose medians differ
by less than --same count as equal and belong to no range. Of several starts the median is taken.
"""
import argparse
import json
import math
import pathlib
import statistics
import sys

SCHEMA = {"name": "ep_bench", "version": 2}


def read_points(file):
    """Returns the medians of a file: {config as text: (config, {line: microseconds})}."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            sys.exit(f"crossings.py: {file} has schema {document['schema']}; it must be {SCHEMA}")
        times = {}
        for start in document["starts"]:
            for point in start["points"]:
                if point["status"] != "complete":
                    continue
                _, lines = times.setdefault(json.dumps(point["config"], sort_keys=True), (point["config"], {}))
                for name, line in point["operations"].items():
                    lines.setdefault(name, []).append(line["median_us"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"crossings.py: {file} is no file of ep_bench --json: {error!r}")
    return {key: (config, {name: statistics.median(medians) for name, medians in lines.items()})
            for key, (config, lines) in times.items()}


def curves(first, second, over):
    """Returns {(line, config but for `over`): [(value of `over`, time of the second file / time of the first)]}."""
    found = {}
    for key in first.keys() & second.keys():
        config, times = first[key]
        rest = tuple(sorted((name, str(value)) for name, value in config.items() if name != over))
        for line in times.keys() & second[key][1].keys():
            found.setdefault((line, rest), []).append((config[over], second[key][1][line] / times[line]))
    return {key: sorted(points) for key, points in sorted(found.items())}


def crossing(left, right):
    """Returns where the ratio is 1 between two points."""
    (x, ratio), (next_x, next_ratio) = left, right
    part = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
    return x + part * (next_x - x)


def sentence(points, names, over, same):
    """Says which of the two files is faster where."""
    ranges = []  # [name, first, last]
    decided = [(x, ratio) for x, ratio in points if abs(math.log(ratio)) > math.log(1 + same / 100)]
    if not decided:
        return f"the same within {same:g} % at {len(points)} points"
    last = None
    for x, ratio in decided:
        faster = names[0] if ratio > 1 else names[1]
        if ranges and ranges[-1][0] == faster:
            ranges[-1][2] = x
        else:
            ranges.append([faster, x, x, crossing(last, (x, ratio)) if last else None])
        last = (x, ratio)
    parts = []
    for name, begin, end, at in ranges:
        where = f" (they cross at about {at:.3g})" if at is not None else ""
        parts.append(f"{name} is faster {'at' if begin == end else f'from {begin} to'} {end} {over}{where}")
    slower = [100 * (max(ratio, 1 / ratio) - 1) for _, ratio in decided]
    return f"{'; '.join(parts)}; by {min(slower):.1f} to {max(slower):.1f} %"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=pathlib.Path)
    parser.add_argument("second", type=pathlib.Path)
    parser.add_argument("--over", choices=("tokens", "num_comm_sms"), default="tokens")
    parser.add_argument("--same", type=float, default=1.0, help="percent")
    arguments = parser.parse_args()
    names = [str(arguments.first), str(arguments.second)]
    found = curves(read_points(arguments.first), read_points(arguments.second), arguments.over)
    if not found:
        sys.exit(f"crossings.py: no complete point of {names[0]} is in {names[1]}")
    configs = {rest for _, rest in found}
    differing = {name for rest in configs for name, value in rest if any(dict(other).get(name) != value for other in configs)}
    for (line, rest), points in found.items():
        which = "".join(f", {name} {value}" for name, value in rest if name in differing)
        print(f"{line}{which}: {sentence(points, names, arguments.over, arguments.same)}")


if __name__ == "__main__":
    main()
