# SPDX-License-Identifier: Apache-2.0
"""epx.jax on CPU devices, against a dense layer in float64 and its finite differences: process-local jit and shard_map."""

import os
import signal
import sys
import tempfile
import unittest

import jax_ranks
import ranks
from jax_ranks import HIDDEN, RANK, RANKS, Data, config, float32, make_group, moe_layer
from reference import numeric_gradient

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epx
import epx.jax

TOLERANCE = dict(rtol=1e-4, atol=1e-5)


def local_experts(group, data):
    return float32(data.experts[group.first_local_expert : group.first_local_expert + group.num_local_experts])


class ProcessLocal(unittest.TestCase):
    """Each process has its own arrays, whose number of tokens may differ."""

    def check(self, group, data, **options):
        def loss(tokens, weights, expert_weight):
            out, token = moe_layer(
                group, tokens, jnp.asarray(data.idx[RANK]), weights, expert_weight, epx.jax.first_token(), **options
            )
            return epx.jax.finish(jnp.sum(out * float32(data.factor[RANK])), token), out

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        arguments = float32(data.tokens[RANK]), float32(data.weights[RANK]), local_experts(group, data)
        (_, out), grads = gradient(*arguments)
        numpy.testing.assert_allclose(out, data.out(RANK), **TOLERANCE)
        mine = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        for got, array, part in zip(
            grads, (data.tokens[RANK], data.weights[RANK], data.experts), (slice(None), slice(None), mine)
        ):
            numpy.testing.assert_allclose(got, numeric_gradient(data.loss, array)[part], **TOLERANCE)
        (_, again), _ = gradient(*arguments)
        numpy.testing.assert_array_equal(out, again)
        group.check()

    def test_1_layers(self):
        group = make_group()
        self.check(group, Data([4] * RANKS))
        self.check(group, Data([0 if rank == RANKS - 1 else 3 + rank for rank in range(RANKS)], seed=2), alignment=8)
        self.check(group, Data([5] * RANKS, top_k=1, seed=3, masked=0), num_rows=5 * RANKS)
        self.check(group, Data([3] * RANKS, top_k=3, seed=4, masked=1))
        group.destroy()

    def test_2_two_layers_two_groups_and_an_unused_output(self):
        group, other = make_group(), make_group(combine_precision="exact")
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
        for each in (group, other):
            each.check()
            each.destroy()

    def test_3_scan_and_checkpoint(self):
        group = make_group()
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
        group.check()
        group.destroy()

    def test_6_forward_alone_without_tokens_on_a_rank(self):
        group = make_group()
        data = Data([0 if rank == RANKS - 1 else 3 for rank in range(RANKS)], seed=10)

        @jax.jit
        def twice(tokens, weights, expert_weight):
            token = epx.jax.first_token()
            for _ in range(2):
                out, token = moe_layer(group, tokens, jnp.asarray(data.idx[RANK]), weights, expert_weight, token)
            return epx.jax.finish(out, token)

        out = twice(float32(data.tokens[RANK]), float32(data.weights[RANK]), local_experts(group, data))
        numpy.testing.assert_allclose(out, data.out(RANK), **TOLERANCE)
        plan = group.prepare(data.idx[RANK])  # the ranks agree about how many calls there have been
        self.assertEqual(plan.num_tokens, len(out))
        group.check()
        group.destroy()

    def test_4_dtypes_and_eager(self):
        group = make_group()
        data = Data([4] * RANKS, seed=8)
        for dtype in (jnp.bfloat16, jnp.float16):
            tokens = jnp.asarray(data.tokens[RANK], dtype)
            plan, token = epx.jax.prepare(group, jnp.asarray(data.idx[RANK]), epx.jax.first_token())
            rows, none, token = epx.jax.dispatch(group, plan, tokens, None, token)
            self.assertIsNone(none)
            self.assertEqual(rows.dtype, dtype)
            out, token = epx.jax.combine(group, plan, rows, None, token)
            routes = (data.idx[RANK] >= 0).sum(axis=1, keepdims=True)
            numpy.testing.assert_allclose(numpy.asarray(out, float), numpy.asarray(tokens, float) * routes, rtol=2e-2)
            numpy.testing.assert_array_equal(numpy.asarray(rows, float)[int(plan.offsets[-1]) :], 0)
        group.check()
        group.destroy()

    def test_5_overflow_and_bad_indices_are_told_by_check(self):
        group = make_group(max_recv_tokens_per_rank=2, max_alignment=1)
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
        group.destroy()


class ShardMap(unittest.TestCase):
    """Arrays are sharded over the processes."""

    def check(self, shape, names):
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        group = epx.jax.make_group(mesh, "ep", transport="host", **config())
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
        group = make_group()

        def call(tokens):
            plan, _ = epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())
            return tokens + plan.counts[0]

        with self.assertRaisesRegex(epx.InvalidArgumentError, "has no mesh axis"):
            jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep"), check_vma=False)(
                jnp.ones(RANKS)
            )
        group.destroy()
        if RANKS > 1:
            odd = epx.jax.make_group(mesh, "ep", transport="host", **config(num_experts=2 * RANKS + 1))
            with self.assertRaisesRegex(epx.InvalidArgumentError, "must divide"):
                jax.shard_map(
                    lambda x: epx.jax.prepare(odd, jnp.zeros((1, 1), jnp.int32), x[0])[1][None],
                    mesh=mesh,
                    in_specs=PartitionSpec("ep"),
                    out_specs=PartitionSpec("ep"),
                    check_vma=False,
                )(jnp.ones(RANKS))
            odd.destroy()


