# SPDX-License-Identifier: Apache-2.0
"""Row formats of epx.jax: the three ways through each call that dispatches, against the definitions of tests/formats, and their
gradients. On GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import dataclasses
import functools

import jax_ranks
import ranks
from jax_ranks import EXPERTS, RANK, RANKS

ranks.require("ml_dtypes")
import format_model
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy
from format_model import HIDDEN, bits
from reference import Exchange, RankMajorExchange

from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epx
import epx.jax

MAX_ROWS = 8
NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 4 + 3 * rank for rank in range(RANKS)]
Data = functools.partial(format_model.Data, NUM_TOKENS, EXPERTS, 2)
DTYPES = numpy.float32, ml_dtypes.bfloat16


def in_bytes(array):
    """Elements of 8 or 4 bits as bytes, of which two of 4 bits are one; others as they are."""
    array = numpy.asarray(array)
    if array.dtype != ml_dtypes.float4_e2m1fn:
        return bits(array)
    codes = array.view(numpy.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def quantised_by_caller(row_format, parts):
    """The tuple that a caller gives whose framework has quantised its rows."""
    rows, scales, *row_scales = parts
    if row_format.elements_per_byte == 2:
        rows = numpy.stack([rows & 15, rows >> 4], -1).reshape(len(rows), 2 * rows.shape[1])
    scales = scales if scales.dtype == numpy.float32 else scales.view(getattr(ml_dtypes, row_format.scale_dtype))
    return rows.view(getattr(ml_dtypes, row_format.dtype)), scales, *row_scales


class ByExpert:
    """dispatch, or prepare_dispatch, as a function of tokens, and what should arrive."""

    def __init__(self, group, data, in_one_call, alignment=1):
        self.group, self.in_one_call, self.alignment = group, in_one_call, alignment
        self.idx = jnp.asarray(data.idx[RANK], jnp.int32)
        self.exchange = Exchange(data.idx, EXPERTS, alignment)
        self.num_rows = group.max_recv_tokens_per_rank

    def __call__(self, tokens, weights, token, **options):
        if self.in_one_call:
            _, *results = epx.jax.prepare_dispatch(
                self.group, tokens, self.idx, weights, token, alignment=self.alignment, **options
            )
            return results
        plan, token = epx.jax.prepare(self.group, self.idx, token, alignment=self.alignment)
        return epx.jax.dispatch(plan, tokens, weights, token, **options)

    def wanted(self, arrays):
        """[R, ...] of this rank; rows that hold no token are zero."""
        rows = self.exchange.scatter(arrays)[RANK]
        return numpy.concatenate([rows, numpy.zeros((self.num_rows - len(rows), *rows.shape[1:]), rows.dtype)])

    def wanted_weights(self, weights):
        rows = self.exchange.scatter_weights(weights)[RANK]
        return numpy.concatenate([rows, numpy.zeros(self.num_rows - len(rows), rows.dtype)])


class RankMajor:
    """Likewise dispatch_rank_major, whose rows [P, M] are those of one matrix here."""

    def __init__(self, group, data):
        self.group = group
        self.idx = jnp.asarray(data.idx[RANK], jnp.int32)
        self.exchange = RankMajorExchange(data.idx, EXPERTS, MAX_ROWS)
        self.num_rows = RANKS * MAX_ROWS

    def __call__(self, tokens, weights, token, **options):
        _, *results = epx.jax.dispatch_rank_major(
            self.group, tokens, self.idx, weights, token, max_rows=MAX_ROWS, **options
        )
        return results

    def wanted(self, arrays):
        rows = self.exchange.scatter(arrays)[RANK]
        return rows.reshape(self.num_rows, *rows.shape[2:])

    def wanted_weights(self, weights):
        return self.exchange.scatter_weights(weights)[RANK].reshape(-1)


class Formats(jax_ranks.TestCase):
    def formats_group(self, **changes):
        return self.group(hidden_dim=HIDDEN, max_alignment=128, **changes)

    def calls(self, group, data, alignment=1, layout=epx.ScaleLayout.ROWS):
        calls = [ByExpert(group, data, in_one_call, alignment) for in_one_call in (False, True)]
        has_rank_major = ranks.num_nodes() == 1 and layout != epx.ScaleLayout.TILES
        return [*calls, RankMajor(group, data)] if has_rank_major else calls

    def compare(self, call, row_format, received, parts):
        self.assertEqual(len(received), row_format.num_parts)
        self.assertEqual(received[0].dtype.name, row_format.dtype)
        self.assertEqual(received[1].dtype.name, row_format.recv_scales_dtype)
        self.assertEqual(received[0].shape[-1], HIDDEN)
        wanted = [call.wanted(part) for part in parts]
        numpy.testing.assert_array_equal(in_bytes(received[0]).reshape(call.num_rows, -1), wanted[0])
        num_scales = row_format.num_scales(HIDDEN)
        scales = format_model.by_rows(row_format.scale_layout, numpy.asarray(received[1]), call.num_rows, num_scales)
        numpy.testing.assert_array_equal(scales, wanted[1])
        if row_format.has_row_scales:
            numpy.testing.assert_array_equal(numpy.asarray(received[2]).reshape(-1), wanted[2])

    def check(self, group, row_format, dtype, alignment=1):
        """Ways a and b in one program, since compiling takes the time."""
        data = Data(dtype)
        parts = data.parts(row_format)
        calls = self.calls(group, data, alignment, row_format.scale_layout)
        inputs = [data.tokens[RANK]]
        if row_format.encode_scale is None:
            inputs.append(quantised_by_caller(row_format, [part[RANK] for part in parts]))

        @jax.jit
        def program(inputs, weights):
            token, results = epx.jax.first_token(), []
            for call in calls:
                for tokens in inputs:
                    *received, token = call(tokens, weights, token, format=row_format)
                    results.append(received)
            return epx.jax.finish(results, token)

        results = iter(program(inputs, data.weights[RANK]))
        for call in calls:
            for _ in inputs:
                received, weights = next(results)
                self.compare(call, row_format, received, parts)
                numpy.testing.assert_array_equal(weights.reshape(-1), call.wanted_weights(data.weights))

    def test_1_quantised_rows_by_the_caller_and_in_the_call(self):
        group = self.formats_group()
        for i, row_format in enumerate(format_model.formats()):
            with self.subTest(format=row_format):
                self.check(group, row_format, DTYPES[i % 2], alignment=4)

    def test_2_layouts_of_scales(self):
        group = self.formats_group()
        for row_format in (
            epx.RowFormat("block128", scale_layout="columns"),
            epx.RowFormat("nv", scale_layout="columns"),
            epx.RowFormat("mx", scale_layout="columns"),
            epx.RowFormat("block128_pow2", scale_layout="packed"),
            epx.RowFormat("mx", scale_layout="packed"),
            epx.RowFormat("mx", scale_layout="tiles"),
            epx.RowFormat("nv", scale_layout="tiles"),
        ):
            with self.subTest(format=row_format):
                self.check(group, row_format, numpy.float32, 128 if row_format.scale_layout == epx.ScaleLayout.TILES else 1)

    def test_3_gradients(self):
        """They are those of a dispatch without a format; rows that arrive wide are q * s. One program has all calls, since
        compiling takes the time."""
        group = self.formats_group()
        for i, row_format in enumerate(format_model.formats()):
            data = Data(DTYPES[i % 2], 3)
            tokens, weights = data.tokens[RANK], data.weights[RANK]
            parts = data.parts(row_format)
            on_wire = dataclasses.replace(row_format, wire_only=True)
            there = [format_model.round_trip(row_format, each.astype(numpy.float32)).astype(each.dtype) for each in data.tokens]
            calls = self.calls(group, data)[i % 2 :]
            ways = {}, dict(format=on_wire), dict(format=row_format, with_wide=True)
            shapes = [(call.num_rows, HIDDEN) if isinstance(call, ByExpert) else (RANKS, MAX_ROWS, HIDDEN) for call in calls]
            factors = [numpy.random.default_rng(RANK).standard_normal(shape).astype(numpy.float32) for shape in shapes]

            @jax.jit
            @functools.partial(jax.grad, has_aux=True)
            def program(leaves):
                token, loss, results = epx.jax.first_token(), 0.0, []
                for (tokens, weights), (call, factor, options) in zip(leaves, cases):
                    *received, token = call(tokens, weights, token, **options)
                    # What comes last, but for weights, has the rows' gradient.
                    rows = received[-1] if len(received) > 2 else received[0]
                    loss += jnp.sum(rows.astype(jnp.float32) * factor) + jnp.sum(jnp.sin(received[1]))
                    results.append(received)
                return epx.jax.finish(loss, token), results

            cases = [(call, factor, options) for call, factor in zip(calls, factors) for options in ways]
            gradients, results = program([(tokens, weights)] * len(cases))
            for j, (call, shape) in enumerate(zip(calls, shapes)):
                with self.subTest(format=row_format, call=type(call).__name__):
                    wanted, *others = gradients[len(ways) * j :][: len(ways)]
                    _, (rows, _), (received, _, wide) = results[len(ways) * j :][: len(ways)]
                    self.assertTrue(jnp.any(wanted[0] != 0) or tokens.size == 0)
                    for each in others:
                        jax.tree.map(numpy.testing.assert_array_equal, each, wanted)
                    self.assertEqual(rows.dtype, tokens.dtype)
                    numpy.testing.assert_array_equal(numpy.asarray(rows).reshape(-1, HIDDEN), call.wanted(there))
                    self.compare(call, row_format, received, parts)
                    self.assertEqual((wide.dtype, wide.shape), (tokens.dtype, shape))

    def test_4_weights_alone_have_gradients(self):
        sidecars = [numpy.arange(count, dtype=numpy.int32)[:, None] for count in NUM_TOKENS]
        for dtype, row_format in zip(DTYPES, (epx.RowFormat("block128"), epx.RowFormat("nv"))):
            group = self.formats_group(max_sidecar_bytes=4, max_token_dtype=numpy.dtype(dtype).name)
            data = Data(dtype, 4)
            parts = data.parts(row_format)
            given = quantised_by_caller(row_format, [part[RANK] for part in parts])
            for call in self.calls(group, data):
                for tokens in (data.tokens[RANK], given):

                    @jax.jit
                    @functools.partial(jax.grad, has_aux=True)
                    def program(weights):
                        received, row_weights, sidecar, token = call(
                            tokens, weights, epx.jax.first_token(), format=row_format, sidecar=sidecars[RANK]
                        )
                        return epx.jax.finish(jnp.sum(row_weights), token), (received, sidecar)

                    with self.subTest(format=row_format, call=type(call).__name__):
                        gradient, (received, sidecar) = program(data.weights[RANK])
                        numpy.testing.assert_array_equal(gradient, data.idx[RANK] >= 0)
                        self.compare(call, row_format, received, parts)
                        numpy.testing.assert_array_equal(sidecar.reshape(-1, 1), call.wanted(sidecars))

    def test_5_gradients_of_combine(self):
        """They are those of out's gradient as it has been on the wire."""
        group = self.formats_group()
        data = Data(numpy.float32, 7)
        idx = jnp.asarray(data.idx[RANK], jnp.int32)
        for row_format in (epx.RowFormat("block128", amax_floor=0.5, wire_only=True), epx.RowFormat("nv", wire_only=True)):
            there = format_model.round_trip(row_format, data.tokens[RANK])
            self.assertFalse(there.size and numpy.array_equal(there, data.tokens[RANK]))

            def by_expert(rows, row_weights, token, **options):
                plan, token = epx.jax.prepare(group, idx, token)
                return epx.jax.combine(plan, rows, row_weights, token, **options)

            def rank_major(rows, row_weights, token, **options):
                plan, _, _, token = epx.jax.dispatch_rank_major(group, data.tokens[RANK], idx, None, token)
                return epx.jax.combine_rank_major(plan, rows * row_weights[..., None], token, **options)

            for function, lead in ((by_expert, (group.max_recv_tokens_per_rank,)), (rank_major, (RANKS, MAX_ROWS))):
                if function is rank_major and ranks.num_nodes() > 1:
                    continue  # refused there

                @functools.partial(jax.jit, static_argnames="grad_format")
                def gradients(rows, row_weights, factor, grad_format=None):
                    def loss(rows, row_weights):
                        options = {} if grad_format is None else dict(grad_format=grad_format)
                        out, token = function(rows, row_weights, epx.jax.first_token(), **options)
                        return epx.jax.finish(jnp.sum(out * factor), token)

                    return jax.grad(loss, (0, 1))(rows, row_weights)

                generator = numpy.random.default_rng(RANK)
                arguments = [generator.random(shape).astype(numpy.float32) for shape in ((*lead, HIDDEN), lead)]
                with self.subTest(format=row_format, function=function.__name__):
                    found = gradients(*arguments, data.tokens[RANK], grad_format=row_format)
                    wanted = gradients(*arguments, there)
                    numpy.testing.assert_array_equal(found[0], wanted[0])
                    numpy.testing.assert_allclose(found[1], wanted[1], rtol=1e-5, atol=1e-5)

    def test_6_sums(self):
        """What travels home is quantised, in combine and in the backward of dispatch; gradients pass straight through."""
        data = Data(numpy.float32, 9)
        idx, x = jnp.asarray(data.idx[RANK], jnp.int32), data.tokens[RANK]
        exchange, rank_major = Exchange(data.idx, EXPERTS), RankMajorExchange(data.idx, EXPERTS, MAX_ROWS)
        row_weights = exchange.scatter_weights(data.weights)
        # A group of 8 bits has room for nothing else.
        for max_dtype, row_format in zip(("float32", "float8_e4m3fn"), format_model.sum_formats()[1::2]):
            group = self.formats_group(max_token_dtype=max_dtype)
            has_rank_major = ranks.num_nodes() == 1
            in_dispatch, there = dict(grad_format=row_format), data.tokens
            if max_dtype != "float32":
                in_dispatch["format"] = row_format
                there = [format_model.round_trip(row_format, each) for each in there]
            in_combine = dict(format=row_format, grad_format=row_format), dict(grad_format=row_format)

            @jax.jit
            @functools.partial(jax.grad, has_aux=True)
            def program(leaves):
                tokens, more = leaves
                token, loss, sums = epx.jax.first_token(), 0.0, []

                def combined(combine, rows, *weights):
                    # The gradient of `more` is that of the expert_out to which it is added.
                    nonlocal token, loss
                    for options, each in zip(in_combine if max_dtype == "float32" else in_combine[:1], more[len(sums) :]):
                        out, token = combine(plan, jax.lax.stop_gradient(rows) + each, *weights, token, **options)
                        sums.append(out)
                        loss += jnp.sum(out * x)

                plan, token = epx.jax.prepare(group, idx, token)
                rows, weights, token = epx.jax.dispatch(plan, tokens[0], data.weights[RANK], token, **in_dispatch)
                loss += jnp.sum(rows**2) / 2  # so that rows are their gradient
                combined(epx.jax.combine, rows, weights)
                if has_rank_major:
                    plan, rows, _, token = epx.jax.dispatch_rank_major(
                        group, tokens[1], idx, None, token, max_rows=MAX_ROWS, **in_dispatch
                    )
                    loss += jnp.sum(rows**2) / 2
                    combined(epx.jax.combine_rank_major, rows)
                return epx.jax.finish(loss, token), sums

            lead = [(group.max_recv_tokens_per_rank,), (RANKS, MAX_ROWS)]
            more = [jnp.zeros((*each, HIDDEN)) for each in lead for _ in range(2 if max_dtype == "float32" else 1)]
            (of_tokens, of_more), sums = program(([x, x], more))
            by_expert = [exchange.partial_sums(exchange.scatter(there), weights)[RANK] for weights in (row_weights, None)]
            by_rank = 2 * [rank_major.partial_sums(rank_major.scatter(there))[RANK]]
            step = len(more) // 2
            for i, partial_sums in enumerate([by_expert, by_rank][: 1 + has_rank_major]):
                with self.subTest(format=row_format, is_rank_major=i == 1):
                    out, grad = [format_model.sums(row_format, each) for each in partial_sums]
                    numpy.testing.assert_array_equal(sums[step * i], out)
                    numpy.testing.assert_array_equal(of_tokens[i], grad)
                    if step == 2:
                        self.assertFalse(x.size and numpy.array_equal(sums[2 * i], sums[2 * i + 1]))
                        numpy.testing.assert_array_equal(of_more[2 * i], of_more[2 * i + 1])

    def test_7_shard_map_and_checkpoint(self):
        """Rows that arrive quantised in two checkpointed layers, whose backward quantises them again."""
        mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,))
        group = epx.jax.make_group(mesh, "ep", transport=jax_ranks.TRANSPORT, **jax_ranks.config(hidden_dim=HIDDEN))
        data = format_model.Data([4] * RANKS, EXPERTS, 2, numpy.float32, 6)
        block = epx.RowFormat("block128", amax_floor=0)

        @jax.custom_vjp
        def dequantise(rows, scales, wide):
            return rows.astype(jnp.float32) * jnp.repeat(scales, 128, axis=1)[:, :HIDDEN]

        dequantise.defvjp(lambda *arguments: (dequantise(*arguments), None), lambda _, grad: (None, None, grad))

        @epx.jax.checkpoint
        def layer(tokens, idx, weights, token):
            plan, received, row_weights, wide, token = epx.jax.prepare_dispatch(
                group, tokens, idx, weights, token, format=block, with_wide=True
            )
            return epx.jax.combine(plan, dequantise(*received, wide), row_weights, token)

        def loss_of_shard(tokens, idx, weights):
            token = epx.jax.first_token()
            for _ in range(2):
                tokens, token = layer(tokens, idx, weights, token)
            return jax.lax.psum(epx.jax.finish(jnp.sum(tokens), token), "ep")

        by_rank = PartitionSpec("ep")
        loss = jax.shard_map(
            loss_of_shard, mesh=mesh, in_specs=(by_rank,) * 3, out_specs=PartitionSpec(), check_vma=False
        )

        def global_array(whole):
            return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, by_rank), lambda index: whole[index])

        arguments = [global_array(numpy.concatenate(parts)) for parts in (data.tokens, data.idx, data.weights)]
        value, gradient = jax.jit(jax.value_and_grad(loss))(*arguments)
        # Each layer multiplies a token by the sum of its weights, once its row has been quantised.
        sums = [(weights * (idx >= 0)).sum(1, keepdims=True) for idx, weights in zip(data.idx, data.weights)]
        out = data.tokens
        for _ in range(2):
            out = [format_model.round_trip(block, each.astype(numpy.float32)) * factor for each, factor in zip(out, sums)]
        numpy.testing.assert_allclose(value, sum(each.sum() for each in out), rtol=1e-4)
        wanted = numpy.broadcast_to(sums[RANK] ** 2, data.tokens[RANK].shape)
        numpy.testing.assert_allclose(gradient.addressable_data(0), wanted, rtol=1e-5)
        group.check()
        group.destroy()

    def test_8_refusals(self):
        """The sentences are those of numpy arrays, but for what JAX alone has."""
        block = epx.RowFormat("block128")
        group = self.formats_group()
        data = Data(numpy.float32, 5)
        x = jnp.asarray(data.tokens[RANK])
        codes, scales = quantised_by_caller(block, [part[RANK] for part in data.parts(block)])
        call = ByExpert(group, data, in_one_call=True)

        def dispatch(tokens, **options):
            return call(tokens, None, epx.jax.first_token(), **options)

        def differentiated(tokens):
            return jax.grad(lambda tokens: epx.jax.finish(jnp.sum(tokens), dispatch(tokens, format=block)[-1]))(tokens)

        arrays = x, codes, scales, scales.astype(numpy.float16), jnp.ones(2)
        cases = format_model.refused_by_dispatch(*arrays, lambda array, count: array[:, :count])
        for words, tokens, options in (*cases, *format_model.refused_with_wide(x)):
            ranks.refused(self, words, lambda: dispatch(tokens, **options))
        ranks.refused(self, "tokens is float8_e4m3fn; it must be float32", lambda: dispatch(codes))
        words = "tokens are differentiated, and their gradient would be cast to float8_e4m3fn"
        ranks.refused(self, words, lambda: differentiated(x))
        plan, token = epx.jax.prepare(group, call.idx, epx.jax.first_token())
        expert_out = jnp.ones((call.num_rows, HIDDEN))
        for words, row_format in format_model.refused_on_wire("grad_format", sums=False).items():
            ranks.refused(self, words, lambda: epx.jax.combine(plan, expert_out, None, token, grad_format=row_format))
        for words, row_format in format_model.refused_on_wire("format", sums=True).items():
            ranks.refused(self, words, lambda: epx.jax.combine(plan, expert_out, None, token, format=row_format))
        for words, row_format in format_model.refused_on_wire("grad_format", sums=True).items():
            ranks.refused(self, words, lambda: dispatch(x, grad_format=row_format))
        jax.block_until_ready(token)
        # The library's own sentence.
        with self.assertRaisesRegex(Exception, "must be a multiple of 128"):
            jax.block_until_ready(dispatch(x, format=epx.RowFormat("mx", scale_layout="tiles")))

    def test_9_gradients_that_do_not_fit_the_group(self):
        """They are refused while the forward is traced, so no rank has made a call."""
        block, data = epx.RowFormat("block128"), Data(numpy.float32, 8)
        x, weights = jnp.asarray(data.tokens[RANK]), jnp.asarray(data.weights[RANK])
        given = quantised_by_caller(block, [part[RANK] for part in data.parts(block)])
        for max_dtype, words, tokens, options in format_model.refused_gradients(x, given):
            for call in self.calls(self.formats_group(max_token_dtype=max_dtype), data):

                def loss(weights):
                    _, row_weights, *_, token = call(tokens, weights, epx.jax.first_token(), **options)
                    return epx.jax.finish(jnp.sum(row_weights), token)

                with self.subTest(max_dtype=max_dtype, words=words, call=type(call).__name__):
                    ranks.refused(self, words, lambda: jax.jit(jax.grad(loss))(weights))
        idx, wire = jnp.asarray(data.idx[RANK], jnp.int32), epx.RowFormat("mx", wire_only=True)
        for max_dtype, words, hidden, options in format_model.refused_gradients_of_combine():
            group = self.formats_group(max_token_dtype=max_dtype)

            def by_expert(rows):
                plan, token = epx.jax.prepare(group, idx, epx.jax.first_token())
                return epx.jax.combine(plan, rows, None, token, **options)

            def rank_major(rows):
                plan, _, _, token = epx.jax.dispatch_rank_major(
                    group, x, idx, None, epx.jax.first_token(), max_rows=MAX_ROWS, format=wire
                )
                return epx.jax.combine_rank_major(plan, rows, token, **options)

            for function, lead in ((by_expert, (group.max_recv_tokens_per_rank,)), (rank_major, (RANKS, MAX_ROWS))):
                if function is rank_major and ranks.num_nodes() > 1:
                    continue  # refused there

                def loss(rows):
                    out, token = function(rows)
                    return epx.jax.finish(jnp.sum(out), token)

                with self.subTest(max_dtype=max_dtype, words=words, function=function.__name__):
                    ranks.refused(self, words, lambda: jax.jit(jax.grad(loss))(jnp.ones((*lead, hidden))))


if __name__ == "__main__":
    jax_ranks.join()
    ranks.main()
