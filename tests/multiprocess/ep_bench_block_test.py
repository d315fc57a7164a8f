#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ep_bench --block computes on the host, block and native layer, is examples/native/moe_data.py's answer in float64.

So the numbers of both languages are the same, and so are routing, weights, and gradients. Exits with 77 without numpy."""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy  # noqa: F401
except ImportError:
    print(f"{sys.executable} has no package numpy")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "moe_tutorial"))
import cases  # noqa: E402
import correctness  # noqa: E402
import programs  # noqa: E402
import sessions  # noqa: E402

import moe_data  # noqa: E402  (correctness has found examples/native)

LIMIT_S = 100
WITHIN = 2e-6  # of the largest element: float32 sums of at most 192 terms


class Block(unittest.TestCase):
    ep_bench = None

    def commands(self, directory, case, ranks, *options):
        (directory / "rendezvous").mkdir(mode=0o700)
        command = [self.ep_bench, "--bootstrap", f"file:{directory / 'rendezvous'}", "--ranks", ranks, *case.options,
                   "--block", "--dtype", "fp32", "--warmup", 0, "--dump", directory, "--json", directory / "out.json", *options]
        return [[*command, "--rank", rank] for rank in range(ranks)]

    def compare(self, case, ranks, *options, more=()):
        """more: other layers than block and native, whose differences it returns, by tensor."""
        layers = ["block", *more, "native"]
        with tempfile.TemporaryDirectory(prefix="ep_bench_block.") as name:
            directory = pathlib.Path(name)
            output = directory / "out.json"
            commands = self.commands(directory, case, ranks, "--iters", 1, "--verify", *options)
            sessions.run_ranks("ep_bench", commands, [{}] * ranks, directory, LIMIT_S)
            result = programs.of_ep_bench(json.loads(output.read_text(encoding="utf-8")))
            tensors = correctness.compare(case, ranks, directory, layers, bf16=False)
        lines = {"block fwd", "block fwd+bwd"} | {f"{layer} {line}" for layer in more for line in ("fwd", "fwd+bwd", "weights")}
        self.assertEqual(set(result["block"]["lines"]), lines)
        self.assertEqual({layer: set(found) for layer, found in result["block"]["differences"].items()},
                         {layer: set(tensors) for layer in layers[1:]})
        self.assertEqual(len(tensors), 7 if case.biases else 5)
        for tensor, entry in tensors.items():
            self.assertGreater(entry["largest"], 0, tensor)
            self.assertEqual(set(entry["layers"]), set(layers))
            for layer, found in entry["layers"].items():
                if layer not in more:
                    self.assertLess(found["from_reference"], WITHIN * entry["largest"], (tensor, layer))
        return {layer: {tensor: entry["layers"][layer]["from_reference"] / entry["largest"] for tensor, entry in tensors.items()}
                for layer in more}

    def test_zipf_with_biases(self):
        self.compare(cases.CHECK, 2)

    def test_experts_that_ranks_do_not_divide(self):
        self.compare(cases.Case("odd", 37, 33, 21, 7, 3), 3, "--combine-precision", "exact", "--alignment", 4)

    def test_experts_in_fp8(self):
        case = cases.Case("fp8", 64, 256, 128, 8, 2)
        for recipe in ("fp8_activations", "fp8"):
            layer = f"block-{recipe}"
            errors = self.compare(case, 2, "--alignment", 16, "--recipe", recipe, more=[layer])[layer]
            for tensor, error in errors.items():
                self.assertLess(error, 0.15, (recipe, tensor))
                self.assertGreater(error, 100 * WITHIN, (recipe, tensor))

    def test_weights_gathered_beside_blocks(self):
        ranks, case = 2, cases.Case("gather", 64, 256, 128, 8, 2)
        with tempfile.TemporaryDirectory(prefix="ep_bench_block.") as name:
            directory = pathlib.Path(name)
            commands = self.commands(directory, case, ranks, "--iters", 3, "--rounds", 3, "--verify", "--alignment", 16, "--recipe",
                                     "fp8", "--path", "ring", "--gather", "wide,fp8", "--gather-sms", 8)
            sessions.run_ranks("ep_bench", commands, [{}] * ranks, directory, LIMIT_S)
            result = programs.of_ep_bench(json.loads((directory / "out.json").read_text(encoding="utf-8")))
        lines, gather = result["block"]["lines"], result["block"]["gather"]
        steps = {f"{layer} fwd+bwd" for layer in ("block", "block-fp8", "block-ring")}
        names = {"gather", "gather-fp8"}
        self.assertEqual({line for line in lines if "gather" in line}, names | {f"{step} + {line}" for step in steps for line in names})
        self.assertEqual((gather["experts"], gather["sms"]), (4, 8))
        # 4 experts: gate_up has 4 * 2 * 128 rows of 256 elements, down 4 * 256 of 128, and half of the rows is the other rank's.
        codes, blocks = 1024 * 256 + 1024 * 128, 8 * 2 + 8 * 1
        received = {"wide": codes * 4 // 2, "fp8": (codes + blocks * 4) // 2}
        self.assertEqual({form: found["received_bytes"] for form, found in gather["forms"].items()}, received)
        for found in gather["forms"].values():
            self.assertEqual(found["wrong"], 0)
            self.assertEqual(set(found["added_percent"]), steps)
            self.assertEqual(len(lines[found["line"]]["rounds_us"]), 3)
            for step, percent in found["added_percent"].items():
                beside = lines[f"{step} + {found['line']}"]["median_us"]
                self.assertAlmostEqual(percent, (beside / lines[step]["median_us"] - 1) * 100, places=6)
        self.assertAlmostEqual(gather["fp8_to_wide"], lines["gather-fp8"]["median_us"] / lines["gather"]["median_us"], places=9)
        self.assertTrue(result["passed"])

    def test_ranks_without_rows_to_gather(self):
        with tempfile.TemporaryDirectory(prefix="ep_bench_block.") as name:
            commands = self.commands(pathlib.Path(name), cases.Case("few", 4, 128, 128, 2, 1), 2, "--iters", 1, "--gather", "fp8")
            running = [subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                       for command in commands]
            ends = [process.communicate(timeout=LIMIT_S) for process in running]
        self.assertEqual([process.returncode for process in running], [2, 2])
        self.assertEqual("".join(error for _, error in ends),
                         "ep_bench: --gather is 'fp8', --experts is 2, --hidden is 128 and --ffn is 128, and 2 ranks share a matrix "
                         "of 128 rows; it must have between 256 and 2147483647\n")

    def test_rounds_that_a_script_starts(self):
        rows, ranks = 8, 2
        with tempfile.TemporaryDirectory(prefix="ep_bench_block.") as name:
            directory = pathlib.Path(name)
            commands = self.commands(directory, cases.CHECK, ranks, "--iters", 5, "--rounds", 2, "--paced", "--dump-rows", rows)
            running = {"ep_bench": sessions.Session("ep_bench", commands, [{}] * ranks, directory, LIMIT_S)}
            self.assertEqual(sessions.run_in_turns(running, phases=4), {})
            result = programs.of_ep_bench(json.loads((directory / "out.json").read_text(encoding="utf-8")))
            differences = correctness.differences(ranks, directory)["native"]
            sampled = correctness.read(directory, "block", "grad_gate_up", ranks)
            expected = moe_data.reference(moe_data.Shape(ranks, 192, 256, 192, 16, 4, biases=True, zipf=1.2, bf16=False))
        for rank, of_rank in enumerate(sampled):
            matrix = expected[rank]["grad_gate_up"].reshape(-1, 256)
            chosen = matrix[moe_data.sample_rows(1, len(matrix), rows)]
            self.assertLess(abs(of_rank - chosen).max(), WITHIN * abs(matrix).max())
            self.assertGreater(abs(chosen).max(), 0)
        self.assertEqual(set(differences), set(result["block"]["differences"]["native"]))
        self.assertTrue(all(difference < WITHIN for difference in differences.values()), differences)
        for line in result["block"]["lines"].values():
            self.assertEqual(len(line["rounds_us"]), 2)
            self.assertLessEqual(line["quartiles_us"][0], line["median_us"])
            self.assertLessEqual(line["median_us"], line["quartiles_us"][1])

    def test_tutorial_in_its_quick_form(self):
        with tempfile.TemporaryDirectory(prefix="moe_tutorial.") as name:
            run = subprocess.run([sys.executable, "-B", ROOT / "docs" / "moe_tutorial" / "moe_tutorial.py", "--quick", "--cpu",
                                  "--programs", "ep_bench", "--ep-bench", self.ep_bench, "--out", name, "--iters", "2",
                                  "--rounds", "2", "--commit", "abc"], capture_output=True, text=True, timeout=LIMIT_S, check=True)
            results = json.loads((pathlib.Path(name) / "results.json").read_text(encoding="utf-8"))
        left_out = {"block-fp8": "experts in FP8 have no biases"}
        self.assertEqual([check["programs"] for check in results["checks"]],
                         [{"ep_bench": {"left_out": left_out}}, {"ep_bench": {}}])
        for check in results["checks"]:
            for tensor, entry in check["tensors"].items():
                self.assertLess(entry["layers"]["block"]["from_reference"], WITHIN * entry["largest"], tensor)
                self.assertEqual("block-fp8" in entry["layers"], not check["shape"]["biases"])
        self.assertEqual(set(results["cases"]), {case.name for case in cases.QUICK_CASES})
        for case in results["cases"].values():
            self.assertTrue(all(difference < WITHIN for difference in case["differences"]["native"].values()))
            self.assertEqual("block-fp8" in case["differences"], not case["shape"]["biases"])
            self.assertEqual(len(case["programs"]["ep_bench"]["block"]["lines"]["block fwd"]["rounds_us"]), 2)
        self.assertEqual(results["runs"][0]["commit"], "abc")
        self.assertEqual(set(results["runs"][0]["cases"]), set(results["cases"]))
        self.assertIn("Not in the table: PyTorch, since the run left it out.", run.stdout)
        self.assertIn("| epx, FP8 |", run.stdout)

    def test_standard_input_that_ends(self):
        with tempfile.TemporaryDirectory(prefix="ep_bench_block.") as name:
            commands = self.commands(pathlib.Path(name), cases.CHECK, 1, "--iters", 1, "--paced")
            run = subprocess.run(list(map(str, commands[0])), input=b"\n", capture_output=True, timeout=LIMIT_S, check=False)
        self.assertEqual(run.returncode, 1)
        self.assertEqual(run.stdout, b"phase 0 done\n")
        self.assertEqual(run.stderr, b"ep_bench: --paced: standard input ended before phase 1\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other arguments are unittest's.")
    parser.add_argument("--ep-bench", required=True)
    arguments, rest = parser.parse_known_args()
    Block.ep_bench = arguments.ep_bench
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
