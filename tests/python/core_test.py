# SPDX-License-Identifier: Apache-2.0
"""The five operations on numpy arrays, against a dense reference in float64; events, refusals and failures as exceptions."""

import os
import unittest

import ranks

ranks.require("numpy")
import numpy
import reference

import epx

RANK, RANKS = ranks.rank(), ranks.num_ranks()
EXPERTS, HIDDEN, TOP_K = 5, 24, 3


CONFIG = dict(
    num_experts=EXPERTS,
    max_tokens_per_rank=32,
    hidden_dim=HIDDEN,
    max_top_k=TOP_K,
    max_token_dtype="float32",
    transport="host",
)


def make_group(name, **changes):
    with ranks.directory_bootstrap(name) as bootstrap:
        return epx.Group(bootstrap, **{**CONFIG, "timeout": ranks.TIMEOUT_SECONDS, **changes})


def group_from(all_gather):
    """Rank 0 of a group of two that Python's `all_gather` makes."""
    return epx.Group(epx.bootstrap.from_all_gather(0, 2, all_gather), **CONFIG, timeout=5)


def make_data(num_tokens, seed, top_k=TOP_K, dtype=numpy.float32, masked=0.2):
    """topk_idx, tokens and weights of each rank; rank r has num_tokens[r] tokens."""
    generator = numpy.random.default_rng(seed)
    idx, tokens, weights = [], [], []
    for count in num_tokens:
        choice = numpy.argsort(generator.random((count, EXPERTS)), axis=1)[:, :top_k]
        idx.append(numpy.where(generator.random(choice.shape) < masked, -1, choice))
        tokens.append(generator.standard_normal((count, HIDDEN)).astype(dtype))
        weights.append(generator.random(choice.shape).astype(numpy.float32))
    return idx, tokens, weights


