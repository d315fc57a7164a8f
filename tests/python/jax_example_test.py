# SPDX-License-Identifier: Apache-2.0
"""examples/jax_moe.py trains a few steps on CPU devices, with as many processes as asked for.

jax_example_test.py EXAMPLE TEXT
"""

import os
import re
import sys
import tempfile
import unittest

import ranks

ranks.require("numpy", "jax")


class Example(unittest.TestCase):
    def run_example(self, example, *options):
        with tempfile.TemporaryDirectory() as directory:
            plot = os.path.join(directory, "curves.png")
            common = ("--device", "cpu", "--text", TEXT, "--plot", plot, "--layers", "1", "--batch", "2", "--context", "16")
            code, output = ranks.finish(ranks.start(example, *common, *options), timeout=240)
            if "is drawn" in output:
                with open(plot, "rb") as file:
                    self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
            else:
                self.assertIn("no matplotlib", output)
        return code, output

    def test_trains_as_the_native_layer_does(self):
        code, output = self.run_example(EXAMPLE, "--processes", "2", "--steps", "5")
        self.assertEqual(code, 0, output)
        losses = re.findall(r"^(epx|all_to_all): loss ([0-9.]+) -> ([0-9.]+), [0-9.]+ ms for each step", output, re.MULTILINE)
        self.assertEqual([name for name, *_ in losses], ["epx", "all_to_all"], output)
        for _, first, last in losses:
            self.assertLess(float(last), float(first))
        self.assertIn("step 5/5 loss: epx ", output)

    def test_tells_of_losses_that_differ(self):
        """The status is 1 where the native layer weights its rows twice."""
        with open(EXAMPLE, encoding="utf-8") as file:
            program = file.read()
        changed = program.replace("weights), token\n", "2 * weights), token\n")
        self.assertNotEqual(changed, program)
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "changed.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write(changed)
            code, output = self.run_example(path, "--processes", "1", "--steps", "2")
        self.assertEqual(code, 1, output)
        self.assertIn("largest relative difference of the losses", output)


if __name__ == "__main__":
    EXAMPLE, TEXT = sys.argv[1:]
    unittest.main(argv=sys.argv[:1], verbosity=2)