class Refusals(unittest.TestCase):
    """Each raises while tracing, on the rank that is wrong, and no call is made."""

    def test_1_arguments(self):
        group = make_group()
        start = epx.jax.first_token()
        idx, tokens, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, HIDDEN)), jnp.ones((2, 1))
        plan, token = epx.jax.prepare(group, idx, start)
        for words, call in {
            "topk_idx is float32": lambda: epx.jax.prepare(group, weights, start),
            "topk_idx has shape": lambda: epx.jax.prepare(group, idx[0], start),
            "9 tokens": lambda: epx.jax.prepare(group, jnp.zeros((9, 1), jnp.int32), start),
            "top_k": lambda: epx.jax.prepare(group, jnp.zeros((2, 5), jnp.int32), start),
            "alignment": lambda: epx.jax.prepare(group, idx, start, alignment=99),
            "token has shape": lambda: epx.jax.prepare(group, idx, tokens),
            "token is int": lambda: epx.jax.prepare(group, idx, 3),
            "tokens has shape": lambda: epx.jax.dispatch(group, plan, tokens[:1], None, token),
            "tokens is int32": lambda: epx.jax.dispatch(group, plan, tokens.astype(jnp.int32), None, token),
            "hidden_dim": lambda: epx.jax.dispatch(group, plan, jnp.ones((2, HIDDEN + 1)), None, token),
            "topk_weights has shape": lambda: epx.jax.dispatch(group, plan, tokens, jnp.ones(2), token),
            "topk_weights is float16": lambda: epx.jax.dispatch(group, plan, tokens, weights.astype(jnp.float16), token),
            "recv_weights has shape": lambda: epx.jax.combine(group, plan, tokens, jnp.ones(3), token),
        }.items():
            for run in (lambda call: call(), lambda call: jax.jit(call)()):
                with self.assertRaises(epx.InvalidArgumentError) as caught:
                    run(call)
                self.assertIn(words, str(caught.exception))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "epx.jax.finish"):
            jax.grad(lambda x: jnp.sum(epx.jax.dispatch(group, plan, x, None, token)[0]))(tokens)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "epx.jax.finish"):
            jax.grad(
                lambda x: jnp.sum(epx.jax.checkpoint(lambda x, t: epx.jax.dispatch(group, plan, x, None, t)[::2])(x, token)[0])
            )(tokens)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "under vmap"):
            jax.vmap(lambda x: epx.jax.dispatch(group, plan, x, None, token)[0])(tokens[None])
        rows, _, token = epx.jax.dispatch(group, plan, tokens, None, token)
        out, _ = epx.jax.combine(group, plan, rows, None, token)
        numpy.testing.assert_array_equal(out, tokens)
        group.check()
        group.destroy()

    def test_2_destroyed_group(self):
        group = make_group()
        prepared = jax.jit(lambda idx: epx.jax.prepare(group, idx, epx.jax.first_token())[0].counts)
        jax.block_until_ready(prepared(jnp.zeros((1, 1), jnp.int32)))
        group.destroy()
        with self.assertRaisesRegex(Exception, "the group of this call has been destroyed"):
            jax.block_until_ready(prepared(jnp.zeros((1, 1), jnp.int32)))
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())

    def test_3_several_devices(self):
        if RANK == 0:
            code, output = ranks.finish(
                ranks.start(
                    __file__, "--several-devices", environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
                )
            )
            self.assertEqual(code, 0, output)

    def test_4_killed_peer(self):
        if RANK != 0:
            self.skipTest("rank 0 starts the peer")
        with tempfile.TemporaryDirectory() as directory:
            peer = ranks.start(__file__, "--peer-dies", directory)
            with epx.bootstrap.from_directory(directory, "job", 0, 2, 30) as bootstrap:
                group = epx.Group(bootstrap, transport="host", **config(timeout=2))
            prepared = jax.jit(lambda idx, token: epx.jax.prepare(group, idx, token)[1])
            idx = jnp.zeros((1, 1), jnp.int32)
            token = jax.block_until_ready(prepared(idx, epx.jax.first_token()))
            with self.assertRaisesRegex(Exception, "EPX_ERROR_TIMEOUT.*rank 1"):
                jax.block_until_ready(prepared(idx, token))
            with self.assertRaises(epx.GroupError) as caught:
                group.check()
            self.assertEqual((caught.exception.culprit, caught.exception.operation), (1, epx.Operation.PREPARE))
            group.destroy()
            self.assertEqual(ranks.finish(peer)[0], -signal.SIGKILL)


def several_devices():
    assert jax.local_device_count() == 2
    group = epx.Group(epx.bootstrap.local(), transport="host", **config())
    try:
        epx.jax.prepare(group, jnp.zeros((1, 1), jnp.int32), epx.jax.first_token())
    except epx.InvalidArgumentError as error:
        assert "2 devices" in str(error), error
        return
    raise AssertionError("it was not refused")


def peer_dies(directory):
    with epx.bootstrap.from_directory(directory, "job", 1, 2, 30) as bootstrap:
        group = epx.Group(bootstrap, transport="host", **config(timeout=60))
    group.prepare(numpy.zeros((1, 1), numpy.int32))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:] == ["--several-devices"]:
        several_devices()
    elif sys.argv[1:2] == ["--peer-dies"]:
        peer_dies(sys.argv[2])
    else:
        jax_ranks.join()
        ranks.main()
