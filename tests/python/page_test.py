# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/python.md for numpy and JAX run as they stand, and README.md has the first. page_test.py PAGE README"""

import os
import re
import sys

import ranks

ranks.require("numpy", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy

import epx

with open(sys.argv[1], encoding="utf-8") as page:
    programs = re.findall(r"```python\n(.*?)```", page.read(), flags=re.DOTALL)
    numpy_program, fp8_program, jax_program, ragged_program = programs[:4]

with open(sys.argv[2], encoding="utf-8") as readme:
    assert f"```python\n{numpy_program}```" in readme.read()

names = {}
exec(numpy_program, names)
numpy.testing.assert_array_equal(names["out"], [[2] * 32, [1] * 32])
names["group"].destroy()

exec(fp8_program, names)
generator = numpy.random.default_rng(1)
sizes = dict(num_experts=4, max_tokens_per_rank=64, hidden_dim=128, max_top_k=2, max_token_dtype="float32", transport="host")
with epx.bootstrap.local() as alone, epx.Group(alone, **sizes) as group:
    tokens, logits, target = (generator.standard_normal((64, count), numpy.float32) for count in (128, 4, 128))
    for recipe in ("fp8_activations", "fp8"):
        with names["make_block"](group, recipe) as block:
            shapes = block.params_shapes
            weights = {name: generator.standard_normal(shape, numpy.float32) / 16 for name, shape in shapes.items()}
            losses = []
            for _ in range(2):
                out = block.forward(tokens, logits, epx.moe.quantise_params(weights)).out
                losses.append(((out - target) ** 2).mean())
                names["train"](block, weights, 10 * [(tokens, logits, target)], 1e-3)
            assert losses[1] < 0.5 * losses[0], losses
    group.check()

mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
names = {"mesh": mesh}
exec(jax_program, names)
spec = jax.sharding.PartitionSpec("ep")
loss = jax.shard_map(names["loss"], mesh=mesh, in_specs=(spec,) * 3, out_specs=jax.sharding.PartitionSpec(), check_vma=False)
arguments = jnp.ones((2, 32)), jnp.array([[0, 5], [3, -1]]), jnp.ones((2, 2))
value, grad = jax.jit(jax.value_and_grad(loss))(*arguments)
numpy.testing.assert_allclose(value, 3 * 32 * numpy.tanh(1), rtol=1e-5)
numpy.testing.assert_allclose(grad, [[2 / numpy.cosh(1) ** 2] * 32, [1 / numpy.cosh(1) ** 2] * 32], rtol=1e-5)

exec(ragged_program, names)
tokens = jnp.asarray(generator.standard_normal((5, 32), numpy.float32))
on_ranks = jax.shard_map(
    lambda *arguments: epx.jax.finish(*names["on_ranks"](*arguments, epx.jax.first_token())),
    mesh=mesh,
    in_specs=(spec, spec),
    out_specs=spec,
    check_vma=False,
)
out = jax.jit(on_ranks)(tokens, jnp.zeros(5, int))
numpy.testing.assert_allclose(out, numpy.tanh(tokens), rtol=1e-5)
names["group"].check()
names["group"].destroy()
