# SPDX-License-Identifier: Apache-2.0
"""examples/jax_moe.py trains a few steps with as many processes as asked for: on CPU devices, or on two GPUs with
EPX_TEST_DEVICE=cuda.

jax_example_test.py EXAMPLE TEXT
"""

import importlib.util
import os
import re
import sys
import tempfile
import unittest

import ranks

os.environ["JAX_PLATFORMS"] = "cpu"  # which JAX reads when it is imported; the example chooses its own platform
ranks.require("numpy", "jax")
if ranks.on_gpu():
    ranks.require_jax_on_gpus(2)
DEVICE, NATIVE = ("cuda", "ragged_all_to_all") if ranks.on_gpu() else ("cpu", "all_to_all")


class CompilerOptions(unittest.TestCase):
    """Between processes XLA refuses ragged_all_to_all without a compiler option, which an older one does not know."""

    def setUp(self):
        spec = importlib.util.spec_from_file_location("jax_moe", EXAMPLE)
        self.example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.example)

    def test_one_that_is_unknown_is_left_out(self):
        self.assertEqual(self.example.known_options({"xla_gpu_no_such_option": True}), {})

    def test_another_error_is_raised(self):
        with self.assertRaisesRegex(Exception, "xla_gpu_autotune_level"):
            self.example.known_options({"xla_gpu_autotune_level": "seven"})

    def test_the_ragged_layer_alone_has_it(self):
        known = {"xla_gpu_autotune_level": 0}
        self.example.RAGGED_OPTIONS = known
        self.assertEqual(self.example.Native(2, 2, is_ragged=True).compiler_options, known)
        self.assertEqual(self.example.Native(2, 2, is_ragged=False).compiler_options, {})
        self.assertEqual(self.example.Epx(None, 2).compiler_options, {})


class Example(unittest.TestCase):
    def run_example(self, example, *options):
        with tempfile.TemporaryDirectory() as directory:
            plot = os.path.join(directory, "curves.png")
            common = ("--device", DEVICE, "--text", TEXT, "--plot", plot, "--layers", "1", "--batch", "2", "--context", "16")
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
        losses = re.findall(r"^(\w+): loss ([0-9.]+) -> ([0-9.]+), [0-9.]+ ms for each step", output, re.MULTILINE)
        self.assertEqual([name for name, *_ in losses], ["epx", NATIVE], output)
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
