# SPDX-License-Identifier: Apache-2.0
"""The row kernels of libepx (row_kernels.cc) on numpy arrays, with the formats of definitions.py."""
import ctypes

import definitions
import numpy as np

_SCALINGS = {"block128": 1, "block128_pow2": 2, "mx": 3, "nv": 4}  # epx_scaling
_DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "e4m3": 8, "e5m2": 9, "e2m1": 10, "e8m0": 11}  # epx_dtype

# Rows are given as the bits of their dtype.
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def numbers(dtype, bits):
    """The float32 numbers that bits of a dtype stand for."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if dtype == "float32" else np.float16).astype(np.float32)


class RowKernels:
    def __init__(self, library):
        self._library = ctypes.CDLL(library)
        self._library.instruction_set.restype = ctypes.c_char_p
        self.instruction_sets = []
        while name := self._library.instruction_set(len(self.instruction_sets)):
            self.instruction_sets.append(name.decode())

    def quantise(self, index, row_format, dtype, bits, encode_scale=None):
        """`bits`: [T, H]. Codes of E2M1 come unpacked, as in definitions.py."""
        bits = np.ascontiguousarray(bits, dtype=BITS[dtype])
        tokens, hidden = bits.shape
        four_bits = row_format.element is definitions.E2M1
        elements = np.full((tokens, hidden // 2 if four_bits else hidden), 0xA5, dtype=np.uint8)
        blocks = -(-hidden // row_format.block)
        scales = np.full((tokens, blocks), 0xA5, dtype=np.float32 if row_format.scales == "float32" else np.uint8)
        row_scales = np.ones(tokens, dtype=np.float32)
        e = None if encode_scale is None else ctypes.byref(ctypes.c_float(encode_scale))
        self._library.quantise_rows(
            index, self._format(row_format), ctypes.c_float(row_format.amax_floor), _DTYPES[dtype], _pointer(bits),
            ctypes.c_int64(tokens), ctypes.c_int64(hidden), e, _pointer(elements), _pointer(scales), _pointer(row_scales))
        if four_bits:
            elements = np.stack([elements & 0xF, elements >> 4], axis=-1).reshape(tokens, hidden)
        return definitions.Quantised(elements, scales, row_scales)

    def dequantise(self, index, row_format, dtype, quantised):
        """Bits of the dtype, [T, H]."""
        tokens, hidden = quantised.codes.shape
        packed = row_format.element is definitions.E2M1
        elements = np.ascontiguousarray(definitions.pack(quantised.codes) if packed else quantised.codes)
        scales = np.ascontiguousarray(quantised.scales)
        rows = np.full((tokens, hidden), 0xA5, dtype=BITS[dtype])
        self._library.dequantise_rows(
            index, self._format(row_format), _DTYPES[dtype], _pointer(elements), _pointer(scales),
            _pointer(quantised.row_scales), ctypes.c_int64(tokens), ctypes.c_int64(hidden), _pointer(rows))
        return rows

    @staticmethod
    def _format(row_format):
        return (ctypes.c_int32 * 3)(
            _SCALINGS[row_format.scaling], _DTYPES[row_format.element.name], _DTYPES[row_format.scales])


def _pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)
