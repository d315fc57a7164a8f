# SPDX-License-Identifier: Apache-2.0
"""epx.jax on CPU devices, or on GPUs (EPX_TEST_DEVICE=cuda, see ranks.py), against a dense layer in float64 and its finite
differences: process-local jit and shard_map."""

import collections
import contextlib
import ctypes
import dataclasses
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import unittest
import warnings
import weakref

import jax_ranks
import ranks
from jax_ragged import Ragged, RaggedShardMap  # noqa: F401  (which are run here)
from jax_ranks import HIDDEN, ON_GPU, RANK, RANKS, TRANSPORT, Data, config, float32, make_group, moe_layer, rank_major_layer
from reference import Exchange, RankMajorExchange, numeric_gradient

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epx
import epx.jax

TOLERANCE = dict(rtol=1e-4, atol=1e-5)


def of_group(plan, group):
    """The plan, as if this group had made it."""
    return dataclasses.replace(plan, group_reference=weakref.ref(group))


def local_experts(group, data):
    return float32(data.experts[group.first_local_expert : group.first_local_expert + group.num_local_experts])


class ProcessLocal(jax_ranks.TestCase):
    """Each process has its own arrays, whose number of tokens may differ."""

    def check(self, group, data, layer=moe_layer, tolerance=TOLERANCE, **options):
        def loss(tokens, weights, expert_weight):
            out, token = layer(
                group, tokens, jnp.asarray(data.idx[RANK]), weights, expert_weight, epx.jax.first_token(), **options
            )
            return epx.jax.finish(jnp.sum(out * float32(data.factor[RANK])), token), out

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        arguments = float32(data.tokens[RANK]), float32(data.weights[RANK]), local_experts(group, data)
        (_, out), grads = gradient(*arguments)
        numpy.testing.assert_allclose(out, data.out(RANK), **tolerance)
        mine = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        for got, array, part in zip(
            grads, (data.tokens[RANK], data.weights[RANK], data.experts), (slice(None), slice(None), mine)
        ):
            numpy.testing.assert_allclose(got, numeric_gradient(data.loss, array)[part], **tolerance)
        (_, again), _ = jax.block_until_ready(gradient(*arguments))
        numpy.testing.assert_array_equal(out, again)
        group.check()

    def test_1_layers(self):
        group = self.group()
        self.check(group, Data([4] * RANKS))
        self.check(group, Data([0 if rank == RANKS - 1 else 3 + rank for rank in range(RANKS)], seed=2), alignment=8)
        self.check(group, Data([5] * RANKS, top_k=1, seed=3, masked=0), num_rows=5 * RANKS)
        self.check(group, Data([3] * RANKS, top_k=3, seed=4, masked=1))
        # On an H200 ragged_dot of jax 0.11.2 has been seen to round float32 to TF32.
        tolerance = dict(rtol=1e-2, atol=5e-3) if ON_GPU else TOLERANCE
        self.check(group, Data([4] * RANKS, seed=17), jax_ranks.undefined_rows_layer, tolerance)

    def test_1_zones_of_fixed_stride(self):
        """Rows behind a zone's pads are zero, and so are they in the gradients."""
        stride = 4 * RANKS  # no expert has more routes
        group = self.group(max_recv_tokens_per_rank=jax_ranks.EXPERTS * stride)
        data = Data([4] * RANKS, seed=24)
        for layer in (moe_layer, jax_ranks.prepare_dispatch_layer):
            self.check(group, data, layer, alignment=4, zone_stride=stride)

        @jax.jit
        def dispatch(tokens):
            idx, weights = jnp.asarray(data.idx[RANK]), float32(data.weights[RANK])
            plan, token = epx.jax.prepare(group, idx, epx.jax.first_token(), zone_stride=stride)
            rows, row_weights, token = epx.jax.dispatch(plan, tokens, weights, token)
            return epx.jax.finish((plan, rows, row_weights), token)

        plan, rows, row_weights = dispatch(float32(data.tokens[RANK]) + 1)
        numpy.testing.assert_array_equal(plan.offsets, stride * numpy.arange(group.num_local_experts + 1))
        used = numpy.zeros((jax_ranks.EXPERTS, stride), bool)
        used[: group.num_local_experts] = numpy.arange(stride) < numpy.asarray(plan.counts)[:, None]
        used = used.reshape(-1)
        numpy.testing.assert_array_equal(row_weights != 0, used)
        numpy.testing.assert_array_equal(rows.any(axis=1), used)

        @jax.jit
        @jax.grad
        def gradient(expert_out):
            plan, token = epx.jax.prepare(group, jnp.asarray(data.idx[RANK]), epx.jax.first_token(), zone_stride=stride)
            out, token = epx.jax.combine(plan, expert_out, None, token)
            return epx.jax.finish(jnp.sum(out), token)

        grads = gradient(jnp.ones_like(rows))
        numpy.testing.assert_array_equal(grads, numpy.broadcast_to(used[:, None], grads.shape))

    def test_1_nodes(self):
        ranks_per_node = ranks.ranks_per_node() if ON_GPU else 1
        group = self.group(combine_precision="node", ranks_per_node=ranks_per_node)
        self.assertEqual(group.ranks_per_node, ranks_per_node)
        self.check(group, Data([4] * RANKS, seed=22), alignment=4)

    def test_1_fixed_rail_tokens(self):
        """Between nodes so many rows travel in every call, and no call waits on the host."""
        group = self.group(fixed_rail_tokens=8)
        self.check(group, Data([4] * RANKS, seed=23))

    def test_1_prepare_dispatch(self):
        group = self.group(max_sidecar_bytes=4)
        layer = jax_ranks.prepare_dispatch_layer
        self.check(group, Data([4] * RANKS, seed=18), layer)
        uneven = [0 if rank == RANKS - 1 else 3 + rank for rank in range(RANKS)]
        self.check(group, Data(uneven, seed=19), layer, alignment=8)
        self.check(group, Data([5] * RANKS, top_k=1, seed=20, masked=0), layer, num_rows=5 * RANKS, with_slot=True)

        data = Data([4] * RANKS, seed=21)
        wanted = Exchange(data.idx, jax_ranks.EXPERTS, 4)
        tokens = [each.astype(numpy.float32) for each in data.tokens]
        sidecars = [numpy.arange(4 * rank, 4 * rank + 4, dtype=numpy.int32)[:, None] for rank in range(RANKS)]

        @jax.jit
        def dispatch(idx, tokens, sidecar):
            plan, rows, none, scales, token = epx.jax.prepare_dispatch(
                group, tokens, idx, None, epx.jax.first_token(), alignment=4, with_slot=True, sidecar=sidecar
            )
            assert none is None
            return epx.jax.finish((plan, rows, scales), token)

        plan, rows, scales = dispatch(data.idx[RANK], tokens[RANK], sidecars[RANK])
        used = wanted.offsets[RANK][-1]
        numpy.testing.assert_array_equal(plan.offsets, wanted.offsets[RANK])
        numpy.testing.assert_array_equal(plan.slot, wanted.slots[RANK][..., 1])
        numpy.testing.assert_array_equal(rows[:used], wanted.scatter(tokens)[RANK])
        numpy.testing.assert_array_equal(scales[:used], wanted.scatter(sidecars)[RANK])
        numpy.testing.assert_array_equal(rows[used:], 0)

    @ranks.skip_over_nodes
    def test_1_rank_major(self):
        group = self.group()
        self.check(group, Data([4] * RANKS, seed=11), rank_major_layer)
        uneven = [0 if rank == RANKS - 1 else 3 + rank for rank in range(RANKS)]
        self.check(group, Data(uneven, seed=12), rank_major_layer)
        self.check(group, Data([5] * RANKS, top_k=1, seed=13, masked=0), rank_major_layer, max_rows=5)
        self.check(group, Data([3] * RANKS, top_k=3, seed=14, masked=1), rank_major_layer)
        self.check(group, Data(uneven, seed=17), rank_major_layer, compact=True)

        # Without weights, and with the rows as they arrive.
        data = Data([4] * RANKS, seed=15)
        tokens = [each.astype(numpy.float32) for each in data.tokens]
        for compact in (False, True):
            wanted = RankMajorExchange(data.idx, jax_ranks.EXPERTS, 3, compact)

            @jax.jit
            def dispatch(idx, tokens):
                plan, rows, none, token = epx.jax.dispatch_rank_major(
                    group, tokens, idx, None, epx.jax.first_token(), max_rows=3, compact=compact
                )
                assert none is None
                return epx.jax.finish((plan, rows), token)

            plan, rows = dispatch(data.idx[RANK], tokens[RANK])
            self.assertEqual(plan.compact, compact)
            numpy.testing.assert_array_equal(plan.counts, wanted.counts[RANK])
            numpy.testing.assert_array_equal(plan.topk_idx, wanted.recv_topk_idx[RANK])
            numpy.testing.assert_array_equal(rows, wanted.scatter(tokens)[RANK])
            if wanted.drops[RANK]:
                with self.assertRaises(epx.EventError):
                    group.check()

    def test_1_info_slot_and_sidecars(self):
        group = self.group(max_sidecar_bytes=8)
        data = Data([4] * RANKS, seed=16)
        tokens = [each.astype(numpy.float32) for each in data.tokens]
        wanted = Exchange(data.idx, jax_ranks.EXPERTS, 4)
        demand = wanted.counts[RANK].sum()
        for dtype in (numpy.float32, numpy.uint8, jnp.bfloat16):
            sidecars = [numpy.arange(8 * rank, 8 * rank + 8).reshape(4, 2).astype(dtype) for rank in range(RANKS)]

            def loss(tokens, idx, weights, sidecar):
                plan, token = epx.jax.prepare(group, idx, epx.jax.first_token(), alignment=4, with_slot=True)
                rows, row_weights, scales, token = epx.jax.dispatch(plan, tokens, weights, token, sidecar=sidecar)
                return epx.jax.finish(jnp.sum(rows) + jnp.sum(row_weights), token), (plan, scales)

            gradient = jax.jit(jax.grad(loss, (0, 2), has_aux=True))
            arguments = tokens[RANK], data.idx[RANK], float32(data.weights[RANK]), sidecars[RANK]
            grads, (plan, scales) = gradient(*arguments)
            numpy.testing.assert_array_equal(plan.info, [demand, demand, 0, 0, wanted.offsets[RANK][-1]])
            self.assertEqual(plan.info.dtype, jnp.int32)
            numpy.testing.assert_array_equal(plan.slot, wanted.slots[RANK][..., 1])
            self.assertEqual(scales.dtype, dtype)
            used = wanted.offsets[RANK][-1]
            numpy.testing.assert_array_equal(scales[:used], wanted.scatter(sidecars)[RANK])
            numpy.testing.assert_array_equal(scales[used:].astype(float), 0)
            routes = (data.idx[RANK] >= 0).astype(float)
            numpy.testing.assert_allclose(grads[0], routes.sum(1, keepdims=True) * numpy.ones(HIDDEN))
            numpy.testing.assert_allclose(grads[1], routes)
        self.assertIsNone(epx.jax.prepare(group, data.idx[RANK], epx.jax.first_token())[0].slot)

    @ranks.skip_over_nodes
    def test_1_sidecars_of_rank_major_rows(self):
        group = self.group(max_sidecar_bytes=8)
        data = Data([4] * RANKS, seed=16)
        wanted = RankMajorExchange(data.idx, jax_ranks.EXPERTS, 8)
        for dtype in (numpy.float32, numpy.uint8, jnp.bfloat16):
            sidecars = [numpy.arange(8 * rank, 8 * rank + 8).reshape(4, 2).astype(dtype) for rank in range(RANKS)]

            def loss(tokens, idx, weights, sidecar):
                token = epx.jax.first_token()
                _, rows, _, scales, token = epx.jax.dispatch_rank_major(group, tokens, idx, weights, token, sidecar=sidecar)
                return epx.jax.finish(2 * jnp.sum(rows), token), scales

            arguments = float32(data.tokens[RANK]), data.idx[RANK], float32(data.weights[RANK]), sidecars[RANK]
            grad, scales = jax.jit(jax.grad(loss, has_aux=True))(*arguments)
            self.assertEqual(scales.dtype, dtype)
            numpy.testing.assert_array_equal(scales, wanted.scatter(sidecars)[RANK])
            ranks_of_token = wanted.gather([numpy.ones((RANKS, 8, 1))] * RANKS)[RANK]
            numpy.testing.assert_allclose(grad, 2 * ranks_of_token * numpy.ones(HIDDEN))

    def test_2_two_layers_two_groups_and_an_unused_output(self):
        group, other = self.group(), self.group(combine_precision="exact")
        data = Data([4] * RANKS, seed=5)
        data_3 = Data([4] * RANKS, top_k=3, seed=6)
        idx, idx_3 = jnp.asarray(data.idx[RANK]), jnp.asarray(data_3.idx[RANK])

        def loss(tokens, expert_weight):
            first, second = epx.jax.first_token(), epx.jax.first_token()
            weights = float32(data.weights[RANK])
            a, first = moe_layer(group, tokens, idx, weights, expert_weight, first)
            b, first = moe_layer(group, tokens, idx, weights, expert_weight, first)  # the same again
            c, second = moe_layer(other, tokens, idx_3, float32(data_3.weights[RANK]), expert_weight, second, alignment=4)
            _, first = moe_layer(group, tokens, idx, weights, expert_weight, first)  # nobody uses what it returns
            total = jnp.sum((a + 2 * b + 3 * c) * float32(data.factor[RANK]))
            return epx.jax.finish(epx.jax.finish(total, first), second)

        def dense():
            return sum(
                (
                    (
                        3 * data.out(r)
                        + 3 * jax_ranks.dense_layer(data.tokens[r], data_3.idx[r], data_3.weights[r], data.experts)
                    )
                    * data.factor[r]
                ).sum()
                for r in range(RANKS)
            )

        grad_tokens, grad_experts = jax.jit(jax.grad(loss, (0, 1)))(float32(data.tokens[RANK]), local_experts(group, data))
        mine = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        numpy.testing.assert_allclose(grad_tokens, numeric_gradient(dense, data.tokens[RANK]), **TOLERANCE)
        numpy.testing.assert_allclose(grad_experts, numeric_gradient(dense, data.experts)[mine], **TOLERANCE)

    def test_3_scan_and_checkpoint(self):
        group = self.group()
        data = Data([3] * RANKS, seed=7)
        idx, weights = jnp.asarray(data.idx[RANK]), float32(data.weights[RANK])

        def stack(wrap, tokens, expert_weight):
            def layer(tokens, scale, token):
                out, token = moe_layer(group, tokens, idx, weights, expert_weight * scale, token)
                return tokens + out, token

            def body(carry, scale):
                carry = wrap(layer)(carry[0], scale, carry[1])
                return wrap(layer)(carry[0], scale, carry[1]), None

            (tokens, token), _ = jax.lax.scan(body, (tokens, epx.jax.first_token()), jnp.array([1.0, 0.5]))
            return epx.jax.finish(jnp.sum(tokens * float32(data.factor[RANK])), token)

        def dense():
            total = 0
            for rank in range(RANKS):
                tokens = data.tokens[rank].copy()
                for scale in (1, 1, 0.5, 0.5):
                    tokens += jax_ranks.dense_layer(tokens, data.idx[rank], data.weights[rank], data.experts * scale)
                total += (tokens * data.factor[rank]).sum()
            return total

        wanted = numeric_gradient(dense, data.tokens[RANK]), numeric_gradient(dense, data.experts)
        first = group.first_local_expert
        wanted = wanted[0], wanted[1][first : first + group.num_local_experts]
        for wrap in (lambda layer: layer, epx.jax.checkpoint):
            gradient = jax.jit(jax.grad(lambda *arrays, wrap=wrap: stack(wrap, *arrays), (0, 1)))
            got = gradient(float32(data.tokens[RANK]), local_experts(group, data))
            for each, want in zip(got, wanted):
                numpy.testing.assert_allclose(each, want, rtol=1e-3, atol=1e-4)

    def test_3_checkpoint_closes_over_plans_and_integers(self):
        group = self.group()
        data = Data([3] * RANKS, seed=11)

        def loss(idx, weights, tokens, factors, wrap):
            plan, token = epx.jax.prepare(group, idx, epx.jax.first_token())

            def layer(tokens, token):
                rows, row_weights, token = epx.jax.dispatch(plan, tokens, weights, token)
                out, token = epx.jax.combine(plan, rows * 2, row_weights, token)
                return jnp.where(factors > 3, out * factors, 0), token

            out, token = wrap(layer)(tokens, token)
            return epx.jax.finish(jnp.sum(out**2), token)

        arguments = (
            jnp.asarray(data.idx[RANK]),
            float32(data.weights[RANK]),
            float32(data.tokens[RANK]),
            jnp.arange(3)[:, None] + 3,
        )
        found = []
        for wrap in (lambda layer: layer, epx.jax.checkpoint):
            for compiled in (jax.jit, lambda function: function):
                gradient = compiled(jax.grad(lambda *arrays, wrap=wrap: loss(*arrays, wrap), (1, 2)))
                found.append(gradient(*arguments))
        self.assertGreater(abs(found[0][1]).sum(), 0)
        for each in found[1:]:
            for got, wanted in zip(each, found[0]):
                numpy.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    def test_4_without_jit(self):
        group = self.group()
        data = Data([4] * RANKS, seed=8)
        with jax.disable_jit():
            self.check(group, data)

    def test_6_forward_alone_without_tokens_on_a_rank(self):
        group = self.group()
        data = Data([0 if rank == RANKS - 1 else 3 for rank in range(RANKS)], seed=10)

        @jax.jit
        def twice(tokens, weights, expert_weight):
            token = epx.jax.first_token()
            for _ in range(2):
                out, token = moe_layer(group, tokens, jnp.asarray(data.idx[RANK]), weights, expert_weight, token)
            return epx.jax.finish(out, token)

        out = twice(float32(data.tokens[RANK]), float32(data.weights[RANK]), local_experts(group, data))
        numpy.testing.assert_allclose(out, data.out(RANK), **TOLERANCE)
        # The ranks agree about how many calls there have been.
        plan, _ = epx.jax.prepare(group, jnp.asarray(data.idx[RANK]), epx.jax.first_token())
        numpy.testing.assert_array_equal(plan.global_counts.sum(1), [(idx >= 0).sum() for idx in data.idx])

    def test_4_dtypes_and_eager(self):
        group = self.group()
        data = Data([4] * RANKS, seed=8)
        for dtype in (jnp.bfloat16, jnp.float16):
            tokens = jnp.asarray(data.tokens[RANK], dtype)
            plan, token = epx.jax.prepare(group, jnp.asarray(data.idx[RANK]), epx.jax.first_token())
            rows, none, token = epx.jax.dispatch(plan, tokens, None, token)
            self.assertIsNone(none)
            self.assertEqual(rows.dtype, dtype)
            out, token = epx.jax.combine(plan, rows, None, token)
            routes = (data.idx[RANK] >= 0).sum(axis=1, keepdims=True)
            numpy.testing.assert_allclose(numpy.asarray(out, float), numpy.asarray(tokens, float) * routes, rtol=2e-2)
            numpy.testing.assert_array_equal(numpy.asarray(rows, float)[int(plan.offsets[-1]) :], 0)

    def test_5_overflow_and_bad_indices_are_told_by_check(self):
        group = self.group(max_recv_tokens_per_rank=2, max_alignment=1)
        idx = jnp.array([[0, 99], [0, -1], [0, -1]], jnp.int32)
        out, token = jax.jit(
            lambda idx, tokens: moe_layer(
                group, tokens, idx, jnp.ones((3, 2)), jnp.ones((group.num_local_experts, HIDDEN, HIDDEN)), epx.jax.first_token()
            )
        )(idx, jnp.ones((3, HIDDEN)))
        jax.block_until_ready((out, token))
        with self.assertRaises(epx.EventError) as caught:
            group.check()
        self.assertEqual(caught.exception.events[epx.EventKind.BAD_INDEX], 1)
        self.assertEqual(epx.EventKind.OVERFLOW in caught.exception.events, RANK == 0)

    def check_plan_of_another_group(self, call):
        """A plan has its group, so that the test forges one. A call that is given another group's sees an event."""
        group, other = self.group(), self.group()

        @jax.jit
        def both(idx, tokens):
            results, token, last = call(group, other, idx, tokens)
            return epx.jax.finish(epx.jax.finish(results, token), last)

        jax.block_until_ready(both(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, HIDDEN))))
        group.check()
        with self.assertRaises(epx.EventError) as caught:
            other.check()
        self.assertEqual(set(caught.exception.events), {epx.EventKind.HANDLE_MISMATCH})
        if ranks.num_nodes() == 1:  # over nodes rail peers report it too
            self.assertEqual(caught.exception.events[epx.EventKind.HANDLE_MISMATCH], 1)

    def test_5_plan_of_another_group_is_told_by_check(self):
        def call(group, other, idx, tokens):
            plan, token = epx.jax.prepare(group, idx, epx.jax.first_token())
            rows, _, last = epx.jax.dispatch(of_group(plan, other), tokens, None, epx.jax.first_token())
            return rows, token, last

        self.check_plan_of_another_group(call)

    @ranks.skip_over_nodes
    def test_5_rank_major_plan_of_another_group_is_told_by_check(self):
        def call(group, other, idx, tokens):
            plan, _, _, token = epx.jax.dispatch_rank_major(group, tokens, idx, None, epx.jax.first_token())
            sums = jnp.ones_like(plan.topk_idx, tokens.dtype)
            out, last = epx.jax.combine_rank_major(of_group(plan, other), sums, epx.jax.first_token())
            return out, token, last

        self.check_plan_of_another_group(call)


