# SPDX-License-Identifier: Apache-2.0
"""Tests of epx.jax.ragged_all_to_all, which jax_test.py runs: against a loop over rows, its gradients against the transpose of
a matrix, and a layer that sorts its own rows against a dense one."""

import unittest

import jax_ranks
import ranks
from jax_ranks import HIDDEN, RANK, RANKS, TRANSPORT, Data, config
from reference import Slices, numeric_gradient

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epx
import epx.jax


def matrix_of(slices, counts_in, counts_out):
    """[M, N] of zeros and ones: what lands in the outputs of all ranks, of the operands of all ranks."""
    first_in, first_out = numpy.cumsum((0, *counts_in)), numpy.cumsum((0, *counts_out))
    matrix = numpy.zeros((first_out[-1], first_in[-1]))
    for source, row, destination, place in slices.rows:
        matrix[first_out[destination] + place, first_in[source] + row] = 1
    return matrix


def of_rank(stacked, counts):
    first = sum(counts[:RANK])
    return stacked[first : first + counts[RANK]]


@ranks.skip_over_nodes
class Ragged(jax_ranks.TestCase):
    """Each process has its own arrays."""

    def check(self, group, slices, row, dtype, transposed, which):
        counts = slices.num_rows[::-1] if transposed else slices.num_rows
        generator = numpy.random.default_rng(1)
        # Small integers, which all dtypes have.
        operands, outputs, factors = [
            [generator.integers(-9, 10, (count, *row)).astype(float) for count in counts[i]] for i in (0, 1, 1)
        ]
        matrix = matrix_of(slices, *slices.num_rows)
        if transposed:
            matrix = matrix.T
        landed = matrix.any(axis=1).reshape(-1, *[1] * len(row))
        stacked = numpy.concatenate(factors)
        grads = numpy.tensordot(matrix.T, stacked, 1), numpy.where(landed, 0, stacked)

        def loss(operand, output, slices):
            token = epx.jax.first_token()
            moved, token = epx.jax.ragged_all_to_all(group, operand, output, *slices, token, transposed=transposed)
            return epx.jax.finish(jnp.sum(moved * jnp.asarray(factors[RANK], dtype)), token), moved

        arguments = *(jnp.asarray(each[RANK], dtype) for each in (operands, outputs)), slices.arguments[RANK]
        got, moved = jax.jit(jax.grad(loss, which, has_aux=True))(*arguments)
        wanted = (slices.move_back if transposed else slices.move)(operands, outputs)[RANK]
        numpy.testing.assert_array_equal(moved.astype(float), wanted)
        for i, grad in zip(which, got):
            self.assertEqual(grad.dtype, dtype)
            numpy.testing.assert_array_equal(grad.astype(float), of_rank(grads[i], counts[i]))
        numpy.testing.assert_array_equal(arguments[1].astype(float), outputs[RANK])  # XLA has copied what is not its own

    def test_1_gradients(self):
        group = self.group()
        for which in ((0, 1), (0,), (1,)):
            self.check(group, Slices(RANKS, 2, 1), (HIDDEN,), jnp.float32, False, which)
        self.check(group, Slices(RANKS, 1, 2), (2, 9), jnp.bfloat16, True, (0, 1))
        self.check(group, Slices(RANKS, 3, 3), (), jnp.float16, False, (0, 1))

    def test_2_eager_and_other_dtypes(self):
        group, slices = self.group(), Slices(RANKS, 1, 4)
        for dtype, row in ((numpy.int32, (3,)), (bool, (2, 1, 2, 1)), (jnp.float8_e4m3fn, ()), (numpy.complex64, (1,))):
            generator = numpy.random.default_rng(2)
            operands, outputs = [
                [generator.integers(0, 2, (count, *row)).astype(dtype) for count in counts] for counts in slices.num_rows
            ]
            given = jnp.asarray(outputs[RANK])
            moved, _ = epx.jax.ragged_all_to_all(group, operands[RANK], given, *slices.arguments[RANK], epx.jax.first_token())
            self.assertEqual(moved.dtype, dtype)
            numpy.testing.assert_array_equal(moved, slices.move(operands, outputs)[RANK])
            numpy.testing.assert_array_equal(given, outputs[RANK])

    def test_2_output_is_written_in_place(self):
        group, slices = self.group(), Slices(RANKS, 1, 5)
        operand, output = [jnp.zeros(counts[RANK]) for counts in slices.num_rows]

        def move(output, operand, slices):
            return epx.jax.ragged_all_to_all(group, operand, output, *slices, epx.jax.first_token())

        compiled = jax.jit(move, donate_argnums=0).lower(output, operand, slices.arguments[RANK]).compile()
        self.assertNotRegex(compiled.as_text(), r"f32\[\d+\]\S* copy\(")
        jax.block_until_ready(compiled(output, operand, slices.arguments[RANK]))
        self.assertTrue(output.is_deleted())

    def test_3_bad_slices_are_told_by_check(self):
        group = jax_ranks.make_group()
        ones = jnp.ones(RANKS, jnp.int32)
        output, _ = epx.jax.ragged_all_to_all(
            group, jnp.ones(3), jnp.zeros(RANKS), 3 * ones, ones, RANK * ones, ones, epx.jax.first_token()
        )
        numpy.testing.assert_array_equal(output, numpy.zeros(RANKS))
        with self.assertRaises(epx.EventError) as caught:
            group.check()
        self.assertEqual(caught.exception.events, {epx.EventKind.BAD_SLICE: 2 * RANKS - 1})
        group.destroy()

    def test_3_refusals(self):
        group, token = self.group(), epx.jax.first_token()
        rows, zeros = jnp.ones((3, 2)), jnp.zeros(RANKS, jnp.int32)

        def move(*changed, **options):
            arguments = {**dict(enumerate([group, rows, rows, *[zeros] * 4, token])), **dict(changed)}
            return epx.jax.ragged_all_to_all(*arguments.values(), **options)

        for words, call in {
            "group is NoneType; this call takes epx.Group": lambda: move((0, None)),
            "operand is list; this call takes jax.Array": lambda: move((1, [1])),
            "operand has shape []": lambda: move((1, token)),
            "operand is int4; its elements must have whole bytes": lambda: move(*((i, rows.astype(jnp.int4)) for i in (1, 2))),
            "output is bfloat16; it must be float32": lambda: move((2, rows.astype(jnp.bfloat16))),
            "output has shape [3, 1]; it must be [any, 2]": lambda: move((2, rows[:, :1])),
            "input_offsets is float32; it must be int32 or int64": lambda: move((3, rows[0])),
            f"send_sizes has shape [{RANKS + 1}]; it must be [{RANKS}]": lambda: move((4, jnp.zeros(RANKS + 1, int))),
            "recv_sizes is int8; it must be int32": lambda: move((6, zeros.astype(jnp.int8))),
            "input_offsets has 0 slices": lambda: move(*((i, zeros[:0]) for i in range(3, 7))),
            "token is int32; it must be float32": lambda: move((7, zeros[0])),
            "transposed is int; this call takes bool": lambda: move(transposed=1),
            "under vmap": lambda: jax.vmap(lambda rows: move((1, rows)))(rows[None]),
            "does not come through its token": lambda: jax.grad(lambda rows: move((1, rows))[0].sum())(rows),
        }.items():
            ranks.refused(self, words, call)
        first = jax.grad(lambda rows: epx.jax.finish(*map(jnp.sum, move((1, rows)))))
        with self.assertRaisesRegex(epx.UnsupportedError, "second derivatives"):
            jax.grad(lambda rows: jnp.sum(first(rows)))(rows)
        group.check()
        if RANKS > 1 and TRANSPORT == "host":  # on GPUs nodes are as they are found
            nodes = self.group(combine_precision="node", ranks_per_node=1)
            ranks.refused(self, f"has {RANKS} nodes; ragged calls need a group of one node", lambda: move((0, nodes)))


