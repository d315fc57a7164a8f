# SPDX-License-Identifier: Apache-2.0
"""epx.torch in eager mode: the operations and the layer against a dense model in float64, forward and backward; checkpointing,
many forwards in flight, refusals and failures. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import dataclasses
import functools
import types
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
    INNER,
    RANK,
    RANKS,
    Data,
    config,
    count_calls,
    dense,
    gradients,
    make_group,
    on_device,
    single,
)

import epx
import epx.moe
import epx.torch
from epx.torch._means import create_mean_routes

NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 3 + 2 * rank for rank in range(RANKS)]


class Exchange(unittest.TestCase):
    def check(
        self,
        group,
        num_tokens,
        *,
        top_k=2,
        alignment=1,
        masked=0.2,
        weighted=True,
        num_rows=None,
        tolerance=1e-5,
        dtype=torch.float32,
        **options,
    ):
        """A layer of experts x -> tanh(A_e x) by the operations, against the same in float64 by one process."""
        data = Data(num_tokens, top_k, seed=top_k + 10 * alignment, masked=masked, dtype=dtype)
        own = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        tokens, weights, matrices = data.tokens[RANK], data.weights[RANK], data.matrices[own]
        leaves = [on_device(each.clone()).requires_grad_() for each in (tokens, weights, matrices)]
        out = torch_model.exchange_layer(group, data.idx[RANK], *leaves, alignment, weighted, num_rows, **options)
        torch_model.check_against_dense(data, out, leaves, own, weighted=weighted, tolerance=tolerance)
        group.check()

    def test_1_against_dense(self):
        with make_group() as group:
            self.check(group, [5] * RANKS)
            self.check(group, NUM_TOKENS)
            self.check(group, NUM_TOKENS, top_k=1, alignment=16, masked=0.5)
            self.check(group, NUM_TOKENS, top_k=3, alignment=4, num_rows=group.max_recv_tokens_per_rank)
            self.check(group, NUM_TOKENS, weighted=False)
            self.check(group, [0] * RANKS)
            self.check(group, [6] * RANKS, masked=1.0)
            self.check(group, [7] * RANKS, dtype=torch.bfloat16, tolerance=3e-2)

    def test_1b_prepare_and_dispatch_in_one_call(self):
        with make_group() as group:
            for num_tokens in ([5] * RANKS, NUM_TOKENS, [0] * RANKS):
                self.check(group, num_tokens, in_one_call=True)
            self.check(group, NUM_TOKENS, top_k=3, alignment=4, in_one_call=True)
            self.check(group, NUM_TOKENS, weighted=False, in_one_call=True)
            self.check(group, [7] * RANKS, dtype=torch.bfloat16, tolerance=3e-2, in_one_call=True)
            data = Data(NUM_TOKENS, 2, seed=12)
            idx, tokens, weights = on_device(data.idx[RANK]), single(data.tokens[RANK]), single(data.weights[RANK])
            options = dict(alignment=8, counts_dtype=torch.int64)
            plan = epx.torch.prepare(group, idx, **options)
            rows, row_weights = epx.torch.dispatch(plan, tokens, weights)
            with count_calls() as calls:
                one, one_rows, one_weights = epx.torch.prepare_dispatch(
                    group, tokens, idx, weights, num_rows=len(rows), **options
                )
            self.assertEqual(dict(calls), {"prepare_dispatch": 1})
            for name in ("counts", "offsets", "global_counts", "info"):
                torch.testing.assert_close(getattr(one, name), getattr(plan, name), rtol=0, atol=0)
            load = group.load_of_counts(plan.global_counts, 2, alignment=8)
            self.assertEqual((load.routes, load.dropped), (int(plan.global_counts.sum()), 0))
            torch.testing.assert_close([one_rows, one_weights], [rows, row_weights], rtol=0, atol=0)
            for words, call in {
                "topk_idx has shape": lambda: epx.torch.prepare_dispatch(group, tokens[:0], idx.repeat(2, 1)[1:], num_rows=1),
                "num_rows is -1": lambda: epx.torch.prepare_dispatch(group, tokens, idx, num_rows=-1),
                "pads is 3": lambda: epx.torch.prepare_dispatch(group, tokens, idx, num_rows=1, pads=3),
            }.items():
                if words.startswith("topk") and not len(idx):
                    continue  # all shapes fit on a rank without tokens
                ranks.refused(self, words, call)
            group.check()

    def test_1c_zones_of_fixed_stride(self):
        stride = 4 * RANKS * RANKS  # no expert has more routes
        with make_group(max_recv_tokens_per_rank=EXPERTS * stride) as group:
            for in_one_call in (False, True):
                for num_tokens in ([4] * RANKS, NUM_TOKENS):
                    self.check(group, num_tokens, alignment=4, zone_stride=stride, in_one_call=in_one_call)
            idx = on_device(torch.zeros(3, 1, dtype=torch.int64))  # all to the first expert, which rank 0 has
            plan = epx.torch.prepare(group, idx, zone_stride=2)
            self.assertEqual(int(plan.counts.sum()), 2 if RANK == 0 else 0)
            if RANK == 0:
                with self.assertRaisesRegex(epx.EventError, "more routes than zone_stride, 2"):
                    group.check()
            for stride, words in (
                (-1, "zone_stride is -1; it must be at least 0"),
                (1.5, "zone_stride is 1.5; it must be an integer"),
                (3, "zone_stride is 3; it must be a multiple"),
            ):
                zones = dict(alignment=2, zone_stride=stride)
                ranks.refused(self, words, lambda: epx.torch.prepare(group, idx, **zones))
                ranks.refused(self, words, lambda: epx.torch.prepare_dispatch(group, idx.float(), idx, **zones))
            group.check()

    def test_2_finite_differences(self):
        with make_group(combine_precision="exact") as group:
            data = Data(NUM_TOKENS, 2, seed=3)
            own = single(data.matrices[group.first_local_expert :][: group.num_local_experts])
            tokens, weights = single(data.tokens[RANK]), single(data.weights[RANK])

            def loss(tokens, weights):
                return torch_model.exchange_layer(group, data.idx[RANK], tokens, weights, own).double().pow(2).sum()

            leaves = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
            grads = gradients(loss(*leaves), leaves)
            generator = torch.Generator().manual_seed(RANK)
            directions = [on_device(torch.randn(each.shape, generator=generator)) for each in leaves]
            step = 1e-2
            ahead = loss(*[leaf.detach() + step * way for leaf, way in zip(leaves, directions)])
            behind = loss(*[leaf.detach() - step * way for leaf, way in zip(leaves, directions)])
            slope = sum((grad.double() * way).sum() for grad, way in zip(grads, directions))
            torch.testing.assert_close((ahead - behind) / (2 * step), slope, rtol=2e-2, atol=1e-3)

    def test_3_outputs_that_nobody_uses_and_equal_calls(self):
        with make_group() as group:
            data = Data(NUM_TOKENS, 2, seed=4)
            idx, tokens, weights = on_device(data.idx[RANK]), single(data.tokens[RANK]), single(data.weights[RANK])
            tokens.requires_grad_()

            def layer():
                plan = epx.torch.prepare(group, idx)
                rows, row_weights = epx.torch.dispatch(plan, tokens, weights)
                return epx.torch.combine(plan, rows, row_weights)

            with count_calls() as calls:
                first, second = layer(), layer()
                epx.torch.dispatch(epx.torch.prepare(group, idx), tokens)  # nobody uses what it returns
                torch.testing.assert_close(first, second, rtol=0, atol=0)
                (first + second).sum().backward()
            self.assertEqual((calls["prepare"], calls["dispatch"], calls["combine"]), (3, 3, 2))
            self.assertEqual((calls["combine_bwd"], calls["dispatch_bwd"]), (2, 2))
            expected = 2 * (weights * on_device(data.idx[RANK] >= 0)).sum(1, keepdim=True).expand_as(tokens)
            torch.testing.assert_close(tokens.grad, expected, rtol=1e-5, atol=1e-5)
            group.check()

    def test_4_two_groups(self):
        with make_group() as one, make_group(combine_precision="exact") as two:
            self.check(one, NUM_TOKENS)
            self.check(two, NUM_TOKENS, top_k=3, alignment=8)
            self.check(one, NUM_TOKENS, top_k=1)
            data = Data(NUM_TOKENS, 2, seed=5)
            plan = epx.torch.prepare(one, on_device(data.idx[RANK]))
            strange = dataclasses.replace(plan, group=two)
            epx.torch.dispatch(strange, single(data.tokens[RANK]), num_rows=4)
            torch_model.wait()
            with self.assertRaises(epx.EventError) as caught:
                two.check()
            self.assertIn(epx.EventKind.HANDLE_MISMATCH, caught.exception.events)
            one.check()

    def test_5_overflow_and_bad_indices_are_told_by_check(self):
        with make_group(max_recv_tokens_per_rank=2, max_alignment=1) as group:
            idx = torch.zeros(4, 2, dtype=torch.int64)
            idx[:, 1] = 77
            tokens = on_device(torch.ones(4, HIDDEN)).requires_grad_()
            plan = epx.torch.prepare(group, on_device(idx))
            rows, _ = epx.torch.dispatch(plan, tokens)
            self.assertLessEqual(plan.num_rows, 2)
            epx.torch.combine(plan, rows).sum().backward()
            torch_model.wait()
            with self.assertRaises(epx.EventError) as caught:
                group.check()
            self.assertEqual(caught.exception.events[epx.EventKind.BAD_INDEX], 4)
            self.assertEqual(epx.EventKind.OVERFLOW in caught.exception.events, group.first_local_expert == 0)
            group.check()

    def test_6_checkpointing(self):
        with make_group() as group:
            data = Data(NUM_TOKENS, 2, seed=6)
            own = single(data.matrices[group.first_local_expert :][: group.num_local_experts])
            weights = single(data.weights[RANK])
            found = []
            for options in ({}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": epx.torch.saves_exchange}):
                tokens = single(data.tokens[RANK]).requires_grad_()

                def layer(tokens):
                    return torch_model.exchange_layer(group, data.idx[RANK], tokens, weights, own)

                with count_calls() as calls:
                    out = checkpoint(layer, tokens, **options) if options else layer(tokens)
                    out.sin().sum().backward()
                found.append((tokens.grad, calls["prepare"], calls["dispatch"], calls["combine_bwd"], calls["dispatch_bwd"]))
            for grad, *_ in found[1:]:
                torch.testing.assert_close(grad, found[0][0], rtol=0, atol=0)
            self.assertEqual([counts for _, *counts in found], [[1, 1, 1, 1], [2, 2, 1, 1], [1, 1, 1, 1]])
            group.check()

    def test_7_many_in_flight(self):
        """1F1B: backwards come in the order of their forwards, with other forwards between them."""
        with make_group() as group:
            own = None
            pending, grads, expected = [], [], []

            def backward():
                out, leaf = pending.pop(0)
                grads.append(gradients(out.sin().sum(), [leaf])[0])

            for number in range(5):
                data = Data([count + number for count in NUM_TOKENS], 2, seed=20 + number)
                if own is None:
                    own, matrices = single(data.matrices[group.first_local_expert :][: group.num_local_experts]), data.matrices
                leaf = single(data.tokens[RANK]).requires_grad_()
                out = torch_model.exchange_layer(group, data.idx[RANK], leaf, single(data.weights[RANK]), own)
                pending.append((out, leaf))
                source = data.tokens[RANK]
                expected += gradients(dense(data.idx[RANK], source, data.weights[RANK], matrices).sin().sum(), [source])
                if number >= 2:
                    backward()
            while pending:
                backward()
            for grad, wanted in zip(grads, expected):
                torch.testing.assert_close(grad.double().cpu(), wanted, rtol=1e-4, atol=1e-4)

    def test_7_group_has_no_calls_on_numpy_arrays(self):
        calls = {name for name in vars(epx.Group) if name.startswith(("prepare", "dispatch", "combine"))}
        self.assertIn("dispatch", calls)
        with make_group() as group:
            self.assertEqual({name for name in calls if hasattr(group, name)}, set())
            self.assertNotIsInstance(group, epx.Group)
            self.assertEqual((group.rank, group.num_ranks, group.num_experts), (RANK, RANKS, EXPERTS))
            self.assertRegex(repr(group), f"<epx.torch.Group [0-9a-f]{{16}}: rank {RANK} of {RANKS}, .*>")

    def test_8_refusals(self):
        with make_group() as group:
            data = Data([4] * RANKS, 2, seed=9)
            idx, tokens, weights = on_device(data.idx[RANK]), single(data.tokens[RANK]), single(data.weights[RANK])
            plan = epx.torch.prepare(group, idx)
            rows, row_weights = epx.torch.dispatch(plan, tokens, weights)
            prepare, dispatch, combine = epx.torch.prepare, epx.torch.dispatch, epx.torch.combine
            for words, call in {
                "topk_idx is float32": lambda: prepare(group, idx.float()),
                "topk_idx has shape": lambda: prepare(group, idx[0]),
                "topk_idx has K = 18; it must be 1 to 3": lambda: prepare(group, idx.repeat(1, 9)),
                "topk_idx has K = 0; it must be 1 to 3": lambda: prepare(group, idx[:, :0].contiguous()),
                "alignment is 10000; it must be 0 to 16": lambda: prepare(group, idx, alignment=10_000),
                "counts_dtype is torch.int16; it must be torch.int32 or torch.int64": lambda: prepare(
                    group, idx, counts_dtype=torch.int16
                ),
                "tokens is float64": lambda: dispatch(plan, tokens.double()),
                "tokens is list; this call takes torch.Tensor": lambda: dispatch(plan, [1.0]),
                "tokens has shape": lambda: dispatch(plan, tokens[0]),
                "tokens has strides": lambda: dispatch(plan, tokens.t().contiguous().t()),
                "topk_weights is float16": lambda: dispatch(plan, tokens, weights.half()),
                "topk_weights has shape": lambda: dispatch(plan, tokens, weights[:, :1].contiguous()),
                "pads is 'none'": lambda: dispatch(plan, tokens, pads="none"),
                "num_rows is -3": lambda: dispatch(plan, tokens, num_rows=-3),
                "num_rows and recv_tokens are given": lambda: dispatch(plan, tokens, num_rows=len(rows), recv_tokens=rows),
                "recv_tokens is bfloat16": lambda: dispatch(plan, tokens, recv_tokens=rows.bfloat16()),
                "recv_weights has shape": lambda: combine(plan, rows, row_weights[1:].contiguous()),
                "expert_out is int32": lambda: combine(plan, rows.int()),
                "handle_mem is float32": lambda: combine(dataclasses.replace(plan, handle_mem=plan.handle_mem.float()), rows),
                "hidden": lambda: dispatch(plan, tokens.repeat(1, 9)),
                "top_k is 4294967298; it must fit in 32 bits": lambda: combine(
                    dataclasses.replace(plan, top_k=2**32 + 2), rows
                ),
                "plan is torch.Tensor; this call takes epx.torch.Plan": lambda: combine(plan.handle_mem, rows),
                "group is epx.torch.Plan; this call takes epx.torch.Group": lambda: prepare(plan, idx),
                "ffn is str; this call takes epx.moe.Ffn": lambda: epx.torch.MoELayer(
                    group, router=epx.moe.Router(top_k=1), ffn="relu2"
                ),
            }.items():
                ranks.refused(self, words, call)
            for elsewhere in ("meta", "cpu")[: 2 if DEVICE.type == "cuda" else 1]:
                with self.assertRaisesRegex(
                    epx.InvalidArgumentError, f"tokens is on {elsewhere}; the tensors of this group are on {DEVICE}"
                ):
                    dispatch(plan, tokens.to(elsewhere))
            # The refused calls have not taken part: the group goes on.
            self.check(group, [4] * RANKS)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            dispatch(plan, tokens, num_rows=1)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            epx.torch.prepare(group, idx)
        leaf = tokens.clone().requires_grad_()
        with make_group() as group:
            out, _ = dispatch(prepare(group, idx), leaf)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            out.sum().backward()

    def test_8_refusals_are_those_of_numpy(self):
        """One mistake has one sentence, whether Python finds it on numpy arrays, in PyTorch, or an operator does."""
        idx, tokens, weights = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, HIDDEN), torch.zeros(4, 2)
        rows = torch.zeros(8, HIDDEN)
        mistakes = {
            "shape": lambda calls, array: calls.prepare(array(idx[0])),
            "index dtype": lambda calls, array: calls.prepare(array(weights)),
            "strides": lambda calls, array: calls.prepare(array(idx.t())),
            "top_k": lambda calls, array: calls.prepare(array(idx.repeat(1, 9))),
            "alignment": lambda calls, array: calls.prepare(array(idx), alignment=10_000),
            "weights' shape": lambda calls, array: calls.dispatch(array(tokens), array(weights[:3])),
            "weights' dtype": lambda calls, array: calls.dispatch(array(tokens), array(weights.double())),
            "num_rows": lambda calls, array: calls.dispatch(array(tokens), num_rows=-3),
            "two sizes": lambda calls, array: calls.dispatch(array(tokens), num_rows=8, recv_tokens=array(rows)),
            "pads": lambda calls, array: calls.dispatch(array(tokens), pads="none"),
            "max_rows": lambda calls, array: calls.dispatch_rank_major(array(tokens), array(idx), max_rows=-1),
        }

        def sentence(mistake, calls, array):
            with self.assertRaises(epx.InvalidArgumentError) as caught:
                mistake(calls, array)
            return str(caught.exception)

        local = epx.Group(epx.bootstrap.local(), **config(transport="host"))
        with make_group() as group, local:
            of_torch = types.SimpleNamespace(
                prepare=functools.partial(epx.torch.prepare, group),
                dispatch=functools.partial(epx.torch.dispatch, epx.torch.prepare(group, on_device(idx))),
                dispatch_rank_major=functools.partial(epx.torch.dispatch_rank_major, group),
            )
            of_numpy = types.SimpleNamespace(
                prepare=local.prepare,
                dispatch=functools.partial(local.dispatch, local.prepare(idx.numpy())),
                dispatch_rank_major=local.dispatch_rank_major,
            )
            for name, mistake in mistakes.items():
                with self.subTest(name):
                    wanted = sentence(mistake, of_numpy, lambda tensor: tensor.numpy())
                    self.assertEqual(sentence(mistake, of_torch, on_device), wanted)

    def test_9_operators_take_padded_rows(self):
        """Inductor pads rows; in eager mode the package's functions refuse what the operators then copy."""

        def padded(tensor):
            wider = tensor.new_empty(tensor.shape[0], tensor.shape[1] + 3)
            wider[:, : tensor.shape[1]] = tensor
            return wider[:, : tensor.shape[1]]

        with make_group() as group:
            data = Data([4] * RANKS, 2, seed=13)
            idx, tokens, weights = on_device(data.idx[RANK]), single(data.tokens[RANK]), single(data.weights[RANK])
            ops, rows = torch.ops.epx, group.max_recv_tokens_per_rank
            found = []
            for change in (lambda tensor: tensor, padded):
                memory, results = ops.prepare(group.number, change(idx), 1, False)
                received, row_weights = ops.dispatch(group.number, memory, change(tokens), change(weights), 2, 1, 0, rows)
                used = epx.torch.Plan(group, 2, 1, 4, memory, results).num_rows
                received[used:] = 0
                row_weights[used:] = 0
                out = ops.combine(group.number, memory, change(received), row_weights, 2, 1, 4)
                grad_rows, _ = ops.combine_bwd(group.number, memory, change(tokens), None, row_weights, 2, 1, rows)
                grad_rows[used:] = 0
                grad_tokens, _ = ops.dispatch_bwd(group.number, memory, change(grad_rows), None, 2, 1, 4)
                found.append((results, received, row_weights, out, grad_rows, grad_tokens))
            torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
            for call in (lambda: epx.torch.prepare(group, padded(idx)), lambda: self.layer_of(group)(padded(tokens))):
                with self.assertRaisesRegex(epx.InvalidArgumentError, r"has strides .* at shape .*: it must be contiguous"):
                    call()
            group.check()

    @staticmethod
    def layer_of(group):
        return epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER))

    def test_a_failures(self):
        if RANKS == 1:
            self.skipTest("a failure needs a peer")
        group = make_group(timeout=5 if ranks.shares_gpu() else 1)  # which holds for creating it, too
        idx = on_device(torch.zeros(2, 2, dtype=torch.int64))
        tokens = on_device(torch.ones(2, HIDDEN)).requires_grad_()
        with self.assertRaises(epx.GroupError) as caught:  # by combine on a rank that comes late
            plan = epx.torch.prepare(group, idx)
            rows, _ = epx.torch.dispatch(plan, tokens)
            out = epx.torch.combine(plan, rows)
            torch_model.wait()
            if RANK == 0:
                group.abort()
            for _ in range(3):  # on a GPU a later call tells
                out.sum().backward(retain_graph=True)
                torch_model.wait()
        self.assertIn(caught.exception.status, (epx.Status.ABORTED, epx.Status.TIMEOUT))
        group.destroy()


