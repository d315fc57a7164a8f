# SPDX-License-Identifier: Apache-2.0
"""The row kernels against torchao 0.18.0, a third definition, on finite numbers.

torchao_test.py LIBRARY

Where torchao is known to differ, blocks are left out by name; all others are equal bit for bit.
"""
import sys
import unittest

try:
    import numpy as np
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    from torchao.prototype.mx_formats.utils import to_blocked
except ModuleNotFoundError as error:
    print(f"skipped: Python has no module {error.name} (tools/lib.sh, install_torch_test_packages)")
    sys.exit(77)

import definitions
from definitions import E2M1, E4M3, E5M2, Format
from row_kernels import RowKernels, numbers

KERNELS = RowKernels(sys.argv.pop())
BEST = len(KERNELS.instruction_sets) - 1


def all_finite_bfloat16():
    """[T, 512] bits: in order, so that blocks have one magnitude, and shuffled."""
    patterns = np.arange(65536, dtype=np.uint16)
    finite = patterns[(patterns & 0x7F80) != 0x7F80]
    return np.concatenate([finite, np.random.default_rng(1).permutation(finite)]).reshape(-1, 512)


def random_float32():
    return np.random.default_rng(2).standard_normal((400, 512)).astype(np.float32).view(np.uint32)


def near(amax, block):
    """[T, 512] bits of float32: the largest element of a block is at most four places from one of the numbers `amax`."""
    generator = np.random.default_rng(3)
    shape = (600, 512 // block, 1)
    centre = generator.choice(amax.astype(np.float32), shape)
    rows = generator.uniform(-0.99, 0.99, (*shape[:2], block)).astype(np.float32) * centre
    rows[..., :1] = (centre.view(np.uint32) + generator.integers(-4, 5, shape)).astype(np.uint32).view(np.float32)
    return rows.reshape(600, 512).view(np.uint32)


def block_amax(dtype, bits, block):
    return np.abs(numbers(dtype, bits)).reshape(bits.shape[0], -1, block).max(axis=-1)


def as_torch(dtype, bits):
    if dtype == "float32":
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def as_bytes(tensor):
    return tensor.view(torch.uint8).numpy()


def mx_differences(amax, byte, largest):
    """Blocks where torchao differs, by the reason. It also divides amax by `largest`, where epx and TransformerEngine multiply by
    the reciprocal; the power of two that is not below is the same for every float32."""
    quotient = amax / np.float32(largest)
    with np.errstate(divide="ignore"):
        logarithm = torch.ceil(torch.log2(torch.from_numpy(quotient))).numpy()
    return {
        "the reciprocal of byte 0 is 1": byte == 0,
        "log2 in float32 is rounded to an integer": (quotient != 0) & (logarithm != definitions.ceil_log2(quotient)),
    }


def nv_differences(amax, encode_scale, code):
    with np.errstate(over="ignore"):
        quotient = amax / np.float32(6) * np.float32(encode_scale)  # exact where encode_scale is a power of two
    return {
        "scales are at least 2^-6": code < 8,
        "amax is divided by 6, not multiplied by the reciprocal": E4M3.encode(quotient) != code,
    }


class Torchao(unittest.TestCase):
    def compare(self, actual, codes, scales, differences, most):
        """`differences`: masks of blocks by name. At most a part `most` of the blocks is left out."""
        known = np.logical_or.reduce(list(differences.values()))
        for name, blocks in differences.items():
            print(f"{int(blocks.sum())} of {blocks.size} blocks left out: {name}")
        self.assertLess(known.mean(), most)
        np.testing.assert_array_equal(np.where(known, 0, actual.scales), np.where(known, 0, scales))
        size = codes.shape[1] // known.shape[1]
        elements = np.repeat(known, size, axis=1)
        np.testing.assert_array_equal(np.where(elements, 0, actual.codes), np.where(elements, 0, codes))

    def test_mx(self):
        for element, torch_dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
            largest = element.magnitudes[-1]
            # Byte 0 takes all magnitudes below `largest` times 2^-127.
            for dtype, bits, most in (
                ("bfloat16", all_finite_bfloat16(), 0.05),
                ("float32", random_float32(), 0.01),
                ("float32", near(largest * np.exp2(np.arange(-100, 100)), 32), 0.75),
            ):
                with self.subTest(element=element.name, dtype=dtype, rows=bits.shape[0]):
                    actual = KERNELS.quantise(BEST, Format("mx", element, "e8m0"), dtype, bits)
                    scales, codes = to_mx(as_torch(dtype, bits), torch_dtype, 32, ScaleCalculationMode.RCEIL)
                    differences = mx_differences(block_amax(dtype, bits, 32), actual.scales, largest)
                    self.compare(actual, as_bytes(codes), as_bytes(scales), differences, most)

    def test_nv(self):
        # torchao's scale is of the tensor; with a power of two its reciprocal is exact. Of all bfloat16, scales of one e take 15
        # powers of two.
        every = [("bfloat16", all_finite_bfloat16(), 2.0**exponent, 0.99) for exponent in range(-116, 120, 12)]
        between = (E4M3.magnitudes[8:-1] + E4M3.magnitudes[9:]) / 2
        for dtype, bits, encode_scale, most in (
            *every,
            ("float32", random_float32(), 512.0, 0.05),
            ("float32", near(between * 6 / 512, 16), 512.0, 0.05),
        ):
            with self.subTest(dtype=dtype, encode_scale=encode_scale):
                actual = KERNELS.quantise(BEST, Format("nv", E2M1, "e4m3"), dtype, bits, encode_scale)
                scale = torch.tensor(1 / encode_scale, dtype=torch.float32)
                scales, packed = nvfp4_quantize(as_torch(dtype, bits), 16, scale)
                packed = as_bytes(packed)
                codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(bits.shape)
                differences = nv_differences(block_amax(dtype, bits, 16), encode_scale, actual.scales)
                self.compare(actual, codes, as_bytes(scales).reshape(actual.scales.shape), differences, most)

    def test_tiles(self):
        for rows, num_scales in ((128, 4), (1, 1), (100, 3), (300, 56), (257, 225)):
            with self.subTest(rows=rows, num_scales=num_scales):
                scales = np.random.default_rng(rows).integers(1, 256, (rows, num_scales)).astype(np.uint8)
                blocked = to_blocked(torch.from_numpy(scales)).numpy()
                expected = np.zeros_like(blocked)
                row, scale = np.meshgrid(np.arange(rows), np.arange(num_scales), indexing="ij")
                expected[definitions.tile_offset(row, scale, num_scales)] = scales
                np.testing.assert_array_equal(blocked, expected)


if __name__ == "__main__":
    unittest.main()