class ShardMap(unittest.TestCase):
    """Arrays are sharded over the processes."""

    def check(self, shape, names):
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        group = epx.jax.make_group(mesh, "ep", transport=TRANSPORT, **config())
        self.assertEqual(group.num_ranks, dict(zip(names, shape))["ep"])
        data = Data([4] * RANKS, seed=9)
        by_rank = PartitionSpec(names)
        by_expert = PartitionSpec("ep")

        def loss_of_shard(tokens, idx, weights, factor, expert_weight):
            out, token = moe_layer(group, tokens, idx, weights, expert_weight, epx.jax.first_token())
            return jax.lax.psum(epx.jax.finish(jnp.sum(out * factor), token), names)

        loss = jax.shard_map(
            loss_of_shard, mesh=mesh, in_specs=(by_rank,) * 4 + (by_expert,), out_specs=PartitionSpec(), check_vma=False
        )

        def global_array(parts, spec):
            whole = numpy.concatenate(parts)
            return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])

        arguments = [
            global_array([each.astype(numpy.float32) for each in data.tokens], by_rank),
            global_array(data.idx, by_rank),
            global_array([each.astype(numpy.float32) for each in data.weights], by_rank),
            global_array([each.astype(numpy.float32) for each in data.factor], by_rank),
            global_array([data.experts.astype(numpy.float32)], by_expert),
        ]
        gradient = jax.jit(jax.value_and_grad(loss, (0, 2, 4)))
        value, grads = gradient(*arguments)
        self.assertAlmostEqual(float(value), data.loss(), delta=1e-3)
        for got, array in zip(grads[:2], (data.tokens[RANK], data.weights[RANK])):
            numpy.testing.assert_allclose(got.addressable_data(0), numeric_gradient(data.loss, array), **TOLERANCE)
        first = group.first_local_expert
        mine = slice(first, first + group.num_local_experts)
        numpy.testing.assert_allclose(
            grads[2].addressable_data(0), numeric_gradient(data.loss, data.experts)[mine], **TOLERANCE
        )
        group.check()

        other = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "axis 'ep', which is not among the axes"):
            jax.shard_map(
                loss_of_shard, mesh=other, in_specs=(PartitionSpec("data"),) * 5, out_specs=PartitionSpec(), check_vma=False
            )(*arguments)
        group.destroy()

    def test_1_one_axis(self):
        self.check((RANKS,), ("ep",))

    def test_2_two_axes(self):
        if RANKS < 4:
            self.skipTest("needs 4 ranks")
        self.check((2, 2), ("data", "ep"))

    def test_3_refusals(self):
        mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "no 'expert'"):
            epx.jax.make_group(mesh, "expert", **config())
        with self.assertRaisesRegex(epx.InvalidArgumentError, "outside of functions that JAX traces"):
            jax.jit(lambda x: epx.jax.make_group(mesh, "ep", **config()) and x)(1.0)
        with epx.bootstrap.from_jax() as bootstrap:
            group = epx.Group(bootstrap, transport="host", **config())

        def call(tokens):
            plan, _ = epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())
            return tokens + plan.counts[0]

        with self.assertRaisesRegex(epx.InvalidArgumentError, "has no mesh axis"):
            jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep"), check_vma=False)(
                jnp.ones(RANKS)
            )
        group.destroy()
        if RANKS > 1:
            odd = epx.jax.make_group(mesh, "ep", transport=TRANSPORT, **config(num_experts=2 * RANKS + 1))
            with self.assertRaisesRegex(epx.InvalidArgumentError, "must divide"):
                jax.shard_map(
                    lambda x: epx.jax.prepare(odd, jnp.zeros((1, 1), jnp.int32), x[0])[1][None],
                    mesh=mesh,
                    in_specs=PartitionSpec("ep"),
                    out_specs=PartitionSpec("ep"),
                    check_vma=False,
                )(jnp.ones(RANKS))
            odd.destroy()


