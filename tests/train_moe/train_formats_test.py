#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training with tokens that travel in 8 or 4 bits, and the errors of the row formats."""
import statistics

import train_runs
from train_runs import TrainTest


class Formats(TrainTest):
    def test_fp8_learns_as_well(self):
        """At the default learning rate any difference grows to more than a percent within 200 steps, in either direction."""
        steady = ("--steps", 200, "--lr", 1e-3)
        wide = self.train(1, *steady)
        for name in ("fp8-block128", "fp8-mx"):
            with self.subTest(name):
                run = self.train(1, *steady, "--dispatch-format", name)
                last = statistics.fmean(run.losses[-50:]) / statistics.fmean(wide.losses[-50:]) - 1
                held_out = run.final["held_out_loss"] / wide.final["held_out_loss"] - 1
                self.assertLessEqual(max(abs(last), abs(held_out)), 0.005)
                self.assertNotEqual(run.losses[0], wide.losses[0])  # the format is used
                self.report(f"{name}: loss of the last 50 steps {last:+.2%}, held out {held_out:+.2%}")

    def test_experts_in_fp8_learn_as_well(self):
        steady = ("--hidden", 128, "--layers", 1, "--batch", 256, "--steps", 200, "--lr", 1e-3)
        wide = self.train(1, *steady)
        for recipe in train_runs.FP8_RECIPES:
            with self.subTest(recipe):
                run = self.train(1, *steady, "--recipe", recipe)
                last = statistics.fmean(run.losses[-50:]) / statistics.fmean(wide.losses[-50:]) - 1
                held_out = run.final["held_out_loss"] / wide.final["held_out_loss"] - 1
                self.assertLessEqual(max(abs(last), abs(held_out)), 0.005)
                self.assertNotEqual(run.losses[0], wide.losses[0])
                self.report(f"{recipe}: loss of the last 50 steps {last:+.2%}, held out {held_out:+.2%}")

    def test_ranks_agree_to_the_bit(self):
        """In every format and recipe: what a rank keeps for itself is quantised too."""
        for option, names in (("--dispatch-format", train_runs.FORMATS), ("--recipe", train_runs.FP8_RECIPES)):
            for name in names:
                with self.subTest(name):
                    args = ("--steps", 10, "--batch", 256, option, name)
                    self.assert_same_curve(self.train(3, *args), self.train(1, *args))

    def test_errors(self):
        """At most half a step of the elements' type, and the same for any number of ranks."""
        most = {"fp8-block128": 2**-4, "fp8-block128-pow2": 2**-4, "fp8-mx": 2**-4, "fp8-e5m2-mx": 2**-3, "fp4-nv": 2**-2}
        args = ("--steps", 10, "--batch", 256, "--format-errors")
        errors, of_three = ([line for line in self.train(num_ranks, *args).lines if "format_errors" in line]
                            for num_ranks in (1, 3))
        self.assertEqual(len(errors), 1)
        self.assertEqual(list(errors[0]["format_errors"]), list(most))
        for name, by_layer in errors[0]["format_errors"].items():
            with self.subTest(name):
                self.assertEqual(len(by_layer), 2)
                for error, other in zip(by_layer, of_three[0]["format_errors"][name], strict=True):
                    self.assertGreater(error, most[name] / 8)
                    self.assertLess(error, most[name])
                    self.assertAlmostEqual(error, other, delta=1e-12)


if __name__ == "__main__":
    train_runs.main()
