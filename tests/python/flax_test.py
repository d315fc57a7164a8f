# SPDX-License-Identifier: Apache-2.0
"""epx.flax on CPU devices, or on GPUs (EPX_TEST_DEVICE=cuda): the block against the dense layer of examples/jax_tutorial,
whose gradients are checked by finite differences, and its router against that of epx_moe.h."""

import itertools
import unittest
from unittest import mock

import jax_ranks
import ranks

ranks.require("numpy", "jax", "flax")
import flax_ranks
import flax.linen as nn
import hlo_order
import jax
import jax.numpy as jnp
import native_block
import numpy
import reference
from flax_ranks import EXPERTS, HIDDEN, INNER, Data, check, make_group, make_mesh
from jax_ranks import ON_GPU, RANKS

import epx.flax
import epx.jax
import epx.moe

TOLERANCE = 1e-2 if ON_GPU else 2e-5  # ragged_dot of jax 0.11.2 has been seen to round float32 to TF32 on an H200
DISPATCH, COMBINE = epx.jax.dispatch, epx.jax.combine
MESHES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}

# Each option away from its default once at least, and what goes together.
OPTIONS = [
    dict(),
    dict(use_bias=True, aux_loss_coeff=0.1, align=4),
    dict(use_bias=True, apply_weights_early=True, align=8, top_k=3),
    dict(use_pre_softmax=True, scaling_factor=2.5, aux_loss_coeff=0.1),
    dict(use_pre_softmax=True, renormalize=True, activation="gelu", top_k=1),
    dict(score_function="sigmoid", renormalize=True, use_expert_bias=True, aux_loss_coeff=0.2, apply_weights_early=True),
    dict(score_function="sigmoid", num_groups=4, topk_groups=2, group_score_top_k=1, activation="relu2", use_bias=True),
    dict(num_groups=2, topk_groups=1, use_expert_bias=True),
]


class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.mesh = make_mesh(MESHES[RANKS])
        cls.group = make_group(cls.mesh)
        cls.addClassCleanup(cls.group.destroy)
        cls.addClassCleanup(cls.group.check)  # before that

    def block(self, **options):
        default = dict(group=self.group, mesh=self.mesh, num_experts=EXPERTS, ffn_dim=INNER, fsdp_axis="fsdp")
        return epx.flax.MoEBlock(**{**default, **options})


