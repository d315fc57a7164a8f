#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""compare_check.py DIR [--pairs N] [--starts N] [--slowed NAME=VALUE] -- COMMAND...

Counts what ep_bench compare says of many pairs of runs of one build, and of pairs whose second run is slower.

COMMAND runs ep_bench once, with --tokens, --layout and --json to be added at its end; the files go to DIR, which is new. Each
pair is two runs, or three with --slowed: the third has NAME=VALUE in its environment, which must make the build slower. The runs
take turns, so that what drifts on the machine is the same for all. --starts N gives each file N starts, by --append.

Printed are the share of rows that are the same, the share that is called slower, the standard deviation of medians between starts
(docs/ep_bench-json.md has those that compare assumes), and by how much NAME=VALUE has slowed each row. The exit status is 1 where
a share is below --min-same (95 %) or --min-slower (90 %), and 2 where a run failed.

On the host transport of 2 ranks, with calls that spin for 10 % of their time:

    export LD_PRELOAD=$PWD/build/tests/multiprocess/slowed_calls.so
    tools/compare_check.py DIR --slowed EPX_SLOWED_PERCENT=10 -- mpirun -n 2 build/tools/ep_bench/ep_bench --transport host

On one GPU, with calls that take about 3 % longer on their stream:

    tools/compare_check.py DIR --slowed EPX_SLOWED_PERCENT=3 -- mpirun -n 1 build/tools/ep_bench/ep_bench --transport nccl --graph
"""
import argparse
import collections
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys

# Five points, which are no product of lists.
POINTS = (("expert-major", ["--tokens", "1,128,1024,4096", "--layout", "expert-major"]),
          ("rank-major", ["--tokens", "128", "--layout", "rank-major"]))
FAILURE = 2
VERDICTS = ("same", "slower", "faster", "ambiguous")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path)
    parser.add_argument("--ep-bench", help="that compares; by default the argument of COMMAND whose name is ep_bench")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--slowed", metavar="NAME=VALUE")
    parser.add_argument("--min-same", type=float, default=95, help="percent")
    parser.add_argument("--min-slower", type=float, default=90, help="percent")
    parser.add_argument("--limit-s", type=float, default=600, help="of one run")
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        arguments, command = arguments[:arguments.index("--")], arguments[arguments.index("--") + 1:]
    options = parser.parse_args(arguments)
    options.command = command
    options.ep_bench = options.ep_bench or next((word for word in command if pathlib.Path(word).name == "ep_bench"), None)
    if options.ep_bench is None:
        parser.error("COMMAND has no argument whose name is ep_bench; give --ep-bench")
    if options.pairs < 1 or options.starts < 1:
        parser.error(f"--pairs is {options.pairs} and --starts is {options.starts}; both must be at least 1")
    if options.slowed is not None and "=" not in options.slowed:
        parser.error(f"--slowed is '{options.slowed}'; it must be NAME=VALUE")
    return options


def measure(options, name, environment):
    """Writes the files of one run, name.LAYOUT.json."""
    for layout, arguments in POINTS:
        for start in range(options.starts):
            command = [*options.command, *arguments, "--json", options.directory / f"{name}.{layout}.json"]
            subprocess.run(command + ["--append"] * (start > 0), env=os.environ | environment, timeout=options.limit_s,
                           stdout=subprocess.DEVNULL, check=True)


def compare(options, before, after):
    """Returns how often each verdict occurs."""
    verdicts = collections.Counter()
    for layout, _ in POINTS:
        files = [options.directory / f"{name}.{layout}.json" for name in (before, after)]
        run = subprocess.run([options.ep_bench, "compare", *files], timeout=options.limit_s, capture_output=True, text=True, check=True)
        rows = re.findall(rf"^ +\d+ .* to .* ({'|'.join(VERDICTS)})$", run.stdout, re.MULTILINE)
        if f"of {len(rows)} rows" not in run.stdout:
            raise RuntimeError(f"this is no table of ep_bench compare:\n{run.stdout}")
        verdicts.update(rows)
    return verdicts


def medians_of(options, *names):
    """Returns the medians of all starts of the runs NAME0, NAME1 and so on, by tokens, layout and line."""
    medians = collections.defaultdict(list)
    for name in (f"{name}{pair}" for pair in range(options.pairs) for name in names):
        for layout, _ in POINTS:
            for start in json.loads((options.directory / f"{name}.{layout}.json").read_text())["starts"]:
                for point in start["points"]:
                    for line, figures in point.get("operations", {}).items():
                        medians[point["config"]["tokens"], layout, line].append(figures["median_us"])
    return medians


def print_deviations(medians):
    deviations = {key: statistics.stdev(map(math.log, values)) for key, values in medians.items()}
    for (tokens, layout, line), deviation in deviations.items():
        values = medians[tokens, layout, line]
        print(f"{tokens:6} {layout:13} {line:25} median {statistics.median(values):9.1f} us, "
              f"between {len(values)} starts {100 * deviation:6.2f} %")
    mean_square = statistics.fmean(deviation**2 for deviation in deviations.values())
    print(f"standard deviation between starts, root of the mean square: {100 * math.sqrt(mean_square):.2f} %")


def print_shifts(before, after):
    """Prints by how much the slowed runs are slower, as all of them together tell."""
    shifts = {key: 100 * (statistics.median(after[key]) / statistics.median(values) - 1) for key, values in before.items()}
    for (tokens, layout, line), shift in shifts.items():
        print(f"{tokens:6} {layout:13} {line:25} slowed by {shift:6.2f} %")
    print(f"slowed by, all rows: {min(shifts.values()):.2f} to {max(shifts.values()):.2f} %, "
          f"median {statistics.median(shifts.values()):.2f} %")


def print_share(what, verdicts, verdict, least):
    """Returns whether the share is large enough."""
    share = 100 * verdicts[verdict] / verdicts.total()
    print(f"{what}: {share:.1f} % of {verdicts.total()} rows are {verdict} ({least:g} % expected), "
          + ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS))
    return share >= least


def main():
    options = parse_arguments()
    options.directory.mkdir()
    unchanged, slowed = collections.Counter(), collections.Counter()
    for pair in range(options.pairs):
        for name in ("a", "b"):
            measure(options, f"{name}{pair}", {})
        unchanged += compare(options, f"a{pair}", f"b{pair}")
        if options.slowed is not None:
            measure(options, f"slowed{pair}", dict([options.slowed.split("=", 1)]))
            slowed += compare(options, f"a{pair}", f"slowed{pair}")
        print(f"pair {pair + 1} of {options.pairs}: {dict(unchanged)}, slowed {dict(slowed)}", file=sys.stderr, flush=True)
    before = medians_of(options, "a", "b")
    print_deviations(before)
    if options.slowed is not None:
        print_shifts(before, medians_of(options, "slowed"))
    passed = print_share("one build", unchanged, "same", options.min_same)
    if options.slowed is not None:
        passed &= print_share(options.slowed, slowed, "slower", options.min_slower)
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"compare_check.py: {error}", file=sys.stderr)
        sys.exit(FAILURE)
