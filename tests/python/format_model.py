# SPDX-License-Identifier: Apache-2.0
"""What the tests of row formats share: the formats, and what arrives, by the definitions in numpy of tests/formats."""

import pathlib
import sys

import numpy

import epx

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "formats"))
import definitions

HIDDEN = 144  # which cuts the last block of BLOCK128 and of MX short
_ELEMENTS = {"float8_e4m3fn": definitions.E4M3, "float8_e5m2": definitions.E5M2, "float4_e2m1fn": definitions.E2M1}
_SCALES = {"float32": "float32", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}


class Data:
    """topk_idx, weights and tokens of each rank; tokens have magnitudes of many blocks."""

    def __init__(self, num_tokens, num_experts, top_k, dtype, seed=1):
        generator = numpy.random.default_rng(seed)
        self.idx, self.tokens, self.weights = [], [], []
        for count in num_tokens:
            choice = numpy.argsort(generator.random((count, num_experts)), axis=1)[:, :top_k]
            self.idx.append(numpy.where(generator.random(choice.shape) < 0.2, -1, choice))
            exponents = generator.integers(-6, 6, (count, HIDDEN // 16)).repeat(16, axis=1)
            self.tokens.append((generator.standard_normal((count, HIDDEN)) * numpy.exp2(exponents)).astype(dtype))
            self.weights.append(generator.random(choice.shape).astype(numpy.float32))

    def parts(self, row_format):
        """By part, and then by rank."""
        return list(zip(*[parts_of(row_format, tokens.astype(numpy.float32)) for tokens in self.tokens]))


def formats(**options):
    """Each scaling with each of its dtypes; options are those of RowFormat."""
    make = epx.RowFormat
    return [
        make("block128", **options),
        make("block128", amax_floor=0.5, **options),
        make("block128_pow2", amax_floor=0.0, **options),
        make("block128_pow2", scale_dtype="float8_e8m0fnu", **options),
        make("mx", **options),
        make("mx", dtype="float8_e5m2", **options),
        make("nv", **options),
        make("nv", encode_scale=numpy.array([37.5], numpy.float32), **options),
    ]


def _definition(row_format):
    name = row_format.scaling.name.lower()
    floor = row_format.amax_floor
    return definitions.Format(name, _ELEMENTS[row_format.dtype], _SCALES[row_format.scale_dtype], floor)


def _quantised(row_format, tokens):
    encode_scale = None if row_format.encode_scale is None else numpy.asarray(row_format.encode_scale)[0]
    with_one_more = numpy.concatenate([tokens, numpy.zeros((1, tokens.shape[1]), numpy.float32)])  # there may be none
    made = definitions.quantise(_definition(row_format), with_one_more, encode_scale)
    return definitions.Quantised(*[numpy.ascontiguousarray(part[:-1]) for part in (made.codes, made.scales, made.row_scales)])


def parts_of(row_format, tokens):
    """Bytes of codes [T, H] or [T, H / 2], scales [T, S] float32 or bytes, and with NV row_scales [T]: those of tokens float32."""
    made = _quantised(row_format, tokens)
    codes = definitions.pack(made.codes) if row_format.elements_per_byte == 2 else made.codes
    return [codes, made.scales, made.row_scales][: row_format.num_parts]


def round_trip(row_format, tokens):
    """[T, H] float32, what wide rows are on their way with wire_only, before they are rounded to their dtype."""
    return definitions.dequantise(_definition(row_format), _quantised(row_format, tokens))


def sum_formats():
    """Those in which sums travel."""
    make = epx.RowFormat
    return [
        make("block128", amax_floor=0, wire_only=True),
        make("block128", amax_floor=0.5, wire_only=True),
        make("mx", wire_only=True),
        make("mx", dtype="float8_e5m2", wire_only=True),
    ]


def sums(row_format, partial_sums):
    """[T, H] float32 at home, before it is rounded to its dtype, of partial sums [P, T, H] float32."""
    out = numpy.zeros(partial_sums.shape[1:], numpy.float32)
    for partial in partial_sums:
        out += round_trip(row_format, partial)
    return out


def refused_by_dispatch(wide, codes, scales, half_scales, two, first_columns):
    """What a dispatch refuses on all kinds of arrays. wide: [T, H] float32.  codes, scales: such rows quantised with BLOCK128.
    half_scales: scales in float16.  two: an array of two float32.  first_columns: a function that returns those of an array.
    Yields the words of the sentence, tokens, and the options."""
    block, nv = epx.RowFormat("block128"), epx.RowFormat("nv")
    wire, nv_wire = epx.RowFormat("block128", wire_only=True), epx.RowFormat("nv", wire_only=True)
    quantised = codes, scales
    yield "format is str; this call takes epx.RowFormat", wide, dict(format="mx")
    yield "tokens is a tuple; this call takes an array, since it has no format", quantised, {}
    yield "tokens is a tuple; this call takes an array, since with wire_only rows are wide", quantised, dict(format=wire)
    yield "tokens is float8_e4m3fn without scales", codes, dict(format=block)
    words = "tokens is a tuple of 2; with scaling nv it must be a tuple (rows, scales, row_scales)"
    yield words, quantised, dict(format=nv)
    yield "tokens is float32; it must be float8_e4m3fn", (wide, scales), dict(format=block)
    yield "scales has shape", (codes, first_columns(scales, 1)), dict(format=block)
    yield "scales is float16; it must be float32", (codes, half_scales), dict(format=block)
    yield "rows have H = 33; it must be even", first_columns(wide, 33), dict(format=nv)
    yield "rows have H = 35; it must be even", first_columns(wide, 35), dict(format=nv_wire)
    yield "encode_scale has shape [2]", wide, dict(format=epx.RowFormat("nv", encode_scale=two))


def refused_with_wide(wide):
    """Likewise where gradients are those of a framework."""
    block, wire = epx.RowFormat("block128"), epx.RowFormat("block128", wire_only=True)
    yield "with_wide is int; this call takes bool", wide, dict(format=block, with_wide=1)
    yield "with_wide is True; it is for a format that quantises wide rows", wide, dict(with_wide=True)
    yield "with_wide is True; it is for a format that quantises wide rows", wide, dict(format=wire, with_wide=True)


def refused_on_wire(name, sums):
    """What a call refuses that takes a format for the wire alone as argument `name`, by the words of the sentence. sums: whether it
    adds rows up."""
    make = epx.RowFormat
    cases = {
        f"{name} is str; this call takes epx.RowFormat": "mx",
        f"{name} has wire_only False; it must be True": make("block128"),
        f"{name} has an encode_scale; it must be None": make("nv", wire_only=True, encode_scale=numpy.ones(1, numpy.float32)),
    }
    of_sums = {
        f"{name} has scaling nv; it must be block128 or mx": make("nv", wire_only=True),
        f"{name} has scaling block128_pow2; it must be block128 or mx": make("block128_pow2", wire_only=True),
    }
    return cases | of_sums if sums else cases


def refused_gradients(tokens, quantised):
    """Dispatches of `tokens`, which are float32, or of the same rows quantised with BLOCK128, whose backward sends rows that the
    group has no room for. Yields the group's max_token_dtype, the words of the sentence, what is dispatched, and the options."""
    block, wire = epx.RowFormat("block128"), epx.RowFormat("block128", wire_only=True)
    of_tokens = "tokens is float32, in which the backward sends its gradient, and the group's max_token_dtype {} is narrower"
    of_weights = "the gradient of topk_weights with a column of float16, and the group's max_token_dtype {} is narrower"
    for max_dtype, words, rows, options in (
        ("bfloat16", of_tokens, tokens, dict(format=wire)),
        ("bfloat16", of_tokens, tokens, dict(format=block, with_wide=True)),
        ("float8_e4m3fn", of_tokens, tokens, dict(format=wire)),
        ("float8_e4m3fn", of_weights, tokens, dict(format=block)),
        ("float8_e4m3fn", of_weights, quantised, dict(format=block)),
    ):
        yield max_dtype, words.format(max_dtype), rows, options
    words = "grad_format has dtype float8_e4m3fn, and the group's max_token_dtype float4_e2m1fn has no room for it"
    yield "float4_e2m1fn", words, tokens, dict(format=epx.RowFormat("nv"), with_wide=True, grad_format=wire)


def refused_gradients_of_combine():
    """Likewise combines of float32 rows. Yields the group's max_token_dtype, the words of the sentence, H, and the options."""
    home, nv = epx.RowFormat("block128", amax_floor=0, wire_only=True), epx.RowFormat("nv", wire_only=True)
    words = "expert_out is float32, in which the backward sends the gradient of out, and the group's max_token_dtype {} is narrower"
    for max_dtype in ("bfloat16", "float8_e4m3fn"):
        yield max_dtype, words.format(max_dtype), HIDDEN, dict(format=home)
    yield "float32", "rows have H = 35; it must be even", 35, dict(grad_format=nv)


def bits(array):
    """An array of any dtype as numbers that can be compared: float32 as they are, others as bytes."""
    array = numpy.ascontiguousarray(array)
    return array if array.dtype.itemsize > 1 else array.view(numpy.uint8)


def by_rows(layout, scales, num_rows, num_scales):
    """Received scales in a layout as [N, S]."""
    scales = bits(scales)
    if layout == epx.ScaleLayout.COLUMNS:
        return scales[:, :num_rows].T
    if layout == epx.ScaleLayout.PACKED:
        words = numpy.ascontiguousarray(scales[:, :num_rows].T)
        return words.view(numpy.uint8)[:, :num_scales]
    if layout == epx.ScaleLayout.TILES:
        flat = scales.reshape(-1)
        row, scale = numpy.mgrid[:num_rows, :num_scales]
        return flat[numpy.vectorize(definitions.tile_offset, otypes=[int])(row, scale, num_scales)]
    return scales.reshape(num_rows, num_scales)