def memory_in_use():
    """Bytes of memory: those that are resident, or on a GPU those that are taken there."""
    if not ON_GPU:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with epx.jax._cuda.current(jax.local_devices()[0]):
        assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return total.value - free.value


def open_files():
    """What this process has open, but for sockets on GPUs: NCCL leaves one open for each communicator that is aborted."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(re.sub(r"[0-9]+", "N", os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # the one that lists them
            pass
    return [name for name in names if not (ON_GPU and name.startswith("socket:"))]


class Lifetime(unittest.TestCase):
    def test_1_groups_created_and_dropped(self):
        """1000 groups, 50 on GPUs, which XLA's handlers know; every 25th one makes a call in a compiled program."""
        if ranks.shares_gpu():
            self.skipTest("memory in use of a GPU is that of all ranks that share it")

        def create(numbers):
            for number in numbers:
                if ON_GPU:
                    group = make_group()
                else:
                    group = epx.Group(epx.bootstrap.local(), transport="host", **config())
                epx.jax._ffi.number_of(group)
                if number % 25 == 0:
                    prepared = jax.jit(lambda idx, group=group: epx.jax.prepare(group, idx, epx.jax.first_token())[1])
                    jax.block_until_ready(prepared(jnp.zeros((1, 1), jnp.int32)))
                    del prepared
                group.check()
                del group
            jax.clear_caches()
            gc.collect()
            return memory_in_use(), collections.Counter(open_files())

        first, files = create(range(5 if ON_GPU else 200))
        last, files_in_the_end = create(range(50 if ON_GPU else 1000))
        print(f"memory {first >> 10} KiB, then {last >> 10} KiB")
        self.assertLess(last - first, 8 << 20)
        self.assertEqual(files_in_the_end - files, collections.Counter())

    def test_1_a_plan_does_not_keep_its_group(self):
        num_rows = jax.jit(lambda plan: plan.offsets[-1])  # which has compiled for this plan, and lives on
        idx, tokens = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, HIDDEN))
        group = make_group() if ON_GPU else epx.Group(epx.bootstrap.local(), transport="host", **config())
        plan, token = epx.jax.prepare(group, idx, epx.jax.first_token())
        self.assertIs(plan.group, group)
        jax.block_until_ready(num_rows(plan))
        alive = weakref.ref(group)
        del group
        gc.collect()
        self.assertIsNone(alive())
        with self.assertRaisesRegex(epx.InvalidArgumentError, "the group has been destroyed"):
            epx.jax.dispatch(plan, tokens, None, token)

    def test_2_the_process_ends_cleanly(self):
        """With a group that lives, one that is only part of a compiled program, a call that nobody has waited for, and one in
        which a thread waits for a peer."""
        if RANK != 0:
            self.skipTest("rank 0 starts the processes")
        for ending in ENDINGS:
            with self.subTest(ending=ending):
                environment = {"EPX_TEST_DEVICE": "cpu", **ranks.ALONE}
                code, output = ranks.finish(ranks.start(__file__, "--ending", ending, environment=environment))
                self.assertEqual(code, 0, output)
                self.assertEqual(output.strip(), "made")


