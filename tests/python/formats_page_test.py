# SPDX-License-Identifier: Apache-2.0
"""The Python snippets of docs/row-formats.md run as they stand, and give the rows of the definitions. formats_page_test.py PAGE
numpy|torch|jax"""

import re
import sys

import ranks

ranks.require("numpy")
import numpy

TOKENS = numpy.random.default_rng(1).standard_normal((4, 256)).astype(numpy.float32)
CONFIG = dict(
    num_experts=4, max_tokens_per_rank=4, hidden_dim=256, max_top_k=1, max_token_dtype="float32", max_recv_tokens_per_rank=600
)


def check_zones(names):
    """What a snippet about zones has made, of one token for each expert, in a group whose R is more than E_l * Z."""
    assert names["group"].max_recv_tokens_per_rank > 4 * 128
    numpy.testing.assert_array_equal(numpy.asarray(names["zones"])[:, 0], TOKENS)
    numpy.testing.assert_array_equal(names["row_weights"][::128], 2)
    numpy.testing.assert_array_equal(names["plan"].offsets, 128 * numpy.arange(5))
    numpy.testing.assert_array_equal(names["plan"].counts, 1)


def check_compact(names):
    """What the snippet about rank-major rows has made, of one rank."""
    numpy.testing.assert_array_equal(names["used"], TOKENS)
    assert names["plan"].compact


def run_numpy(zones_program, program):
    ranks.require("ml_dtypes")
    import format_model
    import ml_dtypes

    import epx

    with epx.Group(epx.bootstrap.local(), transport="host", **CONFIG) as group:
        topk_idx = numpy.arange(4)[:, None]
        names = dict(group=group, tokens=TOKENS, topk_idx=topk_idx, topk_weights=numpy.full((4, 1), 2, numpy.float32))
        exec(zones_program, names)
        check_zones(names)
        out = group.combine(names["plan"], names["rows"], names["row_weights"])
        numpy.testing.assert_array_equal(out, 2 * TOKENS)
        exec(compact, names)
        check_compact(names)

        plan = group.prepare(topk_idx)
        codes, scales = format_model.parts_of(epx.RowFormat("block128"), TOKENS)
        names = dict(epx=epx, group=group, plan=plan, tokens=TOKENS, topk_weights=numpy.ones((4, 1), numpy.float32))
        names.update(tokens_fp8=codes.view(ml_dtypes.float8_e4m3fn), token_scales=scales)
        exec(program, names)
        for received in ((names["rows"], names["scales"]), names["again"]):
            numpy.testing.assert_array_equal(received[0].view(numpy.uint8), codes)
            numpy.testing.assert_array_equal(received[1], scales)
        wide = format_model.round_trip(names["on_wire"], TOKENS)
        numpy.testing.assert_array_equal(names["wide"], wide)
        numpy.testing.assert_array_equal(names["out"], format_model.round_trip(names["of_sums"], wide))
        group.check()


def run_torch(zones_program, program):
    ranks.require("torch", installer="install_torch_test_packages")
    import format_model
    import torch

    import epx.moe
    import epx.torch

    class Experts(torch.autograd.Function):  # which are the identity, of dequantised rows
        @staticmethod
        def forward(ctx, rows, scales, wide):
            return rows.float() * scales.repeat_interleave(128, 1)

        @staticmethod
        def backward(ctx, grad):
            return None, None, 3 * grad

    tokens = torch.tensor(TOKENS, requires_grad=True)
    with epx.torch.Group(epx.bootstrap.local(), device="cpu", **CONFIG) as group:
        topk_idx = torch.arange(4)[:, None]
        names = dict(epx=epx, group=group, tokens=tokens.detach(), topk_idx=topk_idx, topk_weights=torch.full((4, 1), 2.0))
        exec(zones_program, names)
        check_zones(names)

        plan = epx.torch.prepare(group, topk_idx)
        names = dict(epx=epx, group=group, plan=plan, tokens=tokens, topk_weights=torch.ones(4, 1), Experts=Experts)
        exec(program, names)

        def there(name, rows):
            return torch.tensor(format_model.round_trip(names[name], rows.detach().numpy()))

        for name, key, factor in (("out", "block128", 3), ("rows", "on_wire", 1)):
            torch.testing.assert_close(names[name].detach(), there(key, tokens), rtol=0, atol=0)
            (grad,) = torch.autograd.grad(names[name].sum(), [tokens])
            torch.testing.assert_close(grad, torch.full_like(grad, factor), rtol=0, atol=0)
        torch.testing.assert_close(names["summed"].detach(), there("home", there("on_wire", tokens)), rtol=0, atol=0)
        (grad,) = torch.autograd.grad(names["summed"], [tokens], tokens.detach())
        torch.testing.assert_close(grad, there("home", there("home", tokens)), rtol=0, atol=0)
        layer = names["layer"]
        plain = epx.torch.MoELayer(group, router=layer.router, ffn=layer.ffn)
        logits = torch.nn.functional.linear(tokens, layer.gate_weight)
        torch.testing.assert_close(names["layer_out"], plain(there("on_wire", tokens), logits=logits), rtol=0, atol=0)
        group.check()


def run_jax(zones_program, program):
    ranks.require("jax")
    import format_model
    import jax
    import jax.numpy as jnp

    import epx.jax

    @jax.custom_vjp
    def experts(rows, scales, wide):  # which are the identity, of dequantised rows
        return rows.astype(jnp.float32) * jnp.repeat(scales, 128, axis=1)

    experts.defvjp(lambda *arguments: (experts(*arguments), None), lambda _, grad: (None, None, 3 * grad))
    with epx.Group(epx.bootstrap.local(), transport="host", **CONFIG) as group:
        topk_idx, topk_weights = jnp.arange(4)[:, None], jnp.ones((4, 1))
        names = dict(epx=epx, group=group, tokens=jnp.asarray(TOKENS), topk_idx=topk_idx, topk_weights=2 * topk_weights)
        names["token"] = epx.jax.first_token()
        exec(zones_program, names)
        check_zones(names)

        names = dict(epx=epx, jnp=jnp, group=group, topk_idx=topk_idx, experts=experts)
        exec(program, names)
        value, grad = jax.value_and_grad(names["loss"])(jnp.asarray(TOKENS), topk_weights)

        def home(rows):
            return format_model.round_trip(names["home"], rows)

        numpy.testing.assert_allclose(value, home(format_model.round_trip(names["block128"], TOKENS)).sum(), rtol=1e-5)
        numpy.testing.assert_array_equal(grad, home(3 * home(numpy.ones_like(TOKENS))))
        group.check()


with open(sys.argv[1], encoding="utf-8") as page:
    programs = re.findall(r"```python\n(.*?)```", page.read(), flags=re.DOTALL)
runs = dict(numpy=run_numpy, torch=run_torch, jax=run_jax)
place = list(runs).index(sys.argv[2])
zones, compact, formats = programs[: len(runs)], programs[len(runs)], programs[len(runs) + 1 :]
runs[sys.argv[2]](zones[place], formats[place])
