# SPDX-License-Identifier: Apache-2.0
"""The row formats of epx.h in numpy, as slow as they are plain.

Codes come from tables of the values that a type has, in float64, which holds them and the points between two of them exactly.
Every operation that epx.h rounds is one operation on float32 arrays. Nothing here knows the bits of a float32.
"""
import dataclasses

import numpy as np

F32 = np.float32
FLT_MAX = F32(np.finfo(np.float32).max)
NAN_CODE = 0x7F  # of E4M3 and E5M2


def _table(exponent_bits, mantissa_bits, bias, largest):
    """The values of the codes from 0 to that of `largest`, in float64."""
    values = []
    for exponent in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            fraction = mantissa / (1 << mantissa_bits)
            value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            if value <= largest:
                values.append(value)
    return np.array(values)


@dataclasses.dataclass(frozen=True)
class Element:
    name: str
    magnitudes: np.ndarray
    sign: int  # the bit

    def encode(self, values):
        """Codes of float32 numbers: to nearest even, saturating. A NaN has no code here."""
        magnitude = np.abs(np.asarray(values, dtype=np.float64))
        between = (self.magnitudes[:-1] + self.magnitudes[1:]) / 2
        code = np.searchsorted(between, magnitude, side="left")  # of two that are as near, the lower
        tie = (code < between.size) & (between[np.minimum(code, between.size - 1)] == magnitude)
        code = code + (tie & (code % 2 == 1))
        return (code + np.where(np.signbit(values), self.sign, 0)).astype(np.uint8)

    def decode(self, codes):
        """float32 numbers of codes; NaN, and E5M2's infinity, are what is beyond the table."""
        codes = np.asarray(codes, dtype=np.int64)
        beyond = [np.nan] * (self.sign - self.magnitudes.size)
        if self.name == "e5m2":
            beyond[0] = np.inf
        magnitude = np.append(self.magnitudes, beyond)[codes % self.sign]
        return np.where(codes >= self.sign, -magnitude, magnitude).astype(F32)


E4M3 = Element("e4m3", _table(4, 3, 7, 448.0), 0x80)
E5M2 = Element("e5m2", _table(5, 2, 15, 57344.0), 0x80)
E2M1 = Element("e2m1", _table(2, 1, 1, 6.0), 0x8)


@dataclasses.dataclass(frozen=True)
class Format:
    scaling: str  # "block128", "block128_pow2", "mx" or "nv"
    element: Element
    scales: str  # "float32", "e8m0" or "e4m3"
    amax_floor: float = 0.0

    @property
    def block(self):
        return {"mx": 32, "nv": 16}.get(self.scaling, 128)


@dataclasses.dataclass
class Quantised:
    codes: np.ndarray  # [T, H] uint8, not packed
    scales: np.ndarray  # [T, S] float32, or uint8: E8M0 or E4M3
    row_scales: np.ndarray  # [T] float32


def _blocks(rows, size):
    """[T, S, size], filled up with zeros, which change no amax."""
    tokens, hidden = rows.shape
    count = -(-hidden // size)
    filled = np.zeros((tokens, count * size), dtype=F32)
    filled[:, :hidden] = rows
    return filled.reshape(tokens, count, size)


def _amax(blocks):
    return np.max(np.abs(np.where(np.isfinite(blocks), blocks, F32(0))), axis=-1, initial=F32(0))


def ceil_log2(values):
    """The least integer n with 2^n >= value; of 0 a number below all others."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.where(values == 0, -100000, np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.int64)


def _power(exponent):
    return np.ldexp(1.0, exponent).astype(F32)


def _block128(row_format, amax, pow2):
    a = np.maximum(amax, F32(row_format.amax_floor))
    quotient = a / F32(448)
    if pow2:
        exponent = np.where(a == 0, 0, np.clip(ceil_log2(quotient), -126, 127))
        stored = (exponent + 127).astype(np.uint8) if row_format.scales == "e8m0" else _power(exponent)
        return stored, lambda x: x / _power(exponent)[..., None]
    scale = np.where(a == 0, F32(1), quotient)
    factor = np.minimum(F32(1) / scale, FLT_MAX)
    return scale, lambda x: x * factor[..., None]


def _mx(row_format, amax):
    largest = row_format.element.magnitudes[-1]
    byte = np.maximum(ceil_log2(amax * F32(1 / largest)) + 127, 0)
    return byte.astype(np.uint8), lambda x: x * _power(127 - byte)[..., None]


def _nv(amax, encode_scale, finite):
    code = E4M3.encode(np.minimum(amax * (encode_scale[:, None] * F32(1 / 6)), FLT_MAX))
    factor = np.minimum(encode_scale[:, None] / E4M3.decode(code), FLT_MAX)
    factor = np.where((code == 0) | ~finite, F32(0), factor)
    return np.where(finite, code, NAN_CODE).astype(np.uint8), lambda x: x * factor[..., None]


def quantise(row_format, rows, encode_scale=None):
    """`rows`: [T, H] float32, the numbers that the input type has."""
    rows = np.asarray(rows, dtype=F32)
    with np.errstate(all="ignore"):
        blocks = _blocks(rows, row_format.block)
        amax = _amax(blocks)
        row_scales = np.ones(rows.shape[0], dtype=F32)
        if row_format.scaling == "nv":
            row_amax = _amax(rows)
            own = np.where(row_amax == 0, F32(1), np.minimum(F32(2688) / row_amax, FLT_MAX))
            e = own if encode_scale is None else np.full_like(own, encode_scale)
            row_scales = F32(1) / e
            finite = np.isfinite(blocks).all(axis=-1)
            scales, scaled = _nv(amax, e, finite)
        elif row_format.scaling == "mx":
            scales, scaled = _mx(row_format, amax)
        else:
            scales, scaled = _block128(row_format, amax, row_format.scaling == "block128_pow2")
        special = ~np.isfinite(blocks)
        values = scaled(np.where(special, F32(0), blocks))
        assert values.dtype == F32
        codes = row_format.element.encode(values)
        if row_format.scaling == "nv":  # a block without a scale has no signs either
            codes[(scales == 0) | (scales == NAN_CODE)] = 0
        else:
            codes[special] = NAN_CODE
            if row_format.element is E5M2:
                codes[np.isposinf(blocks)] = 0x7C
                codes[np.isneginf(blocks)] = 0xFC
    codes = codes.reshape(rows.shape[0], blocks.shape[1] * blocks.shape[2])[:, : rows.shape[1]]
    return Quantised(codes, scales, row_scales)


def scale_values(row_format, quantised):
    """[T, S] float32, what an element is multiplied by."""
    if row_format.scales == "float32":
        return quantised.scales
    if row_format.scales == "e8m0":
        values = np.ldexp(1.0, quantised.scales.astype(np.int64) - 127).astype(F32)
        return np.where(quantised.scales == 255, F32(np.nan), values)
    return E4M3.decode(quantised.scales) * quantised.row_scales[:, None]


def dequantise(row_format, quantised):
    """[T, H] float32, before it is rounded to the receive type."""
    hidden = quantised.codes.shape[1]
    with np.errstate(all="ignore"):
        scales = np.repeat(scale_values(row_format, quantised), row_format.block, axis=1)[:, :hidden]
        return row_format.element.decode(quantised.codes) * scales


def pack(codes):
    """[T, H / 2]: two codes of E2M1 to a byte, the even index in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def tile_offset(row, scale, num_scales):
    """The byte of a scale in tiles of 128 rows by 4 scales (EPX_SCALES_TILES)."""
    tiles_across = -(-num_scales // 4)
    tile = row // 128 * tiles_across + scale // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + scale % 4
