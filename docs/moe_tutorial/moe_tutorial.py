#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the MoE block of epx beside native baselines on one machine, and writes the tables and the picture of docs/moe.md.

moe_tutorial.py --ranks 2 --out DIR           all of it; DIR/results.json has every figure, DIR also the logs
moe_tutorial.py --ranks 2 --out DIR --cases deepseek   only cases whose name has this in it; what DIR/results.json has of
                                              others stays, so that a run may be made in parts on one machine
moe_tutorial.py --ranks 2 --out DIR --quick   small shapes; with --cpu without GPUs, to try the script itself
moe_tutorial.py --out DIR --write             only writes docs/moe.md and docs/moe-pieces.svg from DIR/results.json

All programs of a case are there at the same time and take turns on the GPUs: each measures one round, then the next one does.
Afterwards their outputs at that shape are compared. A program that fails or is not there is left out of the tables with a
sentence. Needs numpy, and PyTorch, torchao and JAX for theirs.
"""
import argparse
import dataclasses
import datetime
import json
import pathlib
import shlex
import sys
import tempfile

import cases
import picture
import programs
import tables

PAGE, PICTURE = programs.ROOT / "docs" / "moe.md", programs.ROOT / "docs" / "moe-pieces.svg"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="DIR")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--ep-bench", default=programs.ROOT / "build/tools/ep_bench/ep_bench", type=pathlib.Path)
    parser.add_argument("--programs", default=",".join(programs.PROGRAMS), help="which of %(default)s")
    parser.add_argument("--cases", default="", help="parts of the names of the cases to measure, separated by commas; "
                        "'none': only the checks")
    parser.add_argument("--no-check", action="store_true", help="do not compare outputs with the answer in float64")
    parser.add_argument("--iters", type=int, default=20, help="timed iterations of all rounds together")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in which the programs take turns")
    parser.add_argument("--pause-ms", type=int, default=200, help="pause before each iteration of the second measurement")
    parser.add_argument("--limit-s", type=int, default=150, help="the longest that one program may take for one case")
    parser.add_argument("--commit", default=programs.commit(), help="of the sources, where git does not know it")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--cpu", action="store_true", help="with --quick: without GPUs; such times are not written to docs")
    parser.add_argument("--write", action="store_true", help="write the page and the picture from results.json")
    arguments = parser.parse_args()
    if arguments.cpu and not arguments.quick:
        parser.error("--cpu is given without --quick; the models' shapes are for GPUs")
    if not 1 <= arguments.rounds <= arguments.iters:
        parser.error(f"--rounds is {arguments.rounds}; it must be between 1 and --iters, {arguments.iters}")
    unknown = set(arguments.programs.split(",")) - set(programs.PROGRAMS)
    if unknown:
        parser.error(f"--programs has {', '.join(sorted(unknown))}; it may have {', '.join(programs.PROGRAMS)}")
    return arguments


def check(runner, chosen, case):
    """Returns how far each program's outputs are from the answer in float64."""
    import correctness  # numpy is needed from here on

    with tempfile.TemporaryDirectory(dir=runner.directory) as dump:
        results = runner.run(chosen, case, dump, timed=False)
        # On CPUs ep_bench computes in float32 on data that are not rounded, so its answer is another one.
        of_ep_bench = [layer for layer in tables.LAYER_NAMES if layer.startswith(("block", "native"))]
        others = [layer for layer in tables.LAYER_NAMES if layer not in of_ep_bench]
        tensors = correctness.compare(case, runner.ranks, dump, others, bf16=True)
        for tensor, entry in correctness.compare(case, runner.ranks, dump, of_ep_bench, bf16=not runner.cpu).items():
            tensors[tensor]["layers"] |= entry["layers"]
    return {"shape": dataclasses.asdict(case), "tensors": tensors,
            "programs": {program: {key: result[key] for key in ("failed", "left_out") if key in result}
                         for program, result in results.items()}}


def measure(runner, chosen, case):
    """Returns the JSON of each program on a case, and how far their outputs are from the block's."""
    import correctness

    with tempfile.TemporaryDirectory(dir=runner.directory) as dump:
        results = runner.run(chosen, case, dump)
        differences = correctness.differences(runner.ranks, dump)
    for program, result in results.items():
        print(f"{case.name}: {program}: {result.get('failed', 'done')}", flush=True)
    return results, differences


def is_chosen(case, parts):
    return any(part in case.name.lower() for part in parts.lower().split(","))


def run(arguments):
    file = arguments.out / "results.json"
    where = programs.machine(arguments.cpu)
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if results and (results["machine"], results["ranks"]) != (where, arguments.ranks):
        sys.exit(f"moe_tutorial.py: {file} is of {results['ranks']} x {results['machine']}, "
                 f"and here are {arguments.ranks} x {where}")
    results |= {"machine": where, "ranks": arguments.ranks}
    for entry, empty in (("runs", []), ("versions", {}), ("cases", {})):
        results.setdefault(entry, empty)
    chosen = arguments.programs.split(",")
    results["runs"].append({
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "commit": arguments.commit,
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), "programs": chosen, "cases": [],
        "iters": arguments.iters, "rounds": arguments.rounds, "pause_ms": arguments.pause_ms})
    runner = programs.Runner(arguments, arguments.out)

    def save():
        file.write_text(json.dumps(results, indent=1), encoding="utf-8")

    if not arguments.no_check:
        results["checks"] = [check(runner, chosen, case) for case in cases.CHECKS]
        save()
    for case in cases.QUICK_CASES if arguments.quick else cases.all_cases(arguments.ranks):
        if not is_chosen(case, arguments.cases):
            continue
        measured, differences = measure(runner, chosen, case)
        results["cases"][case.name] = {"shape": dataclasses.asdict(case), "programs": measured, "differences": differences}
        results["runs"][-1]["cases"].append(case.name)
        for program, result in measured.items():
            if "failed" not in result:
                results["versions"] |= {program: programs.versions_of(program, result)}
        save()
    return results


def main():
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out = arguments.out.resolve()
    if not arguments.write:
        results = run(arguments)
        there = {"environment": True, "correctness": "checks" in results}
        for part in tables.PARTS:
            if there.get(part, results["cases"]):
                print(tables.PARTS[part](results), end="\n\n")
        return
    results = json.loads((arguments.out / "results.json").read_text(encoding="utf-8"))
    if results["machine"]["device"] == "CPUs":
        sys.exit("moe_tutorial.py: these results are of CPUs, and are no times of epx")
    PAGE.write_text(tables.write(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    PICTURE.write_text(picture.draw(results), encoding="utf-8")


if __name__ == "__main__":
    main()
