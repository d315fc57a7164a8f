#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of docs/moe.md, from results whose figures are small whole numbers."""
import argparse
import copy
import dataclasses
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "moe_tutorial"))
import cases  # noqa: E402
import picture  # noqa: E402
import sessions  # noqa: E402
import tables  # noqa: E402


def line(us, tflops=None, **more):
    return {"median_us": us, "quartiles_us": [us - 1, us + 2], "rounds_us": [us, 1.25 * us], "paused_us": 2 * us,
            "paused_quartiles_us": [2 * us, 2 * us + 1], "tflops": tflops} | more


SHAPE = {"model": "model", "tokens": 8, "hidden": 4, "ffn": 3, "experts": 2, "top_k": 1, "biases": True,
         "routing": "uniform"}
RESULTS = {
    "machine": {"device": "a GPU", "driver": "1.2", "power_limit": "9 W"},
    "ranks": 2,
    "runs": [{"date": "2000-01-01T01:02:03+00:00", "commit": "abc", "cases": ["model-8-uniform"], "iters": 20, "rounds": 4,
              "pause_ms": 200},
             {"date": "2000-01-01T05:06:07+00:00", "commit": "abc", "cases": [], "iters": 20, "rounds": 4, "pause_ms": 200},
             {"date": "2000-01-02T01:02:03+00:00", "commit": None, "cases": [], "iters": 1, "rounds": 1, "pause_ms": 0}],
    "versions": {"ep_bench": {"epx": "0.1.0", "NCCL": "3"}, "torch": {"torch": "2.0"}},
    "checks": [{
        "shape": SHAPE,
        "programs": {"ep_bench": {}, "torch": {"left_out": {"torch-fp8": "experts in FP8 have no biases"}},
                     "jax-best": {"failed": "python3 has no package jax"}},
        "tensors": {"out": {"largest": 2.0, "layers": {"block": {"from_reference": 0.5, "from_block": 0.0},
                                                       "native": {"from_reference": 1.0, "from_block": 0.25}}}},
    }, {
        "shape": SHAPE | {"biases": False},
        "programs": {"ep_bench": {}},
        "tensors": {"grad_down": {"largest": 4.0, "layers": {"block-fp8": {"from_reference": 0.5, "from_block": 0.125}}}},
    }],
    "cases": {"model-8-uniform": {
        "shape": SHAPE,
        "differences": {"native": {"out": 0.01, "grad_down": 0.005}, "torch-usual": {"out": 0.5},
                        "torch-best": {"out": 0.02}, "block-fp8": {"out": 0.1}, "torch-fp8": {"out": 0.125}},
        "programs": {
            "ep_bench": {
                "ranks": 2,
                "block": {"lines": {"block fwd": line(10.0, 6.0, ratio=1.25, max_ratio=2.0), "block fwd+bwd": line(30.0, 6.0),
                                    "block fwd graph": line(5.0, 12.0), "block fwd+bwd graph": line(15.0, 12.0),
                                    "native fwd": line(20.0, 3.0), "native fwd+bwd": line(90.0, 2.0),
                                    "block-fp8 fwd": line(8.0, 8.0), "block-fp8 fwd+bwd": line(20.0, 9.0),
                                    "block-fp8 fwd graph": line(4.0, 16.0), "block-fp8 fwd+bwd graph": line(10.0, 18.0),
                                    "router": line(1.0), "ffn": line(6.0, 9.0), "ffn_bwd": line(12.0, 9.0),
                                    "router_bwd": line(2.0)}},
                "operations": {"prepare": line(1.0), "dispatch": line(3.0), "combine": line(4.0), "combine_bwd": line(3.0),
                               "dispatch_bwd": line(4.0)}},
            "torch": {"layers": {"torch-usual": {"fwd": line(2.0), "fwd+bwd": line(2.0)},
                                 "torch-best": {"fwd": line(1500.0, 1.0), "fwd+bwd": line(4500.0, 1.0)},
                                 "torch-fp8": {"fwd": line(12.0, 5.0), "fwd+bwd": line(50.0, 4.0)}}},
            "jax-best": {"failed": "python3 has no package jax"}}}},
}


def as_proxy(results):
    """Returns results whose only case is the first that stands for four GPUs."""
    case = cases.proxies(2)[0]
    measured = copy.deepcopy(results["cases"]["model-8-uniform"])
    return results | {"cases": {case.name: measured | {"shape": dataclasses.asdict(case)}}}


PAGE = "\n".join(f"before {name}\n<!-- moe_tutorial: {name} -->\nold\n<!-- moe_tutorial: end of {name} -->\nafter"
                 for name in tables.PARTS)
SVG = "{http://www.w3.org/2000/svg}"


def cells(text, row):
    found = [text_line for text_line in text.splitlines() if text_line.startswith(f"| {row} |")]
    return [cell.strip() for cell in found[0].strip("|").split("|")][1:]


