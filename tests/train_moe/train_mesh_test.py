#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Meshes of EP and FSDP: what crosses the FSDP axis, and that the loss does not depend on the mesh or the path."""
import math

import train_runs
from train_runs import TrainTest

RANKS = 4
HIDDEN, FFN, LAYERS, BATCH, CONTEXT, EMBEDDING = 16, 24, 2, 256, 4, 16
BYTE_VALUES, ROW = 256, 64  # of the embedding; the parameters that are not experts' are split in rows of so many
BLOCK = 128  # rows and columns of a weight in FP8 that have one scale
IN_FP8 = ("--recipe", "fp8", "--hidden", BLOCK, "--ffn", BLOCK)
EP_2_FSDP_2 = ("--ep", 2, "--fsdp", 2)
# The load-balance loss is that of the tokens of each EP axis, so meshes are compared without it.
MODEL = ("--batch", BATCH, "--hidden", HIDDEN, "--ffn", FFN, "--layers", LAYERS, "--context", CONTEXT,
         "--embedding", EMBEDDING, "--aux-loss", 0)
LIMIT = 1e-5  # relative, where sums have another order


class Mesh(TrainTest):
    def run_model(self, *args, steps=20, num_ranks=RANKS):
        return self.train(num_ranks, *MODEL, "--steps", steps, *args)

    def check_bytes(self, run, experts, fsdp, hidden=HIDDEN, ffn=FFN, bytes_gathered=4, bytes_reduced=4):
        """Each of fsdp ranks gets of its experts' matrices what the others keep, once per layer, and so do gradients. Each of
        all ranks gets what the others keep of the rest."""
        elements = LAYERS * experts * 3 * hidden * ffn * (fsdp - 1)
        embedded = CONTEXT * EMBEDDING
        shared = BYTE_VALUES * EMBEDDING + hidden * (embedded + 1) + LAYERS * experts * hidden + BYTE_VALUES * (hidden + 1)
        expected = {"experts_gathered": int(elements * bytes_gathered), "experts_reduced": elements * bytes_reduced,
                    "shared_gathered": 4 * math.ceil(shared / ROW) * ROW * (RANKS - 1) if fsdp > 1 else 0}
        self.assertEqual(run.final["fsdp_bytes_per_step"], expected, run)

    def test_bytes_over_the_axis(self):
        for experts, fsdp in ((8, 1), (8, 2), (8, 4), (5, 2)):
            with self.subTest(experts=experts, fsdp=fsdp):
                run = self.run_model("--fsdp", fsdp, "--experts", experts, steps=2)
                self.assertEqual([run.final["ep"], run.final["fsdp"]], [RANKS // fsdp, fsdp])
                self.check_bytes(run, experts, fsdp)

    def test_experts_in_fp8_are_quantised_before_they_are_gathered(self):
        """In the first step, whose weights no gradients have changed, the loss has the bits of weights that are whole."""
        whole = self.run_model(*IN_FP8, steps=5)
        for fsdp in (2, 4):
            with self.subTest(fsdp=fsdp):
                run = self.run_model(*IN_FP8, "--fsdp", fsdp, steps=5)
                self.assertEqual(run.losses[0], whole.losses[0])
                self.assertLessEqual(train_runs.largest_deviation(run.losses, whole.losses), 1e-3)
                self.check_bytes(run, 8, fsdp, BLOCK, BLOCK, bytes_gathered=1 + 4 / BLOCK**2)

    def test_ranks_that_keep_no_rows(self):
        """Of one expert there are two blocks of rows, and one."""
        args = (*IN_FP8, "--experts", 1, "--top-k", 1)
        one = self.run_model(*args, steps=1, num_ranks=1)
        self.assertEqual(self.run_model(*args, "--fsdp", RANKS, steps=1).losses, one.losses)

    def test_gradients_in_bfloat16(self):
        whole = self.run_model(*EP_2_FSDP_2, steps=5)
        run = self.run_model(*EP_2_FSDP_2, "--fsdp-grads", "bf16", steps=5)
        self.check_bytes(run, 8, 2, bytes_reduced=2)
        self.assertNotEqual(run.losses, whole.losses, "nothing was rounded to bfloat16")
        self.assertLessEqual(train_runs.largest_deviation(run.losses, whole.losses), 1e-3)

    def test_one_loss(self):
        one = self.run_model()
        self.assertEqual(self.run_model("--path", "native").losses, one.losses)
        deviations = []
        for args in (("--path", "ring"), ("--path", "ragged"), ("--path", "dense"), EP_2_FSDP_2, ("--path", "ring", *EP_2_FSDP_2)):
            with self.subTest(args):
                deviations.append(self.assert_close(self.run_model(*args), one, limit=LIMIT))
        self.report(f"losses differ from those of dispatch on one axis by at most {max(deviations):.1e}")

    def test_experts_that_the_mesh_does_not_divide(self):
        for experts in (1, 5):  # of one expert, half of the ranks have none
            with self.subTest(experts=experts):
                args = ("--experts", experts, "--top-k", 1)
                one = self.run_model(*args, steps=5, num_ranks=1)
                for mesh in (EP_2_FSDP_2, ("--path", "dense")):
                    self.assert_close(self.run_model(*args, *mesh, steps=5), one, limit=LIMIT)

    def test_closing_line(self):
        run = self.run_model(*EP_2_FSDP_2, steps=2)
        self.assertEqual(run.final["last_loss"], run.losses[-1])
        self.assertAlmostEqual(run.final["perplexity"], math.exp(run.losses[-1]))
        seconds = run.final["median_ms_per_step"]["dispatch"] / 1e3
        self.assertAlmostEqual(run.final["tokens_per_second_per_rank"] * seconds * RANKS, BATCH)
        self.assertGreater(run.final["peak_memory_bytes"], 2**20)

    def test_load_is_that_of_all_ranks(self):
        """In the first step, before the last digits of parameters can select other experts."""
        loads = [self.run_model(*args, steps=1).lines[0]["load"] for args in ((), EP_2_FSDP_2)]
        self.assertEqual(*loads)

    def test_checkpoints_go_from_mesh_to_mesh(self):
        file = self.directory / "checkpoint"
        whole = self.run_model(steps=8, num_ranks=1)
        for first, second in (((), EP_2_FSDP_2), (EP_2_FSDP_2, ("--fsdp", RANKS))):
            with self.subTest(first=first, second=second):
                self.run_model(*first, "--checkpoint", file, steps=4)
                run = self.run_model(*second, "--resume", file, steps=8)
                self.assertLessEqual(train_runs.largest_deviation(run.losses, whole.losses[4:]), LIMIT)

    def test_bad_options(self):
        for args, words in ((("--ep", 3), ("--ep is 3", "4 ranks")),
                            (("--ep", 2, "--fsdp", 1), ("--ep 2", "--fsdp 1", "mesh of 2 ranks")),
                            (("--ep", 0), ("--ep", "Value 0")),
                            (("--fsdp", 2, "--path", "native"), ("--fsdp", "--path native")),
                            (("--fsdp-grads", "bf16"), ("--fsdp-grads is bf16", "1 rank")),
                            (("--ep", 2, "--capacity-factor", 2), ("--capacity-factor", "--ep"))):
            with self.subTest(args):
                self.assert_refused(self.launch(RANKS, "--steps", 1, *args), *words)


if __name__ == "__main__":
    train_runs.main()