class Refusals(jax_ranks.TestCase):
    """Each raises while tracing, on the rank that is wrong, and no call is made."""

    def check_refused(self, calls):
        """Calls, by words of the sentence that each is refused with, eagerly and under jit."""
        for words, call in calls.items():
            for run in (call, jax.jit(call)):
                ranks.refused(self, words, run)

    def test_1_arguments(self):
        group = self.group()
        start = epx.jax.first_token()
        idx, tokens, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, HIDDEN)), jnp.ones((2, 1))
        plan, token = epx.jax.prepare(group, idx, start)
        refused = {
            "topk_idx is float32": lambda: epx.jax.prepare(group, weights, start),
            "topk_idx has shape": lambda: epx.jax.prepare(group, idx[0], start),
            "9 tokens": lambda: epx.jax.prepare(group, jnp.zeros((9, 1), jnp.int32), start),
            "topk_idx has K = 5; it must be 1 to": lambda: epx.jax.prepare(group, jnp.zeros((2, 5), jnp.int32), start),
            "alignment is 99; it must be 0 to": lambda: epx.jax.prepare(group, idx, start, alignment=99),
            "token has shape": lambda: epx.jax.prepare(group, idx, tokens),
            "token is int; this call takes jax.Array": lambda: epx.jax.prepare(group, idx, 3),
            "tokens has shape": lambda: epx.jax.dispatch(plan, tokens[:1], None, token),
            "tokens is int32": lambda: epx.jax.dispatch(plan, tokens.astype(jnp.int32), None, token),
            "hidden_dim": lambda: epx.jax.dispatch(plan, jnp.ones((2, HIDDEN + 1)), None, token),
            "topk_weights has shape": lambda: epx.jax.dispatch(plan, tokens, jnp.ones(2), token),
            "topk_weights is float16": lambda: epx.jax.dispatch(plan, tokens, weights.astype(jnp.float16), token),
            "recv_weights has shape": lambda: epx.jax.combine(plan, tokens, jnp.ones(3), token),
            "sidecar is list; this call takes jax.Array": lambda: epx.jax.dispatch(plan, tokens, None, token, sidecar=[1]),
            "sidecar has shape [1, 1]; it must be [2, any]": lambda: epx.jax.dispatch(plan, tokens, None, token, sidecar=weights[:1]),
            "max_sidecar_bytes is 0": lambda: epx.jax.dispatch(plan, tokens, None, token, sidecar=weights),
            "whole bytes": lambda: epx.jax.dispatch(plan, tokens, None, token, sidecar=weights.astype(jnp.int4)),
            "num_rows is -1; it must be at least 0": lambda: epx.jax.dispatch(plan, tokens, None, token, num_rows=-1),
            "num_rows is 'all'": lambda: epx.jax.prepare_dispatch(group, tokens, idx, None, token, num_rows="all"),
            "plan is tuple; this call takes epx.jax.Plan": lambda: epx.jax.dispatch((), tokens, None, token),
            "plan is epx.Group; this call takes epx.jax.Plan": lambda: epx.jax.dispatch(group, tokens, None, token),
            "this call takes epx.jax.RankMajorPlan": lambda: epx.jax.combine_rank_major(plan, tokens, token),
            "alignment is 4294967297; it must fit": lambda: epx.jax.prepare(group, idx, start, alignment=2**32 + 1),
        }
        self.check_refused(refused)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "epx.jax.finish"):
            jax.grad(lambda x: jnp.sum(epx.jax.dispatch(plan, x, None, token)[0]))(tokens)

        def square_of_rows(x):
            rows, _, end = epx.jax.dispatch(plan, x, None, token)
            return epx.jax.finish(jnp.sum(rows**2), end)

        first = jax.grad(square_of_rows)
        for second in (jax.grad(lambda x: jnp.sum(first(x) ** 2)), jax.jit(jax.jacrev(first))):
            with self.assertRaisesRegex(epx.UnsupportedError, "second derivatives of epx's operations are not supported"):
                second(tokens)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "epx.jax.finish"):
            jax.grad(
                lambda x: jnp.sum(epx.jax.checkpoint(lambda x, t: epx.jax.dispatch(plan, x, None, t)[::2])(x, token)[0])
            )(tokens)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "num_rows is .*Tracer.*; it must be an integer"):
            jax.jit(lambda rows: epx.jax.dispatch(plan, tokens, None, token, num_rows=rows)[0])(3)
        with self.assertRaisesRegex(Exception, "top_k is 2147483648 and alignment is 1; each must fit in 32 bits"):
            strange = dataclasses.replace(plan, top_k=2**31)
            jax.block_until_ready(epx.jax.combine(strange, tokens, None, token))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "under vmap"):
            jax.vmap(lambda x: epx.jax.dispatch(plan, x, None, token)[0])(tokens[None])
        with self.assertRaisesRegex(epx.InvalidArgumentError, "under vmap"):
            jax.vmap(lambda x: epx.jax.prepare(group, x, token)[0].counts)(idx[None])
        rows, _, token = epx.jax.dispatch(plan, tokens, None, token)
        out, _ = epx.jax.combine(plan, rows, None, token)
        numpy.testing.assert_array_equal(out, tokens)

    @ranks.skip_over_nodes
    def test_1_arguments_of_rank_major_calls(self):
        group = self.group()
        idx, tokens, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, HIDDEN)), jnp.ones((2, 1))
        plan, rows, _, token = epx.jax.dispatch_rank_major(group, tokens, idx, None, epx.jax.first_token())

        def dispatch(tokens=tokens, **options):
            return epx.jax.dispatch_rank_major(group, tokens, idx, None, token, **options)

        refused = {
            "whole bytes": lambda: dispatch(sidecar=weights.astype(jnp.int4)),
            "max_rows is -1": lambda: dispatch(max_rows=-1),
            "expert_out has shape": lambda: epx.jax.combine_rank_major(plan, tokens, token),
            "plan is epx.jax.RankMajorPlan; this call takes epx.jax.Plan": lambda: epx.jax.combine(plan, tokens, None, token),
        }
        self.check_refused(refused)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "under vmap"):
            jax.jit(jax.vmap(lambda x: dispatch(x)[1]))(tokens[None])
        out, _ = epx.jax.combine_rank_major(plan, rows, token)
        numpy.testing.assert_array_equal(out, tokens)  # all experts are on rank 0

    def test_1_rank_major_calls_over_nodes(self):
        if RANKS == 1 or ON_GPU and ranks.num_nodes() == 1:
            self.skipTest("needs a group of several nodes")
        group = self.group(combine_precision="node", ranks_per_node=ranks.ranks_per_node() if ON_GPU else 1)
        idx, tokens = jnp.zeros((2, 2), jnp.int32), jnp.ones((2, HIDDEN))
        with self.assertRaisesRegex(epx.InvalidArgumentError, f"has {RANKS // group.ranks_per_node} nodes"):
            epx.jax.dispatch_rank_major(group, tokens, idx, None, epx.jax.first_token())

    @ranks.skip_over_nodes
    def test_1_precision_and_capacity_of_rank_major_calls(self):
        idx, tokens, token = jnp.zeros((2, 2), jnp.int32), jnp.ones((2, HIDDEN)), epx.jax.first_token()
        exact = self.group(combine_precision="exact")
        plan, rows, _, token = epx.jax.dispatch_rank_major(exact, tokens, idx, None, token)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "'exact'"):
            epx.jax.combine_rank_major(plan, rows, token)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "'exact'"):

            def loss(tokens):
                _, rows, _, last = epx.jax.dispatch_rank_major(exact, tokens, idx, None, token)
                return epx.jax.finish(jnp.sum(rows), last)

            jax.grad(loss)(tokens)
        node = self.group(combine_precision="node")
        plan, rows, _, token = epx.jax.dispatch_rank_major(node, tokens, idx, None, epx.jax.first_token())
        out, _ = epx.jax.combine_rank_major(plan, rows, token)
        numpy.testing.assert_array_equal(out, tokens)  # all experts are on rank 0
        small = self.group(max_recv_tokens_per_rank=4, max_alignment=1)
        with self.assertRaisesRegex(epx.InvalidArgumentError, f"K is {RANKS * 8 * 2}; .* max_recv_tokens_per_rank, 4"):
            epx.jax.dispatch_rank_major(small, tokens, idx, None, epx.jax.first_token())

    def test_2_destroyed_group(self):
        group = make_group()
        prepared = jax.jit(lambda idx: epx.jax.prepare(group, idx, epx.jax.first_token())[0].counts)
        jax.block_until_ready(prepared(jnp.zeros((1, 1), jnp.int32)))
        group.destroy()
        with self.assertRaisesRegex(Exception, "the group of this call has been destroyed"):
            jax.block_until_ready(prepared(jnp.zeros((1, 1), jnp.int32)))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())

    def test_2_another_device(self):
        """A group of the host transport takes part in no program on a GPU, and the other way round."""
        if not ON_GPU:
            self.skipTest("needs a GPU")
        idx = jnp.zeros((1, 1), jnp.int32)
        group = epx.Group(epx.bootstrap.local(), transport="host", **config())
        with self.assertRaisesRegex(Exception, "the group has transport host, and this call is on a CUDA device"):
            jax.block_until_ready(epx.jax.prepare(group, idx, epx.jax.first_token())[1])
        group.check()
        group.destroy()

    def test_2_fork(self):
        """A child of fork() is refused with a sentence before JAX is asked for anything, which hangs there."""
        group = self.group()
        idx = jnp.zeros((1, 1), jnp.int32)
        token = epx.jax.first_token()
        prepared = jax.jit(lambda idx, token: epx.jax.prepare(group, idx, token)[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX tells that fork() may deadlock
            child = os.fork()
        if child == 0:
            code = 1
            try:
                prepared.lower(jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32))
            except epx.InvalidArgumentError as error:
                code = 0 if "fork()" in str(error) else 2
            os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        jax.block_until_ready(prepared(idx, token))

    def test_2_two_threads_in_one_group(self):
        """The second of two calls at once is refused on the host, where JAX does not run it after the first; none hangs."""
        if RANK != 0 or ON_GPU:
            self.skipTest("rank 0 starts the peer, on CPU devices")
        with tempfile.TemporaryDirectory() as directory:
            peer = ranks.start(__file__, "--peer-late", directory)
            group = group_of_two(directory, 0, ranks.TIMEOUT_SECONDS)
            idx = jnp.zeros((1, 1), jnp.int32)
            prepared = jax.jit(lambda idx, token: epx.jax.prepare(group, idx, token)[1])
            compiled = prepared.lower(idx, epx.jax.first_token()).compile()
            endings = [None, None]

            def call(number):
                try:
                    jax.block_until_ready(compiled(idx, epx.jax.first_token()))
                    endings[number] = "made"
                except Exception as error:  # JAX's, with epx's sentence
                    endings[number] = str(error)

            threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(ranks.TIMEOUT_SECONDS)
                self.assertFalse(thread.is_alive())
            self.assertIn("made", endings)
            refused = [ending for ending in endings if ending != "made"]
            for ending in refused:
                self.assertRegex(ending, "EPX_ERROR_INVALID_ARGUMENT.*thread")
                jax.block_until_ready(compiled(idx, epx.jax.first_token()))  # for which the peer waits
            group.check()
            group.destroy()
            code, output = ranks.finish(peer)
            self.assertEqual(code, 0, output)

    def test_3_several_devices(self):
        if RANK == 0:
            environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "EPX_TEST_DEVICE": "cpu"}
            code, output = ranks.finish(ranks.start(__file__, "--several-devices", environment=environment))
            self.assertEqual(code, 0, output)

    def test_4_killed_peer(self):
        if RANK != 0:
            self.skipTest("rank 0 starts the peer")
        with tempfile.TemporaryDirectory() as directory:
            peer = ranks.start(__file__, "--peer-dies", directory, environment=ranks.peer_environment())
            # Ranks of several nodes notice a death long before the timeout, which holds for creating the group, too.
            group = group_of_two(directory, 0, ranks.TIMEOUT_SECONDS if ON_GPU else 10)
            prepared = jax.jit(lambda idx, token: epx.jax.prepare(group, idx, token)[1])
            idx = jnp.zeros((1, 1), jnp.int32)
            token = jax.block_until_ready(prepared(idx, epx.jax.first_token()))
            with self.assertRaisesRegex(Exception, "EPX_ERROR_TIMEOUT.*rank 1"):
                for _ in range(3):  # on a GPU a later call tells
                    jax.block_until_ready(prepared(idx, token))
            with self.assertRaises(epx.GroupError) as caught:
                group.check()
            self.assertEqual((caught.exception.culprit, caught.exception.operation), (1, epx.Operation.PREPARE))
            group.destroy()
            self.assertEqual(ranks.finish(peer)[0], -signal.SIGKILL)


