# SPDX-License-Identifier: Apache-2.0
"""MoELayer with experts in FP8: its bits beside those of one rank that has all experts, and when its weights are quantised. On
GPUs with EPX_TEST_DEVICE=cuda, see ranks.py."""

import unittest

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import numpy
import torch
import torch_model
from torch.utils.checkpoint import checkpoint
from torch_model import EXPERTS, ON_GPU, RANK, RANKS, Graphs, compiled, count_calls, make_group, on_device

import epx
import epx.moe
import epx.torch

HIDDEN, INNER = 256, 128
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # of tokens
RECIPES = "fp8_activations", "fp8"
COUNTS = [0 if RANKS > 1 and rank == RANKS - 1 else 11 + 13 * rank for rank in range(RANKS)]
OWN = slice(sum(COUNTS[:RANK]), sum(COUNTS[: RANK + 1]))
WITH_INDUCTOR = RANKS == 1 or ON_GPU  # a compiler for each rank takes minutes on few cores


def normal(*sizes, seed):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


# Of all ranks.
TOKENS = normal(sum(COUNTS), HIDDEN, seed=1).to(DTYPE)
LOGITS = normal(sum(COUNTS), EXPERTS, seed=2)
GRAD_OUT = normal(sum(COUNTS), HIDDEN, seed=3).to(DTYPE)


def group_of_fp8():
    return make_group(hidden_dim=HIDDEN, max_tokens_per_rank=64, max_alignment=32, combine_precision="exact")


def make_layer(group, recipe, **options):
    sizes = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER), dtype=DTYPE)
    return epx.torch.MoELayer(group, recipe=recipe, **{**sizes, **options})


def run(layer, call=None, inputs=None):
    """out, and the gradients of tokens, logits and both weights, for a call of the layer (default: its own) on tokens, logits and
    the gradient of out (default: this rank's)."""
    tokens, logits, grad_out = inputs or [on_device(each[OWN]) for each in (TOKENS, LOGITS, GRAD_OUT)]
    leaves = tokens.detach().requires_grad_(), logits.detach().requires_grad_()
    out = (call or layer)(leaves[0], logits=leaves[1])
    return out.detach(), *torch.autograd.grad(out, (*leaves, *layer.expert_parameters()), grad_out)