class Tables(unittest.TestCase):
    def test_times(self):
        text = tables.times(RESULTS)
        self.assertEqual(cells(text, "epx"),
                         ["10.0 ± 1.5", "20.0 ± 0.5", "6", "1.00", "1.25", "2.00", "30.0 ± 1.5", "60.0 ± 0.5", "6", "1.00", "-",
                          "-", "-"])
        self.assertEqual(cells(text, "epx, graph replay")[3], "0.50")
        self.assertEqual(cells(text, "epx, FP8")[3::9], ["0.80", "1.0e-01"])
        self.assertEqual(cells(text, "epx, FP8, graph replay")[3], "0.40")
        self.assertEqual(cells(text, "PyTorch, FP8")[3], "1.20")
        self.assertLess(text.index("| PyTorch, best |"), text.index("| epx, FP8 |"))
        self.assertIn("took 6.0 us; the weights of a rank's experts are 0.0 GB, which is 0.0 TB/s", text)
        self.assertEqual(cells(text, "C++ sendrecv")[3], "2.00")
        self.assertEqual(cells(text, "C++ sendrecv")[-1], "1.0e-02")
        self.assertEqual(cells(text, "PyTorch, best")[:4], ["1,500 ± 2", "3,000 ± 0", "1", "150.00"])
        self.assertNotIn("| PyTorch, usual", text)
        self.assertIn("PyTorch, usual, since its outputs differ from epx's by 5.0e-01", text)
        self.assertIn("Not in the table: JAX, best, since python3 has no package jax.", text)
        self.assertIn("Not in the table: JAX, usual, since the run left it out.", text)
        self.assertIn("model, 8 tokens per rank, uniform (H 4, F 3, E 2, K 1, biases)", text)

    def test_cases_that_were_not_measured(self):
        text = tables.times(as_proxy(RESULTS))
        missing = [text_line for text_line in text.splitlines() if text_line.startswith("Not measured: ")]
        self.assertEqual(len(missing), len(cases.all_cases(2)) - 1)
        self.assertIn("Not measured: DeepSeek-V3, 256 tokens per rank, zipf:1.2 (H 7168, F 2048, E 256, K 8); the run", text)

    def test_cases_have_the_order_of_the_list(self):
        first, second = (case.name for case in cases.all_cases(2)[:2])
        ordered = tables.ordered({"ranks": 2, "cases": {"other": 1, second: 2, first: 3}})
        self.assertEqual(ordered, [3, 2, 1])

    def test_remarks(self):
        results = copy.deepcopy(RESULTS)
        programs = results["cases"]["model-8-uniform"]["programs"]
        programs["torch"]["alone"] = True
        programs["jax-best"] = {"layers": {}, "candidates_us": {
            "jax-best": {"padded to 16 rows": 1200.0, "padded to 128 rows": 1100.0}}}
        programs["torch"]["left_out"] = {"torch-fp8": "python3 has no package torchao"}
        text = tables.times(results)
        self.assertIn("Not in the table: PyTorch, FP8, since python3 has no package torchao.", text)
        self.assertIn("PyTorch was measured alone, after the others", text)
        self.assertIn("JAX, best: forward and backward padded to 16 rows 1,200 us, padded to 128 rows 1,100 us", text)

    def test_outputs_that_are_no_numbers(self):
        results = copy.deepcopy(RESULTS)
        results["cases"]["model-8-uniform"]["differences"]["native"]["out"] = float("nan")
        self.assertNotIn("| C++ sendrecv |", tables.times(results))

    def test_limit_of_layers_in_fp8(self):
        results = copy.deepcopy(RESULTS)
        results["cases"]["model-8-uniform"]["differences"]["block-fp8"]["out"] = 0.25
        text = tables.times(results)
        self.assertNotIn("| epx, FP8", text)  # nor its graph replays
        self.assertIn("epx, FP8, since its outputs differ from epx's by 2.5e-01 of the largest element, and 0.2 is", text)

    def test_proxy(self):
        self.assertEqual(cells(tables.proxy(as_proxy(RESULTS)), "4096 tokens, uniform"),
                         ["10.0", "150.00", "6.00", "300.00", "225.00", "2.50"])
        self.assertIn("take 6.0 of the 5.0 us of epx's forward replay", tables.proxy(as_proxy(RESULTS)))
        self.assertEqual(len(tables.proxy(RESULTS).splitlines()), 2)
        self.assertEqual([case.experts for case in cases.proxies(2)], [128] * 3)
        self.assertEqual(cases.proxies(4), [])

    def test_environment(self):
        text = tables.environment(RESULTS)
        self.assertIn("2 x a GPU, driver 1.2, power limit 9 W.", text)
        self.assertIn("epx and C++ sendrecv: epx 0.1.0, NCCL 3.", text)
        self.assertIn("2000-01-01, commit abc: 1 case, 20 calls in 4 rounds, pauses of 200 ms.", text)
        self.assertEqual(text.count("commit abc"), 1)
        self.assertNotIn("2000-01-02", text)
        self.assertIn("took 25.0 % longer than its fastest one in the median over all lines, and 25.0 % at most.", text)

    def test_correctness(self):
        text = tables.correctness(RESULTS)
        self.assertEqual(cells(text, "`out`"), ["2.5e-01", "5.0e-01", "1.2e-01"])
        self.assertEqual(cells(text, "`grad_down`"), ["1.2e-01", "3.1e-02"])
        self.assertIn("no package jax", text)
        self.assertIn("PyTorch, FP8, since experts in FP8 have no biases.", text)
        self.assertEqual([text_line for text_line in text.splitlines() if "tokens per rank" in text_line],
                         ["8 tokens per rank, uniform (H 4, F 3, E 2, K 1, biases):",
                          "8 tokens per rank, uniform (H 4, F 3, E 2, K 1):"])

    def test_program_that_failed(self):
        results = copy.deepcopy(RESULTS)
        results["cases"]["model-8-uniform"]["programs"]["ep_bench"] = {"failed": "it did not start"}
        self.assertEqual(cells(tables.times(results), "PyTorch, best")[3], "-")
        self.assertEqual(len(tables.pieces(results).splitlines()), 2)
        self.assertEqual(picture.bars_of(results), [])

    def test_page(self):
        page = tables.write(PAGE, RESULTS)
        self.assertEqual(tables.write(page, RESULTS), page)
        self.assertNotIn("\nold\n", page)
        self.assertEqual(page.count("after"), len(tables.PARTS))
        self.assertIn("2 x a GPU, driver 1.2", page)
        with self.assertRaisesRegex(ValueError, "markers '<!-- moe_tutorial: times -->'"):
            tables.write(PAGE.replace("moe_tutorial: times", "moe_tutorial: time"), RESULTS)

    def test_markers_of_the_page(self):
        tables.write((ROOT / "docs" / "moe.md").read_text(encoding="utf-8"), RESULTS)

    def test_picture(self):
        svg = xml.etree.ElementTree.fromstring(picture.draw(RESULTS))
        texts = [element.text for element in svg.iter(f"{SVG}text")]
        self.assertIn("model, 8 tokens, uniform: forward", texts)
        self.assertIn("15 us", texts)
        self.assertIn("21 us", texts)
        ffn = [element for element in svg.iter(f"{SVG}rect") if element.findtext(f"{SVG}title") == "ffn: 6.0 us"]
        self.assertAlmostEqual(float(ffn[0].get("width")), picture.LENGTH * 6 / 15, places=1)


