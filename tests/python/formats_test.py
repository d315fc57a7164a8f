# SPDX-License-Identifier: Apache-2.0
"""Row formats on numpy arrays: the three ways through each call that dispatches, against the definitions of tests/formats."""

import ctypes
import dataclasses
import functools
import itertools
import sys
import types
import unittest
import unittest.mock

import ranks

ranks.require("numpy", "ml_dtypes")
import format_model
import ml_dtypes
import numpy
import reference
from format_model import HIDDEN, bits

import epx
from epx import _formats

RANK, RANKS = ranks.rank(), ranks.num_ranks()
EXPERTS, TOP_K = 5, 3
NUM_TOKENS = [0 if RANKS > 1 and rank == RANKS - 1 else 6 + 3 * rank for rank in range(RANKS)]
DTYPES = numpy.float32, numpy.float16, ml_dtypes.bfloat16
Data = functools.partial(format_model.Data, NUM_TOKENS, EXPERTS, TOP_K)
_names = iter(range(1_000_000))


def make_group(**changes):
    config = dict(num_experts=EXPERTS, max_tokens_per_rank=16, hidden_dim=HIDDEN, max_top_k=TOP_K, max_token_dtype="float32")
    with ranks.directory_bootstrap(f"formats-{next(_names)}") as bootstrap:
        return epx.Group(bootstrap, transport="host", timeout=ranks.TIMEOUT_SECONDS, **{**config, **changes})


def quantised_by_caller(row_format, parts):
    """The tuple that a caller gives whose framework has quantised its rows."""
    dtypes = {1: numpy.uint8 if row_format.elements_per_byte == 2 else row_format.dtype, 2: row_format.scale_dtype, 3: "float32"}
    return tuple(
        part.view(getattr(ml_dtypes, dtype) if isinstance(dtype, str) and part.dtype == numpy.uint8 else dtype)
        for part, dtype in zip(parts, dtypes.values())
    )


def both_ways(row_format, data, parts):
    """Wide rows, and where nothing but them says how they are scaled, the same rows quantised by the caller."""
    yield data.tokens[RANK]
    if row_format.encode_scale is None:
        yield quantised_by_caller(row_format, [part[RANK] for part in parts])


def is_taken(call):
    try:
        call()
    except epx.InvalidArgumentError:
        return False
    return True


