# SPDX-License-Identifier: Apache-2.0
"""examples/jax_tutorial runs as docs/jax-tutorial.md says, on 4 CPU devices, or on two GPUs with EPX_TEST_DEVICE=cuda: both
blocks agree with the dense layer, a block that is wrong is told, and no process outlives the time limit. The program of the
page trains.

flax_tutorial_test.py EXAMPLE_FOLDER PAGE
"""

import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import unittest

import ranks

DEVICE = "cuda" if ranks.on_gpu() else "cpu"
os.environ["JAX_PLATFORMS"] = DEVICE  # which JAX reads when it is imported
ranks.require("numpy", "jax", "flax", "scipy")
if ranks.on_gpu():
    ranks.require_jax_on_gpus(2)
import jax.numpy as jnp
import numpy

SMALL = "--tokens", "16", "--hidden", "16", "--ffn", "16", "--experts", "8", "--top-k", "2", "--calls", "2"
TWO = "--ep", "2", "--fsdp", "1"
BEGIN, END = "<!-- jax_tutorial: output -->\n", "<!-- jax_tutorial: end of output -->\n"


def run(*options, folder=None):
    script = pathlib.Path(folder or EXAMPLE, "tutorial.py")
    return ranks.finish(ranks.start(str(script), "--device", DEVICE, *options), timeout=240)


def rows_of(text):
    """{first column: the other columns} of the table in a text."""
    lines = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines if not first.startswith("---")}


class Tutorial(unittest.TestCase):
    def test_1_both_blocks_agree_with_the_dense_layer(self):
        page = pathlib.Path(PAGE).read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as directory:
            copy = pathlib.Path(directory, "page.md")
            copy.write_text(page, encoding="utf-8")
            code, output = run(*SMALL, "--write", "--page", str(copy), *(TWO if ranks.on_gpu() else ()))
            self.assertEqual(code, 0, output)
            written = copy.read_text(encoding="utf-8")
        self.assertIn(f"mesh fsdp {1 if ranks.on_gpu() else 2} x ep 2, jax ", output)
        rows = rows_of(output)
        self.assertEqual(rows["difference from float64, or time"], ["epx", "native"])
        for name, columns in rows.items():
            if name == "loss" or name.startswith("gradient of "):
                self.assertLess(max(map(float, columns)), 1e-2 if ranks.on_gpu() else 1e-4, name)
        for name in ("forward, ms", "forward and backward, ms"):
            self.assertGreater(min(map(float, rows[name])), 0)
        # The page has the output of such a run, and nothing else of it has changed.
        before, shown = page.split(BEGIN)
        shown, after = shown.split(END)
        new, rest = written.removeprefix(before + BEGIN).split(END)
        self.assertEqual(rest, after)
        self.assertIn(new, output)
        self.assertEqual(rows_of(shown).keys(), rows.keys())
        self.assertEqual("These are times of CPUs" in shown, " x CPU device, " in shown)

    def test_2_a_wrong_block_is_told(self):
        with tempfile.TemporaryDirectory() as directory:
            folder = pathlib.Path(directory, "jax_tutorial")
            shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
            native = folder / "native_block.py"
            program = native.read_text(encoding="utf-8")
            changed = program.replace("outs, late.astype", "2 * outs, late.astype")
            self.assertNotEqual(changed, program)
            native.write_text(changed, encoding="utf-8")
            code, output = run(*SMALL, *TWO, folder=folder)
        self.assertEqual(code, 1, output)
        self.assertRegex(output, r"the largest difference is [0-9.]+e[+-]\d+; it must be [0-9.]+ at most")

    def test_2_processes_end_at_the_time_limit(self):
        begin = time.monotonic()
        code, output = run(*SMALL, *TWO, "--limit-s", "2")  # importing JAX alone takes longer
        self.assertLess(time.monotonic() - begin, 60)
        self.assertNotEqual(code, 0)
        self.assertIn("ended what still ran, after a failure or 2 s", output)

    def test_2_refusals(self):
        for options, words in [
            (("--experts", "7"), "--experts is 7; the 2 devices of its axis must divide it"),
            (("--hidden", "9", "--fsdp", "2"), "--hidden is 9; the 2 devices of its axis must divide it"),
        ]:
            code, output = run(*options)
            self.assertEqual(code, 2, output)
            self.assertIn(words, output)

    @unittest.skipIf(ranks.on_gpu(), "the program of the page runs on CPU devices")
    def test_3_the_program_of_the_page_trains(self):
        (program,) = re.findall(r"```python\n(.*?)```", pathlib.Path(PAGE).read_text(encoding="utf-8"), flags=re.DOTALL)
        generator = numpy.random.default_rng(1)
        inputs, target = (jnp.asarray(generator.standard_normal((4, 16, 64)), jnp.float32) for _ in range(2))
        names = dict(num_fsdp=1, num_ep=1, inputs=inputs, batches=20 * [(inputs, target)])
        exec(program, names)
        self.assertLess(names["loss"], 0.9 * names["first_loss"])
        names["group"].destroy()


if __name__ == "__main__":
    EXAMPLE, PAGE = sys.argv[1:]
    unittest.main(argv=sys.argv[:1], verbosity=2)
