#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The curve does not depend on the number of ranks or on the path, and it falls."""
import collections
import concurrent.futures
import functools
import math
import statistics

import train_runs
from train_runs import TEXT, TrainTest

STEPS = 200
FEW_STEPS = 50  # a bit that differs after one step has changed every digit that is printed long before


class LongRuns(TrainTest):
    """The default model, over 200 steps on 1 and 4 ranks, and over 50 of them otherwise."""

    @classmethod
    def setUpClass(cls):
        """The slowest two, of one rank each, share the time."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for run in [pool.submit(cls.long_run, 1), pool.submit(cls.short_run, 1, "--path", "replicated")]:
                run.result()

    @classmethod
    @functools.cache
    def run_of(cls, steps, num_ranks, *args):
        run = cls.launch(num_ranks, "--steps", steps, *args)
        assert run.status == train_runs.SUCCESS, run
        assert len(run.step_lines) == steps, run
        return run

    @classmethod
    def long_run(cls, num_ranks, *args):
        return cls.run_of(STEPS, num_ranks, *args)

    @classmethod
    def short_run(cls, num_ranks, *args):
        return cls.run_of(FEW_STEPS, num_ranks, *args)

    def test_ranks_agree_to_the_bit(self):
        for num_ranks, run_on in ((2, self.short_run), (3, self.short_run), (4, self.long_run)):
            with self.subTest(num_ranks=num_ranks):
                run = run_on(num_ranks)
                self.assert_same_curve(run, run_on(1))
                self.assertEqual(run.final["ranks"], num_ranks)

    def test_replicated_agrees(self):
        replicated = self.short_run(1, "--path", "replicated")
        self.assert_same_curve(self.short_run(3, "--path", "replicated"), replicated)
        deviation = self.assert_close(self.short_run(1), replicated)
        self.report(f"differs from replicated by at most {deviation:.1e} of the loss")

    def test_native_agrees_to_the_bit(self):
        for num_ranks in (2, 4):
            with self.subTest(num_ranks=num_ranks):
                self.assert_same_curve(self.short_run(num_ranks, "--path", "native"), self.short_run(1))

    def test_both_side_by_side(self):
        run = self.train(2, "--steps", 30, "--path", "both")
        self.assertEqual(run.step_lines, self.long_run(1).step_lines[:30])
        times = run.final["median_ms_per_step"]
        self.assertEqual(list(times), ["dispatch", "native"])
        self.assertGreater(min(times.values()), 0)
        first_words = [line.split()[0] for line in run.stderr.splitlines() if line.strip()]
        table = first_words[first_words.index("path"):]
        self.assertEqual(table[1:3], ["dispatch", "native"])
        self.report(f"median ms per step on 2 ranks: {times}")

    def test_it_learns(self):
        run = self.long_run(1)
        blocks = [statistics.fmean(run.losses[first:first + STEPS // 4]) for first in range(0, STEPS, STEPS // 4)]
        self.assertEqual(blocks, sorted(blocks, reverse=True))
        self.assertAlmostEqual(run.losses[0], math.log(256), delta=0.1)  # it begins without an opinion
        self.assertLessEqual(run.final["ratio"], 0.75)
        self.report(f"loss by quarters {[round(block, 3) for block in blocks]}; held out {run.final['held_out_loss']:.4f}, "
                    f"{run.final['ratio']:.3f} of the unigram entropy")

    def test_final_line(self):
        final = self.long_run(1).final
        counts = collections.Counter(TEXT.read_bytes()).values()
        entropy = math.log(sum(counts)) - math.fsum(count * math.log(count) for count in counts) / sum(counts)
        self.assertLess(abs(final["unigram_entropy"] / entropy - 1), 1e-12)
        self.assertEqual(final["ratio"], final["held_out_loss"] / final["unigram_entropy"])
        self.assertEqual(final["steps"], STEPS)


class Shapes(TrainTest):
    """Few steps of other models: ranks agree to the bit, and with replicated experts nearly."""

    def check(self, num_ranks, *args, batch=256):
        args = ["--steps", 10, "--batch", batch, *args]
        one = self.train(1, *args)
        self.assert_same_curve(self.train(num_ranks, *args), one)
        deviation = self.assert_close(one, self.train(1, "--path", "replicated", *args))
        self.report(f"differs from replicated by at most {deviation:.1e} of the loss")
        return one

    def test_one_expert_per_token(self):
        self.check(2, "--top-k", 1)

    def test_all_experts_per_token(self):
        self.check(3, "--experts", 4, "--top-k", 4)

    def test_experts_that_ranks_do_not_divide(self):
        self.check(3, "--experts", 5)

    def test_fewer_experts_than_ranks(self):
        self.check(3, "--experts", 2)

    def test_fewer_experts_than_ranks_one_per_token(self):
        self.check(4, "--experts", 3, "--top-k", 1)

    def test_batch_that_chunks_do_not_divide(self):
        self.check(3, batch=100)

    def test_batch_smaller_than_a_chunk(self):
        """Two of the ranks have no tokens."""
        self.check(3, batch=20)

    def test_odd_sizes(self):
        self.check(2, "--hidden", 33, "--ffn", 17, "--context", 3, "--embedding", 5, "--layers", 3, "--seed", 9)

    def test_no_aux_loss(self):
        run = self.check(2, "--aux-loss", 0)
        self.assertNotEqual(run.losses, self.train(1, "--steps", 10, "--batch", 256).losses)


if __name__ == "__main__":
    train_runs.main()