class Layer(unittest.TestCase):
    def check_plan(self, plan, wanted):
        numpy.testing.assert_array_equal(plan.counts, wanted.counts[RANK])
        numpy.testing.assert_array_equal(plan.offsets, wanted.offsets[RANK])
        numpy.testing.assert_array_equal(plan.global_counts, wanted.global_counts())
        numpy.testing.assert_array_equal(plan.slot, wanted.slots[RANK][..., 1])
        self.assertEqual(plan.info[1], wanted.counts[RANK].sum())

    def check_layer(
        self,
        group,
        num_tokens,
        *,
        alignment=1,
        top_k=TOP_K,
        dtype=numpy.float32,
        seed=1,
        index_dtype=numpy.int64,
        tolerance=1e-5,
    ):
        idx, tokens, weights = make_data(num_tokens, seed, top_k, dtype)
        wanted = reference.Exchange(idx, EXPERTS, alignment)
        plan = group.prepare(
            idx[RANK].astype(index_dtype), alignment=alignment, counts_dtype=index_dtype, with_slot=True, with_slot_origin=True
        )
        self.check_plan(plan, wanted)
        self.assertEqual(plan.counts.dtype, index_dtype)
        origins = {tuple(origin) for origin in plan.slot_origin if origin[0] >= 0}
        self.assertEqual(
            origins,
            {(source, token, k) for source in range(RANKS) for token, k, owner, _ in wanted.routes(source) if owner == RANK},
        )

        recv_tokens, recv_weights = group.dispatch(plan, tokens[RANK], weights[RANK])
        rows, row_weights = wanted.scatter(tokens), wanted.scatter_weights(weights)
        numpy.testing.assert_array_equal(recv_tokens, rows[RANK])
        numpy.testing.assert_array_equal(recv_weights, row_weights[RANK])

        expert_out = [(row * 2 + 1).astype(dtype) for row in rows]
        out = group.combine(plan, expert_out[RANK], recv_weights)
        numpy.testing.assert_allclose(out, wanted.gather(expert_out, row_weights)[RANK], tolerance, tolerance)
        self.assertEqual(out.dtype, numpy.dtype(dtype))

        grad_out = [numpy.cos(token).astype(dtype) for token in tokens]
        grad_expert_out, grad_recv_weights = group.combine_bwd(plan, grad_out[RANK], expert_out[RANK], recv_weights)
        grad_rows = [row.astype(float) * weight[:, None] for row, weight in zip(wanted.scatter(grad_out), row_weights)]
        numpy.testing.assert_allclose(grad_expert_out, grad_rows[RANK], tolerance, tolerance)
        grad_row_weights = wanted.row_products(grad_out, expert_out)
        in_zone = wanted.scatter_weights([numpy.ones(i.shape) for i in idx])[RANK] > 0
        numpy.testing.assert_allclose(grad_recv_weights[in_zone], grad_row_weights[RANK][in_zone], 1e-4, 1e-4)

        grad_tokens, grad_topk_weights = group.dispatch_bwd(plan, expert_out[RANK], row_weights[RANK])
        numpy.testing.assert_allclose(grad_tokens, wanted.gather(expert_out)[RANK], tolerance, tolerance)
        numpy.testing.assert_array_equal(grad_topk_weights, wanted.gather_weights(row_weights)[RANK].astype(numpy.float32))

        # Without weights, nothing but the rows is returned.
        recv_tokens, none = group.dispatch(plan, tokens[RANK])
        self.assertIsNone(none)
        numpy.testing.assert_allclose(group.combine(plan, recv_tokens), wanted.gather(rows)[RANK], tolerance, tolerance)
        grad_expert_out, none = group.combine_bwd(plan, grad_out[RANK])
        self.assertIsNone(none)
        numpy.testing.assert_array_equal(grad_expert_out, wanted.scatter(grad_out)[RANK])
        grad_tokens, none = group.dispatch_bwd(plan, grad_expert_out)
        self.assertIsNone(none)
        group.check()

    def test_1_layers(self):
        with make_group("layers") as group:
            self.assertEqual((group.rank, group.num_ranks, group.num_experts), (RANK, RANKS, EXPERTS))
            self.check_layer(group, [7] * RANKS)
            self.check_layer(group, [7] * RANKS, alignment=4, seed=2, index_dtype=numpy.int32)
            self.check_layer(group, [0] + [9] * (RANKS - 1), top_k=1, alignment=16, seed=3)
            self.check_layer(group, [32 - 5 * rank for rank in range(RANKS)], seed=4)
            self.check_layer(group, [0] * RANKS, seed=5)
            self.check_layer(group, [11] * RANKS, dtype=numpy.float16, seed=6, tolerance=1e-2)

    def test_2_bfloat16(self):
        try:
            from ml_dtypes import bfloat16
        except ModuleNotFoundError:
            self.skipTest("ml_dtypes is not installed")
        with make_group("bfloat16", max_token_dtype="bfloat16") as group:
            self.assertEqual(group.max_token_dtype, "bfloat16")
            self.check_layer(group, [13] * RANKS, dtype=bfloat16, tolerance=5e-2)

    def test_3_two_groups_and_outputs_of_the_caller(self):
        with make_group("two") as group:
            with make_group("exact", combine_precision="exact") as exact:
                self.assertNotEqual(group.group_id, exact.group_id)
                idx, tokens, _ = make_data([6] * RANKS, 7)
                wanted = reference.Exchange(idx, EXPERTS)
                plans = [each.prepare(idx[RANK]) for each in (group, exact)]
                rows = numpy.full((plans[0].num_rows + 3, HIDDEN), 7, numpy.float32)
                received, _ = group.dispatch(plans[0], tokens[RANK], recv_tokens=rows)
                self.assertIs(received, rows)
                numpy.testing.assert_array_equal(rows[:-3], wanted.scatter(tokens)[RANK])
                numpy.testing.assert_array_equal(rows[-3:], 7)
                again, _ = exact.dispatch(plans[1], tokens[RANK])
                out = numpy.empty_like(tokens[RANK])
                self.assertIs(exact.combine(plans[1], again, out=out), out)
                numpy.testing.assert_allclose(out, wanted.gather(wanted.scatter(tokens))[RANK], 1e-5, 1e-5)

    def test_3_nodes(self):
        with make_group("nodes", combine_precision="node", ranks_per_node=1) as group:
            self.assertEqual(group.ranks_per_node, 1)
            self.check_layer(group, [7] * RANKS, seed=8)

    def test_3_prepare_dispatch(self):
        with make_group("prepare_dispatch", max_sidecar_bytes=4) as group:
            for num_tokens, alignment, with_weights in (
                ([32 - 5 * rank for rank in range(RANKS)], 1, True),
                ([0] + [9] * (RANKS - 1), 4, False),
                ([1] * RANKS, 16, True),
            ):
                idx, tokens, weights = make_data(num_tokens, 14)
                sidecars = [numpy.arange(len(each), dtype=numpy.float32)[:, None] for each in tokens]
                wanted = reference.Exchange(idx, EXPERTS, alignment)
                plan, rows, row_weights, sidecar = group.prepare_dispatch(
                    tokens[RANK],
                    idx[RANK],
                    weights[RANK] if with_weights else None,
                    alignment=alignment,
                    with_slot=True,
                    with_slot_origin=True,
                    sidecar=sidecars[RANK],
                )
                self.check_plan(plan, wanted)
                self.assertEqual((plan.slot_origin[:, 0] >= 0).sum(), wanted.counts[RANK].sum())
                numpy.testing.assert_array_equal(rows, wanted.scatter(tokens)[RANK])
                numpy.testing.assert_array_equal(sidecar, wanted.scatter(sidecars)[RANK])
                if with_weights:
                    numpy.testing.assert_array_equal(row_weights, wanted.scatter_weights(weights)[RANK])
                else:
                    self.assertIsNone(row_weights)
                out = group.combine(plan, rows, row_weights)
                row_weights = wanted.scatter_weights(weights) if with_weights else None
                numpy.testing.assert_allclose(out, wanted.gather(wanted.scatter(tokens), row_weights)[RANK], 1e-5, 1e-5)
            buffer = numpy.full((plan.num_rows + 2, HIDDEN), 7, numpy.float32)
            plan, rows, _ = group.prepare_dispatch(tokens[RANK], idx[RANK], alignment=16, recv_tokens=buffer, pads="untouched")
            self.assertIs(rows, buffer)
            self.assertEqual((rows != 7).any(axis=1).sum(), plan.counts.sum())
            group.check()

    def test_3_zones_of_fixed_stride(self):
        """Routes beyond the stride are dropped, and rows of a zone behind its pads are neither written nor read."""
        alignment, stride = 2, 4 * RANKS
        with make_group("zones") as group:
            idx, tokens, weights = make_data([5] * RANKS, 15)
            for each in idx:
                each[:, 0] = 0  # an expert of rank 0, which has too many routes
            wanted = reference.Exchange(idx, EXPERTS, alignment, stride)
            zones = dict(alignment=alignment, with_slot=True, zone_stride=stride)
            mine = slice(wanted.bounds[RANK], wanted.bounds[RANK + 1])
            dropped = wanted.global_counts()[:, mine].sum() - wanted.counts[RANK].sum()
            self.assertTrue(RANK > 0 or dropped > 0)
            written = numpy.concatenate([numpy.arange(stride) < -(-each // alignment) * alignment for each in wanted.counts[RANK]])
            self.assertFalse(written.all())

            plan = group.prepare(idx[RANK], **zones)
            buffer = numpy.full((len(written), HIDDEN), 7, numpy.float32)
            rows, row_weights = group.dispatch(plan, tokens[RANK], weights[RANK], recv_tokens=buffer)
            numpy.testing.assert_array_equal(rows[~written], 7)
            again, *received = group.prepare_dispatch(tokens[RANK], idx[RANK], weights[RANK], **zones)
            for each, arrays in ((plan, (rows, row_weights)), (again, received)):
                self.check_plan(each, wanted)
                self.assertEqual(each.info[2], dropped)
                for array, scattered in zip(arrays, (wanted.scatter(tokens), wanted.scatter_weights(weights))):
                    numpy.testing.assert_array_equal(array[written], scattered[RANK][written])
            if dropped:
                with self.assertRaisesRegex(epx.EventError, f"more routes than zone_stride, {stride}"):
                    group.check()
            counts, kept = plan.global_counts, sum(each.sum() for each in wanted.counts)
            load = group.load_of_counts(counts, plan.top_k, alignment=alignment, zone_stride=stride)
            self.assertEqual((load.routes, load.dropped), (counts.sum(), counts.sum() - kept))
            self.assertEqual(load.most_routes_of_expert, counts.sum(axis=0).max())
            self.assertEqual(group.load_of_counts(counts, plan.top_k, alignment=alignment).dropped, 0)
            with self.assertRaisesRegex(epx.InvalidArgumentError, rf"global_counts .*\[P, E\], here \[{RANKS}, {EXPERTS}\]"):
                group.load_of_counts(counts[:, 1:].copy(), plan.top_k)

            wanted_rows, wanted_weights = wanted.scatter(tokens), wanted.scatter_weights(weights)
            expert_out = numpy.where(written[:, None], wanted_rows[RANK], numpy.nan)
            out = group.combine(plan, expert_out, row_weights)
            numpy.testing.assert_allclose(out, wanted.gather(wanted_rows, wanted_weights)[RANK], 1e-5, 1e-5)
            grads, grad_weights = group.combine_bwd(plan, tokens[RANK], expert_out, row_weights)
            grad_rows = wanted_rows[RANK] * wanted_weights[RANK][:, None]
            numpy.testing.assert_allclose(grads[written], grad_rows[written], 1e-5, 1e-5)
            products = wanted.row_products(tokens, wanted_rows)[RANK]
            numpy.testing.assert_allclose(grad_weights[written], products[written], 1e-4, 1e-4)
            grads, grad_weights = group.dispatch_bwd(plan, expert_out, row_weights)
            numpy.testing.assert_allclose(grads, wanted.gather(wanted_rows)[RANK], 1e-5, 1e-5)
            numpy.testing.assert_array_equal(grad_weights, wanted.gather_weights(wanted_weights)[RANK].astype(numpy.float32))

            for zone_stride, words in (
                (-1, "zone_stride is -1; it must be at least 0"),
                (1.5, "zone_stride is 1.5; it must be an integer"),
                (3, "zone_stride is 3; it must be a multiple of layer.alignment, 2"),
            ):
                zones = dict(alignment=alignment, zone_stride=zone_stride)
                ranks.refused(self, words, lambda: group.prepare(idx[RANK], **zones))
                ranks.refused(self, words, lambda: group.prepare_dispatch(tokens[RANK], idx[RANK], **zones))
            group.check()

    def test_3_pads(self):
        with make_group("pads") as group:
            idx, tokens, _ = make_data([6] * RANKS, 9)
            plan = group.prepare(idx[RANK], alignment=16)
            is_pad = numpy.ones(plan.num_rows, bool)
            for begin, count in zip(plan.offsets, plan.counts):
                is_pad[begin : begin + count] = False
            self.assertTrue(RANK > 0 or is_pad.any())
            for pads, expected in {"zero": 0, "untouched": 7}.items():
                rows = numpy.full((plan.num_rows, HIDDEN), 7, numpy.float32)
                group.dispatch(plan, tokens[RANK], recv_tokens=rows, pads=pads)
                numpy.testing.assert_array_equal(rows[is_pad], expected)
                self.assertFalse((rows[~is_pad] == 7).all(axis=1).any())
            group.check()

    def test_3_rank_major(self):
        with make_group("rank_major") as group:
            for max_rows, compact, num_tokens, with_weights, index_dtype in (
                (None, False, [32 - 5 * rank for rank in range(RANKS)], True, numpy.int64),
                (9, False, [0] + [9] * (RANKS - 1), False, numpy.int32),
                (2, False, [7] * RANKS, True, numpy.int32),
                (0, False, [3] * RANKS, True, numpy.int64),
                (None, True, [32 - 5 * rank for rank in range(RANKS)], True, numpy.int32),
                (9, True, [0] + [9] * (RANKS - 1), False, numpy.int64),
                (2, True, [7] * RANKS, True, numpy.int32),
            ):
                idx, tokens, weights = make_data(num_tokens, 12)
                wanted = reference.RankMajorExchange(idx, EXPERTS, 32 if max_rows is None else max_rows, compact)
                plan, rows, row_weights = group.dispatch_rank_major(
                    tokens[RANK],
                    idx[RANK].astype(index_dtype),
                    weights[RANK] if with_weights else None,
                    max_rows=max_rows,
                    compact=compact,
                    counts_dtype=index_dtype,
                )
                self.assertEqual(plan.counts.dtype, index_dtype)
                self.assertEqual(plan.num_rows, wanted.counts[RANK].sum())
                numpy.testing.assert_array_equal(plan.counts, wanted.counts[RANK])
                numpy.testing.assert_array_equal(plan.topk_idx, wanted.recv_topk_idx[RANK])
                numpy.testing.assert_array_equal(rows, wanted.scatter(tokens)[RANK])
                if with_weights:
                    numpy.testing.assert_array_equal(row_weights, wanted.scatter_weights(weights)[RANK])
                else:
                    self.assertIsNone(row_weights)

                expert_out = [each * 2 + 1 for each in wanted.scatter(tokens)]
                numpy.testing.assert_allclose(
                    group.combine_rank_major(plan, expert_out[RANK]), wanted.gather(expert_out)[RANK], 1e-5, 1e-5
                )
                grad_out = [numpy.cos(each) for each in tokens]
                numpy.testing.assert_array_equal(
                    group.combine_rank_major_bwd(plan, grad_out[RANK]), wanted.scatter(grad_out)[RANK]
                )
                row_grads = [numpy.sin(each + 1) for each in wanted.scatter(weights)]
                grad_tokens, grad_weights = group.dispatch_rank_major_bwd(
                    plan, expert_out[RANK], row_grads[RANK] if with_weights else None
                )
                numpy.testing.assert_allclose(grad_tokens, wanted.gather(expert_out)[RANK], 1e-5, 1e-5)
                if with_weights:
                    numpy.testing.assert_allclose(grad_weights, wanted.gather_weights(row_grads)[RANK], 1e-6)
                else:
                    self.assertIsNone(grad_weights)
                if wanted.drops[RANK]:
                    with self.assertRaises(epx.EventError) as caught:
                        group.check()
                    self.assertEqual(list(caught.exception.events), [epx.EventKind.TOO_FEW_ROWS])
                    self.assertEqual(caught.exception.operation, epx.Operation.DISPATCH_RANK_MAJOR)
                else:
                    group.check()
            with self.assertRaisesRegex(epx.InvalidArgumentError, "max_rows is -1"):
                group.dispatch_rank_major(tokens[RANK], idx[RANK], max_rows=-1)
            with self.assertRaisesRegex(epx.InvalidArgumentError, "compact is int; this call takes bool"):
                group.dispatch_rank_major(tokens[RANK], idx[RANK], compact=1)
            with self.assertRaisesRegex(epx.InvalidArgumentError, "expert_out has shape"):
                group.combine_rank_major(plan, tokens[RANK])

    def test_3_sidecars(self):
        with make_group("sidecars", max_sidecar_bytes=12) as group:
            self.assertEqual(group.max_sidecar_bytes, 12)
            idx, tokens, weights = make_data([6] * RANKS, 13)
            generator = numpy.random.default_rng(3)
            sidecars = [generator.standard_normal((6, 3)).astype(numpy.float32) for _ in range(RANKS)]
            wanted = reference.Exchange(idx, EXPERTS, alignment=4)
            plan = group.prepare(idx[RANK], alignment=4)
            rows, none, sidecar = group.dispatch(plan, tokens[RANK], sidecar=sidecars[RANK])
            self.assertIsNone(none)
            numpy.testing.assert_array_equal(rows, wanted.scatter(tokens)[RANK])
            numpy.testing.assert_array_equal(sidecar, wanted.scatter(sidecars)[RANK])
            bytes_ = [each.view(numpy.uint8)[:, :5].copy() for each in sidecars]
            plan, rows, row_weights, sidecar = group.dispatch_rank_major(
                tokens[RANK], idx[RANK], weights[RANK], sidecar=bytes_[RANK]
            )
            wanted = reference.RankMajorExchange(idx, EXPERTS, 32)
            numpy.testing.assert_array_equal(rows, wanted.scatter(tokens)[RANK])
            numpy.testing.assert_array_equal(row_weights, wanted.scatter_weights(weights)[RANK])
            numpy.testing.assert_array_equal(sidecar, wanted.scatter(bytes_)[RANK])
            for words, sidecar in {
                "sidecar has shape": sidecars[RANK][:5],
                "strides": numpy.zeros((3, 6), numpy.float32).T,
                "sidecar is list; this call takes numpy.ndarray": [1],
                "max_sidecar_bytes": numpy.zeros((6, 13), numpy.uint8),
            }.items():
                with self.assertRaisesRegex(epx.InvalidArgumentError, words):
                    group.dispatch_rank_major(tokens[RANK], idx[RANK], sidecar=sidecar)
            group.check()

    def test_4_events_are_told_by_check_alone(self):
        with make_group("events", max_recv_tokens_per_rank=2, max_alignment=1) as group:
            idx = numpy.zeros((4, TOP_K), int)
            idx[:, 1:] = [[1, 77]] * 4
            plan = group.prepare(idx)
            self.assertLessEqual(plan.num_rows, 2)
            group.combine(plan, group.dispatch(plan, numpy.ones((4, HIDDEN), numpy.float32))[0])
            with self.assertRaises(epx.EventError) as caught:
                group.check()
            self.assertEqual(caught.exception.events[epx.EventKind.BAD_INDEX], 4)
            self.assertEqual(caught.exception.operation, epx.Operation.PREPARE)
            self.assertIn("77", str(caught.exception))
            self.assertEqual(epx.EventKind.OVERFLOW in caught.exception.events, RANK == 0)  # which owns experts 0 and 1
            group.check()  # the first one has read them

            # A plan of another layer: the call takes part without routes.
            good = group.prepare(numpy.zeros((1, 1), int))
            other = group.prepare(numpy.zeros((1, 2), int))
            mixed = epx.Plan(1, 1, 1, other.handle_mem, good.counts, good.offsets, good.global_counts, good.info, None, None)
            group.dispatch(mixed, numpy.ones((1, HIDDEN), numpy.float32))
            with self.assertRaises(epx.EventError) as caught:
                group.check()
            self.assertIn(epx.EventKind.HANDLE_MISMATCH, caught.exception.events)

    def test_3_ragged_all_to_all(self):
        dtypes = ["float32", "float64", "uint8", "int64", "bool", "complex128", "datetime64[s]"]
        try:
            from ml_dtypes import bfloat16, float4_e2m1fn

            dtypes += [bfloat16, float4_e2m1fn]
        except ModuleNotFoundError:
            pass
        shapes = (), (HIDDEN,), (3, 5), (2 * HIDDEN,), (1, 2, 1, 3)  # of a row; the fourth is longer than the group's
        with make_group("ragged") as group:
            for seed, dtype in enumerate(map(numpy.dtype, dtypes)):
                shape, index_dtype, per_pair = shapes[seed % 5], (numpy.int32, numpy.int64)[seed % 2], 1 + seed % 3
                slices = reference.Slices(RANKS, per_pair, seed, dtype=index_dtype)
                generator = numpy.random.default_rng(seed)
                operands, outputs = [
                    [generator.integers(0, 7, (count, *shape)).astype(dtype) for count in counts] for counts in slices.num_rows
                ]
                moved, arguments = outputs[RANK].copy(), slices.arguments[RANK]
                self.assertIs(group.ragged_all_to_all(operands[RANK], moved, *arguments), moved)
                numpy.testing.assert_array_equal(moved, slices.move(operands, outputs)[RANK])
                moved = operands[RANK].copy()
                group.ragged_all_to_all(outputs[RANK], moved, *arguments, transposed=True)
                numpy.testing.assert_array_equal(moved, slices.move_back(outputs, operands)[RANK])
            # An all-gather, of slices that overlap where they are read; the last rank has no rows.
            counts = numpy.array([2 * (RANKS - 1 - rank) for rank in range(RANKS)])
            first = counts.cumsum() - counts
            own = [numpy.full((count, 3), rank, numpy.uint8) for rank, count in enumerate(counts)]
            arguments = [numpy.full(RANKS, value) for value in (0, counts[RANK], first[RANK])]
            gathered = numpy.full((counts.sum() + 1, 3), 99, numpy.uint8)
            group.ragged_all_to_all(own[RANK], gathered, *arguments, counts)
            numpy.testing.assert_array_equal(gathered, numpy.concatenate([*own, [[99] * 3]]))
            # More bytes than pass through the group's staging at once.
            wide = numpy.arange(1 << 20, dtype=numpy.uint32).reshape(RANKS, -1) + RANK
            to, ones = numpy.arange(RANKS), numpy.ones(RANKS, int)
            received = group.ragged_all_to_all(wide, numpy.zeros_like(wide), to, ones, ones * RANK, ones)
            numpy.testing.assert_array_equal(received, wide[RANK] + (to[:, None] - RANK))
            group.check()

    def test_4_bad_slices(self):
        """Of slices of a row each that go from each rank to each, that from the first rank to the last."""
        last = RANKS - 1
        bad = {
            "leaves (this|that) rank's tensor": ((0, RANKS), (0, -1), (1, 2)),
            r"in send_sizes and 1 rows in recv_sizes": ((1, -1), (1, 0)),
            r"leaves the tensor of (rank [0-9]|this rank): it has 1 rows, and": ((2, 2 * RANKS), (2, -5)),
        }
        with make_group("slices") as group:
            for transposed in (False, True):
                for words, changes in bad.items():
                    for array, value in changes:
                        arguments = [numpy.arange(RANKS), *(numpy.full(RANKS, each) for each in (1, 2 * RANK, 1))]
                        if RANK == 0:
                            arguments[array][last] = value
                        rows = (2 * RANKS, RANKS) if transposed else (RANKS, 2 * RANKS)
                        operand, output = [numpy.full((count, 2), i) for i, count in enumerate(rows)]
                        group.ragged_all_to_all(operand, output, *arguments, transposed=transposed)
                        wanted = numpy.ones_like(output)
                        wanted[:: 1 if transposed else 2] = 0
                        if transposed and RANK == 0:
                            wanted[last] = 1
                        if not transposed and RANK == last:
                            wanted[0] = 1
                        numpy.testing.assert_array_equal(output, wanted)
                        if RANK in (0, last):
                            with self.assertRaisesRegex(epx.EventError, words) as caught:
                                group.check()
                            self.assertEqual(caught.exception.events, {epx.EventKind.BAD_SLICE: 1})
                            self.assertEqual(caught.exception.operation, epx.Operation.RAGGED_ALL_TO_ALL)
                        group.check()

    def test_5_refusals_leave_the_group_as_it_was(self):
        with make_group("refusals") as group:
            idx, tokens, weights = make_data([4] * RANKS, 8)
            plan = group.prepare(idx[RANK])
            x, w = tokens[RANK], weights[RANK]
            by_rank, *_ = group.dispatch_rank_major(x, idx[RANK])

            def move(*arrays, transposed=False):
                arrays = {**dict(enumerate([x, x.copy(), *[numpy.zeros(RANKS, int)] * 4])), **dict(arrays)}
                return lambda: group.ragged_all_to_all(*arrays.values(), transposed=transposed)

            for words, call in {
                "tokens has shape": lambda: group.dispatch(plan, x[:3]),
                "tokens has strides": lambda: group.dispatch(plan, numpy.zeros((HIDDEN, 4), numpy.float32).T),
                "float64": lambda: group.dispatch(plan, x.astype(float)),
                "complex128": lambda: group.dispatch(plan, x.astype(complex)),
                "tokens is list; this call takes numpy.ndarray": lambda: group.dispatch(plan, x.tolist()),
                "topk_weights is float64": lambda: group.dispatch(plan, x, w.astype(float)),
                "topk_idx is float32": lambda: group.prepare(x),
                "topk_idx has shape": lambda: group.prepare(idx[RANK][0]),
                "topk_idx has K = 4; it must be 1 to 3": lambda: group.prepare(numpy.zeros((2, TOP_K + 1), int)),
                "topk_idx has K = 0; it must be": lambda: group.prepare_dispatch(x, numpy.zeros((4, 0), int)),
                "K = 9; it must be": lambda: group.dispatch_rank_major(x, numpy.zeros((4, 9), int)),
                "alignment is -1; it must be 0 to 128": lambda: group.prepare(idx[RANK], alignment=-1),
                "counts_dtype is int16; it must be int32 or int64": lambda: group.prepare(idx[RANK], counts_dtype="int16"),
                "counts_dtype is float32; it must be int32 or int64": lambda: group.dispatch_rank_major(
                    x, idx[RANK], counts_dtype=numpy.float32
                ),
                "recv_weights has shape": lambda: group.combine(plan, x, w),
                "expert_out has shape": lambda: group.combine_bwd(plan, x, numpy.zeros((4, HIDDEN + 1), numpy.float32)),
                "pads is 'none'": lambda: group.dispatch(plan, x, pads="none"),
                "hidden": lambda: group.dispatch(plan, numpy.zeros((4, HIDDEN + 1), numpy.float32)),
                "dtype >f4 is not in the byte order": lambda: group.dispatch(plan, x.astype(">f4")),
                "dtype >i8 is not in the byte order": lambda: group.prepare(idx[RANK], counts_dtype=">i8"),
                "sidecar has dtype object": lambda: group.dispatch(plan, x, sidecar=numpy.full((4, 1), None)),
                "plan is list; this call takes epx.Plan": lambda: group.dispatch([], x),
                "plan is epx.RankMajorPlan; this call takes epx.Plan": lambda: group.combine(by_rank, x),
                "plan is epx.Plan; this call takes epx.RankMajorPlan": lambda: group.combine_rank_major(plan, x),
                "expert_out is int; this call takes numpy.ndarray": lambda: group.combine_bwd(plan, x, 3),
                "num_rows is -1; it must be at least 0": lambda: group.dispatch(plan, x, num_rows=-1),
                "num_rows is 2.5; it must be an integer": lambda: group.combine_bwd(plan, x, num_rows=2.5),
                "alignment is 4294967297; it must fit in 32 bits": lambda: group.prepare(idx[RANK], alignment=2**32 + 1),
                "max_rows is 'all'": lambda: group.dispatch_rank_major(x, idx[RANK], max_rows="all"),
                "num_rows and recv_tokens are given": lambda: group.dispatch(plan, x, num_rows=4, recv_tokens=x),
                "operand is list; this call takes numpy.ndarray": move((0, x.tolist())),
                "operand has strides": move((0, numpy.zeros((HIDDEN, 4), numpy.float32).T)),
                "operand has shape []; it must have at least one": move((0, numpy.array(1.0))),
                "operand has shape [4, 0]; its rows must have": move((0, x[:, :0].copy()), (1, x[:, :0].copy())),
                "operand has dtype object": move((0, x.astype(object)), (1, x.astype(object))),
                "output is float64; it must be float32": move((1, x.astype(float))),
                f"output has shape [4, {HIDDEN // 2}]; it must be [any, {HIDDEN}]": move((1, x[:, ::2].copy())),
                "output is read-only": move((1, numpy.broadcast_to(x, x.shape))),
                "output overlaps operand": move((1, x)),
                "input_offsets is float32; it must be int32 or int64": move((2, x[0])),
                "send_sizes is int32; it must be int64": move((3, numpy.zeros(RANKS, numpy.int32))),
                f"recv_sizes has shape [{RANKS + 1}]; it must be [{RANKS}]": move((5, numpy.zeros(RANKS + 1, int))),
                "K = sizes[0] = 0 slices": move(*((i, numpy.zeros(0, int)) for i in range(2, 6))),
                "transposed is int; this call takes bool": move(transposed=1),
                "recv_tokens is read-only": lambda: group.dispatch(plan, x, recv_tokens=numpy.broadcast_to(x, x.shape)),
            }.items():
                error = ranks.refused(self, words, call)
                self.assertEqual(error.status, epx.Status.INVALID_ARGUMENT)
                self.assertIsInstance(error, ValueError)
            group.combine(plan, group.dispatch(plan, x, w)[0])
            group.check()
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            group.dispatch(plan, x)

    def test_6_configurations(self):
        with self.assertRaisesRegex(epx.InvalidArgumentError, "transport is 'gpu'"):
            make_group("never", transport="gpu")
        with self.assertRaises(TypeError):
            make_group("never", experts=3)
        for words, change in {
            "hidden_dim is 4294967304; it must fit in 32 bits": {"hidden_dim": 2**32 + 8},
            "num_experts is 2.0; it must be an integer": {"num_experts": 2.0},
            "transport is 7; it must be one of 'auto', 'host', 'nccl'": {"transport": 7},
            "timeout is inf; it must be a number of seconds": {"timeout": float("inf")},
            "timeout is '1'; it must be a number of seconds": {"timeout": "1"},
        }.items():
            ranks.refused(self, words, lambda change=change: make_group("never", **change))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "num_ranks is 4294967297; it must fit in 32 bits"):
            epx.bootstrap.from_all_gather(0, 2**32 + 1, None)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "float64"):
            epx.memory_plan(RANKS, num_experts=1, max_tokens_per_rank=1, hidden_dim=1, max_top_k=1, max_token_dtype="float64")
        plan = epx.memory_plan(RANKS, **CONFIG)
        with make_group("plan") as group:
            self.assertEqual(group.window_bytes, plan["window_bytes"])
            self.assertEqual(group.max_recv_tokens_per_rank, plan["max_recv_tokens_per_rank"])
        if RANKS > 1:
            with self.assertRaisesRegex(epx.Error, "num_experts") as caught:
                make_group("differ", num_experts=4 + RANK)
            self.assertEqual(caught.exception.status, epx.Status.MISMATCH)

    def test_7_a_bootstrap_that_raises(self):
        def all_gather(data, timeout):
            raise KeyError("no such store")

        with self.assertRaisesRegex(epx.Error, "no such store") as caught:
            group_from(all_gather)
        self.assertIsInstance(caught.exception.__cause__, KeyError)

        def interrupted(data, timeout):
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            group_from(interrupted)

    def test_7_a_bootstrap_that_returns_nonsense(self):
        nonsense = {
            "the record of rank 0, this rank's own, in the place of rank 1": lambda data: [data, data],
            "something else than the record of rank 1": lambda data: [data, os.urandom(len(data))],
            "no record of rank 1": lambda data: [data, bytes(len(data))],
            "a damaged record of rank 1": lambda data: [data, data[:300].ljust(len(data), b"?")],
            "instead of 2 parts": lambda data: [data, data[:-1]],
            "expected a bytes-like object": lambda data: [data, "?" * len(data)],
        }
        for sentence, gather in nonsense.items():
            with self.subTest(sentence), self.assertRaisesRegex(epx.Error, sentence):
                group_from(lambda data, timeout, gather=gather: gather(data))

    def test_8_failures_have_the_fields_of_the_report(self):
        if RANKS == 1:
            self.skipTest("needs a peer")
        group = make_group("sequence")
        plan = group.prepare(numpy.zeros((2, 1), int))
        rows = numpy.ones((2, HIDDEN), numpy.float32)
        with self.assertRaises(epx.GroupError) as caught:
            if RANK == 1:
                group.combine(plan, rows)
            else:
                group.dispatch(plan, rows)
            group.dispatch(plan, rows)  # a rank may be through with its call before the others see that it is another one
        error = caught.exception
        self.assertEqual(error.status, epx.Status.OUT_OF_SEQUENCE)
        self.assertIsNone(error.culprit)  # two ranks differ, and neither is right
        self.assertRegex(str(error), "dispatch on rank [0-9] and combine on rank 1")
        self.assertIn(error.operation, (epx.Operation.DISPATCH, epx.Operation.COMBINE))
        with self.assertRaises(epx.GroupError) as again:
            group.check()
        self.assertEqual((again.exception.status, again.exception.culprit), (error.status, error.culprit))
        group.destroy()


if __name__ == "__main__":
    ranks.main()
