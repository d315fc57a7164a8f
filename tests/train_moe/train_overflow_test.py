#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training with a receive capacity below the worst case: what happens to steps that need more."""
import train_runs
from train_runs import FAILURE, TrainTest

STEPS = ("--steps", 12, "--batch", 256, "--aux-loss", 0)


class Overflow(TrainTest):
    def test_rerun_learns_as_if_nothing_were_dropped(self):
        wide = self.train(2, *STEPS)
        run = self.train(2, *STEPS, "--capacity-factor", 1.2, "--on-overflow", "rerun")
        self.assertEqual(run.losses, wide.losses)
        self.assertEqual(run.final["held_out_loss"], wide.final["held_out_loss"])
        steps = [line for line in run.lines if "step" in line]
        self.assertTrue(any(line["ran_again"] for line in steps) and not all(line["ran_again"] for line in steps), run)
        for line in steps:
            self.assertEqual(line["ran_again"], line["dropped_routes"] > 0)
            self.assertEqual(line["dropped_routes"] > 0, line["required_capacity_factor"] > 1.2, line)
            self.assertAlmostEqual(line["required_capacity_factor"], line["max_load_of_rank"])  # without pads

    def test_required_factor_is_enough(self):
        """The largest one that a run has needed drops nothing; a little less does."""
        run = self.train(2, *STEPS, "--capacity-factor", 4)
        needed = max(line["required_capacity_factor"] for line in run.lines if "step" in line)
        self.assertGreater(needed, 1)
        for factor, drops in ((needed, False), (needed - 0.01, True)):
            with self.subTest(factor=factor):
                steps = [line for line in self.train(2, *STEPS, "--capacity-factor", factor, "--on-overflow", "drop").lines
                         if "step" in line]
                self.assertEqual(any(line["dropped_routes"] for line in steps), drops)

    def test_factor_of_any_routing(self):
        run = self.train(2, *STEPS, "--capacity-factor", 1e12)
        self.assertEqual(run.losses, self.train(2, *STEPS).losses)

    def test_drop_goes_on(self):
        wide, run = self.train(2, *STEPS), self.train(2, *STEPS, "--capacity-factor", 0.5, "--on-overflow", "drop")
        steps = [line for line in run.lines if "step" in line]
        self.assertTrue(all(line["dropped_routes"] > 0 and not line["ran_again"] for line in steps), run)
        self.assertNotEqual(run.losses, wide.losses)

    def test_error_ends_the_training(self):
        run = self.launch(2, *STEPS, "--capacity-factor", 0.5)
        self.assertEqual(run.status, FAILURE, run)
        self.assertIn("max_recv_tokens_per_rank", run.stderr)

    def test_bad_options(self):
        for args, words in ((("--capacity-factor", 0), ("--capacity-factor is 0",)),
                            (("--capacity-factor", "inf"), ("--capacity-factor is inf",)),
                            (("--capacity-factor", 2, "--path", "both"), ("--capacity-factor", "--path both")),
                            (("--on-overflow", "drop"), ("--on-overflow", "without --capacity-factor")),
                            (("--on-overflow", "maybe", "--capacity-factor", 2), ("--on-overflow", "maybe"))):
            with self.subTest(args):
                self.assert_refused(self.launch(1, "--steps", 1, *args), *words)


if __name__ == "__main__":
    train_runs.main()