# Ends each phase as a measured program does; an argument makes it fail in one.
PROGRAM = """
import sys
for phase in range(4):
    sys.stdin.readline() or sys.exit("standard input ended")
    if sys.argv[1] == f"fail {phase}":
        sys.exit("CUDA error: out of memory")
    print(sys.argv[2], phase, file=open("order", "a"))
    print(f"phase {phase} done", flush=True)
    if sys.argv[1] == f"end {phase}":
        sys.exit(0)
    if sys.argv[1] == f"sleep {phase}":
        sys.stdin.readline(), sys.stdin.read()
"""


class Sessions(unittest.TestCase):
    def run_programs(self, behaviours, limit_s=60):
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            command = [sys.executable, "-c", f"import os; os.chdir({name!r})\n{PROGRAM}"]
            running = {program: sessions.Session(program, [[*command, behaviour, program]], [{}], directory, limit_s)
                       for program, behaviour in behaviours.items()}
            failed = sessions.run_in_turns(running, phases=4)
            self.assertTrue(all(process.poll() is not None for session in running.values() for process in session.processes))
            order = (directory / "order").read_text(encoding="utf-8").splitlines()
            return order, {program: (str(failure), running[program].ran_out_of_memory()) for program, failure in failed.items()}

    def test_programs_take_turns(self):
        order, failed = self.run_programs({"a": "", "b": ""})
        self.assertEqual(order, ["a 0", "b 0", "a 1", "b 1", "a 2", "b 2", "a 3", "b 3"])
        self.assertEqual(failed, {})

    def test_program_that_fails(self):
        order, failed = self.run_programs({"a": "fail 1", "b": "", "c": "end 2"})
        self.assertEqual(order, ["a 0", "b 0", "c 0", "b 1", "c 1", "b 2", "c 2", "b 3"])
        self.assertEqual(failed["a"], ("a ended with status 1: CUDA error: out of memory", True))
        self.assertEqual(failed["c"], ("c ended too early", False))

    def test_program_that_takes_too_long(self):
        order, failed = self.run_programs({"a": "sleep 1", "b": ""}, limit_s=3)
        self.assertEqual(order[-1], "b 3")
        self.assertEqual(failed["a"], ("a did not finish within its time", False))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    unittest.main(verbosity=2)
