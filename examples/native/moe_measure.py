# SPDX-License-Identifier: Apache-2.0
"""How the programs here measure and report, as ep_bench --block does."""
import json
import math
import statistics
import sys

import moe_data


def add_options(parser):
    parser.add_argument("--iters", type=int, default=20, help="timed iterations of all rounds together; 0: none")
    parser.add_argument("--rounds", type=int, default=1, help="rounds, in each of which every layer is measured")
    parser.add_argument("--pause-ms", type=int, default=0, help="measure again with this pause before each iteration")
    parser.add_argument("--paced", action="store_true",
                        help="wait for a line of standard input before the set-up, before each round and before the dump, and "
                        "print 'phase N done' after each, so that a script can alternate programs on the same GPUs")
    parser.add_argument("--json", help="file for the times")
    parser.add_argument("--dump", metavar="DIR", help="directory for the outputs and gradients, as of ep_bench --dump")
    parser.add_argument("--dump-rows", type=int, default=0, help="only so many rows of each tensor, drawn by --seed; 0: all")


class Pacer:
    """Divides a run into phases; with --paced a script starts each."""

    def __init__(self, is_paced):
        self.is_paced, self.phase = is_paced, 0

    def begin(self):
        if self.is_paced and not sys.stdin.readline():
            raise SystemExit(f"--paced: standard input ended before phase {self.phase}")

    def end(self):
        """To be called once the GPUs are idle."""
        if self.is_paced:
            print(f"phase {self.phase} done", flush=True)
        self.phase += 1


def per_round(iterations, rounds):
    return -(-iterations // rounds)


def paused_iterations(arguments):
    """Returns how many iterations of a round follow a pause: of all rounds a quarter, 5 at least."""
    return per_round(max(arguments.iters // 4, 5), arguments.rounds) if arguments.pause_ms else 0


def percentile(times, percent):
    return sorted(times)[max(math.ceil(percent / 100 * len(times)), 1) - 1]


def quartiles(times):
    return [percentile(times, 25), percentile(times, 75)]


def figures(rounds, paused, flops):
    """Returns the figures of one line from its times in microseconds: those of each round, and those after pauses."""
    times = [time for of_round in rounds for time in of_round]
    return {"median_us": statistics.median(times), "min_us": min(times), "p99_us": percentile(times, 99),
            "quartiles_us": quartiles(times), "rounds_us": [statistics.median(of_round) for of_round in rounds],
            "paused_us": statistics.median(paused) if paused else None,
            "paused_quartiles_us": quartiles(paused) if paused else None,
            "tflops": flops / statistics.median(times) / 1e6}


def measure_in_rounds(arguments, pacer, layers, shape):
    """Measures layers, {name: {"fwd": time, "fwd+bwd": time}}, in rounds, and returns their figures likewise. `time`
    (iterations, pause_s) returns a list of microseconds."""
    times = {(layer, line): ([], []) for layer, lines in layers.items() for line in lines}
    for _ in range(arguments.rounds):
        pacer.begin()
        for (layer, line), (rounds, paused) in times.items() if arguments.iters else ():
            time = layers[layer][line]
            rounds.append(time(per_round(arguments.iters, arguments.rounds), 0))
            if arguments.pause_ms:
                paused += time(paused_iterations(arguments), arguments.pause_ms / 1e3)
        pacer.end()
    products = {"fwd": 1, "fwd+bwd": 3}
    return {layer: {line: figures(*times[layer, line], products[line] * shape.forward_flops()) for line in lines}
            for layer, lines in layers.items() if arguments.iters}


def report(file, program, versions, shape, layers, **more):
    for layer, lines in layers.items():
        for name, line in lines.items():
            print(f"{layer} {name}: {line['median_us']:.1f} us, {line['tflops']:.1f} TFLOP/s")
    if file:
        with open(file, "w", encoding="utf-8") as output:
            json.dump({"program": program, "versions": versions, "ranks": shape.ranks, "layers": layers} | more, output,
                      indent=2)


def dumped_rows(shape, tensor_shape, arguments):
    """Returns which rows of a rank's tensor --dump writes, of the tensor as a matrix of its last dimension; None: all."""
    return moe_data.sample_rows(shape.seed, math.prod(tensor_shape[:-1]), arguments.dump_rows)