class Layer(TestCase):
    def test_1_options(self):
        for number, options in enumerate(OPTIONS):
            if RANKS == 1 or number in (1, 2, 5):  # what devices see of the others has no other options
                block = self.block(**options)
                check(block, Data(block, seed=number), TOLERANCE)

    def test_1_native_block(self):
        """The block that the tutorial compares with computes the same."""
        for number, options in enumerate(OPTIONS if RANKS == 1 else OPTIONS[2:3]):
            fields = {name: value for name, value in options.items() if name != "align"}
            fields |= dict(num_experts=EXPERTS, ffn_dim=INNER, fsdp_axis="fsdp", is_ragged=ON_GPU)
            block = native_block.NativeBlock(self.mesh, **fields)
            check(block, Data(block, seed=number), TOLERANCE)

    def test_2_experts_that_fsdp_does_not_shard(self):
        block = self.block(fsdp_axis=None, use_bias=True)
        check(block, Data(block, seed=20), TOLERANCE)

    def test_2_two_dimensions_of_tokens(self):
        block = self.block()
        data = Data(block, seed=21, batch=16, sequence=1)
        data.inputs, data.grad_out = data.inputs[:, 0], data.grad_out[:, 0]
        check(block, data, TOLERANCE)

    def test_2_one_hot_expert(self):
        """All tokens choose one expert, so most ranks get rows of the second choice alone."""
        block = self.block(use_expert_bias=True, use_bias=True, align=8)
        data = Data(block, seed=22)
        data.params["expert_bias"][5] = 1e3
        self.assertEqual(check(block, data, TOLERANCE).counts[5], 24)

    def test_2_rows_that_hold_no_token(self):
        """Rows behind the last zone may be whatever memory held, in the forward and in the backward; here they are NaN."""

        def spoil(plan, rows):
            in_use = jnp.arange(len(rows)) < plan.offsets[-1]
            return rows * jnp.where(in_use, 1, jnp.nan).astype(rows.dtype).reshape(-1, *(rows.ndim - 1) * [1])

        def dispatch(plan, tokens, weights, token):
            rows, row_weights, token = DISPATCH(plan, tokens, weights, token)
            return spoil(plan, rows), spoil(plan, row_weights), token

        def combine(plan, expert_out, recv_weights, token):
            return COMBINE(plan, spoil(plan, expert_out), recv_weights, token)

        for early in (False, True):
            block = self.block(use_bias=True, apply_weights_early=early, align=4)
            with mock.patch.multiple(epx.jax, dispatch=dispatch, combine=combine):
                check(block, Data(block, seed=26), TOLERANCE)

    def test_2_low_precision(self):
        """Tokens and kernels are bfloat16 on their way; parameters and their gradients stay float32."""
        block = self.block(dtype=jnp.bfloat16, use_bias=True, aux_loss_coeff=0.1)
        data = Data(block, seed=23)
        for array in (data.inputs, *data.params.values()):  # what bfloat16 has, so that routing is the same
            array[...] = numpy.asarray(jnp.asarray(array, jnp.bfloat16), numpy.float32)
        check(block, data, 3e-2)

    def test_2_same_bits_again(self):
        block = self.block(use_bias=True, aux_loss_coeff=0.1)
        data = Data(block, seed=24)
        first, second = flax_ranks.run(block, data), flax_ranks.run(block, data)
        for name in ("out", "grad_inputs", "loss"):
            numpy.testing.assert_array_equal(getattr(first, name), getattr(second, name))

    def test_3_init(self):
        block = self.block(use_bias=True, use_expert_bias=True, param_dtype=jnp.bfloat16, aux_loss_coeff=1.0)
        inputs = numpy.zeros((8, 3, HIDDEN), numpy.float32)
        variables = jax.jit(block.init)(jax.random.key(1), inputs)
        self.assertEqual(set(variables), {"params"})
        boxed = variables["params"]
        specs = nn.get_partition_spec(boxed)
        self.assertEqual(specs["wi"], jax.sharding.PartitionSpec("ep", "fsdp", None))
        self.assertEqual(specs["wo"], jax.sharding.PartitionSpec("ep", None, "fsdp"))
        params = nn.unbox(boxed)
        local, rows = params["wi"].addressable_data(0).shape[:2]
        self.assertEqual((local, rows), (EXPERTS // self.mesh.shape["ep"], HIDDEN // self.mesh.shape["fsdp"]))
        dtypes = {name: array.dtype for name, array in params.items()}
        self.assertEqual(dtypes.pop("expert_bias"), jnp.float32)
        self.assertEqual(set(dtypes.values()), {jnp.dtype(jnp.bfloat16)})
        # Each expert is drawn by itself, with the scale of its own inputs.
        kernels = flax_ranks.whole(self.mesh, params["wi"])
        self.assertEqual(len(numpy.unique(kernels[:, 0, 0])), EXPERTS)
        self.assertAlmostEqual(kernels.std() * HIDDEN**0.5, 1, delta=0.15)
        for name in ("wi_bias", "wo_bias", "expert_bias"):
            self.assertFalse(flax_ranks.whole(self.mesh, params[name]).any())

    def test_3_layers_share_a_group(self):
        """Two blocks, of which the second reads what the first returns, train: the loss falls."""
        block, inputs = self.block(), jax.sharding.PartitionSpec(self.mesh.axis_names)

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for number in range(2):
                    x = x + block.clone(name=f"moe{number}", parent=self)(x)
                return x

        model, data = Model(), Data(block, seed=25)
        arrays = [flax_ranks.on_mesh(self.mesh, array, inputs) for array in (data.inputs, data.grad_out)]
        params = nn.unbox(jax.jit(model.init)(jax.random.key(2), arrays[0]))

        @jax.jit
        def step(params, inputs, target):
            loss, grads = jax.value_and_grad(lambda params: jnp.mean((model.apply(params, inputs) - target) ** 2))(params)
            return jax.tree.map(lambda param, grad: param - 0.5 * grad, params, grads), loss

        losses = []
        for _ in range(8):
            params, loss = jax.block_until_ready(step(params, *arrays))
            losses.append(float(loss))
        self.assertLess(losses[-1], 0.8 * losses[0])


class Order(TestCase):
    """XLA's programs have the calls of several blocks in one order, which the data alone give them."""

    FORWARD, BACKWARD = ["prepare", "dispatch", "combine"], ["combine_bwd", "dispatch_bwd"]

    def calls(self, model):
        inputs = jnp.ones((8, 3, HIDDEN))
        params = jax.eval_shape(model.init, jax.random.key(0), inputs)

        def loss(params, inputs):
            out, state = model.apply(params, inputs, mutable="losses")
            return jnp.sum(out**2) + sum(map(jnp.sum, jax.tree.leaves(state)))

        return hlo_order.Module(jax.jit(jax.grad(loss)).lower(params, inputs).compile().as_text()).calls()

    def test_1_layers(self):
        block = self.block(aux_loss_coeff=0.1, use_bias=True)

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for number in range(2):
                    x = x + block.clone(name=f"moe{number}", parent=self)(nn.LayerNorm()(x))
                return x

        self.assertEqual(self.calls(Model()), 2 * self.FORWARD + 2 * self.BACKWARD)

    def test_1_two_blocks_of_one_input_have_none(self):
        """As the docstring says."""
        block = self.block()

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return sum(block.clone(name=f"moe{number}", parent=self)(x) for number in range(2))

        with self.assertRaisesRegex(ValueError, "nothing orders"):
            self.calls(Model())

    def test_1_checkpoints_have_none(self):
        """As the docstring says."""
        block = self.block()

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for number in range(2):
                    x = x + nn.remat(epx.flax.MoEBlock)(**fields, name=f"moe{number}")(x)
                return x

        fields = {name: getattr(block, name) for name in ("group", "mesh", "num_experts", "ffn_dim")}
        with self.assertRaisesRegex(ValueError, "nothing orders"):
            self.calls(Model())

    def test_1_loops(self):
        block = self.block(aux_loss_coeff=0.1)

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + block.clone(name="moe", parent=self)(nn.LayerNorm()(x)), None

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                axes = {"params": 0, "losses": 0}
                loop = nn.scan(
                    Layer, axes, split_rngs={"params": True}, length=3, metadata_params={nn.PARTITION_NAME: None}
                )
                return loop()(x, None)[0]

        self.assertEqual(self.calls(Model()), self.FORWARD + self.BACKWARD)


class Routers(unittest.TestCase):
    """On one process, without a group."""

    ROUTERS = [
        epx.moe.Router(2),
        epx.moe.Router(3, score="softmax_then_topk", scaling_factor=0.5),
        epx.moe.Router(3, score="softmax_then_topk", renormalize=True, num_groups=2, topk_groups=2, group_score_top_k=2),
        epx.moe.Router(4, score="sigmoid", num_groups=4, topk_groups=2, aux_loss_coeff=0.3),
        epx.moe.Router(2, score="sigmoid", renormalize=True, scaling_factor=2.0, aux_loss_coeff=0.3),
        epx.moe.Router(EXPERTS, score="sigmoid", renormalize=True),
    ]

    def test_1_route_is_that_of_the_library(self):
        generator = numpy.random.default_rng(3)
        logits = 3 * generator.standard_normal((50, EXPERTS), numpy.float32)
        logits[0] = 1  # ties
        logits[1] = -200  # sigmoids of which are 0
        tokens, ffn = numpy.ones((50, HIDDEN), numpy.float32), epx.moe.Ffn(HIDDEN, INNER)
        for router, has_bias in itertools.product(self.ROUTERS, (False, True)):
            bias = generator.standard_normal(EXPERTS, numpy.float32) if has_bias else None
            with epx.moe.Block(None, router=router, ffn=ffn, num_experts=EXPERTS, max_tokens_per_rank=50) as block:
                params = {name: numpy.zeros(shape, numpy.float32) for name, shape in block.params_shapes.items()}
                wanted = block.forward(tokens, logits, params, selection_bias=bias)
            topk_idx, weights = epx.flax.route(router, jnp.asarray(logits), bias)
            numpy.testing.assert_array_equal(topk_idx, wanted.topk_idx, str(router))
            numpy.testing.assert_allclose(weights, wanted.topk_weights, rtol=2e-6, atol=1e-7, err_msg=str(router))

    def test_2_refusals(self):
        for router, words in [
            (epx.moe.Router(9), "top_k is 9; it must be 1 to 8"),
            (epx.moe.Router(0), "top_k is 0; it must be 1 to 8"),
            (epx.moe.Router(2, score="tanh"), "score is 'tanh'; it must be one of 'topk_then_softmax'"),
            (epx.moe.Router(2, num_groups=3), "num_groups is 3; it must divide 8 experts"),
            (epx.moe.Router(2, num_groups=2, topk_groups=3), "topk_groups is 3; it must be 1 to 2, num_groups"),
            (epx.moe.Router(3, num_groups=4), "top_k is 3; 1 groups (topk_groups) of 2 experts have 2"),
            (epx.moe.Router(2, num_groups=4, group_score_top_k=3), "group_score_top_k is 3; it must be 0 to 2"),
            (
                epx.moe.Router(3, num_groups=4, topk_groups=2),
                "group_score_top_k is 0, which stands for top_k / topk_groups",
            ),
        ]:
            ranks.refused(self, words, lambda: epx.flax.route(router, jnp.zeros((1, EXPERTS))))


class Reference(unittest.TestCase):
    """The tutorial's reference has the gradients that finite differences have, in a few directions for each array."""

    def check(self, options, data):
        generator = numpy.random.default_rng(5)
        arrays = {name: array.astype(numpy.float64) for name, array in {**data.params, "inputs": data.inputs}.items()}

        def loss(changed):
            result = reference.run(options, {name: changed[name] for name in data.params}, changed["inputs"], data.grad_out)
            return (result.out * data.grad_out).sum() + result.loss

        found = reference.run(options, data.params, data.inputs, data.grad_out)
        for name, gradient in {**found.grads, "inputs": found.grad_inputs}.items():
            for _ in range(4):
                step = 1e-6 * generator.standard_normal(gradient.shape)
                above, below = (loss({**arrays, name: arrays[name] + sign * step}) for sign in (1, -1))
                self.assertAlmostEqual((above - below) / 2e-6, (gradient * step).sum() / 1e-6, delta=1e-5, msg=name)

    def test_1_gradients(self):
        for number, changes in enumerate(OPTIONS):
            fields = {name: field.default for name, field in epx.flax.MoEBlock.__dataclass_fields__.items()}
            options = reference.types.SimpleNamespace(**{**fields, **changes})
            self.check(options, Data(options, seed=number))


class Refusals(TestCase):
    def refused(self, words, shape=(8, 3, HIDDEN), dtype=jnp.float32, **options):
        block = self.block(**options)
        ranks.refused(
            self, words, lambda: jax.eval_shape(block.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, dtype))
        )

    def test_1_fields(self):
        self.refused("num_experts is 4; the group has 8", num_experts=4)
        self.refused("ffn_dim is 0; it must be at least 1", ffn_dim=0)
        self.refused("group is int; this call takes epx.Group", group=1)
        self.refused("activation is 'silu'; it must be one of 'swiglu', 'gelu', 'relu2'", activation="silu")
        self.refused("score_function is 'tanh'; it must be one of 'softmax', 'sigmoid'", score_function="tanh")
        self.refused(
            "use_pre_softmax is True with score_function 'sigmoid'", use_pre_softmax=True, score_function="sigmoid"
        )
        self.refused("use_bias is int; this call takes bool", use_bias=1)
        self.refused("top_k is 9; it must be 1 to 8", top_k=9)
        self.refused("K = 4; it must be 1 to 3, the group's max_top_k", top_k=4)
        self.refused("alignment is 16; it must be 0 to 8, the group's max_alignment", align=16)
        self.refused("scaling_factor is 'two'; it must be a number", scaling_factor="two")

    def test_1_mesh(self):
        self.refused("mesh is tuple; this call takes ", mesh=(2, 2))
        self.refused("fsdp_axis is 'data'; it must be one of 'fsdp', None", fsdp_axis="data")
        self.refused("fsdp_axis is 'ep'; it must be one of 'fsdp', None", fsdp_axis="ep")
        self.refused("the mesh has axes {'other'", mesh=make_mesh((RANKS, 1), ("other", "one")), fsdp_axis=None)
        with epx.Group(epx.bootstrap.local(), transport="host", **jax_ranks.config(num_experts=EXPERTS)) as group:
            self.refused("has no mesh axis: create it by epx.jax.make_group", group=group)

    def test_1_inputs(self):
        self.refused("inputs is int32 of shape [8, 12]; it must be floating point, [B, ..., H]", (8, HIDDEN), jnp.int32)
        self.refused("inputs is float32 of shape [12]; it must be floating point", (HIDDEN,))
        if RANKS > 1:
            self.refused(f"the {RANKS} devices of the mesh must divide 5", (5, HIDDEN))
        if self.mesh.shape["fsdp"] > 1:
            self.refused("inputs has 11 columns; the 2 devices along fsdp_axis 'fsdp' must divide them", (8, 11))

    def test_1_the_group_is_too_small(self):
        block = self.block()
        for shape, words in [
            ((64 * RANKS, HIDDEN), "topk_idx has 64 tokens; the group's max_tokens_per_rank is 32"),
            ((8, 24), "tokens has 24 columns; the group's hidden_dim is 12"),
        ]:
            inputs = jax.ShapeDtypeStruct(shape, jnp.float32)
            variables = jax.eval_shape(block.init, jax.random.key(0), inputs)
            ranks.refused(self, words, lambda: jax.eval_shape(block.apply, variables, inputs))


if __name__ == "__main__":
    jax_ranks.join()
    ranks.main()
