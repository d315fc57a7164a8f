# SPDX-License-Identifier: Apache-2.0
"""epx.torch under PyTorch's modes: what they would make wrong without a word is refused with a sentence, before the call has
taken part. autocast, forward mode, torch.func, default dtypes, devices of groups, failures that nobody asked for. On GPUs with
EPX_TEST_DEVICE=cuda, see ranks.py."""

import copy
import pathlib
import tempfile
import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch
import torch_model
from torch.autograd import forward_ad
from torch_model import DEVICE, EXPERTS, HIDDEN, INNER, RANKS, compiled, make_group, on_device

import epx
import epx.moe
import epx.torch

NUM_TOKENS = 4


def make_layer(group, **options):
    options = {"max_in_flight": 3, **options}
    return epx.torch.MoELayer(group, router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER), **options)


class Modes(unittest.TestCase):
    def setUp(self):
        self.group = make_group()
        generator = torch.Generator().manual_seed(3)
        self.tokens = on_device(torch.randn(NUM_TOKENS, HIDDEN, generator=generator))
        self.idx = on_device(torch.arange(NUM_TOKENS * 2).view(NUM_TOKENS, 2) % EXPERTS)
        self.weights = on_device(torch.rand(NUM_TOKENS, 2, generator=generator))

    def tearDown(self):
        self.group.check()
        self.group.destroy()

    def calls(self):
        """Each call that takes part, as a function of tokens."""
        group, idx, weights = self.group, self.idx, self.weights
        plan = epx.torch.prepare(group, idx)
        layer = make_layer(group)
        yield lambda tokens: epx.torch.dispatch(plan, tokens, weights, num_rows=60)[0]
        yield lambda tokens: epx.torch.combine(plan, tokens.repeat(2 * RANKS, 1))  # no fewer rows than are in use
        yield lambda tokens: epx.torch.prepare_dispatch(group, tokens, idx, num_rows=60)[1]
        yield layer
        if group.ranks_per_node == RANKS:
            yield lambda tokens: epx.torch.dispatch_rank_major(group, tokens, idx)[1]

    def test_1_transforms_are_refused(self):
        for call in self.calls():
            for requires_grad in (False, True):
                tokens = self.tokens.clone().requires_grad_(requires_grad)
                for transformed in (
                    lambda: torch.vmap(call)(tokens[None]),
                    lambda: torch.func.grad(lambda each: call(each).sum())(tokens),
                    lambda: torch.func.jvp(call, (tokens,), (tokens,)),
                    lambda: torch.func.jacfwd(call)(tokens),
                ):
                    with self.assertRaisesRegex(epx.InvalidArgumentError, "cannot be called under vmap or another transform"):
                        transformed()

    def test_2_forward_mode_is_refused(self):
        for call in self.calls():
            with forward_ad.dual_level():
                call(self.tokens)  # no tensor has a tangent
                with self.assertRaisesRegex(epx.InvalidArgumentError, "have no forward-mode derivatives"):
                    call(forward_ad.make_dual(self.tokens, self.tokens))
        tokens = self.tokens.clone().requires_grad_()
        plan = epx.torch.prepare(self.group, self.idx)
        rows, _ = epx.torch.dispatch(plan, tokens)
        out = epx.torch.combine(plan, rows)
        with forward_ad.dual_level():  # forward over reverse
            with self.assertRaisesRegex(epx.InvalidArgumentError, "have no forward-mode derivatives"):
                torch.autograd.grad(out, tokens, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))

    def test_2b_second_derivatives_are_refused(self):
        """Also where the gradient that arrives requires none, as that of a sum: what flows through saved tensors would be
        missing without a word."""
        for call in self.calls():
            for loss in (lambda out: out.sum(), lambda out: out.pow(2).sum()):
                tokens = self.tokens.clone().requires_grad_()
                (grad,) = torch.autograd.grad(loss(call(tokens)), tokens, create_graph=True)
                with self.assertRaisesRegex(epx.UnsupportedError, "second derivatives of epx's operations are not supported"):
                    grad.pow(2).sum().backward()
        layer = make_layer(self.group)
        (grad,) = torch.autograd.grad(layer(self.tokens).sum(), layer.gate_weight, create_graph=True)
        (once,) = torch.autograd.grad(layer(self.tokens).sum(), layer.gate_weight)
        torch.testing.assert_close(grad.detach(), once, rtol=0, atol=0)
        with self.assertRaisesRegex(epx.UnsupportedError, "second derivatives of epx's operations are not supported"):
            grad.sum().backward()

    def test_3_autocast(self):
        """The router computes in float32, since a rounded logit selects other experts, and tokens take the layer's dtype."""
        layer = make_layer(self.group)
        other = torch.bfloat16
        wanted, routing = layer(self.tokens.to(other).float(), with_routing=True)
        with torch.autocast(DEVICE.type, dtype=other):
            out, found = layer(self.tokens.to(other), with_routing=True)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        self.assertEqual(found.logits.dtype, torch.float32)
        torch.testing.assert_close(found.logits, routing.logits, rtol=0, atol=0)
        with self.assertRaisesRegex(epx.InvalidArgumentError, "tokens is bfloat16; it must be float32"):
            layer(self.tokens.to(other))

    def test_4_default_dtype(self):
        torch.set_default_dtype(torch.float64)
        self.addCleanup(torch.set_default_dtype, torch.float32)
        layer = make_layer(self.group, selection_bias=True)
        self.assertEqual({each.dtype for each in layer.state_dict().values()}, {torch.float32})
        _, routing = layer(self.tokens, with_routing=True)
        layer.update_selection_bias(routing, 0.5)
        layer(self.tokens).sum().backward()

    def test_5_masks(self):
        layer = make_layer(self.group)
        mask = on_device(torch.tensor([1, 0, 1, 1]))
        wanted = layer(self.tokens, token_mask=mask.bool())
        self.assertEqual(wanted[1].abs().sum().item(), 0)
        torch.testing.assert_close(layer(self.tokens, token_mask=mask.to(torch.uint8)), wanted, rtol=0, atol=0)
        for wrong in (mask, mask * 0.5):
            with self.assertRaisesRegex(epx.InvalidArgumentError, f"token_mask is {wrong.dtype}; it must be torch.bool or"):
                layer(self.tokens, token_mask=wrong)

    def test_6_devices_of_groups(self):
        self.assertEqual(self.group.device, DEVICE)
        with epx.torch.Group(epx.bootstrap.local(), **{**torch_model.config(), "transport": "auto"}, device="cpu") as group:
            self.assertEqual((group.device, group.transport), (torch.device("cpu"), epx.Transport.HOST))
        wrong = [("meta", "auto", "cpu has transport 'host'"), ("cpu", "nccl", "device is cpu and transport 'nccl'")]
        if torch.cuda.is_available():
            wrong.append(("cuda", "host", "device is cuda and transport 'host'"))
        else:
            wrong.append(("cuda:0", "auto", "device is cuda:0, and PyTorch finds no GPU of CUDA"))
        for device, transport, words in wrong:
            with self.assertRaisesRegex(epx.InvalidArgumentError, words):
                epx.torch.Group(epx.bootstrap.local(), **{**torch_model.config(), "transport": transport}, device=device)

    def test_7_copies(self):
        """A copy of what refers to a group refers to the same one."""
        self.assertIs(copy.deepcopy(self.group), self.group)
        plan = copy.deepcopy(epx.torch.prepare(self.group, self.idx))
        self.assertIs(plan.group, self.group)
        rows, weights = epx.torch.dispatch(plan, self.tokens, self.weights)
        expected = self.tokens * self.weights.sum(1, keepdim=True)
        torch.testing.assert_close(epx.torch.combine(plan, rows, weights), expected, rtol=1e-5, atol=1e-5)

    def test_8_failures_that_nobody_asked_for(self):
        """A failure in a compiled graph is not told again by a later call, whose own failure is another one."""
        plan = epx.torch.prepare(self.group, self.idx)

        def program(tokens):
            return torch.ops.epx.combine(self.group.number, plan.handle_mem, tokens, None, 2**31, 1, NUM_TOKENS)

        with self.assertRaisesRegex(RuntimeError, "top_k is 2147483648"):
            compiled(program, backend="eager")(self.tokens)
        with self.assertRaises(RuntimeError) as caught:
            epx.torch.dispatch(plan, self.tokens, num_rows="many")
        self.assertNotIn("2147483648", str(caught.exception))

    def test_8b_package_without_the_library(self):
        """The import says how to build it."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("libepx.so.0", "libepx_moe.so.0"):
                maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
                path = next(line.split()[-1] for line in maps if name in line)
                pathlib.Path(folder, name).symlink_to(path)
            process = ranks.start("-c", "import epx.torch", environment={**ranks.ALONE, "LD_LIBRARY_PATH": folder})
            status, output = ranks.finish(process)
        self.assertEqual(status, 1)
        self.assertIn("ImportError: epx: libepx_torch.so.0 is neither part of this package nor installed", output)
        self.assertIn('pip install . --no-build-isolation --config-settings=setup-args=-Dtorch_python="$(command', output)

    def test_9_too_little_memory(self):
        for limit in (-1, 2**31 - 1):
            with self.assertRaises(epx.Error, msg=limit):
                make_layer(self.group, max_in_flight=limit)
        with self.assertRaisesRegex(
            torch.OutOfMemoryError, r"PyTorch could not allocate a tensor of float32 \[\d+, 8\]"
        ) as caught:
            epx.torch.prepare_dispatch(self.group, self.tokens, self.idx, num_rows=2**45)
        self.assertEqual(caught.exception.status, epx.Status.OUT_OF_MEMORY)


if __name__ == "__main__":
    torch_model.main()
