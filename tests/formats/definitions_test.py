# SPDX-License-Identifier: Apache-2.0
"""The row kernels of every instruction set against definitions.py, bit for bit.

definitions_test.py LIBRARY
"""
import sys
import unittest

try:
    import numpy as np
except ModuleNotFoundError:
    print("skipped: Python has no module numpy (tools/lib.sh, install_python_test_packages)")
    sys.exit(77)

import definitions
from definitions import E2M1, E4M3, E5M2, Format
from row_kernels import BITS, RowKernels, numbers

FORMATS = [
    Format("block128", E4M3, "float32", 0.0),
    Format("block128", E4M3, "float32", 1e-4),
    Format("block128_pow2", E4M3, "float32", 0.0),
    Format("block128_pow2", E4M3, "e8m0", 0.0),
    Format("block128_pow2", E4M3, "e8m0", 1e-4),
    Format("mx", E4M3, "e8m0"),
    Format("mx", E5M2, "e8m0"),
    Format("nv", E2M1, "e4m3"),
]
HIDDEN = [1, 2, 16, 31, 100, 128, 2880, 7168]
KERNELS = RowKernels(sys.argv.pop())


def rounded(dtype, values):
    """The bits that float32 numbers have in a dtype, to nearest even; NaNs are not looked at."""
    with np.errstate(all="ignore"):
        if dtype == "float32":
            return values.view(np.uint32)
        if dtype == "float16":
            return values.astype(np.float16).view(np.uint16)
        # bfloat16 has 8 bits of precision, and float32's exponents. Numbers are exact in float64, as are their multiples of a place.
        wide = values.astype(np.float64)
        place = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 8, -133))
        nearest = np.rint(wide / place) * place
        beyond = np.abs(nearest) >= 2.0**128
        result = np.where(beyond, np.copysign(np.inf, wide), nearest).astype(np.float32)
        return (result.view(np.uint32) >> 16).astype(np.uint16)


class Kernels(unittest.TestCase):
    def check(self, dtype, bits, encode_scale=None):
        for row_format in FORMATS:
            if row_format.scaling == "nv" and bits.shape[1] % 2:
                continue
            expected = definitions.quantise(row_format, numbers(dtype, bits), encode_scale)
            values = definitions.dequantise(row_format, expected)
            for index, name in enumerate(KERNELS.instruction_sets):
                with self.subTest(instruction_set=name, format=row_format, dtype=dtype, shape=bits.shape, e=encode_scale):
                    actual = KERNELS.quantise(index, row_format, dtype, bits, encode_scale)
                    np.testing.assert_array_equal(actual.codes, expected.codes)
                    np.testing.assert_array_equal(actual.scales.view(np.uint8), expected.scales.view(np.uint8))
                    np.testing.assert_array_equal(actual.row_scales.view(np.uint32), expected.row_scales.view(np.uint32))
                    back = KERNELS.dequantise(index, row_format, dtype, actual)
                    nan = np.isnan(values)
                    np.testing.assert_array_equal(np.isnan(numbers(dtype, back)), nan)
                    np.testing.assert_array_equal(np.where(nan, 0, back), np.where(nan, 0, rounded(dtype, values)))

    def test_random_rows(self):
        generator = np.random.default_rng(20261129)
        for hidden in HIDDEN:
            tokens = 3 if hidden > 1000 else 20
            normal = generator.standard_normal((tokens, hidden)).astype(np.float32)
            spread = normal * np.exp2(generator.integers(-20, 8, (tokens, hidden)).astype(np.float32))
            for rows in (normal, spread):
                for dtype in BITS:
                    self.check(dtype, rounded(dtype, rows))

    def test_random_bits(self):  # of every magnitude, with NaNs and infinities
        generator = np.random.default_rng(1)
        for hidden in HIDDEN:
            for dtype, bits in BITS.items():
                self.check(dtype, generator.integers(0, np.iinfo(bits).max, (3, hidden), dtype=bits, endpoint=True))

    def test_no_rows(self):
        for dtype, bits in BITS.items():
            self.check(dtype, np.zeros((0, 130), dtype=bits))

    def test_all_16_bit_patterns(self):
        patterns = np.arange(65536, dtype=np.uint16)
        for dtype in ("bfloat16", "float16"):
            self.check(dtype, patterns.reshape(32, 2048))  # blocks of one magnitude
            self.check(dtype, patterns.reshape(1, 65536))
            self.check(dtype, np.random.default_rng(2).permutation(patterns).reshape(32, 2048))

    def test_special_blocks(self):
        largest = float(definitions.FLT_MAX)
        for magnitude in (0.0, 2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1e-9, 1e-4, 6.0, 448.0, 449.0, 57344.0, 1e38, largest):
            rows = np.full((5, 300), magnitude, dtype=np.float32)
            rows[:, ::3] *= -1
            rows[1, 5] = rows[1, 290] = np.nan
            rows[2, 5] = rows[2, 290] = np.inf
            rows[3, 5] = rows[3, 290] = -np.inf
            rows[4, :200] = np.inf
            self.check("float32", rows.view(np.uint32))

    def test_encode_scale_of_the_caller(self):
        rows = np.random.default_rng(3).standard_normal((4, 512)).astype(np.float32)
        rows[1] *= np.float32(1e-30)
        rows[2, 17] = np.nan
        for encode_scale in (2.0**-20, 0.37, 448.0, 3e7, 3e38):
            self.check("float32", rows.view(np.uint32), encode_scale)

    def test_every_code_of_scales(self):
        generator = np.random.default_rng(4)
        for row_format in FORMATS:
            hidden = 256 * row_format.block
            codes = generator.integers(0, 2 * row_format.element.sign, (2, hidden)).astype(np.uint8)
            scales = np.tile(np.arange(256, dtype=np.uint8), (2, 1))
            if row_format.scales == "float32":
                scales = generator.integers(0, 2**32, (2, 256), dtype=np.uint32).view(np.float32)
            quantised = definitions.Quantised(codes, scales, np.array([0.3, 1e-12], dtype=np.float32))
            values = definitions.dequantise(row_format, quantised)
            nan = np.isnan(values)
            for index, name in enumerate(KERNELS.instruction_sets):
                for dtype in BITS:
                    with self.subTest(instruction_set=name, format=row_format, dtype=dtype):
                        back = KERNELS.dequantise(index, row_format, dtype, quantised)
                        np.testing.assert_array_equal(np.isnan(numbers(dtype, back)), nan)
                        np.testing.assert_array_equal(np.where(nan, 0, back), np.where(nan, 0, rounded(dtype, values)))


if __name__ == "__main__":
    unittest.main()