class Formats(unittest.TestCase):
    def compare(self, row_format, received, wanted, num_rows):
        """A tuple that has arrived with the parts [N, ...] that should have."""
        self.assertEqual(len(received), row_format.num_parts)
        self.assertEqual(received[0].dtype.name, "uint8" if row_format.elements_per_byte == 2 else row_format.dtype)
        self.assertEqual(received[1].dtype.name, row_format.recv_scales_dtype)
        num_scales = row_format.num_scales(HIDDEN)
        numpy.testing.assert_array_equal(bits(received[0]).reshape(num_rows, -1), wanted[0])
        scales = format_model.by_rows(row_format.scale_layout, received[1], num_rows, num_scales)
        numpy.testing.assert_array_equal(scales, wanted[1])
        if row_format.has_row_scales:
            numpy.testing.assert_array_equal(received[2].reshape(-1), wanted[2])

    def calls(self, group, idx, alignment=1):
        """Each call by expert, as a function that returns a plan and what arrives; rows are in use to the last one."""

        def dispatch(*arguments, **options):
            plan = group.prepare(idx, alignment=alignment)
            return plan, *group.dispatch(plan, *arguments, **options)

        def prepare_dispatch(tokens, weights, **options):
            return group.prepare_dispatch(tokens, idx, weights, alignment=alignment, **options)

        return dispatch, prepare_dispatch

    def check_by_expert(self, group, row_format, dtype, alignment=1):
        data = Data(dtype)
        exchange = reference.Exchange(data.idx, EXPERTS, alignment)
        parts = data.parts(row_format)
        wanted = [exchange.scatter(part)[RANK] for part in parts]
        num_rows = len(wanted[0])
        for call in self.calls(group, data.idx[RANK], alignment):
            for tokens in both_ways(row_format, data, parts):
                _, received, weights = call(tokens, data.weights[RANK], format=row_format)
                self.compare(row_format, received, wanted, num_rows)
                numpy.testing.assert_array_equal(weights, exchange.scatter_weights(data.weights)[RANK])

    def check_rank_major(self, group, row_format, dtype):
        data = Data(dtype, 2)
        parts = data.parts(row_format)
        for compact, tokens in enumerate(both_ways(row_format, data, parts)):
            exchange = reference.RankMajorExchange(data.idx, EXPERTS, 16, bool(compact))
            wanted = [exchange.scatter(part)[RANK] for part in parts]
            wanted = [part.reshape(RANKS * 16, *part.shape[2:]) for part in wanted]
            options = dict(format=row_format, compact=bool(compact))
            _, received, _ = group.dispatch_rank_major(tokens, data.idx[RANK], data.weights[RANK], **options)
            self.assertEqual(received[0].shape[:2], (RANKS, 16))
            if row_format.scale_layout == epx.ScaleLayout.ROWS:
                self.assertEqual(received[1].shape, (RANKS, 16, row_format.num_scales(HIDDEN)))
            self.compare(row_format, received, wanted, RANKS * 16)

    def test_1_quantised_rows_by_the_caller_and_in_the_call(self):
        with make_group() as group:
            for row_format in format_model.formats():
                for dtype in DTYPES:
                    with self.subTest(format=row_format, dtype=dtype):
                        self.check_by_expert(group, row_format, dtype, alignment=4)
                        self.check_rank_major(group, row_format, dtype)
            group.check()

    def test_2_layouts_of_scales(self):
        columns, packed, tiles = epx.ScaleLayout.COLUMNS, epx.ScaleLayout.PACKED, epx.ScaleLayout.TILES
        with make_group() as group:
            for row_format in format_model.formats(scale_layout=columns) + [
                epx.RowFormat("block128_pow2", scale_layout=packed),
                epx.RowFormat("mx", scale_layout=packed),
                epx.RowFormat("mx", scale_layout=tiles),
                epx.RowFormat("nv", scale_layout=tiles),
            ]:
                with self.subTest(format=row_format):
                    is_tiled = row_format.scale_layout == tiles
                    self.check_by_expert(group, row_format, numpy.float32, alignment=128 if is_tiled else 1)
                    if not is_tiled:
                        self.check_rank_major(group, row_format, numpy.float32)
            group.check()

    def test_3_quantised_wire(self):
        with make_group() as group:
            for row_format in format_model.formats(wire_only=True):
                for dtype in DTYPES:
                    data = Data(dtype, 3)
                    there = [
                        format_model.round_trip(row_format, tokens.astype(numpy.float32)).astype(dtype) for tokens in data.tokens
                    ]
                    rows = reference.Exchange(data.idx, EXPERTS).scatter(there)[RANK]
                    with self.subTest(format=row_format, dtype=dtype):
                        for call in self.calls(group, data.idx[RANK]):
                            plan, received, weights = call(data.tokens[RANK], data.weights[RANK], format=row_format)
                            self.assertEqual(received.dtype, numpy.dtype(dtype))
                            numpy.testing.assert_array_equal(received, rows)
                        group.combine(plan, received, weights)
                        _, received, _ = group.dispatch_rank_major(data.tokens[RANK], data.idx[RANK], format=row_format)
                        wanted = reference.RankMajorExchange(data.idx, EXPERTS, 16).scatter(there)[RANK]
                        numpy.testing.assert_array_equal(received, wanted)
            group.check()

    def test_4_sidecars_and_memory_of_the_caller(self):
        with make_group(max_sidecar_bytes=4) as group:
            data = Data(numpy.float32, 4)
            sidecars = [numpy.arange(count, dtype=numpy.float32)[:, None] for count in NUM_TOKENS]
            exchange = reference.Exchange(data.idx, EXPERTS)
            plan = group.prepare(data.idx[RANK])
            for row_format in format_model.formats():
                wanted = [exchange.scatter(part)[RANK] for part in data.parts(row_format)]
                new, _, sidecar = group.dispatch(plan, data.tokens[RANK], sidecar=sidecars[RANK], format=row_format)
                numpy.testing.assert_array_equal(sidecar, exchange.scatter(sidecars)[RANK])
                given = tuple(numpy.empty_like(part) for part in new)
                received, _ = group.dispatch(plan, data.tokens[RANK], recv_tokens=given, format=row_format)
                self.assertIs(received, given)
                self.compare(row_format, received, wanted, plan.num_rows)
            group.check()

    def test_5_combine_bwd(self):
        with make_group() as group:
            data = Data(numpy.float32, 5)
            exchange, rank_major = reference.Exchange(data.idx, EXPERTS), reference.RankMajorExchange(data.idx, EXPERTS, 16)
            weights = exchange.scatter_weights(data.weights)
            generator = numpy.random.default_rng(5)
            expert_out = [generator.standard_normal((len(each), HIDDEN)).astype(numpy.float16) for each in weights]
            plan = group.prepare(data.idx[RANK])
            rank_major_plan, *_ = group.dispatch_rank_major(data.tokens[RANK], data.idx[RANK])
            for row_format in format_model.formats():
                parts = data.parts(row_format)
                wanted = [exchange.scatter(part)[RANK] for part in parts]
                there = [format_model.round_trip(row_format, tokens) for tokens in data.tokens]
                products = exchange.row_products(there, expert_out)[RANK]
                num_rows = len(products)
                row_weights = None
                if row_format.scaling == epx.Scaling.BLOCK128:
                    row_weights = weights[RANK]
                    wanted[1] = wanted[1] * row_weights[:, None]
                for grad_out in both_ways(row_format, data, parts):
                    with self.subTest(format=row_format, quantised=isinstance(grad_out, tuple)):
                        grads, grad_weights = group.combine_bwd(
                            plan, grad_out, expert_out[RANK], row_weights, format=row_format
                        )
                        self.compare(row_format, grads, wanted, num_rows)
                        numpy.testing.assert_allclose(grad_weights, products, rtol=1e-5, atol=1e-4)
                        grads = group.combine_rank_major_bwd(rank_major_plan, grad_out, format=row_format)
                        kept = [rank_major.scatter(part)[RANK] for part in parts]
                        kept = [part.reshape(RANKS * 16, *part.shape[2:]) for part in kept]
                        self.compare(row_format, grads, kept, RANKS * 16)
                on_wire = dataclasses.replace(row_format, wire_only=True)
                with self.subTest(format=on_wire):
                    grads, none = group.combine_bwd(plan, data.tokens[RANK], None, weights[RANK], format=on_wire)
                    self.assertIsNone(none)
                    numpy.testing.assert_array_equal(grads, exchange.scatter(there)[RANK] * weights[RANK][:, None])
                    grads = group.combine_rank_major_bwd(rank_major_plan, data.tokens[RANK], format=on_wire)
                    numpy.testing.assert_array_equal(grads, rank_major.scatter(there)[RANK])
            group.check()

    def test_6_sums(self):
        """What travels home is quantised: each rank's partial sum, once; the home rank adds in rank order."""
        with make_group() as group:
            data = Data(numpy.float32, 8)
            exchange, rank_major = reference.Exchange(data.idx, EXPERTS), reference.RankMajorExchange(data.idx, EXPERTS, 16)
            weights = exchange.scatter_weights(data.weights)
            plan = group.prepare(data.idx[RANK])
            rank_major_plan, *_ = group.dispatch_rank_major(data.tokens[RANK], data.idx[RANK])
            for dtype in DTYPES:
                rows, by_rank = [
                    [numpy.sin(part * (1 + rank)).astype(dtype) for rank, part in enumerate(each.scatter(data.tokens))]
                    for each in (exchange, rank_major)
                ]
                weighted, plain, summed = [
                    each[RANK]
                    for each in (
                        exchange.partial_sums(rows, weights), exchange.partial_sums(rows), rank_major.partial_sums(by_rank)
                    )
                ]
                row_weights = numpy.random.default_rng(RANK).random((RANKS, 16, TOP_K)).astype(numpy.float32)
                for row_format in format_model.sum_formats():
                    with self.subTest(format=row_format, dtype=dtype):
                        out = group.combine(plan, rows[RANK], weights[RANK], format=row_format)
                        grads, grad_weights = group.dispatch_bwd(plan, rows[RANK], weights[RANK], format=row_format)
                        home = group.combine_rank_major(rank_major_plan, by_rank[RANK], format=row_format)
                        back, back_weights = group.dispatch_rank_major_bwd(
                            rank_major_plan, by_rank[RANK], row_weights, format=row_format
                        )
                        for found, partial in ((out, weighted), (grads, plain), (home, summed), (back, summed)):
                            self.assertEqual(found.dtype, numpy.dtype(dtype))
                            wanted = format_model.sums(row_format, partial).astype(dtype)
                            numpy.testing.assert_array_equal(bits(found), bits(wanted))
                        wide = group.combine(plan, rows[RANK], weights[RANK])
                        self.assertFalse(out.size and numpy.array_equal(out, wide))
                        numpy.testing.assert_array_equal(grad_weights, exchange.gather_weights(weights)[RANK])
                        numpy.testing.assert_array_equal(
                            back_weights, group.dispatch_rank_major_bwd(rank_major_plan, by_rank[RANK], row_weights)[1]
                        )
            group.check()
        with make_group(combine_precision="exact") as group:
            plan = group.prepare(data.idx[RANK])
            words = "format is given, and the group's combine_precision is exact; it must be wire"
            rows = numpy.ones((plan.num_rows, 4), numpy.float32)
            ranks.refused(self, words, lambda: group.combine(plan, rows, format=row_format))

    def test_7_without_a_format_rows_of_8_bits_are_copied(self):
        with make_group(max_token_dtype="float8_e4m3fn") as group:
            self.assertEqual(group.max_token_dtype, "float8_e4m3fn")
            for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
                data = Data(dtype, 5)
                plan = group.prepare(data.idx[RANK])
                received, _ = group.dispatch(plan, data.tokens[RANK])
                wanted = reference.Exchange(data.idx, EXPERTS).scatter(data.tokens)[RANK]
                self.assertEqual(received.dtype, numpy.dtype(dtype))
                numpy.testing.assert_array_equal(bits(received), bits(wanted))
            group.check()

    def test_8_refusals(self):
        block, nv = epx.RowFormat("block128"), epx.RowFormat("nv")
        wire = dataclasses.replace(block, wire_only=True)
        with make_group() as group:
            data = Data(numpy.float32, 6)
            idx, x = data.idx[RANK], data.tokens[RANK]
            plan = group.prepare(idx)
            codes = x.astype(ml_dtypes.float8_e4m3fn)
            scales = numpy.ones((len(x), 2), numpy.float32)
            rows, _ = group.dispatch(plan, x, format=block)
            rank_major_plan, *_ = group.dispatch_rank_major(x, idx)
            for words, call in {
                "scaling is 'fp8'; it must be one of 'block128', 'block128_pow2', 'mx', 'nv'": lambda: epx.RowFormat("fp8"),
                "dtype is 'float8_e4m3'; it must be one of": lambda: epx.RowFormat("mx", dtype=ml_dtypes.float8_e4m3),
                "scale_layout is 'blocked'": lambda: epx.RowFormat("mx", scale_layout="blocked"),
                "amax_floor is 'low'; it must be a number": lambda: epx.RowFormat("block128", amax_floor="low"),
                "wire_only is int; this call takes bool": lambda: epx.RowFormat("mx", wire_only=1),
                "scale_layout is columns; with wire_only it must be rows": lambda: epx.RowFormat(
                    "mx", wire_only=True, scale_layout="columns"
                ),
                "encode_scale is given; with scaling mx it must be None": lambda: epx.RowFormat("mx", encode_scale=numpy.ones(1)),
                "tokens is float8_e4m3fn; it must be uint8": lambda: group.dispatch(
                    plan, (codes, scales, scales[:, 0].copy()), format=nv
                ),
                "tokens is float4_e2m1fn, whose arrays have one element to a byte": lambda: group.dispatch(
                    plan, x.astype(ml_dtypes.float4_e2m1fn)
                ),
                "recv_tokens is numpy.ndarray; with scaling block128 it must be a tuple (rows, scales)": lambda: group.dispatch(
                    plan, x, recv_tokens=rows[0], format=block
                ),
                "recv_tokens is a tuple; this call takes an array, since with wire_only": lambda: group.dispatch(
                    plan, x, recv_tokens=rows, format=wire
                ),
                "recv_scales has shape": lambda: group.dispatch(
                    plan, x, recv_tokens=(rows[0], numpy.ones((len(rows[0]), 3), numpy.float32)), format=block
                ),
                "grad_out is float8_e4m3fn without scales": lambda: group.combine_bwd(plan, codes, format=block),
                "grad_out is a tuple; this call takes an array, since it has no format": lambda: group.combine_bwd(
                    plan, (codes, scales)
                ),
                "grad_out is a tuple of 2; with scaling nv": lambda: group.combine_rank_major_bwd(
                    rank_major_plan, (codes, scales), format=nv
                ),
                # The library's own sentences.
                "recv_weights is given": lambda: group.combine_bwd(
                    plan, x, None, numpy.ones(plan.num_rows, numpy.float32), format=epx.RowFormat("mx")
                ),
                "must be a multiple of 128": lambda: group.dispatch(plan, x, format=epx.RowFormat("mx", scale_layout="tiles")),
                "which the rank-major layout does not have": lambda: group.dispatch_rank_major(
                    x, idx, format=epx.RowFormat("mx", scale_layout="tiles")
                ),
            }.items():
                ranks.refused(self, words, call)
            arrays = x, codes, scales, scales.astype(numpy.float16), numpy.ones(2, numpy.float32)
            for words, tokens, options in format_model.refused_by_dispatch(*arrays, lambda array, count: array[:, :count].copy()):
                ranks.refused(self, words, lambda: group.dispatch(plan, tokens, **options))
            wide = numpy.ones((plan.num_rows, HIDDEN), numpy.float32)
            by_rank = numpy.ones((RANKS, 16, HIDDEN), numpy.float32)
            for words, row_format in format_model.refused_on_wire("format", sums=True).items():
                for call, *arguments in (
                    (group.combine, plan, wide),
                    (group.dispatch_bwd, plan, wide),
                    (group.combine_rank_major, rank_major_plan, by_rank),
                    (group.dispatch_rank_major_bwd, rank_major_plan, by_rank),
                ):
                    ranks.refused(self, words, lambda: call(*arguments, format=row_format))
            with unittest.mock.patch.dict(sys.modules, {"ml_dtypes": None}):
                ranks.refused(self, "need the package ml_dtypes", lambda: group.dispatch(plan, x, format=block))
                group.dispatch(plan, x, format=wire)  # which makes no array of 8 bits
            group.check()

    def test_9_ranks_agree(self):
        if RANKS == 1:
            self.skipTest("needs a peer")
        group = make_group()
        data = Data(numpy.float32, 7)
        with self.assertRaisesRegex(epx.GroupError, "amax_floor") as caught:
            plan = group.prepare(data.idx[RANK])
            group.dispatch(plan, data.tokens[RANK], format=epx.RowFormat("block128", amax_floor=1.0 + (RANK == 0)))
            group.dispatch(plan, data.tokens[RANK])  # a rank may be through before the others see it
        self.assertEqual(caught.exception.status, epx.Status.MISMATCH)
        group.destroy()


