# SPDX-License-Identifier: Apache-2.0
"""The MoE block on numpy arrays: against a dense layer in float64, its gradients against finite differences of the same."""

import copy
import importlib.util
import pickle
import unittest

import ranks

ranks.require("numpy")
import format_model
import numpy

import epx
import epx.moe
from epx import _moe_structs
from epx._tensors import dtype_of
from reference import numeric_gradient

RANK, RANKS = ranks.rank(), ranks.num_ranks()
EXPERTS, HIDDEN, FFN, TOP_K = 5, 6, 4, 2
RECIPES = "fp8_activations", "fp8"  # those in FP8
in_fp8 = unittest.skipUnless(importlib.util.find_spec("ml_dtypes"), "ml_dtypes is not installed")


def dense_layer(tokens, logits, gate_up, down):
    """Mixtral's layer on all tokens of one rank, with all experts: [T, H]."""
    order = numpy.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    chosen = numpy.take_along_axis(logits, order, axis=1)
    weights = numpy.exp(chosen - chosen.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out = numpy.zeros_like(tokens)
    for token in range(len(tokens)):
        for expert, weight in zip(order[token], weights[token]):
            gate, up = numpy.split(gate_up[expert] @ tokens[token], 2)
            out[token] += weight * (down[expert] @ (gate / (1 + numpy.exp(-gate)) * up))
    return out


class Data:
    """The data of all ranks in float64."""

    def __init__(self, num_tokens, seed=1, hidden=HIDDEN, ffn=FFN):
        generator = numpy.random.default_rng(seed)
        self.tokens = [generator.standard_normal((count, hidden)) for count in num_tokens]
        self.logits = [generator.standard_normal((count, EXPERTS)) for count in num_tokens]
        self.grad_out = [generator.standard_normal((count, hidden)) for count in num_tokens]
        self.gate_up = generator.standard_normal((EXPERTS, 2 * ffn, hidden))
        self.down = generator.standard_normal((EXPERTS, hidden, ffn))

    def loss(self, rank):
        return (dense_layer(self.tokens[rank], self.logits[rank], self.gate_up, self.down) * self.grad_out[rank]).sum()

    def loss_of_all(self):
        return sum(self.loss(rank) for rank in range(len(self.tokens)))


def config(hidden=HIDDEN, ffn=FFN):
    return dict(router=epx.moe.Router(TOP_K), ffn=epx.moe.Ffn(hidden, ffn))


def weights(data, mine=slice(None)):
    """Of the experts in this slice, float32."""
    return {"gate_up_weight": data.gate_up[mine].astype(numpy.float32), "down_weight": data.down[mine].astype(numpy.float32)}


def dequantised(quantised, name):
    """What the codes and the scales of a weight say, float32."""
    scales = quantised[f"{name}_scales"].repeat(128, axis=1).repeat(128, axis=2)
    return quantised[f"{name}_codes"].astype(numpy.float32) * scales


def run(block, tokens, logits, grad_out, params):
    """out, grad_tokens, grad_logits, and the gradients of both weights."""
    out = block.forward(tokens, logits, params).out
    grad_tokens, grad_logits, grads = block.backward(grad_out, params)
    return out, grad_tokens, grad_logits, grads["gate_up_weight"], grads["down_weight"]


def trained(recipe, steps=30):
    """The losses of a tiny layer that learns what another one, with experts of its own, makes of the same tokens."""
    hidden, ffn, experts, num_tokens, rate = 128, 256, 4, 96, 3e-3
    generator = numpy.random.default_rng(11)

    def normal(*sizes):
        return generator.standard_normal(sizes).astype(numpy.float32)

    tokens, logits = normal(num_tokens, hidden), 2 * normal(num_tokens, experts)
    shapes = {"gate_up_weight": (experts, 2 * ffn, hidden), "down_weight": (experts, hidden, ffn)}
    teacher, params = ({name: normal(*shape) / shape[2] ** 0.5 for name, shape in shapes.items()} for _ in range(2))
    options = dict(num_experts=experts, max_tokens_per_rank=num_tokens, **config(hidden, ffn))
    with epx.moe.Block(None, **options) as block:
        target = block.forward(tokens, logits, teacher).out
    moments = {name: [numpy.zeros_like(each), numpy.zeros_like(each)] for name, each in params.items()}
    losses = []
    with epx.moe.Block(None, recipe=recipe, **options) as block:
        for step in range(1, steps + 1):
            given = params if recipe == "wide" else epx.moe.quantise_params(params)
            difference = block.forward(tokens, logits, given).out - target
            losses.append(float((difference**2).mean()))
            _, _, grads = block.backward(2 / difference.size * difference, given)
            for name, grad in grads.items():  # Adam
                first, second = moments[name]
                first += 0.1 * (grad - first)
                second += 0.01 * (grad**2 - second)
                params[name] -= rate * first / (1 - 0.9**step) / (numpy.sqrt(second / (1 - 0.99**step)) + 1e-12)
    return numpy.array(losses)


class Blocks(unittest.TestCase):
    def check(self, block, data, rank, first, count, dtype, tolerance):
        mine = slice(first, first + count)
        params = {"gate_up_weight": data.gate_up[mine].astype(dtype), "down_weight": data.down[mine].astype(dtype)}
        self.assertEqual({name: array.shape for name, array in params.items()}, block.params_shapes)
        output = block.forward(data.tokens[rank].astype(dtype), data.logits[rank].astype(dtype), params)
        wanted = dense_layer(data.tokens[rank], data.logits[rank], data.gate_up, data.down)
        numpy.testing.assert_allclose(output.out, wanted, tolerance, tolerance)
        self.assertEqual(output.global_counts.sum(), TOP_K * sum(len(tokens) for tokens in data.tokens))
        numpy.testing.assert_array_equal(output.info, [0, 0, -1])
        grad_tokens, grad_logits, grads = block.backward(data.grad_out[rank].astype(dtype), params)
        numpy.testing.assert_allclose(
            grad_tokens, numeric_gradient(lambda: data.loss(rank), data.tokens[rank]), 1e-3, tolerance * 10
        )
        numpy.testing.assert_allclose(
            grad_logits, numeric_gradient(lambda: data.loss(rank), data.logits[rank]), 1e-3, tolerance * 10
        )
        for name, array in (("gate_up_weight", data.gate_up), ("down_weight", data.down)):
            numeric = numeric_gradient(data.loss_of_all, array)[mine]
            numpy.testing.assert_allclose(grads[name], numeric, 1e-3, tolerance * 10)
            _, _, sums = block.backward(
                data.grad_out[rank].astype(dtype), params, grads={k: v.copy() for k, v in grads.items()}
            )
            numpy.testing.assert_allclose(sums[name], 2 * grads[name], 1e-5, tolerance)

    def test_1_local(self):
        data = Data([3])
        with epx.moe.Block(None, num_experts=EXPERTS, dtype="float64", max_tokens_per_rank=3, **config()) as block:
            self.check(block, data, 0, 0, EXPERTS, numpy.float64, 1e-9)

    def test_2_group(self):
        num_tokens = [0 if RANKS > 1 and rank == RANKS - 1 else 2 + rank for rank in range(RANKS)]
        with ranks.directory_bootstrap("block") as bootstrap:
            group = epx.Group(
                bootstrap,
                num_experts=EXPERTS,
                max_tokens_per_rank=8,
                hidden_dim=HIDDEN,
                max_top_k=TOP_K,
                max_token_dtype="float32",
                transport="host",
                timeout=ranks.TIMEOUT_SECONDS,
            )
        with group:
            for options in ({}, {"weighting": "early", "alignment": 4, "recompute": True}):
                with epx.moe.Block(group, **config(), **options) as block:
                    self.check(
                        block, Data(num_tokens), RANK, group.first_local_expert, group.num_local_experts, numpy.float32, 1e-4
                    )
            group.check()

    def test_3_masked_and_bad_tokens(self):
        data = Data([4])
        data.logits[0][2] = numpy.nan
        block = epx.moe.Block(None, num_experts=EXPERTS, dtype="float64", max_tokens_per_rank=4, **config())
        output = block.forward(
            data.tokens[0],
            data.logits[0],
            {"gate_up_weight": data.gate_up, "down_weight": data.down},
            token_mask=numpy.array([True, False, True, True]),
        )
        numpy.testing.assert_array_equal(output.info, [1, 1, 2])
        numpy.testing.assert_array_equal(output.topk_idx[1:3], -1)
        numpy.testing.assert_array_equal(output.out[1:3], 0)
        self.assertTrue((output.out[[0, 3]] != 0).all())

    def test_4_refusals(self):
        data = Data([3])
        params = {"gate_up_weight": data.gate_up, "down_weight": data.down}
        for words, changes in {
            "activation is 'tanh'": dict(ffn=epx.moe.Ffn(HIDDEN, FFN, "tanh")),
            "top_k": dict(router=epx.moe.Router(9)),
            "iff the block has no group": dict(num_experts=None),
        }.items():
            options = {**config(), "num_experts": EXPERTS, "max_tokens_per_rank": 3, **changes}
            ranks.refused(self, words, lambda options=options: epx.moe.Block(None, **options))
        with self.assertRaisesRegex(epx.Error, "the block needs [0-9]+ bytes of host memory") as caught:
            ffn = epx.moe.Ffn(1 << 16, FFN)  # so that no machine can map the memory of so many flights
            epx.moe.Block(
                None, num_experts=EXPERTS, max_tokens_per_rank=64, max_in_flight=2**31 - 1, **{**config(), "ffn": ffn}
            )
        self.assertEqual(caught.exception.status, epx.Status.OUT_OF_MEMORY)
        block = epx.moe.Block(None, num_experts=EXPERTS, dtype="float64", max_tokens_per_rank=3, **config())
        tokens, logits = data.tokens[0], data.logits[0]
        for words, call in {
            "tokens is float32": lambda: block.forward(tokens.astype(numpy.float32), logits, params),
            "logits has shape": lambda: block.forward(tokens, logits[:, 1:].copy(), params),
            "'weight'": lambda: block.forward(tokens, logits, {"weight": data.down}),
            "down_weight": lambda: block.forward(tokens, logits, {"gate_up_weight": data.gate_up}),
            "flight": lambda: block.forward(tokens, logits, params, flight=7),
            "flight is 4294967296; it must fit": lambda: block.forward(tokens, logits, params, flight=2**32),
            "token_mask is float64": lambda: block.forward(tokens, logits, params, token_mask=numpy.full(3, 0.5)),
            "token_mask is int64": lambda: block.forward(tokens, logits, params, token_mask=numpy.full(3, 256)),
            "token_mask is list": lambda: block.forward(tokens, logits, params, token_mask=[1, 1, 1]),
            "forward": lambda: block.backward(tokens, params),
        }.items():
            ranks.refused(self, words, call)
        block.forward(tokens, logits, params)
        kept = {name: numpy.zeros_like(array) for name, array in params.items()}
        kept["down_weight"].flags.writeable = False
        with self.assertRaisesRegex(epx.InvalidArgumentError, r"grads\['down_weight'\] is read-only"):
            block.backward(tokens, params, grads=kept)
        self.assertFalse(kept["down_weight"].any() or kept["gate_up_weight"].any())
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(TypeError, "Block cannot be copied or pickled"):
                copied(block)
        block.destroy()
        block.destroy()
        with self.assertRaisesRegex(epx.InvalidArgumentError, "destroyed"):
            block.forward(tokens, logits, params)

    def test_5_group_scores(self):
        logits = numpy.array([[9.0, 0, 0, 5, 5, 0]])  # 9 > 5, and 9 + 0 < 5 + 5
        for group_score_top_k, experts in {0: [3, 4], 1: [0, 1], 2: [3, 4]}.items():
            router = epx.moe.Router(2, num_groups=2, group_score_top_k=group_score_top_k)
            options = dict(num_experts=6, dtype="float64", max_tokens_per_rank=1)
            with epx.moe.Block(None, router=router, ffn=epx.moe.Ffn(HIDDEN, FFN), **options) as block:
                params = {name: numpy.zeros(shape) for name, shape in block.params_shapes.items()}
                output = block.forward(numpy.zeros((1, HIDDEN)), logits, params)
            numpy.testing.assert_array_equal(output.topk_idx, [experts])

    def test_6_dispatch_format(self):
        """The bits are those of tokens that were quantised and dequantised before, forward and backward, with a group and
        without."""
        with ranks.directory_bootstrap("block-format") as bootstrap:
            sizes = dict(num_experts=EXPERTS, max_tokens_per_rank=8, hidden_dim=HIDDEN, max_top_k=TOP_K, max_token_dtype="float32")
            group = epx.Group(bootstrap, transport="host", timeout=ranks.TIMEOUT_SECONDS, **sizes)
        with group:
            first, count = group.first_local_expert, group.num_local_experts
            data = Data([0 if RANKS > 1 and rank == RANKS - 1 else 3 + rank for rank in range(RANKS)])
            tokens, logits, grad_out = [
                each[RANK].astype(numpy.float32) for each in (data.tokens, data.logits, data.grad_out)
            ]
            for row_format in format_model.formats(wire_only=True)[:-1]:  # the last has an encode_scale
                there = format_model.round_trip(row_format, tokens)
                self.assertFalse(tokens.size and numpy.array_equal(there, tokens))
                for mine, where in (
                    (slice(first, first + count), dict(group=group)),
                    (slice(None), dict(group=None, num_experts=EXPERTS, max_tokens_per_rank=8)),
                ):
                    params = {"gate_up_weight": data.gate_up[mine], "down_weight": data.down[mine]}
                    params = {name: each.astype(numpy.float32) for name, each in params.items()}
                    found = []
                    for given, options in ((tokens, dict(dispatch_format=row_format)), (there, {})):
                        with epx.moe.Block(**where, **config(), **options) as block:
                            out = block.forward(given, logits, params).out
                            found.append((out, *block.backward(grad_out, params)))
                    with self.subTest(format=row_format, **where):
                        for one, other in zip(*[(*each[:3], *each[3].values()) for each in found]):
                            numpy.testing.assert_array_equal(one, other)
            for words, row_format in format_model.refused_on_wire("dispatch_format", sums=False).items():
                ranks.refused(self, words, lambda: epx.moe.Block(group, **config(), dispatch_format=row_format))
            nv = epx.RowFormat("nv", wire_only=True)
            local = dict(num_experts=EXPERTS, max_tokens_per_rank=8, dispatch_format=nv)
            for words, changes in {
                "dtype is float64; with a dispatch_format it must be": dict(dtype="float64"),
                "H is 7; with scaling nv it must be even": dict(ffn=epx.moe.Ffn(7, FFN)),
                "router is int; this call takes epx.moe.Router": dict(router=2),
            }.items():
                ranks.refused(self, words, lambda: epx.moe.Block(None, **{**config(), **local, **changes}))
            group.check()

    @in_fp8
    def test_7_quantised_params(self):
        """By the definitions in numpy of tests/formats, with the largest magnitude of 128 x 128 weights in place of a row's."""
        hidden, ffn = 128, 256
        given = weights(Data([0], hidden=hidden, ffn=ffn))
        given["gate_up_weight"][0, 128:256] *= 1e-3  # another scale than its neighbours
        given["down_weight"][1, :, :128] = 0
        found = epx.moe.quantise_params(given)
        self.assertEqual(list(found), list(_moe_structs.FP8_PARAMS))
        for name in ("gate_up", "down"):
            array = given[f"{name}_weight"]
            blocks = array.reshape(EXPERTS, array.shape[1] // 128, 128, array.shape[2] // 128, 128).transpose(0, 1, 3, 2, 4)
            scales = numpy.maximum(abs(blocks).max((3, 4)), numpy.float32(1e-4)) / numpy.float32(448)
            numpy.testing.assert_allclose(found[f"{name}_scales"], scales, 1e-6)
            difference = abs(dequantised(found, name) - array)
            bound = scales.repeat(128, axis=1).repeat(128, axis=2) * 2.0**-10  # half of the least step of a subnormal number
            self.assertTrue((difference <= numpy.maximum(abs(array) / 16, bound) * (1 + 1e-5)).all())
            for part in ("codes", "scales"):
                transposed = found[f"{name}_transposed_{part}"]
                numpy.testing.assert_array_equal(
                    transposed.view(numpy.uint8 if part == "codes" else numpy.uint32),
                    found[f"{name}_{part}"].transpose(0, 2, 1).view(numpy.uint8 if part == "codes" else numpy.uint32),
                )
        narrow = {name: array.astype(dtype_of("bfloat16")) for name, array in given.items()}
        rounded = {name: array.astype(numpy.float32) for name, array in narrow.items()}
        for one, other in zip(*[epx.moe.quantise_params(each).values() for each in (narrow, rounded)]):
            self.assertEqual(one.tobytes(), other.tobytes())
        transposed_down = given["down_weight"].transpose(0, 2, 1)
        for words, params in {
            "params is NoneType; this call takes dict": None,
            "params has no arrays; experts in FP8 have gate_up_weight and down_weight": {},
            "params has 'gate_up_weight'; experts in FP8 have": {**given, "down_weight": None},
            "params has 'gate_up_weight', 'down_weight', 'down_bias'; experts": {**given, "down_bias": given["down_weight"]},
            "params['gate_up_weight'] is list; this call takes numpy.ndarray": {**given, "gate_up_weight": []},
            "params['gate_up_weight'] is float64; it must be float32 or float16 or bfloat16": {
                name: array.astype(numpy.float64) for name, array in given.items()
            },
            "params['down_weight'] has strides": {**given, "down_weight": transposed_down},
            f"params['down_weight'] has shape [5, 256, 128]; it must be [5, {hidden}, {ffn}]": {
                **given,
                "down_weight": transposed_down.copy(),
            },
            "params['gate_up_weight'] has shape [5, 512, 100], [E_l, 2F, H]; in FP8 F and H are positive multiples of 128": {
                **given,
                "gate_up_weight": given["gate_up_weight"][:, :, :100].copy(),
            },
            "params['gate_up_weight'] has shape [5, 384, 128]": {
                **given,
                "gate_up_weight": given["gate_up_weight"][:, :384].copy(),
            },
        }.items():
            ranks.refused(self, words, lambda params=params: epx.moe.quantise_params(params))

    @in_fp8
    def test_8_recipes(self):
        """Each rank's bits are those of one block without a group on the tokens of all ranks, and near those of a wide block
        with the weights that the codes stand for."""
        hidden, ffn = 256, 128
        num_tokens = [0 if RANKS > 1 and rank == RANKS - 1 else 9 + 20 * rank for rank in range(RANKS)]
        data = Data(num_tokens, hidden=hidden, ffn=ffn)
        ends = numpy.cumsum(num_tokens)
        own = slice(ends[RANK] - num_tokens[RANK], ends[RANK])
        every = [numpy.concatenate(each).astype(numpy.float32) for each in (data.tokens, data.logits, data.grad_out)]
        quantised = epx.moe.quantise_params(weights(data))
        with ranks.directory_bootstrap("block-recipes") as bootstrap:
            group = epx.Group(
                bootstrap,
                num_experts=EXPERTS,
                max_tokens_per_rank=64,
                hidden_dim=hidden,
                max_top_k=TOP_K,
                max_token_dtype="float32",
                combine_precision="exact",
                transport="host",
                timeout=ranks.TIMEOUT_SECONDS,
            )
        with group:
            mine = slice(group.first_local_expert, group.first_local_expert + group.num_local_experts)
            alone = dict(num_experts=EXPERTS, max_tokens_per_rank=len(every[0]), **config(hidden, ffn))
            with epx.moe.Block(None, **alone) as block:
                wide = run(block, *every, {f"{name}_weight": dequantised(quantised, name) for name in ("gate_up", "down")})
            for recipe, options in [*((recipe, {}) for recipe in RECIPES), ("fp8", dict(alignment=32, recompute=True))]:
                with self.subTest(recipe=recipe, **options):
                    with epx.moe.Block(None, recipe=recipe, **options, **alone) as block:
                        whole = run(block, *every, quantised)
                    for one, other in zip(whole, wide):
                        self.assertEqual(one.dtype, numpy.float32)
                        self.assertLess(numpy.linalg.norm(one - other), 0.12 * numpy.linalg.norm(other))
                    with epx.moe.Block(group, recipe=recipe, **options, **config(hidden, ffn)) as block:
                        params = epx.moe.quantise_params(weights(data, mine))
                        sent, routed, grad_out = [each[own] for each in every]
                        found = run(block, sent, routed, grad_out, params)
                        # Which arrays a forward looks at, and which a backward that does not compute anything again.
                        forwards = {name: array for name, array in params.items() if "transposed" not in name}
                        backwards = {name: array for name, array in params.items() if "transposed" in name}
                        out = block.forward(sent, routed, forwards).out
                        given = params if options else backwards
                        kept = {"gate_up_weight": found[3].copy(), "down_weight": found[4].copy()}
                        *_, sums = block.backward(grad_out, given, grads=kept)
                    numpy.testing.assert_array_equal(out, found[0])
                    for one, other, part in zip(found, whole, 3 * [own] + 2 * [mine]):
                        numpy.testing.assert_array_equal(one, other[part])
                    for one, other in zip(found[3:], sums.values()):
                        numpy.testing.assert_allclose(other, 2 * one, 1e-5, 1e-6 * abs(one).max(initial=0))
            self.check_refused_recipes(group, data, quantised, every, alone)
            group.check()

    def check_refused_recipes(self, group, data, quantised, every, alone):
        for words, changes in {
            "recipe is 'fp16'; it must be one of 'wide', 'fp8_activations', 'fp8'": dict(recipe="fp16"),
            "recipe is 3; it must be one of": dict(recipe=3),
            "weighting is EPX_MOE_WEIGHT_LATE (0); with a recipe in FP8 it must be EARLY (1)": dict(weighting="late"),
            "alignment is 8; with EPX_MOE_RECIPE_FP8 it must be a multiple of 16": dict(alignment=8),
            "ffn.hidden_dim is 100; products in FP8 take multiples of 128": dict(ffn=epx.moe.Ffn(100, 128)),
            "ffn.activation is 1; experts in FP8 have": dict(ffn=epx.moe.Ffn(256, 128, "gelu")),
            "dispatch_format is given; a recipe in FP8 has its own": dict(
                dispatch_format=epx.RowFormat("block128", wire_only=True)
            ),
        }.items():
            options = {"recipe": "fp8", **changes}
            ranks.refused(self, words, lambda: epx.moe.Block(None, **{**alone, **options}))
            ranks.refused(self, words, lambda: epx.moe.Block(group, **{**config(256, 128), **options}))
        tokens, logits, grad_out = every
        wide = weights(data)
        codes = "gate_up_codes", "gate_up_transposed_codes"
        wide_codes = {**quantised, **dict.fromkeys(codes, wide["gate_up_weight"])}
        short = {name: array[:1] for name, array in quantised.items()}
        names = "the names are gate_up_codes, gate_up_scales, down_codes, down_scales, gate_up_transposed_codes, "
        for recipe, table in {
            "fp8": {
                f"params has 'gate_up_weight'; {names}": wide,
                "params is list; this call takes dict": [],
                "params['down_codes'] is list; this call takes numpy.ndarray": {"down_codes": []},
                "params.gate_up_{}codes is NULL; it is required": {},
                "params.gate_up_{}codes has sizes[0] = 1; its shape must be [E_l = 5, ": short,
                "params.gate_up_{}codes has dtype 1 (float32); it must be float8_e4m3": wide_codes,
            },
            "wide": {
                "params has 'gate_up_codes'; the names are gate_up_weight, gate_weight, ": quantised,
                "params is NoneType; this call takes dict": None,
            },
        }.items():
            with epx.moe.Block(None, recipe=recipe, **alone) as block:
                block.forward(tokens, logits, wide if recipe == "wide" else quantised)
                for words, params in table.items():
                    ranks.refused(self, words.format(""), lambda params=params: block.forward(tokens, logits, params))
                    ranks.refused(self, words.format("transposed_"), lambda params=params: block.backward(grad_out, params))
        with epx.moe.Block(None, recipe="fp8", **alone) as block:
            block.forward(tokens, logits, quantised)
            ranks.refused(
                self,
                "grads.down_bias is given; in FP8 experts have no biases",
                lambda: block.backward(grad_out, quantised, grads={"down_bias": numpy.zeros((EXPERTS, 256), numpy.float32)}),
            )

    @in_fp8
    def test_9_training_in_fp8(self):
        wide = trained("wide")
        self.assertLess(wide[-1], 0.01 * wide[0])
        for recipe in RECIPES:
            losses = trained(recipe)
            with self.subTest(recipe=recipe, first=losses[0], last=losses[-1], wide=wide[-1]):
                numpy.testing.assert_allclose(losses, wide, 0.05, 2e-3 * wide[0])
                self.assertTrue((losses != wide).all())

    def test_a_paths(self):
        """The bits are those of path "dispatch" in a group of the precision that sums as the path does."""
        sizes = dict(num_experts=EXPERTS, max_tokens_per_rank=8, hidden_dim=HIDDEN, max_top_k=4, max_token_dtype="float32")
        parts = dict(router=epx.moe.Router(4), ffn=epx.moe.Ffn(HIDDEN, FFN))  # sums of two have one order
        data = Data([0 if RANKS > 1 and rank == RANKS - 1 else 3 + rank for rank in range(RANKS)])
        given = [each[RANK].astype(numpy.float32) for each in (data.tokens, data.logits, data.grad_out)]
        for path, precision in {"ring": "wire", "ragged": "exact", epx.moe.Path.RAGGED: "exact"}.items():
            with ranks.directory_bootstrap(f"block-{path}") as bootstrap:
                options = dict(combine_precision=precision, transport="host", timeout=ranks.TIMEOUT_SECONDS)
                group = epx.Group(bootstrap, **options, **sizes)
            with group, self.subTest(path=path):
                first, count = group.first_local_expert, group.num_local_experts
                params = weights(data, slice(first, first + count))
                for options in ({}, dict(alignment=4, recompute=True)):
                    with epx.moe.Block(group, weighting="early", **options, **parts) as block:
                        wanted = run(block, *given, params)
                    with epx.moe.Block(group, path=path, **options, **parts) as block:
                        found = run(block, *given, params)
                    for one, other in zip(found, wanted):
                        numpy.testing.assert_array_equal(one, other)
                self.check_refused_paths(group)
                group.check()

    def check_refused_paths(self, group):
        alone, nv = dict(num_experts=EXPERTS, max_tokens_per_rank=8), epx.RowFormat("nv", wire_only=True)
        for words, changes in {
            "path is 'star'; it must be one of 'dispatch', 'ring', 'ragged'": dict(path="star"),
            "path is 3; it must be one of": dict(path=3),
            "weighting is EPX_MOE_WEIGHT_LATE (0); on path ring it must be EARLY (1)": dict(weighting="late"),
            "recipe is fp8_activations; on path ring it must be wide": dict(recipe=RECIPES[0], ffn=epx.moe.Ffn(128, 128)),
            "dispatch_format is given; on path ring it must be NULL": dict(dispatch_format=nv),
        }.items():
            options = {"path": "ring", **config(), **changes}
            ranks.refused(self, words, lambda: epx.moe.Block(None, **alone, **options))
            ranks.refused(self, words, lambda: epx.moe.Block(group, **options))


if __name__ == "__main__":
    ranks.main()