@ranks.skip_over_nodes
class RaggedShardMap(unittest.TestCase):
    def layer(self, group, tokens, expert, weight, token):
        """Brings each token to its one expert, with rows sorted by rank; num_local_experts are of each rank."""
        one = jnp.ones(RANKS, jnp.int32)
        owner = expert // len(weight)
        order = jnp.argsort(owner)
        send_sizes = jnp.bincount(owner, length=RANKS).astype(jnp.int32)
        me = jax.lax.axis_index("ep")
        # What all ranks send to all: an all-gather, of one row from each.
        none = jnp.zeros((RANKS, RANKS), jnp.int32)
        sizes, token = epx.jax.ragged_all_to_all(group, send_sizes[None], none, 0 * one, one, me * one, one, token)
        first = jnp.cumsum(sizes, 0, dtype=jnp.int32) - sizes  # in the output of each rank
        slices = jnp.cumsum(send_sizes, dtype=jnp.int32) - send_sizes, send_sizes, first[me], sizes[:, me]
        num_rows = RANKS * len(tokens)
        rows, token = epx.jax.ragged_all_to_all(
            group, tokens[order], jnp.zeros((num_rows, tokens.shape[1])), *slices, token
        )
        local, token = epx.jax.ragged_all_to_all(group, expert[order] % len(weight), jnp.zeros(num_rows, int), *slices, token)
        rows = jnp.tanh(jnp.einsum("nh,nhg->ng", rows, weight[local]))
        # Rows for which no row comes back keep what they are: there are none.
        out, token = epx.jax.ragged_all_to_all(group, rows, tokens[order], *slices, token, transposed=True)
        return out[jnp.argsort(order)], token

    def test_1_layer_that_sorts(self):
        mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,))
        # Its experts need not be as many on all ranks.
        group = epx.jax.make_group(mesh, "ep", transport=TRANSPORT, **config(num_experts=2 * RANKS - 1, hidden_dim=1))
        data = Data([4] * RANKS, top_k=1, seed=31, masked=0)
        for weights in data.weights:
            weights[:] = 1
        spec = PartitionSpec("ep")
        num_experts = len(data.experts) // RANKS * RANKS
        idx = [each % num_experts for each in data.idx]
        data.idx = idx

        def global_array(parts):
            whole = numpy.concatenate(parts)
            whole = whole if whole.dtype == numpy.int32 else whole.astype(numpy.float32)
            return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])

        arguments = [global_array(each) for each in (data.tokens, [data.experts[:num_experts]], idx, data.factor)]
        wanted = numeric_gradient(data.loss, data.tokens[RANK]), numeric_gradient(data.loss, data.experts)[:num_experts]
        per_rank = num_experts // RANKS
        wanted = wanted[0], wanted[1][RANK * per_rank : (RANK + 1) * per_rank]
        for wrap in (lambda layer: layer, epx.jax.checkpoint):

            def loss_of_shard(tokens, weight, idx, factor, wrap=wrap):
                def layer(tokens, weight, token):
                    return self.layer(group, tokens, idx[:, 0], weight, token)

                out, token = wrap(layer)(tokens, weight, epx.jax.first_token())
                return jax.lax.psum(epx.jax.finish(jnp.sum(out * factor), token), "ep")

            loss = jax.shard_map(loss_of_shard, mesh=mesh, in_specs=(spec,) * 4, out_specs=PartitionSpec(), check_vma=False)
            value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(*arguments)
            self.assertAlmostEqual(float(value), data.loss(), delta=1e-3)
            for got, want in zip(grads, wanted):
                numpy.testing.assert_allclose(got.addressable_data(0), want, rtol=1e-4, atol=1e-5)
        group.check()
        group.destroy()
