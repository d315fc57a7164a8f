# SPDX-License-Identifier: Apache-2.0
"""The rank-major operations of epx.torch: against a dense model in float64, forward and backward; under torch.compile and
checkpoints; refusals. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import dataclasses
import functools
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch.utils.checkpoint import checkpoint
from torch_model import (
    DEVICE,
    EXPERTS,
    HIDDEN,
    ON_GPU,
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
dispatch, combine = epx.torch.dispatch_rank_major, epx.torch.combine_rank_major


def experts_of_rows(plan, rows, row_weights, matrices):
    """[P, M, H]: the sum over a row's routes of weight * tanh(A_e x); zero where there is no row."""
    rows = torch.where(plan.is_row[..., None], rows, 0)
    outs = torch.tanh(torch.einsum("pmh,egh->pmeg", rows, matrices))
    is_route = plan.topk_idx >= 0
    chosen = torch.take_along_dim(outs, plan.topk_idx.clamp(min=0).long()[..., None], 2)
    weights = torch.ones_like(is_route, dtype=rows.dtype) if row_weights is None else row_weights.to(rows.dtype)
    return torch.where(is_route[..., None], weights[..., None] * chosen, 0).sum(2)


@ranks.skip_over_nodes
class RankMajor(unittest.TestCase):
    def layer(self, group, idx, tokens, weights, matrices, **options):
        plan, rows, row_weights = dispatch(group, tokens, idx, weights, **options)
        return combine(plan, experts_of_rows(plan, rows, row_weights, matrices))

    def check(self, group, num_tokens, *, top_k=2, masked=0.2, weighted=True, dtype=torch.float32, tolerance=1e-5, **options):
        data = Data(num_tokens, top_k, seed=top_k, masked=masked, dtype=dtype)
        own = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        tokens, weights, matrices = data.tokens[RANK], data.weights[RANK], data.matrices
        leaves = [single(tokens).to(dtype), single(weights), single(matrices[own]).to(dtype)]
        for leaf in leaves:
            leaf.requires_grad_()
        out = self.layer(group, on_device(data.idx[RANK]), leaves[0], leaves[1] if weighted else None, leaves[2], **options)
        torch_model.check_against_dense(data, out, leaves, own, weighted=weighted, tolerance=tolerance)
        group.check()

    def test_1_against_dense(self):
        with make_group() as group:
            self.check(group, [5] * RANKS)
            self.check(group, NUM_TOKENS)
            self.check(group, NUM_TOKENS, max_rows=max(NUM_TOKENS))
            self.check(group, NUM_TOKENS, compact=True)
            self.check(group, NUM_TOKENS, compact=True, max_rows=max(NUM_TOKENS), top_k=3)
            self.check(group, NUM_TOKENS, top_k=1, masked=0.5)
            self.check(group, NUM_TOKENS, top_k=3)
            self.check(group, NUM_TOKENS, weighted=False)
            self.check(group, [0] * RANKS, max_rows=0)
            self.check(group, [6] * RANKS, masked=1.0)
            self.check(group, [7] * RANKS, dtype=torch.bfloat16, tolerance=4e-2)

    def test_2_plan(self):
        """What the receiver gets to know, in one closed form: token t of rank r goes to expert (t + r) % E and its next one."""
        with make_group() as group:
            first, end = group.first_local_expert, group.first_local_expert + group.num_local_experts

            def routes(rank):
                return [[(token + rank) % EXPERTS, (token + rank + 1) % EXPERTS] for token in range(NUM_TOKENS[rank])]

            idx = torch.tensor(routes(RANK), dtype=torch.int32).view(-1, 2)
            tokens = torch.arange(NUM_TOKENS[RANK]).float()[:, None] + 100 * RANK
            plan, rows, weights = dispatch(
                group, on_device(tokens.expand(-1, HIDDEN).contiguous()), on_device(idx), on_device(idx.float() / 8)
            )
            self.assertEqual(rows.shape, (RANKS, group.max_tokens_per_rank, HIDDEN))
            for source in range(RANKS):
                mine = [(token, each) for token, each in enumerate(routes(source)) if any(first <= e < end for e in each)]
                count = int(plan.counts[source])
                self.assertEqual(count, len(mine))
                self.assertEqual(rows[source, :count, 0].tolist(), [100 * source + token for token, _ in mine])
                local = [[e - first if first <= e < end else -1 for e in each] for _, each in mine]
                self.assertEqual(plan.topk_idx[source, :count].tolist(), local)
                weighted = [[e / 8 if first <= e < end else 0 for e in each] for _, each in mine]
                self.assertEqual(weights[source, :count].tolist(), weighted)
            compact_plan, compact, _ = dispatch(
                group, on_device(tokens.expand(-1, HIDDEN).contiguous()), on_device(idx), compact=True
            )
            self.assertTrue(compact_plan.compact)
            self.assertEqual(compact.shape, rows.shape)
            num_rows = int(plan.counts.sum())
            self.assertEqual(compact_plan.is_row.flatten().tolist(), [i < num_rows for i in range(rows[..., 0].numel())])
            torch.testing.assert_close(compact.flatten(0, 1)[:num_rows], rows[plan.is_row], rtol=0, atol=0)
            self.assertEqual(compact_plan.topk_idx.flatten(0, 1)[:num_rows].tolist(), plan.topk_idx[plan.is_row].tolist())
            # A rank whose rows are dropped reports that, and the others go on.
            to_first = on_device(torch.zeros(4, 1, dtype=torch.int64))
            plan, *_ = dispatch(group, on_device(torch.ones(4, HIDDEN)), to_first, max_rows=3)
            self.assertEqual(plan.counts.tolist(), [3 if first == 0 and end > 0 else 0] * RANKS)
            torch_model.wait()
            if first == 0 and end > 0:
                with self.assertRaises(epx.EventError) as caught:
                    group.check()
                self.assertEqual(caught.exception.events, {epx.EventKind.TOO_FEW_ROWS: RANKS})
            group.check()

    def test_3_window_memory(self):
        with make_group() as group:
            data = Data(NUM_TOKENS, 2, seed=8)
            idx, tokens = on_device(data.idx[RANK]), single(data.tokens[RANK]).requires_grad_()
            window = group.empty(RANKS, group.max_tokens_per_rank, HIDDEN)
            plan, rows, _ = dispatch(group, tokens, idx, recv_tokens=window)
            self.assertEqual(rows.data_ptr(), window.data_ptr())
            compact_window = group.empty(RANKS, group.max_tokens_per_rank, HIDDEN)
            compact_plan, compact, _ = dispatch(group, tokens.detach(), idx, recv_tokens=compact_window, compact=True)
            torch.testing.assert_close(compact[compact_plan.is_row], rows.detach()[plan.is_row], rtol=0, atol=0)
            other_plan, other, _ = dispatch(group, tokens.detach(), idx)
            torch.testing.assert_close(rows.detach()[plan.is_row], other[other_plan.is_row], rtol=0, atol=0)
            num_ranks_of = combine(other_plan, torch.ones_like(other))  # in each element, of how many ranks a token is
            combine(plan, torch.where(plan.is_row[..., None], rows, 0)).sum().backward()
            torch.testing.assert_close(tokens.grad, num_ranks_of)
            in_place = dispatch(group, tokens.detach(), idx, recv_tokens=window)[1]
            self.assertEqual(in_place.data_ptr(), window.data_ptr())

    def test_4_equal_calls_unused_outputs_and_checkpoints(self):
        with make_group() as group:
            data = Data(NUM_TOKENS, 2, seed=4)
            idx, weights = on_device(data.idx[RANK]), single(data.weights[RANK])
            own = single(data.matrices[group.first_local_expert :][: group.num_local_experts])
            found = []
            for options in (None, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": epx.torch.saves_exchange}):
                tokens = single(data.tokens[RANK]).requires_grad_()

                def layer(tokens):
                    return self.layer(group, idx, tokens, weights, own)

                with count_calls() as calls:
                    call = layer if options is None else functools.partial(checkpoint, layer, **options)
                    first, second = call(tokens), call(tokens)
                    dispatch(group, tokens, idx)  # nobody uses what it returns
                    (first + second).sin().sum().backward()
                torch.testing.assert_close(first, second, rtol=0, atol=0)
                names = "dispatch_rank_major", "combine_rank_major", "combine_rank_major_bwd", "dispatch_rank_major_bwd"
                found.append((tokens.grad, [calls[name] for name in names]))
            self.assertEqual([counts for _, counts in found], [[3, 2, 2, 2], [5, 4, 2, 2], [3, 2, 2, 2]])
            for grad, _ in found[1:]:
                torch.testing.assert_close(grad, found[0][0], rtol=0, atol=0)
            group.check()

    def test_5_compiled(self):
        with make_group() as group:
            data = Data([0 if RANKS > 1 and rank == RANKS - 1 else 4 for rank in range(RANKS)], 2, seed=5)
            idx, tokens, weights = on_device(data.idx[RANK]), single(data.tokens[RANK]), single(data.weights[RANK])
            own = single(data.matrices[group.first_local_expert :][: group.num_local_experts])
            leaves = [tokens.requires_grad_(), weights.requires_grad_()]

            def program(tokens, weights):
                first = self.layer(group, idx, tokens, weights, own)
                dispatch(group, tokens, idx)
                return first + self.layer(group, idx, tokens, weights, own, max_rows=4, compact=True)

            graphs, found = Graphs(), []
            for each in (program, compiled(program, backend=graphs.backend())):
                out = each(tokens, weights)
                found.append((out, gradients(out.sin().sum(), leaves)))
            torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
            forward = ["dispatch_rank_major", "combine_rank_major"]
            self.assertEqual(graphs.forward, [forward + forward[:1] + forward])
            self.assertEqual(sorted(graphs.backward[0]), sorted(2 * [name + "_bwd" for name in forward]))

            def into(tokens):
                return dispatch(group, tokens, idx, recv_tokens=torch.empty(RANKS, 4, HIDDEN, device=DEVICE))[1]

            with self.assertRaisesRegex(Exception, "not supported under torch.compile"):
                compiled(into, backend="eager")(tokens.detach())
            group.check()

    def test_6_refusals(self):
        with make_group() as group, make_group(combine_precision="exact") as exact:
            data = Data([4] * RANKS, 2, seed=9)
            idx, tokens, weights = on_device(data.idx[RANK]), single(data.tokens[RANK]), single(data.weights[RANK])
            plan, rows, _ = dispatch(group, tokens, idx, weights)
            exact_plan, exact_rows, _ = dispatch(exact, tokens, idx)
            for words, call in {
                "topk_idx is float32": lambda: dispatch(group, tokens, idx.float()),
                "topk_idx has shape": lambda: dispatch(group, tokens, idx[1:].contiguous()),
                "tokens is float64": lambda: dispatch(group, tokens.double(), idx),
                "tokens has strides": lambda: dispatch(group, tokens.t().contiguous().t(), idx),
                "topk_weights has shape": lambda: dispatch(group, tokens, idx, weights[:, :1].contiguous()),
                "compact is int; this call takes bool": lambda: dispatch(group, tokens, idx, compact=1),
                "max_rows is -1": lambda: dispatch(group, tokens, idx, max_rows=-1),
                "recv_tokens alone": lambda: dispatch(group, tokens, idx, max_rows=4, recv_tokens=rows),
                "recv_tokens has shape": lambda: dispatch(group, tokens, idx, recv_tokens=rows[0]),
                "expert_out has shape": lambda: combine(plan, rows[0]),
                "expert_out is int32": lambda: combine(plan, rows.int()),
                "precision": lambda: combine(exact_plan, exact_rows),
            }.items():
                ranks.refused(self, words, call)
            self.check(group, [4] * RANKS)  # the refused calls have not taken part
            # The plan of an expert-major prepare is another one's.
            expert_major = epx.torch.prepare(group, idx)
            combine(dataclasses.replace(plan, handle_mem=expert_major.handle_mem), rows)
            torch_model.wait()
            with self.assertRaises(epx.EventError) as caught:
                group.check()
            self.assertEqual(caught.exception.events, {epx.EventKind.HANDLE_MISMATCH: 1})
            leaf = tokens.clone().requires_grad_()
            _, out, _ = dispatch(group, leaf, idx)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            out.sum().backward()


class Nodes(unittest.TestCase):
    def test_rank_major_calls_are_refused(self):
        if RANKS == 1 or ON_GPU and ranks.num_nodes() == 1:
            self.skipTest("needs a group of several nodes")
        with make_group(combine_precision="node", ranks_per_node=ranks.ranks_per_node() if ON_GPU else 1) as group:
            data = Data([4] * RANKS, 2, seed=9)
            with self.assertRaisesRegex(epx.UnsupportedError, f"has {RANKS // group.ranks_per_node} nodes"):
                dispatch(group, single(data.tokens[RANK]), on_device(data.idx[RANK]))
            group.check()


if __name__ == "__main__":
    torch_model.main()
