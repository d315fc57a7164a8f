#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the MoE block of epx beside native baselines on one machine, and writes the tables and the picture of docs/moe.md.

moe_tutorial.py --ranks 2 --out DIR           all of it; DIR/results.json has every figure, DIR also the logs
moe_tutorial.py --ranks 2 --out DIR --cases deepseek   only cases whose name has this in it; what DIR/results.json has of
                                              others stays, so that a run may be made in parts on one machine
moe_tutorial.py --ranks 2 --out DIR --quick   small shapes; with --cpu without GPUs, to try the script itself
moe_tutorial.py --out DIR --write             only writes docs/moe.md and docs/moe-pieces.svg from DIR/results.json

A program that fails or is not there is left out of the tables with a sentence. Needs numpy, and PyTorch and JAX for theirs.
"""
import argparse
import dataclasses
import datetime
import json
import pathlib
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
    parser.add_argument("--cases", default="", help="part of the names of the cases to measure; 'none': only the check")
    parser.add_argument("--no-check", action="store_true", help="do not compare outputs")
    parser.add_argument("--iters", type=int, default=20, help="timed iterations")
    parser.add_argument("--pause-ms", type=int, default=200, help="pause before each iteration of the second measurement")
    parser.add_argument("--limit-s", type=int, default=150, help="the longest that one program may take for one case")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--cpu", action="store_true", help="with --quick: without GPUs; such times are not written to docs")
    parser.add_argument("--write", action="store_true", help="write the page and the picture from results.json")
    arguments = parser.parse_args()
    if arguments.cpu and not arguments.quick:
        parser.error("--cpu is given without --quick; the models' shapes are for GPUs")
    unknown = set(arguments.programs.split(",")) - set(programs.PROGRAMS)
    if unknown:
        parser.error(f"--programs has {', '.join(sorted(unknown))}; it may have {', '.join(programs.PROGRAMS)}")
    return arguments


def check(runner, chosen, directory):
    """Returns how far each program's outputs are from the answer in float64."""
    import correctness  # numpy is needed from here on

    case, failed = cases.CHECK, {}
    with tempfile.TemporaryDirectory(dir=directory) as dump:
        for program in chosen:
            try:
                reason = runner.missing(program)
                if reason:
                    raise programs.Failed(reason)
                runner.run(program, case, f"check-{program}", dump=dump, timed=False)
            except programs.Failed as failure:
                failed[program] = str(failure)
        layers = ["block", "native", *programs.PROGRAMS[1:]]
        # On CPUs ep_bench computes in float32 on data that are not rounded, so its answer is another one.
        tensors = correctness.compare(case, runner.ranks, dump, layers[2:] if runner.cpu else layers, bf16=True)
        if runner.cpu:
            for tensor, entry in correctness.compare(case, runner.ranks, dump, layers[:2], bf16=False).items():
                tensors[tensor]["layers"] |= entry["layers"]
    return {"shape": dataclasses.asdict(case), "tensors": tensors, "failed": failed}


def measure(runner, program, case, versions):
    try:
        reason = runner.missing(program)
        if reason:
            raise programs.Failed(reason)
        result = runner.run(program, case, f"{case.name}-{program}")
    except programs.Failed as failure:
        print(f"{case.name}: {failure}; its logs are in {runner.directory}", flush=True)
        return {"failed": str(failure)}
    library = "epx" if program == "ep_bench" else program.partition("-")[0]
    versions[library] = result["epx_version" if program == "ep_bench" else "version"]
    print(f"{case.name}: {program} done", flush=True)
    return result


def run(arguments):
    file = arguments.out / "results.json"
    where = programs.machine(arguments.cpu)
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if results and (results["machine"], results["ranks"]) != (where, arguments.ranks):
        sys.exit(f"moe_tutorial.py: {file} is of {results['ranks']} x {results['machine']}, "
                 f"and here are {arguments.ranks} x {where}")
    results |= {"machine": where, "ranks": arguments.ranks, "date": datetime.date.today().isoformat(),
                "iters": arguments.iters, "pause_ms": arguments.pause_ms}
    results.setdefault("versions", {})
    results.setdefault("cases", {})
    chosen = arguments.programs.split(",")
    runner = programs.Runner(arguments, arguments.out)

    def save():
        file.write_text(json.dumps(results, indent=1), encoding="utf-8")

    if not arguments.no_check:
        results["check"] = check(runner, chosen, arguments.out)
        save()
    for case in cases.QUICK_CASES if arguments.quick else cases.CASES:
        if arguments.cases.lower() not in case.name.lower():
            continue
        measured = results["cases"].setdefault(case.name, {"shape": dataclasses.asdict(case), "programs": {}})
        for program in chosen:
            measured["programs"][program] = measure(runner, program, case, results["versions"])
            save()
    return results


def main():
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out = arguments.out.resolve()
    if not arguments.write:
        results = run(arguments)
        there = {"environment": True, "correctness": "check" in results, "times": results["cases"], "pieces": results["cases"]}
        for part in filter(there.get, tables.PARTS):
            print(tables.PARTS[part](results), end="\n\n")
        return
    results = json.loads((arguments.out / "results.json").read_text(encoding="utf-8"))
    if results["machine"]["device"] == "CPUs":
        sys.exit("moe_tutorial.py: these results are of CPUs, and are no times of epx")
    PAGE.write_text(tables.write(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    PICTURE.write_text(picture.draw(results), encoding="utf-8")


if __name__ == "__main__":
    main()
