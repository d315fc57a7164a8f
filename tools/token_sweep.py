#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws ep_bench's times over the number of tokens, and the speed-of-light bound, into one picture. Needs matplotlib.

token_sweep.py --output docs/token-sweep.svg FILE

FILE is what a sweep over tokens with --transport nccl --floor has written by --json. Each layout, routing and number of SMs is a line of the
picture: the median of its shortest sequence of calls that ends in combine. The bound is that of dispatch plus that of combine. Points
that are not complete are left out. Of several starts the median is drawn.
"""
import argparse
import json
import pathlib
import statistics
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402  (the backend comes first)

SCHEMA = {"name": "ep_bench", "version": 2}
FIELDS = ("layout", "routing", "num_comm_sms")


def read_points(file):
    """Returns the number of ranks, and the complete points of all starts: {name: {tokens: [point]}}."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            sys.exit(f"token_sweep.py: {file} has schema {document['schema']}; it must be {SCHEMA}")
        points = [point for start in document["starts"] for point in start["points"] if point["status"] == "complete"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"token_sweep.py: {file} is no file of ep_bench --json: {error!r}")
    differing = [field for field in FIELDS if len({point["config"][field] for point in points}) > 1]
    lines = {}
    for point in points:
        config = point["config"]
        name = ", ".join(str(config[field]) for field in differing) or config["layout"]
        lines.setdefault(name, {}).setdefault(config["tokens"], []).append(point)
    if not any(point["operations"]["dispatch"]["floor"] for point in points):
        sys.exit(f"token_sweep.py: {file} has no complete point with --floor")
    return document["run"]["ranks"], {name: dict(sorted(of_name.items())) for name, of_name in sorted(lines.items())}


def sequence_of(starts):
    """Returns the name and the median of the point's sequence of calls with the fewest of them, microseconds."""
    operations = starts[0]["operations"]
    name = min((name for name in operations if name.endswith("+combine")), key=lambda name: name.count("+"))
    return name, statistics.median(point["operations"][name]["median_us"] for point in starts)


def bound_of(starts):
    """Returns the speed-of-light bound of dispatch and combine together, microseconds."""
    return statistics.median(sum(point["operations"][name]["floor"]["us"] for name in ("dispatch", "combine")) for point in starts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("file", type=pathlib.Path)
    arguments = parser.parse_args()
    ranks, lines = read_points(arguments.file)

    matplotlib.rcParams.update({"svg.hashsalt": "epx", "svg.fonttype": "none", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for i, (name, of_name) in enumerate(lines.items()):
        tokens = list(of_name)
        sequence = sequence_of(of_name[tokens[0]])[0]
        axes.plot(tokens, [sequence_of(starts)[1] for starts in of_name.values()], marker="o", markersize=4, color=f"C{i}",
                  label=f"{name}: {sequence}")
        # Where the bounds of two layouts coincide, the dashes of one lie in the gaps of the other.
        axes.plot(tokens, [bound_of(starts) for starts in of_name.values()], linestyle=(3 * i, (3, 3)), color=f"C{i}",
                  label=f"{name}: speed-of-light bound of dispatch + combine")
    point = next(iter(next(iter(lines.values())).values()))[0]
    shape = point["config"]
    axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="microseconds",
             title=f"{ranks} GPUs, H {shape['hidden']} {shape['dtype']}, top-{shape['top_k']} of "
                   f"{shape['experts']} experts, {point['group']['num_comm_sms']} SMs")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
