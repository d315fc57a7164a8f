# SPDX-License-Identifier: Apache-2.0
"""Sidecars of epx.torch: each arrives beside its token, by all calls that take one, with gradients and under torch.compile;
refusals. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch_model import (
    DEVICE,
    HIDDEN,
    RANK,
    RANKS,
    Data,
    Graphs,
    compiled,
    count_calls,
    gradients,
    make_group,
    on_device,
    single,
)

import epx
import epx.torch

NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 3 + 2 * rank for rank in range(RANKS)]
LARGEST = 16  # bytes of a row


def sidecar_of(ids, dtype, columns):
    """[..., columns]: what travels with the token of each id, which is never 0; zero for those that are 0, as pads are."""
    values = ids[..., None] + torch.arange(columns, device=ids.device)
    return torch.where(ids[..., None] > 0, values, 0).to(dtype)


class Sidecars(unittest.TestCase):
    def calls(self, group, idx, weights, num_rows):
        """Each call that takes a sidecar, as a function of tokens and sidecar. It returns which rows hold a token or are pads, the
        rows, the sidecar, and the tokens that come home."""

        def prepared(plan, rows, row_weights, recv_sidecar):
            in_use = torch.arange(len(rows), device=DEVICE) < plan.offsets[-1]
            return in_use, rows, recv_sidecar, epx.torch.combine(plan, rows, row_weights)

        def dispatch(tokens, sidecar, **options):
            plan = epx.torch.prepare(group, idx, alignment=4)
            options = options or dict(num_rows=num_rows)
            return prepared(plan, *epx.torch.dispatch(plan, tokens, weights, sidecar=sidecar, **options))

        def dispatch_into(tokens, sidecar):
            return dispatch(tokens, sidecar, recv_tokens=torch.empty(num_rows, HIDDEN, device=DEVICE))

        def prepare_dispatch(tokens, sidecar):
            return prepared(*epx.torch.prepare_dispatch(group, tokens, idx, weights, alignment=4, sidecar=sidecar))

        def rank_major(tokens, sidecar, **options):
            plan, rows, _, recv_sidecar = epx.torch.dispatch_rank_major(
                group, tokens, idx, weights, sidecar=sidecar, **options
            )
            kept = torch.where(plan.is_row[..., None], rows, 0)
            return plan.is_row, kept, recv_sidecar, epx.torch.combine_rank_major(plan, kept)

        def rank_major_into(tokens, sidecar):
            return rank_major(tokens, sidecar, recv_tokens=torch.empty(RANKS, 32, HIDDEN, device=DEVICE))

        yield from (dispatch, dispatch_into, prepare_dispatch)
        if ranks.num_nodes() == 1:
            yield from (rank_major, rank_major_into)

    def make(self, num_tokens):
        data = Data(num_tokens, 2, seed=31, masked=0.2)
        ids = 10 * RANK + torch.arange(1, num_tokens[RANK] + 1, device=DEVICE)
        tokens = ids[:, None].float().expand(-1, HIDDEN).contiguous()
        return on_device(data.idx[RANK]), single(data.weights[RANK]), ids, tokens

    def test_1_arrives_beside_its_token(self):
        dtypes = (torch.float32, 4), (torch.uint8, 3), (torch.int64, 1), (torch.float8_e4m3fn, 5), (torch.bool, 2)
        with make_group(max_sidecar_bytes=LARGEST) as group:
            for num_tokens in (NUM_TOKENS, [0] * RANKS):
                idx, weights, ids, tokens = self.make(num_tokens)
                for row_weights in (weights, None):
                    for call in self.calls(group, idx, row_weights, group.max_recv_tokens_per_rank):
                        for dtype, columns in dtypes:
                            with self.subTest(call=call.__name__, dtype=dtype):
                                in_use, rows, received, _ = call(tokens, sidecar_of(ids, dtype, columns))
                                self.assertEqual((received.dtype, received.shape), (dtype, (*rows.shape[:-1], columns)))
                                wanted = sidecar_of(rows[..., 0].long(), dtype, columns)
                                torch.testing.assert_close(
                                    received[in_use].view(torch.uint8), wanted[in_use].view(torch.uint8), rtol=0, atol=0
                                )
            group.check()

    def test_2_has_no_gradient(self):
        """The other gradients are those without a sidecar."""
        with make_group(max_sidecar_bytes=LARGEST) as group:
            idx, weights, ids, tokens = self.make(NUM_TOKENS)
            leaves = [tokens.requires_grad_(), weights.requires_grad_()]
            for call in self.calls(group, idx, weights, group.max_recv_tokens_per_rank):
                sidecar = sidecar_of(ids, torch.float32, 4).requires_grad_()
                _, rows, received, out = call(tokens, sidecar)
                self.assertTrue(rows.requires_grad)
                self.assertFalse(received.requires_grad)
                grads = gradients(out.sin().sum(), [*leaves, sidecar])
                torch.testing.assert_close(grads[2], torch.zeros_like(sidecar), rtol=0, atol=0)
                plan = epx.torch.prepare(group, idx)
                if "rank_major" in call.__name__:
                    plan, rows, _ = epx.torch.dispatch_rank_major(group, tokens, idx, weights)
                    again = epx.torch.combine_rank_major(plan, torch.where(plan.is_row[..., None], rows, 0))
                else:
                    again = epx.torch.combine(plan, *epx.torch.dispatch(plan, tokens, weights))
                torch.testing.assert_close(out, again)
                torch.testing.assert_close(grads[:2], gradients(again.sin().sum(), leaves))
            group.check()

    def test_3_compiled(self):
        with make_group(max_sidecar_bytes=LARGEST) as group:
            idx, weights, ids, tokens = self.make(NUM_TOKENS)
            tokens.requires_grad_()
            sidecar = sidecar_of(ids, torch.float32, 4)
            for call in self.calls(group, idx, weights, group.max_recv_tokens_per_rank):
                if call.__name__.endswith("into"):
                    continue  # refused there
                graphs, found = Graphs(), []
                for each in (call, compiled(call, backend=graphs.backend())):
                    in_use, _, received, out = each(tokens, sidecar)
                    found.append((received[in_use], out, gradients(out.sin().sum(), [tokens])))
                torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
                names = [name for name in graphs.forward[0] if name.endswith("_sidecar")]
                self.assertEqual(names, [f"{'dispatch_rank_major' if call.__name__ == 'rank_major' else call.__name__}_sidecar"])
            group.check()

    def test_4_calls_without_one_have_the_operator_of_before(self):
        with make_group(max_sidecar_bytes=LARGEST) as group:
            idx, weights, _, tokens = self.make(NUM_TOKENS)
            with count_calls() as calls:
                plan, rows, row_weights = epx.torch.prepare_dispatch(group, tokens, idx, weights)
            self.assertEqual(rows.shape, (group.max_recv_tokens_per_rank, HIDDEN))
            self.assertEqual(dict(calls), {"prepare_dispatch": 1})
            group.check()

    def test_5_refusals(self):
        """The sentences are those of numpy arrays."""
        local = epx.Group(epx.bootstrap.local(), **torch_model.config(transport="host", max_sidecar_bytes=LARGEST))
        with make_group(max_sidecar_bytes=LARGEST) as group, local:
            idx, tokens = torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, HIDDEN)
            plan, of_numpy = epx.torch.prepare(group, on_device(idx)), local.prepare(idx.numpy())
            for sidecar in (torch.zeros(3, 2), torch.zeros(4), torch.zeros(4, 0), torch.zeros(4, 5), torch.zeros(2, 4).t()):
                with self.assertRaises(epx.InvalidArgumentError) as wanted:
                    local.dispatch(of_numpy, tokens.numpy(), sidecar=sidecar.numpy())
                with self.assertRaises(epx.InvalidArgumentError) as caught:
                    epx.torch.dispatch(plan, on_device(tokens), sidecar=on_device(sidecar))
                self.assertEqual(str(caught.exception).replace("torch.", ""), str(wanted.exception))
            with self.assertRaisesRegex(epx.InvalidArgumentError, "sidecar is list; this call takes torch.Tensor"):
                epx.torch.dispatch(plan, on_device(tokens), sidecar=[1])
            group.check()


if __name__ == "__main__":
    torch_model.main()