class Layers(unittest.TestCase):
    def make_layer(self, group, **options):
        router = epx.moe.Router(options.pop("top_k", 2), score=options.pop("score", "topk_then_softmax"))
        return epx.torch.MoELayer(
            group, router=router, ffn=epx.moe.Ffn(HIDDEN, INNER, options.pop("activation", "swiglu")), **options
        )

    def check(self, layer, num_tokens, seed=1, mask=False, tolerance=2e-5):
        group = layer.group
        everything = torch_model.whole_parameters(layer)
        data = Data(num_tokens, layer.router.top_k, seed=seed)
        masks = [torch.arange(count) % 3 != 1 if mask else torch.ones(count, dtype=torch.bool) for count in num_tokens]
        losses, outs = [], []
        for rank in range(RANKS):
            outs.append(torch_model.dense_block(layer, data.tokens[rank], everything, masks[rank]))
            losses.append(outs[-1].sin().sum())
        tokens = single(data.tokens[RANK]).requires_grad_()
        out, routing = layer(tokens, token_mask=on_device(masks[RANK]) if mask else None, with_routing=True)
        torch.testing.assert_close(out.double().cpu(), outs[RANK], rtol=tolerance, atol=tolerance)
        self.assertEqual(int(routing.global_counts.sum()), layer.router.top_k * sum(int(each.sum()) for each in masks))
        layer.zero_grad()
        out.sin().sum().backward()
        names = [name for name, _ in layer.named_parameters()]
        (wanted,) = gradients(losses[RANK], [data.tokens[RANK]], keep=True)
        torch.testing.assert_close(tokens.grad.double().cpu(), wanted, rtol=1e-4, atol=1e-4)
        own = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        all_losses = sum(losses) / (RANKS if layer.reduce_gradients == "mean" else 1)
        for name in names:
            is_local = name == "gate_weight" and layer.reduce_gradients == "none"
            (grad,) = gradients(losses[RANK] if is_local else all_losses, [everything[name]], keep=True)
            torch.testing.assert_close(
                getattr(layer, name).grad.double().cpu(),
                grad if name == "gate_weight" else grad[own],
                rtol=1e-4,
                atol=1e-4,
                msg=lambda m: f"{name}: {m}",
            )
        group.check()
        return routing

    def test_1_against_dense(self):
        with make_group() as group:
            for number, options in enumerate(
                (
                    {},
                    {"top_k": 3, "alignment": 16, "weighting": "early"},
                    {"activation": "gelu", "bias": True},
                    {"score": "softmax_then_topk", "recompute": True, "bias": True},
                    {"reduce_gradients": "none", "bias": True},
                )
            ):
                layer = self.make_layer(group, seed=number, **options)
                self.check(layer, NUM_TOKENS)
                self.check(layer, [4] * RANKS, seed=2, mask=True)
                self.check(layer, [0] * RANKS)
                layer.destroy()

    def test_2_layers_together(self):
        with make_group() as group:
            one = self.make_layer(group, seed=1, top_k=1)
            two = self.make_layer(group, seed=2, top_k=3, alignment=8)
            twin = self.make_layer(group, seed=1, top_k=1)
            torch.testing.assert_close(one.first_weight, twin.first_weight, rtol=0, atol=0)
            with epx.torch.Group(epx.bootstrap.local(), **torch_model.config(transport="host")) as alone:
                whole = self.make_layer(alone, seed=1, top_k=1)
                for name in ("first_weight", "down_weight"):  # the seed alone decides, and not the number of ranks
                    own = getattr(whole, name)[group.first_local_expert :][: group.num_local_experts]
                    torch.testing.assert_close(getattr(one, name).cpu(), own, rtol=0, atol=0)
            tokens = single(Data(NUM_TOKENS, 1, seed=7).tokens[RANK]).requires_grad_()
            with count_calls() as calls:
                a, b = one(tokens), twin(tokens)
                torch.testing.assert_close(a, b, rtol=0, atol=0)
                (a + b + two(a)).sum().backward()
            self.assertEqual((calls["block_fwd"], calls["block_bwd"]), (3, 3))
            for layer in (one, twin, two):
                layer.destroy()
                layer.destroy()

    def test_3_flights(self):
        with make_group() as group:
            layer = self.make_layer(group, max_in_flight=2)
            tokens = single(Data(NUM_TOKENS, 2, seed=8).tokens[RANK])
            wanted = layer(tokens)
            grads = gradients(wanted.sum(), [layer.down_weight])
            del wanted
            # Backwards in the order of the forwards, and in the other one.
            for order in ((0, 1), (1, 0)):
                outs = [layer(tokens) for _ in range(2)]
                with self.assertRaisesRegex(epx.InvalidArgumentError, "max_in_flight"):
                    layer(tokens)
                for number in order:
                    torch.testing.assert_close(gradients(outs[number].sum(), [layer.down_weight]), grads)
                del outs
            # A forward without a backward gives its flight back when nothing refers to it any more, and so do evaluations.
            for _ in range(5):
                layer(tokens)
                with torch.no_grad():
                    layer(tokens)
            kept = [layer(tokens)]
            kept.append(layer(tokens))
            del kept[0]
            kept.append(layer(tokens))
            with self.assertRaisesRegex(RuntimeError, "second time"):
                for _ in range(2):
                    kept[0].sum().backward()
            del kept
            # Any number of checkpointed forwards needs one flight, in their backwards.
            layer.zero_grad()
            outs = [checkpoint(layer, tokens.clone().requires_grad_(), use_reentrant=False) for _ in range(4)]
            sum(outs).sum().backward()
            torch.testing.assert_close(layer.down_weight.grad, 4 * grads[0], rtol=1e-5, atol=1e-5)
            layer.destroy()
            with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
                layer(tokens)

    def test_3b_arena(self):
        """Layers that share flights: as many forwards of all of them may be in flight as the arena has."""
        with make_group() as group, make_group() as other:
            sizes = dict(router=epx.moe.Router(3), ffn=epx.moe.Ffn(HIDDEN, INNER), alignment=8)
            arena = epx.torch.Arena(group, num_flights=3, **sizes)
            self.assertEqual(arena.info()["num_flights"], 3)
            layers = [self.make_layer(group, seed=number, top_k=number + 1, arena=arena) for number in range(3)]
            own = [self.make_layer(group, seed=number, top_k=number + 1) for number in range(3)]
            tokens = single(Data(NUM_TOKENS, 1, seed=12).tokens[RANK])

            def run(layers):
                out = tokens
                for layer in layers:
                    out = out + layer(out)
                return [out, *gradients(out.sin().sum(), [each for layer in layers for each in layer.parameters()])]

            torch.testing.assert_close(run(layers), run(own), rtol=0, atol=0)
            kept = [layers[0](tokens), layers[1](tokens), layers[0](tokens)]
            with self.assertRaisesRegex(epx.InvalidArgumentError, "the flights, 3, all have a forward"):
                layers[2](tokens)
            del kept
            layers[2](tokens)
            with self.assertRaisesRegex(epx.InvalidArgumentError, "another group"):
                self.make_layer(other, arena=arena)
            for each in (*layers, *own, arena, arena):
                each.destroy()
            with self.assertRaisesRegex(epx.InvalidArgumentError, "arena has been destroyed"):
                self.make_layer(group, arena=arena)
            group.check()

    @unittest.skipIf(ranks.num_nodes() > 1, "a path of slices needs a group of one node")
    def test_3c_paths(self):
        """The bits are those of path "dispatch" in a group of the precision that sums as the path does."""
        tokens = single(Data(NUM_TOKENS, 1, seed=13).tokens[RANK]).requires_grad_()
        for path, precision in {"ring": "wire", "ragged": "exact"}.items():
            with make_group(combine_precision=precision) as group, self.subTest(path=path):
                sizes = dict(router=epx.moe.Router(3), ffn=epx.moe.Ffn(HIDDEN, INNER))
                arena = epx.torch.Arena(group, path=path, **sizes)
                found = []
                for options in (dict(weighting="early"), dict(path=path), dict(path=path, arena=arena)):
                    layer = self.make_layer(group, top_k=3, bias=True, seed=3, **options)
                    out = layer(tokens)
                    found.append([out, *gradients(out.sin().sum(), [tokens, *layer.parameters()])])
                    layer.destroy()
                for other in found[1:]:
                    torch.testing.assert_close(other, found[0], rtol=0, atol=0)
                for words, options in {
                    "path is 'star'; it must be one of 'dispatch', 'ring', 'ragged'": dict(path="star"),
                    f"weighting is EPX_MOE_WEIGHT_LATE (0); on path {path} it must be EARLY (1)": dict(weighting="late"),
                }.items():
                    ranks.refused(self, words, lambda: self.make_layer(group, **{"path": path, **options}))
                ranks.refused(self, "path is 'star'", lambda: epx.torch.Arena(group, path="star", **sizes))
                arena.destroy()
                group.check()

    def test_4_balance(self):
        with make_group() as group:
            options = dict(router=epx.moe.Router(2, aux_loss_coeff=0.5), ffn=epx.moe.Ffn(HIDDEN, INNER), selection_bias=True)
            layer, local = (epx.torch.MoELayer(group, reduce_gradients=each, **options) for each in ("mean", "none"))
            data = Data(NUM_TOKENS, 2, seed=9)
            tokens = single(data.tokens[RANK])
            out, routing = layer(tokens, with_routing=True)
            everything = torch_model.whole_parameters(layer)
            gate = everything["gate_weight"]
            counts = routing.global_counts.sum(0).double().cpu()
            total = sum(NUM_TOKENS)
            shares = [((source.detach() @ gate.t()).softmax(-1).sum(0) * counts).sum() for source in data.tokens]
            losses = [EXPERTS * 0.5 / (2 * total**2) * share for share in shares]
            torch.testing.assert_close(layer.aux_loss(routing).cpu(), losses[RANK].detach(), rtol=1e-5, atol=1e-7)
            (out * 0).sum().backward()  # leaves the gradient of the loss that no output has
            layer.zero_grad()
            # The mean over the ranks has all of the load-balance loss, as it has on one rank with the tokens of all.
            for each, loss in (layer, sum(losses)), (local, losses[RANK]):
                each.aux_loss_grad = 3.0
                each(tokens).mul(0).sum().backward()
                torch.testing.assert_close(
                    each.gate_weight.grad.double().cpu(), 3 * gradients(loss, [gate], keep=True)[0], rtol=1e-4, atol=1e-6
                )
            local.destroy()
            layer.update_selection_bias(routing, 0.25)
            torch.testing.assert_close(layer.selection_bias.double().cpu(), 0.25 * torch.sign(counts.mean() - counts))
            layer.selection_bias.copy_(on_device(torch.tensor([100.0, 100.0] + [0.0] * (EXPERTS - 2))))
            _, routing = layer(tokens, with_routing=True)
            self.assertTrue(((routing.topk_idx == 0) | (routing.topk_idx == 1)).all())
            # Counts are compared as integers: float32 has not all of these.
            for counts, signs in (
                ([2**24 + 1] + [2**24] * 4, [-1, 1, 1, 1, 1]),
                ([2**24] * 2 + [2**24 + 2, 2**24 + 1, 2**24 + 2], [1, 1, -1, 0, -1]),
                ([8_400_002, 8_399_999, 8_400_001, 8_400_000, 8_399_998], [-1, 1, -1, 0, 1]),
            ):
                counts = on_device(torch.tensor([counts], dtype=torch.int64))
                layer.selection_bias.zero_()
                layer.update_selection_bias(dataclasses.replace(routing, global_counts=counts), 0.5)
                self.assertEqual(layer.selection_bias.tolist(), [0.5 * sign for sign in signs])
            with self.assertRaisesRegex(epx.InvalidArgumentError, "rate"):
                layer.update_selection_bias(routing, float("nan"))
            layer.destroy()

    def test_5_refusals(self):
        with make_group() as group:
            with self.assertRaisesRegex(epx.InvalidArgumentError, "dtype is torch.float64"):
                self.make_layer(group, dtype=torch.float64)
            with self.assertRaisesRegex(epx.InvalidArgumentError, "activation"):
                self.make_layer(group, activation="tanh")
            layer = self.make_layer(group)
            tokens = on_device(torch.ones(3, HIDDEN))
            for words, call in {
                "tokens is float64": lambda: layer(tokens.double()),
                "tokens has shape": lambda: layer(tokens[:, :-1].contiguous(), logits=on_device(torch.ones(3, EXPERTS))),
                "logits has shape": lambda: layer(tokens, logits=on_device(torch.ones(3, EXPERTS + 1))),
                "logits is float64": lambda: layer(tokens, logits=on_device(torch.ones(3, EXPERTS)).double()),
                "token_mask has shape": lambda: layer(tokens, token_mask=on_device(torch.ones(4, dtype=torch.bool))),
            }.items():
                ranks.refused(self, words, call)
            out = layer(tokens)
            out.sum().backward()
            with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each):
                out = layer(tokens)
            with self.assertRaisesRegex(epx.InvalidArgumentError, "not as a copy"):
                out.sum().backward()
            layer.destroy()

    def test_5b_means_of_gradients(self):
        """The operator behind gate_weight's mean, in groups that have room for few rows, or for rows of a narrower dtype."""
        special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-41, 3e38, 1 / 3])
        for number, changes in enumerate(
            (
                {},
                {"max_tokens_per_rank": 2},
                {"fixed_rail_tokens": 3},
                {"max_recv_tokens_per_rank": RANKS, "max_alignment": 1},
                {"num_experts": 1},
                {"num_experts": 11, "max_tokens_per_rank": 4, "combine_precision": "exact"},
                {"max_token_dtype": "bfloat16"},
                {"max_token_dtype": "float16", "max_tokens_per_rank": 9},
                {"max_token_dtype": "bfloat16", "max_recv_tokens_per_rank": 5 * RANKS, "max_alignment": 1},
            )
        ):
            with make_group(**changes) as group:
                create_mean_routes(group)
                limit = changes.get("fixed_rail_tokens", group.max_tokens_per_rank)  # of what another node takes
                self.assertLessEqual(group.mean_routes.num_rows * group.mean_routes.parts, limit)
                for hidden in (1, HIDDEN - 1, HIDDEN):
                    rows = [
                        torch.randn(group.num_experts, hidden, generator=torch.Generator().manual_seed(10 * number + rank))
                        for rank in range(RANKS)
                    ]
                    if hidden == len(special):
                        rows[RANKS - 1][0] = special
                    found = torch.ops.epx.mean_over_ranks(group.number, on_device(rows[RANK])).cpu()
                    wanted = torch.stack(rows).sum(0) / RANKS
                    torch.testing.assert_close(
                        found, wanted, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m: f"{changes}: {m}"
                    )
                group.check()

    def test_5c_what_takes_part_in_means(self):
        with make_group() as group:
            layer = self.make_layer(group, max_in_flight=2)
            tokens = single(Data(NUM_TOKENS, 2, seed=14).tokens[RANK])
            calls_of_means = int(RANKS > 1)
            with count_calls() as calls:
                layer(tokens).sum().backward()
            self.assertEqual(calls["mean_over_ranks"], calls_of_means)
            once = [parameter.grad.clone() for parameter in layer.parameters()]
            for _ in range(2):  # accumulated gradients, of two flights
                one, two = layer(tokens), layer(tokens)
                (one + two).sum().backward()
            torch.testing.assert_close([each.grad for each in layer.parameters()], [5 * each for each in once])
            with count_calls() as calls, torch.no_grad():
                layer(tokens)
            self.assertEqual(dict(calls), {"block_fwd": 1})
            logits = on_device(torch.randn(len(tokens), EXPERTS)).requires_grad_()
            layer.zero_grad()
            with count_calls() as calls:
                layer(tokens, logits=logits).sum().backward()
            self.assertEqual((dict(calls), layer.gate_weight.grad), ({"block_fwd": 1, "block_bwd": 1}, None))
            layer.gate_weight.requires_grad_(False)
            with count_calls() as calls:
                layer(tokens).sum().backward()
            self.assertEqual((dict(calls), layer.gate_weight.grad), ({"block_fwd": 1, "block_bwd": 1}, None))
            layer.destroy()
            with self.assertRaisesRegex(epx.InvalidArgumentError, "reduce_gradients is 'sum'; it must be one of 'mean', 'none'"):
                self.make_layer(group, reduce_gradients="sum")
        if RANKS > 1:
            with make_group(max_recv_tokens_per_rank=RANKS - 1, max_alignment=1) as group:
                layer = self.make_layer(group)
                with torch.no_grad():
                    layer(tokens[:0])
                with self.assertRaisesRegex(
                    epx.InvalidArgumentError, f"max_recv_tokens_per_rank {RANKS - 1}: .* reduce_gradients='none'"
                ):
                    layer(tokens[:0])
                layer.destroy()

    def test_6_training_reaches_a_target(self):
        with make_group() as group:
            layer = self.make_layer(group, seed=3)
            data = Data([8] * RANKS, 2, seed=11)
            tokens = single(data.tokens[RANK])
            target = on_device(torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(RANK)))
            optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
            losses = []
            for _ in range(30):
                optimizer.zero_grad()
                loss = (layer(tokens) - target).pow(2).mean()
                loss.backward()
                optimizer.step()
                group.check()
                losses.append(loss.item())
            self.assertLess(losses[-1], 0.7 * losses[0])
            layer.destroy()


if __name__ == "__main__":
    torch_model.main()
