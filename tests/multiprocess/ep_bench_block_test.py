#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ep_bench --block computes on the host, block and native layer, is examples/native/moe_data.py's answer in float64.

So the numbers of both languages are the same, and so are routing, weights, and gradients. Exits with 77 without numpy."""
import argparse
import json
import pathlib
import sys
import tempfile
import unittest

try:
    import numpy  # noqa: F401
except ImportError:
    print(f"{sys.executable} has no package numpy")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "moe_tutorial"))
import cases  # noqa: E402
import correctness  # noqa: E402
import programs  # noqa: E402

LIMIT_S = 100
WITHIN = 2e-6  # of the largest element: float32 sums of at most 192 terms


class Block(unittest.TestCase):
    ep_bench = None

    def compare(self, case, ranks, *options):
        with tempfile.TemporaryDirectory(prefix="ep_bench_block.") as name:
            directory = pathlib.Path(name)
            (directory / "rendezvous").mkdir(mode=0o700)
            output = directory / "out.json"
            command = [self.ep_bench, "--bootstrap", f"file:{directory / 'rendezvous'}", "--ranks", ranks, *case.options,
                       "--block", "--dtype", "fp32", "--iters", 1, "--warmup", 0, "--verify", "--dump", directory,
                       "--json", output, *options]
            commands = [[*command, "--rank", rank] for rank in range(ranks)]
            programs.run_ranks("ep_bench", commands, [{}] * ranks, directory, LIMIT_S)
            result = json.loads(output.read_text(encoding="utf-8"))
            tensors = correctness.compare(case, ranks, directory, ["block", "native"], bf16=False)
        self.assertEqual(set(result["block"]["lines"]), {"block fwd", "block fwd+bwd"})
        self.assertEqual(set(result["block"]["differences"]), set(tensors))
        self.assertEqual(len(tensors), 7 if case.biases else 5)
        for tensor, entry in tensors.items():
            self.assertGreater(entry["largest"], 0, tensor)
            self.assertEqual(set(entry["layers"]), {"block", "native"})
            for layer, found in entry["layers"].items():
                self.assertLess(found["from_reference"], WITHIN * entry["largest"], (tensor, layer))

    def test_zipf_with_biases(self):
        self.compare(cases.CHECK, 2)

    def test_experts_that_ranks_do_not_divide(self):
        self.compare(cases.Case("odd", 37, 33, 21, 7, 3), 3, "--combine-precision", "exact", "--alignment", 4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other arguments are unittest's.")
    parser.add_argument("--ep-bench", required=True)
    arguments, rest = parser.parse_known_args()
    Block.ep_bench = arguments.ep_bench
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
