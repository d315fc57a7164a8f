#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws ep_bench's times over the number of tokens, and the speed-of-light bound, into one picture. Needs matplotlib.

token_sweep.py --output docs/token-sweep.svg DIRECTORY

DIRECTORY holds the files of token_sweep.sh: NAME-TOKENS.json, what ep_bench --json wrote. Each NAME is a line of the picture: the
median of its shortest sequence of calls that ends in combine. The bound is that of dispatch plus that of combine.
"""
import argparse
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402  (the backend comes first)


def read_runs(directory):
    """Returns the runs of each NAME, by their number of tokens."""
    runs = {}
    for path in directory.glob("*-*.json"):
        name, _, tokens = path.stem.rpartition("-")
        runs.setdefault(name, {})[int(tokens)] = json.loads(path.read_text(encoding="utf-8"))
    if not runs:
        sys.exit(f"token_sweep.py: {directory}: there is no NAME-TOKENS.json in it")
    return {name: dict(sorted(of_name.items())) for name, of_name in sorted(runs.items())}


def sequence_of(run):
    """Returns the name and the median of the run's sequence of calls with the fewest of them, microseconds."""
    name = min((name for name in run["operations"] if name.endswith("+combine")), key=lambda name: name.count("+"))
    return name, run["operations"][name]["median_us"]


def bound_of(run):
    """Returns the speed-of-light bound of dispatch and combine together, microseconds."""
    return sum(run["operations"][name]["floor"]["us"] for name in ("dispatch", "combine"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("directory", type=pathlib.Path)
    arguments = parser.parse_args()
    runs = read_runs(arguments.directory)

    matplotlib.rcParams.update({"svg.hashsalt": "epx", "svg.fonttype": "none", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for i, (name, of_name) in enumerate(runs.items()):
        tokens = list(of_name)
        sequence = sequence_of(of_name[tokens[0]])[0]
        axes.plot(tokens, [sequence_of(run)[1] for run in of_name.values()], marker="o", markersize=4, color=f"C{i}",
                  label=f"{name}: {sequence}")
        # Where the bounds of two layouts coincide, the dashes of one lie in the gaps of the other.
        axes.plot(tokens, [bound_of(run) for run in of_name.values()], linestyle=(3 * i, (3, 3)), color=f"C{i}",
                  label=f"{name}: speed-of-light bound of dispatch + combine")
    config = next(iter(next(iter(runs.values())).values()))
    shape = config["config"]
    axes.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="microseconds",
             title=f"{config['ranks']} GPUs, H {shape['hidden']} {shape['dtype']}, top-{shape['top_k']} of "
                   f"{shape['experts']} experts, {shape['num_comm_sms']} SMs")
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
