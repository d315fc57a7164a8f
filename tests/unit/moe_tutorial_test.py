#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of docs/moe.md, from results whose figures are small whole numbers."""
import argparse
import copy
import pathlib
import sys
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "moe_tutorial"))
import picture  # noqa: E402
import tables  # noqa: E402


def line(us, tflops=None, **more):
    return {"median_us": us, "paused_us": 2 * us, "tflops": tflops} | more


RESULTS = {
    "machine": {"device": "a GPU", "driver": "1.2"},
    "ranks": 2,
    "date": "2000-01-01",
    "iters": 20,
    "pause_ms": 200,
    "versions": {"epx": "0.1.0", "torch": "2.0"},
    "check": {
        "failed": {"jax-best": "python3 has no package jax"},
        "tensors": {"out": {"largest": 2.0, "layers": {"block": {"from_reference": 0.5, "from_block": 0.0},
                                                       "native": {"from_reference": 1.0, "from_block": 0.25}}}},
    },
    "cases": {"model-8-uniform": {
        "shape": {"model": "model", "tokens": 8, "hidden": 4, "ffn": 3, "experts": 2, "top_k": 1, "biases": True,
                  "routing": "uniform"},
        "programs": {
            "ep_bench": {
                "block": {"lines": {"block fwd": line(10.0, 6.0, ratio=1.25, max_ratio=2.0), "block fwd+bwd": line(30.0, 6.0),
                                    "block fwd graph": line(5.0, 12.0), "block fwd+bwd graph": line(15.0, 12.0),
                                    "native fwd": line(20.0, 3.0), "native fwd+bwd": line(90.0, 2.0),
                                    "router": line(1.0), "ffn": line(6.0, 9.0), "ffn_bwd": line(12.0, 9.0),
                                    "router_bwd": line(2.0)}},
                "operations": {"prepare": line(1.0), "dispatch": line(3.0), "combine": line(4.0), "combine_bwd": line(3.0),
                               "dispatch_bwd": line(4.0)}},
            "torch": {"lines": {"fwd": line(1500.0, 1.0), "fwd+bwd": line(4500.0, 1.0)}},
            "jax-best": {"failed": "python3 has no package jax"}}}},
}
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
                         ["10.0", "20.0", "6", "1.00", "1.25", "2.00", "30.0", "60.0", "6", "1.00", "-", "-"])
        self.assertEqual(cells(text, "epx, graph replay")[3], "0.50")
        self.assertEqual(cells(text, "C++ sendrecv")[3], "2.00")
        self.assertEqual(cells(text, "PyTorch")[:4], ["1,500", "3,000", "1", "150.00"])
        self.assertIn("Not in the table: jax-best, since python3 has no package jax.", text)
        self.assertIn("model, 8 tokens per rank, uniform (H 4, F 3, E 2, K 1, biases)", text)

    def test_correctness(self):
        text = tables.correctness(RESULTS)
        self.assertEqual(cells(text, "`out`"), ["2.5e-01", "5.0e-01", "1.2e-01"])
        self.assertIn("no package jax", text)

    def test_program_that_failed(self):
        results = copy.deepcopy(RESULTS)
        results["cases"]["model-8-uniform"]["programs"]["ep_bench"] = {"failed": "it did not start"}
        self.assertEqual(cells(tables.times(results), "PyTorch")[3], "-")
        self.assertEqual(len(tables.pieces(results).splitlines()), 2)
        self.assertEqual(picture.bars_of(results), [])

    def test_page(self):
        page = tables.write(PAGE, RESULTS)
        self.assertEqual(tables.write(page, RESULTS), page)
        self.assertNotIn("\nold\n", page)
        self.assertEqual(page.count("after"), len(tables.PARTS))
        self.assertIn("2 x a GPU, driver 1.2, 2000-01-01: epx 0.1.0, torch 2.0", page)
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
        self.assertAlmostEqual(float(ffn[0].get("width")), (picture.WIDTH - picture.LEFT - 90) * 6 / 15, places=1)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_known_args()
    unittest.main(verbosity=2)
