# SPDX-License-Identifier: Apache-2.0
"""What the tests of epx.flax share: the reference of the tutorial, and layers on the mesh (fsdp, ep) of all ranks."""

import pathlib
import sys

import jax_ranks
import ranks

ranks.require("flax", "scipy")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "jax_tutorial"))
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epx.flax
import epx.jax

EXPERTS, HIDDEN, INNER = 8, 12, 10
AXES = "fsdp", "ep"


def make_mesh(sizes, names=AXES):
    return jax.make_mesh(sizes, names, axis_types=len(sizes) * (AxisType.Auto,))


def make_group(mesh, **changes):
    changes = dict(num_experts=EXPERTS, hidden_dim=HIDDEN, max_tokens_per_rank=32, **changes)
    return epx.jax.make_group(mesh, "ep", transport=jax_ranks.TRANSPORT, **jax_ranks.config(**changes))


def on_mesh(mesh, array, spec):
    """A numpy array that all processes have, as one array over the mesh."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def whole(mesh, tree):
    """Arrays over the mesh as numpy arrays in float64, on each process."""
    everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda array: numpy.asarray(array.addressable_data(0)).astype(numpy.float64), everywhere)


class Data:
    """Inputs [B, S, H], the gradient of the output, and parameters of a block, the same on all processes."""

    def __init__(self, block, seed=1, batch=8, sequence=3):
        generator = numpy.random.default_rng(seed)

        def normal(*shape):
            return generator.standard_normal(shape).astype(numpy.float32)

        first = 2 * INNER if block.activation == "swiglu" else INNER
        self.inputs, self.grad_out = normal(batch, sequence, HIDDEN), normal(batch, sequence, HIDDEN)
        self.params = {
            "gate_kernel": normal(HIDDEN, EXPERTS) / 2,
            "wi": normal(EXPERTS, HIDDEN, first) / 3,
            "wo": normal(EXPERTS, INNER, HIDDEN) / 3,
        }
        if block.use_bias:
            self.params |= {"wi_bias": normal(EXPERTS, first) / 3, "wo_bias": normal(EXPERTS, HIDDEN) / 3}
        if block.use_expert_bias:
            self.params["expert_bias"] = normal(EXPERTS)


def specs_of(block, inputs):
    """The PartitionSpecs of a block's parameters by name."""
    return nn.get_partition_spec(jax.eval_shape(block.init, jax.random.key(0), inputs))["params"]


def make_gradient(block):
    """A compiled function of params, inputs and grad_out: ((sum(out * grad_out) + losses, (out, state)), gradients of
    params and inputs)."""

    def loss(params, inputs, grad_out):
        out, state = block.apply({"params": params}, inputs, mutable=["losses", "intermediates"])
        total = jnp.sum(out.astype(jnp.float32) * grad_out) + sum(jax.tree.leaves(state.get("losses", {})))
        return total, (out, state)

    options = dict(compiler_options=getattr(block, "compiler_options", None))  # the native block has some
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), **options)


def run(block, data):
    """What the block makes of the data: out, loss, counts, grad_inputs and grads, as reference.run() has them."""
    mesh, specs = block.mesh, specs_of(block, data.inputs)
    assert specs.keys() == data.params.keys(), specs.keys()
    by_token = PartitionSpec(mesh.axis_names)
    params = {name: on_mesh(mesh, array, specs[name]) for name, array in data.params.items()}
    inputs, grad_out = (on_mesh(mesh, array, by_token) for array in (data.inputs, data.grad_out))
    (_, (out, state)), (grads, grad_inputs) = jax.block_until_ready(make_gradient(block)(params, inputs, grad_out))
    (counts,) = state["intermediates"]["expert_counts"]
    loss = state["losses"]["load_balance"] if block.aux_loss_coeff else jnp.zeros(())
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim), (name, grad.sharding)
    found = dict(out=out, loss=loss, counts=counts, grad_inputs=grad_inputs, grads=grads)
    return reference.types.SimpleNamespace(**whole(mesh, found))


def check(block, data, tolerance):
    """Compares a block's outputs and gradients with the reference. Returns what it has made."""
    wanted, found = reference.run(block, data.params, data.inputs, data.grad_out), run(block, data)
    numpy.testing.assert_array_equal(found.counts, wanted.counts)
    close = {"loss": (found.loss, wanted.loss), "out": (found.out, wanted.out)}
    close["grad_inputs"] = found.grad_inputs, wanted.grad_inputs
    close |= {name: (found.grads[name], wanted.grads[name]) for name in wanted.grads}
    for name, (got, want) in close.items():
        scale = max(numpy.abs(want).max(), 1e-3)
        numpy.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=tolerance, err_msg=name)
    return found
