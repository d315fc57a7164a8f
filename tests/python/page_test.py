# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/python.md run as they stand, and README.md has the first of them. page_test.py PAGE README"""

import os
import re
import sys

import ranks

ranks.require("numpy", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy

with open(sys.argv[1], encoding="utf-8") as page:
    numpy_program, jax_program = re.findall(r"```python\n(.*?)```", page.read(), flags=re.DOTALL)[:2]

with open(sys.argv[2], encoding="utf-8") as readme:
    assert f"```python\n{numpy_program}```" in readme.read()

names = {}
exec(numpy_program, names)
numpy.testing.assert_array_equal(names["out"], [[2] * 32, [1] * 32])
names["group"].destroy()

mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
names = {"mesh": mesh}
exec(jax_program, names)
spec = jax.sharding.PartitionSpec("ep")
loss = jax.shard_map(names["loss"], mesh=mesh, in_specs=(spec,) * 3, out_specs=jax.sharding.PartitionSpec(), check_vma=False)
arguments = jnp.ones((2, 32)), jnp.array([[0, 5], [3, -1]]), jnp.ones((2, 2))
value, grad = jax.jit(jax.value_and_grad(loss))(*arguments)
numpy.testing.assert_allclose(value, 3 * 32 * numpy.tanh(1), rtol=1e-5)
numpy.testing.assert_allclose(grad, [[2 / numpy.cosh(1) ** 2] * 32, [1 / numpy.cosh(1) ** 2] * 32], rtol=1e-5)
names["group"].check()
names["group"].destroy()