class Fp8(unittest.TestCase):
    def assert_same(self, found, wanted):
        for one, other in zip(found, wanted, strict=True):
            self.assertTrue(torch.equal(one, other), f"{one.dtype} {list(one.shape)}")

    def whole(self, recipe, masters=torch.float32):
        """What run() finds, of a layer on the host that has all experts and the tokens of all ranks."""
        sizes = dict(hidden_dim=HIDDEN, max_tokens_per_rank=max(len(TOKENS), 1), combine_precision="exact", transport="host")
        with epx.torch.Group(epx.bootstrap.local(), **torch_model.config(**sizes)) as alone:
            layer = make_layer(alone, recipe, dtype=torch.float32).to(masters)
            return run(layer, inputs=[each.float() for each in (TOKENS, LOGITS, GRAD_OUT)])

    def check_against_whole(self, group, found, whole):
        mine = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
        for one, other, part in zip(found, whole, 3 * [OWN] + 2 * [mine]):
            one, other = one.cpu(), other[part]
            if ON_GPU:  # which computes in bfloat16
                self.assertLessEqual((one.float() - other.float()).norm(), 0.05 * other.float().norm())
            else:
                self.assertTrue(torch.equal(one, other), f"{one.dtype} {list(one.shape)}")

    def test_1_bits(self):
        with group_of_fp8() as group:
            wide = self.whole("wide")
            for recipe in RECIPES:
                whole = self.whole(recipe)
                for one, other in zip(whole, wide):
                    self.assertLess((one - other).norm(), 0.12 * other.norm())
                for options in ({}, dict(recompute=True, alignment=32)):
                    layer = make_layer(group, recipe, reduce_gradients="none", **options)
                    with self.subTest(recipe=recipe, **options):
                        with count_calls() as calls:
                            found = run(layer)
                        self.check_against_whole(group, found, whole)
                        quantised = 2 + 2 + ("recompute" in options)
                        self.assertEqual(calls, {"quantise_weights": quantised, "block_fwd_fp8": 1, "block_bwd_fp8": 1})
                        layer.quantise_parameters()
                        with count_calls() as calls:
                            self.assert_same(run(layer), found)
                        self.assertEqual(calls, {"block_fwd_fp8": 1, "block_bwd_fp8": 1})
                        with torch.no_grad():
                            out = layer(on_device(TOKENS[OWN]), logits=on_device(LOGITS[OWN]))
                        self.assertTrue(torch.equal(out, found[0]))
                    layer.destroy()
            group.check()

    def test_2_means_of_gradients(self):
        with group_of_fp8() as group:
            one, other = (make_layer(group, "fp8", reduce_gradients=each) for each in ("mean", "none"))
            for mean, each in zip(run(one), run(other)):
                is_weight = mean.dim() == 3
                torch.testing.assert_close(mean, each / RANKS if is_weight else each, rtol=1e-2 if ON_GPU else 1e-6, atol=0)
            tokens = on_device(TOKENS[OWN])
            one(tokens).sum().backward()
            self.assertGreater(one.gate_weight.grad.abs().sum().item(), 0)
            one.destroy(), other.destroy()
            group.check()

    def test_3_weights_that_change(self):
        """Calls see each change of the weights, also those that no _version tells of."""
        with group_of_fp8() as group:
            layer, twin = make_layer(group, "fp8"), make_layer(group, "fp8")

            def check():
                """Against a layer that has quantised nothing before."""
                twin.load_state_dict(layer.state_dict())
                self.assert_same(run(layer), run(twin))

            def step(**options):
                optimizer = torch.optim.AdamW(layer.expert_parameters(), lr=0.05, **options)
                for each in layer.expert_parameters():
                    each.grad = torch.ones_like(each)
                optimizer.step()

            def in_place():
                with torch.no_grad():
                    layer.down_weight.mul_(1.5)

            def by_data():
                layer.first_weight.data.mul_(1.5)

            for change in (step, lambda: step(fused=True), in_place, by_data, lambda: layer.reset_parameters(7)):
                before = run(layer)
                change()
                self.assertFalse(torch.equal(run(layer)[3], before[3]) and len(TOKENS[OWN]))
                check()
            layer.quantise_parameters()
            kept = layer._kept.tensors
            addresses = [each.data_ptr() for each in kept]
            for change in (step, in_place, lambda: layer.reset_parameters(8), lambda: layer.load_state_dict(twin.state_dict())):
                change()
                for call in (lambda: run(layer), lambda: layer(on_device(TOKENS[OWN]))):
                    ranks.refused(self, "_weight has changed since quantise_parameters(): call it after each step", call)
                layer.quantise_parameters()
                check()
            for change in (lambda: step(fused=True), by_data):
                before = run(layer)
                change()
                self.assert_same(run(layer)[:3], before[:3])  # until the layer is told
                layer.quantise_parameters()
                check()
            self.assertEqual(addresses, [each.data_ptr() for each in layer._kept.tensors])
            layer.destroy(), twin.destroy()
            group.check()

    def test_4_changes_before_a_backward(self):
        with group_of_fp8() as group:
            layer = make_layer(group, "fp8", max_in_flight=2)
            tokens, logits = on_device(TOKENS[OWN]), on_device(LOGITS[OWN])

            def change():
                with torch.no_grad():
                    layer.first_weight.mul_(2)

            for is_kept in (False, True):
                if is_kept:
                    layer.quantise_parameters()
                out = layer(tokens, logits=logits)
                change()
                if is_kept:
                    (grad,) = torch.autograd.grad(
                        out.sum(), layer.down_weight, retain_graph=True
                    )  # of the weights as they were
                    self.assertTrue(grad.isfinite().all())
                    layer.quantise_parameters()
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    out.sum().backward()
                del out
            group.check()
            layer.destroy()

    def test_5_modes(self):
        with group_of_fp8() as group:
            layer = make_layer(group, "fp8")
            tokens, logits = on_device(TOKENS[OWN]), on_device(LOGITS[OWN])
            wanted = run(layer)
            for is_kept in (False, True):
                with torch.inference_mode():
                    if is_kept:
                        layer.quantise_parameters()
                    self.assertTrue(torch.equal(layer(tokens, logits=logits), wanted[0]))
                self.assert_same(run(layer), wanted)
                for options in ({}, dict(context_fn=epx.torch.saves_exchange)):
                    with count_calls() as calls:
                        self.assert_same(
                            run(
                                layer,
                                lambda *args, **kwargs: checkpoint(layer, *args, use_reentrant=False, **options, **kwargs),
                            ),
                            wanted,
                        )
                    quantised = {} if is_kept else {"quantise_weights": 6}
                    self.assertEqual(calls, {**quantised, "block_fwd_fp8": 1 if options else 2, "block_bwd_fp8": 1})
                with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
                    out = layer(tokens.float(), logits=logits)
                self.assertEqual(out.dtype, DTYPE)
                torch.testing.assert_close(out, wanted[0], rtol=0, atol=0)
            layer.destroy()
            group.check()

    def test_6_masters_of_the_other_dtype(self):
        """Tokens and weights may differ in dtype, and gradients have that of weights."""
        masters = torch.float32 if ON_GPU else torch.bfloat16
        with group_of_fp8() as group:
            layer = make_layer(group, "fp8", reduce_gradients="none").to(masters)
            found = run(layer)
            self.assertEqual([each.dtype for each in found], 2 * [DTYPE] + [torch.float32] + 2 * [masters])
            self.check_against_whole(group, found, self.whole("fp8", masters))
            layer.quantise_parameters()
            self.assert_same(run(layer), found)
            layer.half()
            words = "first_weight is torch.float16; it must be torch.float32 or torch.bfloat16"
            ranks.refused(self, words, lambda: run(layer))
            ranks.refused(self, words, layer.quantise_parameters)
            layer.destroy()
            group.check()

    def test_7_compiled(self):
        with group_of_fp8() as group:
            layer = make_layer(group, "fp8")
            for is_kept in (False, True):
                graphs = Graphs()
                for backend in (graphs.backend(), *(["inductor"] if WITH_INDUCTOR else [])):
                    fast = compiled(lambda tokens, logits: layer(tokens, logits=logits), backend=backend)
                    for factor in (1, 2, 0.5):  # graphs see the weights as they are
                        with torch.no_grad():
                            layer.down_weight.mul_(factor)
                        if is_kept:
                            layer.quantise_parameters()
                        self.assert_same(run(layer, lambda tokens, logits: fast(tokens, logits)), run(layer))
                self.assertEqual((graphs.forward, graphs.backward), ([["block_fwd_fp8"]], [["block_bwd_fp8"]]))
            with self.assertRaisesRegex(Exception, "quantise_parameters is not supported under torch.compile"):
                compiled(lambda: layer.quantise_parameters(), backend="eager")()
            layer.destroy()
            group.check()

    def test_8_arena(self):
        with group_of_fp8() as group:
            sizes = dict(router=epx.moe.Router(2), ffn=epx.moe.Ffn(HIDDEN, INNER), dtype=DTYPE)
            arena, wide = (epx.torch.Arena(group, recipe=recipe, **sizes) for recipe in ("fp8", "wide"))
            self.assertLess(arena.info()["flight_bytes"], wide.info()["flight_bytes"])
            one, two = make_layer(group, "fp8", arena=arena), make_layer(group, "fp8")
            self.assert_same(run(one), run(two))
            for each in (one, two, arena, wide):
                each.destroy()
            group.check()

    def test_9_training(self):
        """The losses of a layer in FP8 are near those of a wide one."""
        with group_of_fp8() as group:
            tokens, logits = on_device(TOKENS[OWN]), on_device(LOGITS[OWN])
            target = on_device(normal(*TOKENS.shape, seed=4)[OWN]) * 0.1
            losses = {}
            for recipe in ("wide", *RECIPES):
                layer = make_layer(group, recipe, seed=5)
                optimizer = torch.optim.AdamW(layer.expert_parameters(), lr=1e-3)
                if recipe == "fp8":
                    layer.quantise_parameters()
                    optimizer.register_step_post_hook(lambda *_: layer.quantise_parameters())
                found = []
                for _ in range(30):
                    optimizer.zero_grad()
                    out = layer(tokens, logits=logits)  # a router that learns changes a loss in jumps
                    loss = (out.float() - target).pow(2).sum() * RANKS / TOKENS.numel()
                    loss.backward()
                    optimizer.step()
                    found.append(loss.item())
                losses[recipe] = numpy.array(found)
                layer.destroy()
            wide = losses["wide"]
            if len(target):
                self.assertLess(wide[-1], 0.5 * wide[0])
            for recipe in RECIPES:
                with self.subTest(recipe=recipe, last=losses[recipe][-1], wide=wide[-1]):
                    numpy.testing.assert_allclose(losses[recipe], wide, 0.05, 0.02 * wide[0])
            group.check()

    def test_a_refusals(self):
        with group_of_fp8() as group:
            wire = epx.RowFormat("block128", wire_only=True)
            for words, options in {
                "recipe is 'fp4'; it must be one of 'wide', 'fp8_activations', 'fp8'": dict(recipe="fp4"),
                "bias is True; with a recipe in FP8 experts have no biases": dict(bias=True),
                "weighting is EPX_MOE_WEIGHT_LATE (0); with a recipe in FP8 it must be EARLY (1)": dict(weighting="late"),
                "alignment is 8; with EPX_MOE_RECIPE_FP8 it must be a multiple of 16": dict(alignment=8),
                "ffn.hidden_dim is 100; products in FP8 take multiples of 128": dict(ffn=epx.moe.Ffn(100, INNER)),
                "ffn.ffn_dim is 100; products in FP8 take multiples of 128": dict(ffn=epx.moe.Ffn(HIDDEN, 100)),
                "ffn.activation is 1; experts in FP8 have": dict(ffn=epx.moe.Ffn(HIDDEN, INNER, "gelu")),
                "dispatch_format is given; a recipe in FP8 has its own": dict(dispatch_format=wire),
                "with a recipe in FP8 it must be" if ON_GPU else "on the host transport a block computes in float32": dict(
                    dtype=torch.float16
                ),
            }.items():
                ranks.refused(self, words, lambda options=options: make_layer(group, options.pop("recipe", "fp8"), **options))
            layer = make_layer(group, "wide")
            ranks.refused(self, "the layer was created with recipe wide", layer.quantise_parameters)
            layer.destroy()
            layer = make_layer(group, epx.moe.Recipe.FP8)
            self.assertEqual(layer.recipe, epx.moe.Recipe.FP8)
            layer.first_weight = torch.nn.Parameter(torch.empty(0, device="meta"))
            ranks.refused(self, "first_weight is on meta", layer.quantise_parameters)
            layer.destroy()
            group.check()


if __name__ == "__main__":
    torch_model.main()
