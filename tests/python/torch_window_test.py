# SPDX-License-Identifier: Apache-2.0
"""epx.torch with memory of the caller's, which rows are written into: in place, in each step of a training, beside tensors that
autograd has saved; Group.empty() and free(). On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch_model import DEVICE, HIDDEN, RANK, RANKS, Data, make_group, on_device, single

import epx
import epx.torch

NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 3 + 2 * rank for rank in range(RANKS)]


class Window(unittest.TestCase):
    def test_1_rows_are_written_in_place(self):
        with make_group() as group:
            data = Data(NUM_TOKENS, 2, seed=8)
            window = group.empty(group.max_recv_tokens_per_rank, HIDDEN)
            self.assertEqual(window.device, DEVICE)
            tokens = single(data.tokens[RANK]).requires_grad_()
            plan = epx.torch.prepare(group, on_device(data.idx[RANK]))
            rows, _ = epx.torch.dispatch(plan, tokens, recv_tokens=window)
            self.assertEqual(rows.data_ptr(), window.data_ptr())
            again, _ = epx.torch.dispatch(plan, tokens.detach())
            torch.testing.assert_close(rows.detach()[: plan.num_rows], again, rtol=0, atol=0)
            padded = epx.torch.prepare(group, on_device(data.idx[RANK]), alignment=8)
            zones = list(zip(padded.offsets.tolist(), padded.offsets[1:].tolist(), padded.counts.tolist()))
            is_pad = [row for begin, end, count in zones for row in range(begin + count, end)]
            for pads, expected in (("untouched", 7), ("zero", 0)):
                window.fill_(7)
                epx.torch.dispatch(padded, tokens.detach(), recv_tokens=window, pads=pads)
                self.assertEqual(window[is_pad].unique().tolist(), [expected] if is_pad else [])
            epx.torch.dispatch(plan, tokens.detach(), recv_tokens=window)
            epx.torch.combine(plan, rows).sum().backward()
            routes = on_device((data.idx[RANK] >= 0).sum(1, keepdim=True).float())
            torch.testing.assert_close(tokens.grad, routes.expand_as(tokens))

    def calls(self, group, num_tokens):
        """Functions that bring tokens into a window, both layouts, and the window; each token goes to this rank itself."""
        idx = on_device(torch.full((num_tokens, 1), group.first_local_expert))
        plan = epx.torch.prepare(group, idx)
        yield (
            lambda tokens, window: epx.torch.dispatch(plan, tokens, recv_tokens=window)[0],
            lambda rows: epx.torch.combine(plan, rows),
            group.empty(num_tokens, HIDDEN),
        )
        if group.ranks_per_node < RANKS:
            return
        made, *_ = epx.torch.dispatch_rank_major(group, on_device(torch.zeros(num_tokens, HIDDEN)), idx, max_rows=num_tokens)
        yield (
            lambda tokens, window: epx.torch.dispatch_rank_major(group, tokens, idx, recv_tokens=window)[1],
            lambda rows: epx.torch.combine_rank_major(made, torch.where(made.is_row[..., None], rows, 0)),
            group.empty(RANKS, num_tokens, HIDDEN),
        )

    def test_2_each_step_of_a_training(self):
        """The window is the same in all steps, and neither it nor a view of it joins the graph."""
        with make_group() as group:
            for dispatch, combine, window in self.calls(group, 4):
                for step in range(3):
                    for part in (window, window.view(window.shape)):
                        tokens = on_device(torch.full((4, HIDDEN), 1.0 + step)).requires_grad_()
                        rows = dispatch(tokens, part)
                        self.assertEqual(rows.data_ptr(), window.data_ptr())
                        self.assertEqual((rows.requires_grad, part.requires_grad, window.requires_grad), (True, False, False))
                        combine(rows.square()).sum().backward()
                        torch.testing.assert_close(tokens.grad, 2 * tokens.detach())
                with self.assertRaisesRegex(epx.InvalidArgumentError, "recv_tokens requires a gradient"):
                    dispatch(tokens, rows)
            group.check()

    def test_3_saved_rows_are_not_overwritten_without_a_word(self):
        with make_group() as group:
            for dispatch, _, window in self.calls(group, 4):
                for records in (False, True):
                    tokens = on_device(torch.ones(4, HIDDEN)).requires_grad_()
                    loss = dispatch(tokens, window).square().sum()  # saves the window for the backward
                    dispatch(on_device(torch.ones(4, HIDDEN)).requires_grad_(records), window)
                    with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                        loss.backward()
            group.check()

    def test_4_empty_and_free(self):
        with make_group() as group, make_group() as another:
            other = group.empty(4, HIDDEN, dtype=torch.bfloat16)
            other.fill_(3)
            part = other[1:]
            with self.assertRaisesRegex(epx.InvalidArgumentError, "has views"):
                group.free(other)
            del part
            group.free(other)
            theirs = another.empty(3)
            for tensor in (torch.zeros(3), theirs):
                with self.assertRaisesRegex(epx.InvalidArgumentError, "does not begin memory from empty.. of this group"):
                    group.free(tensor)
            self.assertEqual(theirs.shape, (3,))  # the refusal has left it as it was
            another.free(theirs)
            for sizes in ((-4, 8), (2.0,), (2**40, 2**40)):
                with self.assertRaisesRegex(epx.InvalidArgumentError, "they must be integers, at least 0, of at most"):
                    group.empty(*sizes)
            with self.assertRaises(torch.OutOfMemoryError) as caught:
                group.empty(2**48)
            self.assertIsInstance(caught.exception, epx.torch.OutOfMemoryError)
            kept = group.empty(2, 3)
            kept.fill_(1)
        self.assertEqual(kept.sum().item(), 6)  # the memory lives as long as the tensor


if __name__ == "__main__":
    torch_model.main()
