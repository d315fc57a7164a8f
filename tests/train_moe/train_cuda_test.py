#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""train_moe --device cuda against the host. Skips (exit status 77) where not every rank has a GPU."""
import shlex

import train_runs
from train_runs import FAILURE, TEXT, TrainTest, largest_deviation

CUDA = ("--device", "cuda")
BF16 = (*CUDA, "--dtype", "bf16")


def why_not():
    """Returns why there is not a GPU for each rank, or None."""
    run = TrainTest.launch(TrainTest.num_ranks, "--steps", 1, "--batch", 32 * TrainTest.num_ranks, *CUDA)
    reasons = [line for line in run.complaints if "there is no GPU" in line or "needs a GPU of its own" in line]
    return reasons[0] if reasons else None


class Devices(TrainTest):
    def setUp(self):
        super().setUp()
        text = self.directory / "text"
        text.write_bytes(TEXT.read_bytes()[:self.text_bytes or None])
        self.options = ["--text", text, *shlex.split(self.model)]

    def run_host(self, *args):
        return self.train(1, *self.options, "--steps", self.steps, *args)

    def run_cuda(self, *args, device=CUDA):
        return self.train(self.num_ranks, *self.options, "--steps", self.steps, *device, *args)

    def test_float32(self):
        host = self.run_host()
        run = self.run_cuda()
        self.assertEqual(len(run.step_lines), self.steps)
        deviation = self.assert_close(run, host, limit=1e-3)
        self.report(f"losses differ from the host's by at most {deviation:.1e}, ms per step {run.final['median_ms_per_step']}")

    def test_paths_and_meshes(self):
        host = self.run_host("--aux-loss", 0)
        for args in (("--path", "ring"), ("--path", "ragged"), ("--fsdp", self.num_ranks)):
            with self.subTest(args):
                self.assert_close(self.run_cuda("--aux-loss", 0, *args), host, limit=1e-3)

    def test_weights_that_are_gathered(self):
        """Rounded or quantised before: in the first step the loss has the bits of weights that are whole."""
        fsdp = ("--fsdp", self.num_ranks)
        for args in (BF16, (*CUDA, "--hidden", 128, "--ffn", 128, "--recipe", "fp8")):
            with self.subTest(args):
                whole = self.run_cuda("--aux-loss", 0, *args)
                run = self.run_cuda("--aux-loss", 0, *args, *fsdp)
                self.assertEqual(run.losses[0], whole.losses[0])
                self.assertLessEqual(largest_deviation(run.losses, whole.losses), 0.02)

    def test_ranks_agree(self):
        for device in (CUDA, BF16):
            with self.subTest(device):
                one = self.train(1, *self.options, "--steps", self.steps, *device)
                run = self.run_cuda(device=device)
                self.assertEqual(run.losses, one.losses)
                self.assertEqual(run.final["held_out_loss"], one.final["held_out_loss"])

    def test_bfloat16(self):
        host = self.run_host()
        run = self.run_cuda(device=BF16)
        self.assertNotEqual(run.losses, self.run_cuda().losses, "nothing was rounded to bfloat16")
        deviation = largest_deviation([run.final["held_out_loss"]], [host.final["held_out_loss"]])
        self.assertLessEqual(deviation, 0.02)
        self.report(f"held-out loss differs from the host's by {deviation:.1e}")

    def test_experts_in_fp8(self):
        """Of an option that is repeated the last counts."""
        for recipe in train_runs.FP8_RECIPES:
            with self.subTest(recipe):
                args = ("--hidden", 128, "--ffn", 128, "--recipe", recipe)
                host = self.run_host(*args)
                one = self.train(1, *self.options, "--steps", self.steps, *CUDA, *args)
                run = self.run_cuda(*args)
                self.assertEqual(run.losses, one.losses)
                deviation = largest_deviation([run.final["held_out_loss"]], [host.final["held_out_loss"]])
                self.assertLessEqual(deviation, 0.02)
                self.report(f"{recipe}: held-out loss differs from the host's by {deviation:.1e}")

    def test_checkpoints_go_from_device_to_device(self):
        expected = self.run_host()
        half = self.steps // 2
        for name, first, second in (("host", (), CUDA), ("cuda", CUDA, ()), ("bf16", BF16, CUDA)):
            with self.subTest(name):
                file = self.directory / name
                ranks = [self.num_ranks if device else 1 for device in (first, second)]
                self.train(ranks[0], *self.options, "--steps", half, *first, "--checkpoint", file)
                rest = self.train(ranks[1], *self.options, "--steps", self.steps, *second, "--resume", file)
                limit = 0.02 if first == BF16 else 1e-3
                self.assertLessEqual(largest_deviation(rest.losses[-1:], expected.losses[-1:]), limit)
                self.assertEqual(len(rest.step_lines), self.steps - half)

    def test_logits_that_are_not_numbers(self):
        run = self.launch(self.num_ranks, *self.options, "--steps", 5, "--lr", 1e30, *CUDA)
        self.assert_refused(run, "step 2", "layer 0", "rank 0", "--lr", status=FAILURE)
        self.assertEqual(len(run.lines), 1)

    def test_ranks_without_tokens(self):
        """And batches that chunks do not divide, on experts that ranks do not divide."""
        for batch in (20, 100):
            with self.subTest(batch=batch):
                args = ["--batch", batch, "--experts", 5, "--hidden", 24, "--layers", 1]
                self.assert_close(self.run_cuda(*args), self.run_host(*args), limit=1e-3)


if __name__ == "__main__":
    train_runs.main(why_not, num_ranks=1, steps=20, text_bytes=0, model="")
