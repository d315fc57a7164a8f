#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curves of train_moe (JSON lines, --log) into one picture. Needs matplotlib.

loss_curve.py --output docs/loss-curve.svg "epx, 4 ranks=p4.jsonl" "dense=dense.jsonl" ...
"""
import argparse
import json
import math
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend comes first)


def read_run(path):
    """Returns the steps, their losses, and the closing line of a finished run."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if "step" in line]
    closing = next((line for line in lines if "held_out_loss" in line), None)
    if not steps or closing is None:
        sys.exit(f"loss_curve.py: {path}: this is not the log of a finished run of train_moe")
    return [line["step"] for line in steps], [line["loss"] for line in steps], closing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("runs", nargs="+", metavar="NAME=FILE")
    arguments = parser.parse_args()

    matplotlib.rcParams.update({"svg.hashsalt": "epx", "svg.fonttype": "none", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    widths = [6 - 4 * i / max(1, len(arguments.runs) - 1) for i in range(len(arguments.runs))]  # equal curves stay visible
    for run, width in zip(arguments.runs, widths):
        name, _, path = run.partition("=")
        steps, losses, closing = read_run(path)
        axes.plot(steps, losses, linewidth=width, label=name, alpha=0.8)
    axes.axhline(closing["unigram_entropy"], color="gray", linestyle=":", label="unigram entropy of the text")
    axes.axhline(closing["held_out_loss"], color="black", linestyle="--", linewidth=1, label="held-out loss at the end")
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, steps[-1]), ylim=(0, math.ceil(losses[0])))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
