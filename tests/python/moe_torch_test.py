# SPDX-License-Identifier: Apache-2.0
"""The variants of examples/native/moe_torch.py on gloo, beside the answer in float64, and the parts of the one in FP8."""

import json
import pathlib
import sys
import tempfile
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
ROOT = pathlib.Path(__file__).resolve().parents[2]
NATIVE = ROOT / "examples" / "native"
sys.path += [str(ROOT / "docs" / "moe_tutorial"), str(NATIVE)]
import cases
import correctness
import moe_torch_fp8
import sessions
import torch

LIMIT_S = 100
BF16_LIMIT = 2e-2  # of the largest element: sums of some hundred products of bfloat16 numbers, in bfloat16
FP8_LIMITS = 1e-2, 0.15  # products in FP8 are off by at least and at most so much


def run(case, num_ranks):
    """Runs the program. Returns its JSON, and {layer: {tensor: distance from float64, divided by the largest element}}."""
    with tempfile.TemporaryDirectory(prefix="moe_torch.") as name:
        directory = pathlib.Path(name)
        files = ["--store", directory / "store", "--json", directory / "out.json", "--dump", directory]
        command = [sys.executable, "-B", NATIVE / "moe_torch.py", "--device", "cpu", "--iters", 0, *case.options, *files]
        environments = [
            {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
            for rank in range(num_ranks)
        ]
        sessions.run_ranks("torch", [command] * num_ranks, environments, directory, LIMIT_S)
        layers = sorted({file.name.split(".")[0] for file in directory.glob("*.out.0.npy")})
        tensors = correctness.compare(case, num_ranks, directory, layers, bf16=True)
        errors = {layer: {} for layer in layers}
        for tensor, entry in tensors.items():
            for layer in layers:
                errors[layer][tensor] = entry["layers"][layer]["from_reference"] / entry["largest"]
        return json.loads((directory / "out.json").read_text(encoding="utf-8")), errors


class Program(unittest.TestCase):
    def check(self, case, num_ranks, layers):
        result, errors = run(case, num_ranks)
        self.assertEqual(set(errors), layers)
        for layer, of_layer in errors.items():
            self.assertEqual(len(of_layer), 7 if case.biases else 5)
            least, most = FP8_LIMITS if layer == "torch-fp8" else (0, BF16_LIMIT)
            for tensor, error in of_layer.items():
                if not tensor.endswith("bias"):  # the usual variant sums rows of these in bfloat16
                    self.assertTrue(least <= error <= most, (layer, tensor, error))
        return result

    def test_variants(self):
        result = self.check(cases.CHECKS[1], 2, {"torch-usual", "torch-best", "torch-fp8"})
        self.assertEqual(set(result["candidates_us"]["torch-fp8"]), set(moe_torch_fp8.WEIGHT_GRADS))
        self.assertNotIn("left_out", result)

    def test_experts_that_ranks_do_not_divide(self):
        case = cases.Case("odd", 37, 48, 32, 7, 3, routing="zipf:1.2")
        self.check(case, 3, {"torch-usual", "torch-best", "torch-fp8"})

    def test_experts_without_rows(self):
        case = cases.Case("few", 1, 48, 32, 8, 2)
        self.check(case, 2, {"torch-usual", "torch-best", "torch-fp8"})

    def test_biases(self):
        result = self.check(cases.CHECK, 1, {"torch-usual", "torch-best"})
        self.assertEqual(result["left_out"], {"torch-fp8": "experts in FP8 have no biases"})
        self.assertNotIn("candidates_us", result)

    def test_odd_sizes(self):
        result = self.check(cases.Case("odd", 5, 33, 32, 4, 2), 1, {"torch-usual", "torch-best"})
        wanted = "H is 33 and F is 32, and both must be multiples of 16"
        self.assertEqual(result["left_out"], {"torch-fp8": wanted})


def normal(*sizes, seed=1):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


class Parts(unittest.TestCase):
    def test_quantiser(self):
        rows = normal(64, 96) * torch.logspace(-8, 8, 64)[:, None]
        rows[3] = 0
        rows[4, 5] = 448.0  # fits without a scale
        rows[4] = rows[4].clamp(-448, 448)
        codes, scales = moe_torch_fp8.quantise(rows)
        self.assertTrue(torch.equal(scales.frexp().mantissa, torch.full((64,), 0.5)))
        self.assertEqual(scales[4], 1)
        largest = codes.float().abs().amax(1)
        self.assertEqual(largest[3], 0)
        self.assertTrue(((largest > 220) & (largest <= 448))[torch.arange(64) != 3].all())
        # Half a step of three bits of mantissa, or of the least exponent.
        error = (codes.float() * scales[:, None] - rows).abs()
        self.assertTrue((error <= torch.maximum(rows.abs() * 2**-4, scales[:, None] * 2**-10)).all())

    def test_zones(self):
        counts = torch.tensor([[3, 0, 16, 1], [14, 0, 0, 15]])
        slot_of_row, row_of_slot, ends = moe_torch_fp8.zones(counts, counts, 49)
        self.assertEqual(ends.tolist(), [32, 48, 64, 80])
        self.assertEqual(ends.dtype, torch.int32)
        zones = [zone[zone < 49].tolist() for zone in row_of_slot.tensor_split([32, 48, 64])]
        first_rank, second_rank = range(20), range(20, 49)
        self.assertEqual(zones[0], [*first_rank[:3], *second_rank[:14]])
        self.assertEqual(zones[1:], [[], [*first_rank[3:19]], [first_rank[19], *second_rank[14:]]])
        self.assertTrue(torch.equal(row_of_slot[slot_of_row], torch.arange(49)))

    def test_exchange_with_itself(self):
        topk_idx, counts = torch.tensor([[2, 0], [0, 2], [2, 1], [2, 0], [0, 2]]), torch.tensor([[4, 1, 5, 0]])
        by_expert = topk_idx.view(-1).argsort(stable=True)
        exchange = moe_torch_fp8.Exchange(
            [10], [10], by_expert // 2, by_expert, by_expert.argsort().view(5, 2), *moe_torch_fp8.zones(counts, counts, 10)
        )
        codes, scales = moe_torch_fp8.quantise(normal(5, 32))
        with tempfile.TemporaryDirectory() as name:
            torch.distributed.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
            torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
            found_codes, found_scales = exchange.receive(exchange.send(codes, scales[exchange.token_of_row]))
            returned, work = exchange.send_home(moe_torch_fp8.dequantise(found_codes, found_scales))
            work.wait()
            torch.use_deterministic_algorithms(False)
            torch.distributed.destroy_process_group()
        experts = found_codes.float().tensor_split([16, 32, 48])
        for expert, zone in enumerate(experts):
            tokens = (topk_idx == expert).any(1).nonzero()[:, 0]
            self.assertTrue(torch.equal(zone[: len(tokens)], codes[tokens].float()))
            self.assertTrue(torch.equal(found_scales[16 * expert :][: len(tokens)], scales[tokens]))
            self.assertFalse(zone[len(tokens) :].any())
            self.assertFalse(found_scales[16 * expert + len(tokens) : 16 * expert + 16].any())
        by_token = returned[exchange.row_of_route]
        self.assertTrue(torch.equal(by_token, moe_torch_fp8.dequantise(codes, scales)[:, None].expand(5, 2, 32)))

    def test_gradients_of_weights(self):
        sizes = 32, 16, 64
        ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
        grads, rows = normal(112, 48).bfloat16(), normal(112, 80, seed=2).bfloat16()
        grads[20:48] = 0  # pads of a zone, and a zone of pads
        wanted = torch.stack(
            [grad.double().T @ zone.double() for grad, zone in zip(grads.split(sizes), rows.split(sizes), strict=True)]
        )
        for name, least, most in (("FP8", 0.02, 0.08), ("bfloat16", 0, 5e-3)):
            found = moe_torch_fp8.WEIGHT_GRADS[f"gradients of weights in {name}"](grads, rows, ends)
            self.assertEqual(found.dtype, torch.bfloat16)
            self.assertEqual(found[1].abs().max(), 0)
            error = (found.double() - wanted).norm() / wanted.norm()
            self.assertTrue(least <= error <= most, (name, error))

    def test_gradient_of_swiglu(self):
        pre_act, grad = normal(32, 128).bfloat16(), normal(32, 64, seed=2).bfloat16()
        leaf = pre_act.double().requires_grad_()
        gate, up = leaf.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        (wanted,) = torch.autograd.grad(inner, leaf, grad.double())
        codes, scales, wide, found_inner = moe_torch_fp8.swiglu_bwd(pre_act, grad)
        for found, expected, most in (
            (wide, wanted, 4e-3),
            (found_inner, inner, 4e-3),
            (moe_torch_fp8.dequantise(codes, scales), wanted, 0.04),
            (moe_torch_fp8.dequantise(*moe_torch_fp8.swiglu(pre_act)), inner, 0.04),
        ):
            self.assertLess((found.double() - expected).norm() / expected.norm(), most)


if __name__ == "__main__":
    ranks.main()