class Fields(unittest.TestCase):
    def test_1_equality(self):
        """Formats that quantise otherwise are not equal, as keys of caches neither: an encode_scale is the array that it is."""
        scale = numpy.ones(1, numpy.float32)
        make = functools.partial(epx.RowFormat, "nv")
        self.assertEqual(make(encode_scale=scale), make(encode_scale=scale))
        self.assertEqual(len({make(encode_scale=scale), make(encode_scale=scale), make(), make()}), 2)
        self.assertNotEqual(make(encode_scale=scale), make(encode_scale=scale.copy()))
        self.assertNotEqual(make(encode_scale=scale), make())
        pow2 = epx.RowFormat("block128_pow2")
        for change in (
            dict(amax_floor=0), dict(scale_dtype="float8_e8m0fnu"), dict(scale_layout="columns"), dict(wire_only=True),
            dict(scaling="block128"),
        ):
            self.assertNotEqual(dataclasses.replace(pow2, **change), pow2)
        self.assertNotEqual(epx.RowFormat("mx"), epx.RowFormat("mx", dtype="float8_e5m2"))
        self.assertNotEqual(pow2, "block128_pow2")

    def test_2_what_fits_is_what_the_library_takes(self):
        """RowFormat refuses the fields that the library refuses of wide or of quantised rows, and no others."""
        wide = numpy.ones((1, 32), numpy.float32)
        config = dict(num_experts=1, max_tokens_per_rank=1, hidden_dim=32, max_top_k=1, max_token_dtype="float32")
        with epx.Group(epx.bootstrap.local(), transport="host", **config) as group:
            plan = group.prepare(numpy.zeros((1, 1), numpy.int32), alignment=128)  # which scales in tiles need

            for scaling in epx.Scaling:
                for dtype, scale_dtype, layout, floor in itertools.product(
                    ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
                    ("float32", "float8_e8m0fnu", "float8_e4m3fn"),
                    epx.ScaleLayout,
                    (0.0, 2.0, -1.0, numpy.inf, numpy.nan, 1e39),
                ):
                    fields = dict(
                        dtype=dtype, scale_dtype=scale_dtype, scale_layout=layout, amax_floor=ctypes.c_float(floor).value
                    )
                    forced = epx.RowFormat(scaling)
                    for name, value in fields.items():
                        object.__setattr__(forced, name, value)
                    with self.subTest(scaling=scaling, **fields):
                        found = is_taken(lambda: epx.RowFormat(scaling, **{**fields, "amax_floor": floor}))
                        parts = [numpy.zeros((1, 32 // forced.elements_per_byte), numpy.uint8)]
                        parts += [numpy.ones((1, forced.num_scales(32)), getattr(ml_dtypes, scale_dtype, numpy.float32))]
                        parts += [numpy.ones(1, numpy.float32)]
                        quantised = quantised_by_caller(forced, parts[: forced.num_parts])
                        wanted = [is_taken(lambda: group.dispatch(plan, each, format=forced)) for each in (wide, quantised)]
                        self.assertEqual(found, all(wanted))

    def test_2_layouts_of_scales(self):
        """A scale_dtype that is not given is one that the layout takes, and what fits no layout is refused by its name."""
        make = functools.partial(epx.RowFormat, "block128_pow2")
        for layout, dtype in zip(epx.ScaleLayout, ("float32", "float32", "float8_e8m0fnu", "float8_e8m0fnu")):
            self.assertEqual(make(scale_layout=layout).scale_dtype, dtype)
        for scaling, layout, words in (
            ("block128", "packed", "scale_layout is packed; with scale_dtype float32 it must be rows or columns"),
            ("block128", "tiles", "scale_layout is tiles; with scale_dtype float32 it must be rows or columns"),
            ("nv", "packed", "scale_layout is packed; with scale_dtype float8_e4m3fn it must be rows or columns or tiles"),
        ):
            ranks.refused(self, words, lambda: epx.RowFormat(scaling, scale_layout=layout))
        words = "scale_layout is packed; with scale_dtype float32"
        ranks.refused(self, words, lambda: make(scale_layout="packed", scale_dtype="float32"))

    def test_3_room_of_groups(self):
        """A format of a backward is refused where the library refuses the backward."""
        config = dict(num_experts=1, max_tokens_per_rank=1, hidden_dim=256, max_top_k=1)
        for max_dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"):
            with epx.Group(epx.bootstrap.local(), transport="host", max_token_dtype=max_dtype, **config) as group:
                plan = group.prepare(numpy.zeros((1, 1), numpy.int32))
                for row_format in format_model.formats(wire_only=True)[:-1]:  # the last has an encode_scale

                    def check():
                        _formats.on_wire("grad_format", row_format, group, sums=False)

                    def backward():
                        group.combine_bwd(plan, numpy.ones((1, 256), numpy.float32), num_rows=1, format=row_format)

                    with self.subTest(max_dtype=max_dtype, format=row_format):
                        self.assertEqual(is_taken(check), is_taken(backward))

    def test_4_precision_of_groups(self):
        """Quantised sums are partial sums of ranks, so those of nodes refuse them."""
        group = types.SimpleNamespace(max_token_dtype="bfloat16", combine_precision=epx.CombinePrecision.WIRE)
        wire = epx.RowFormat("mx", wire_only=True)
        self.assertEqual(_formats.on_wire("grad_format", wire, group, sums=True), (list(wire.codes), 0.0))
        group.combine_precision = epx.CombinePrecision.NODE
        words = "the group's combine_precision is node; it must be wire"
        ranks.refused(self, words, lambda: _formats.on_wire("grad_format", wire, group, sums=True))
        self.assertEqual(_formats.on_wire("grad_format", wire, group, sums=False), (list(wire.codes), 0.0))


if __name__ == "__main__":
    ranks.main()