def end(ending):
    group = epx.Group(epx.bootstrap.local(), transport="host", **config())
    idx, tokens = jnp.zeros((8, 2), jnp.int32), jnp.ones((8, HIDDEN))

    def step(tokens):
        out, token = moe_layer(group, tokens, idx, jnp.ones((8, 2)), jnp.ones((4, HIDDEN, HIDDEN)), epx.jax.first_token())
        return epx.jax.finish(out, token)

    compiled = jax.jit(step).lower(tokens).compile()
    jax.block_until_ready(compiled(tokens))
    kept = {"alive": (group, compiled), "compiled": compiled, "under way": group}[ending]
    sys.modules["builtins"].epx_kept = kept
    if ending == "under way":
        for _ in range(50):
            tokens = compiled(tokens)
    print("made")


def end_in_a_call():
    """A thread waits, in a compiled program, for a peer that does not come."""
    made = [None, None]
    with tempfile.TemporaryDirectory() as directory:

        def create(rank):
            made[rank] = group_of_two(directory, rank, ranks.TIMEOUT_SECONDS)

        threads = [threading.Thread(target=create, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    prepared = jax.jit(lambda idx, token: epx.jax.prepare(made[0], idx, token)[1])
    compiled = prepared.lower(jnp.zeros((1, 1), jnp.int32), epx.jax.first_token()).compile()

    def call():
        with contextlib.suppress(Exception):
            jax.block_until_ready(compiled(jnp.zeros((1, 1), jnp.int32), epx.jax.first_token()))

    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.5)
    print("made")


ENDINGS = "alive", "compiled", "under way", "in a call"


def several_devices():
    assert jax.local_device_count() == 2
    group = epx.Group(epx.bootstrap.local(), transport="host", **config())
    try:
        epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())
    except epx.InvalidArgumentError as error:
        assert "2 devices" in str(error), error
        return
    raise AssertionError("it was not refused")


def group_of_two(directory, rank, timeout):
    """A group of this process and one that it started, or that started it."""
    (device,) = jax.local_devices()
    with epx.bootstrap.from_directory(directory, "job", rank, 2, 60) as bootstrap, epx.jax._cuda.current(device):
        return epx.Group(bootstrap, transport=TRANSPORT, **config(timeout=timeout))


def peer_late(directory):
    group = group_of_two(directory, 1, ranks.TIMEOUT_SECONDS)
    time.sleep(1)
    for _ in range(2):
        group.prepare(numpy.zeros((1, 1), numpy.int32))
    group.check()


def peer_dies(directory):
    group = group_of_two(directory, 1, ranks.TIMEOUT_SECONDS)
    jax.block_until_ready(epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())[1])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:] == ["--several-devices"]:
        several_devices()
    elif sys.argv[1:2] == ["--ending"]:
        end_in_a_call() if sys.argv[2] == "in a call" else end(sys.argv[2])
    elif sys.argv[1:2] == ["--peer-dies"]:
        peer_dies(sys.argv[2])
    elif sys.argv[1:2] == ["--peer-late"]:
        peer_late(sys.argv[2])
    else:
        jax_ranks.join()
        ranks.main()
