# SPDX-License-Identifier: Apache-2.0
"""Measures epx.jax under epx_test_launch, on GPUs with EPX_TEST_DEVICE=cuda: import and first group; calls in a compiled
program beside the same calls of the C API; and an MoE layer beside the best variant of examples/native/moe_jax.py, forward and
backward. Both layers have the same experts, so that the exchange and the permutations around it make the difference.

jax_times.py [--tokens T] [--hidden H] [--ffn F] [--experts E] [--top-k K] [--rounds N] [--only-calls]
"""

import argparse
import ctypes
import functools
import os
import pathlib
import statistics
import sys
import time

import ranks

ranks.require("numpy", "jaxlib")
os.environ.setdefault("JAX_PLATFORMS", "cuda" if os.environ.get("EPX_TEST_DEVICE") == "cuda" else "cpu")
sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples" / "native"))
begin = time.perf_counter()
import jax

JAX_SECONDS = time.perf_counter() - begin
begin = time.perf_counter()
import epx.jax  # after JAX, so that it is epx's own share

IMPORT_SECONDS = time.perf_counter() - begin
import jax_ranks
import moe_data
import moe_jax
from jax_ranks import ON_GPU, RANK, RANKS

import jax.numpy as jnp
import numpy
from epx import _structs
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ROUNDS = 10, 60  # of prepare, dispatch and combine in a compiled program; what a program costs itself is in both
CODES = {"float32": 1, "bfloat16": 3, "int32": 4}


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


def median_us(times):
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


def view(array):
    return ctypes.pointer(
        _structs.Tensor(array.unsafe_buffer_pointer(), CODES[array.dtype.name], array.ndim, tuple(array.shape))
    )


def synchronize():
    if ON_GPU:
        with epx.jax._cuda.current(jax.local_devices()[0]):
            assert ctypes.CDLL("libcuda.so.1").cuCtxSynchronize() == 0


def overhead(group, shape, dtype):
    """A round of the three calls in a compiled program, and by the C API on arrays of JAX: the difference of the medians of
    both numbers of ROUNDS, divided by that of the numbers."""
    generator = numpy.random.default_rng(RANK)
    choice = numpy.argsort(generator.random((shape.tokens, shape.experts)), axis=1)[:, : shape.top_k]
    idx = jnp.asarray(choice, jnp.int32)
    tokens = jnp.ones((shape.tokens, shape.hidden), dtype)
    num_rows = shape.tokens * shape.top_k * (1 if RANKS == 1 else 2)

    @jax.jit
    def plan_of(idx):
        plan, token = epx.jax.prepare(group, idx, epx.jax.first_token())
        return epx.jax.finish(plan, token)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def program(idx, tokens, rounds, zero_unused):
        token, out = epx.jax.first_token(), tokens
        for _ in range(rounds):
            plan, token = epx.jax.prepare(group, idx, token, zero_unused=zero_unused)
            rows, _, token = epx.jax.dispatch(plan, tokens, None, token, num_rows=num_rows)
            out, token = epx.jax.combine(plan, rows, None, token)
        return epx.jax.finish(out, token)

    plan = jax.block_until_ready(plan_of(idx))
    info, rows, out = jnp.zeros((5, 2), jnp.uint32), jnp.zeros((num_rows, shape.hidden), dtype), jnp.zeros_like(tokens)
    jax.block_until_ready((idx, tokens, info, rows, out))
    handle, memory = group.handle, plan.handle_mem
    numbers = ctypes.pointer(_structs.Tensor(info.unsafe_buffer_pointer(), 5, 1, (5,)))

    def args(name, *tensors, more=()):
        address = memory.unsafe_buffer_pointer()
        struct, struct_size, _ = _structs.CALLS[name]
        return struct(struct_size, _structs.Layer(shape.top_k, 1), address, memory.nbytes, None, *tensors, *more)

    outputs = view(plan.counts), view(plan.offsets), view(plan.global_counts), numbers, None, None
    prepare = args("prepare", view(idx), *outputs)
    dispatch = args("dispatch", view(tokens), None, view(rows), None, more=(0, 0))
    combine = args("combine", view(rows), None, view(out))

    def by_c(rounds):
        for _ in range(rounds):
            assert _structs.CALLS["prepare"].function(handle, prepare) == 0
            assert _structs.CALLS["dispatch"].function(handle, dispatch) == 0
            assert _structs.CALLS["combine"].function(handle, combine) == 0
        synchronize()

    def by_jax(zero_unused, rounds):
        jax.block_until_ready(program(idx, tokens, rounds, zero_unused))

    runs = {
        "C API": by_c,
        "jit, zero_unused=False": functools.partial(by_jax, False),
        "jit": functools.partial(by_jax, True),
    }
    times = {(name, rounds): [] for name in runs for rounds in ROUNDS}
    for _ in range(14):
        for name, rounds in times:
            start = time.perf_counter()
            runs[name](rounds)
            times[name, rounds].append((time.perf_counter() - start) * 1e6)
    say(f"prepare, dispatch, combine of {shape.tokens} tokens, {shape.hidden} {jnp.dtype(dtype)}, top-{shape.top_k}, us:")
    for name in runs:
        few, many = (statistics.median(times[name, rounds][2:]) for rounds in ROUNDS)
        each = (many - few) / (ROUNDS[1] - ROUNDS[0])
        say(f"  {name}: {each:.1f} for each round, {few - ROUNDS[0] * each:.0f} besides for each program")
    group.check()


def make_inputs(shape, mesh, dtype):
    def sharded(local):
        local = jax.device_put(local.astype(dtype) if local.dtype != jnp.float32 else local, jax.local_devices()[0])
        sizes = (RANKS * local.shape[0], *local.shape[1:])
        return jax.make_array_from_single_device_arrays(sizes, NamedSharding(mesh, PartitionSpec("ranks")), [local])

    def params(tensor, sizes, scale):
        first, count = shape.owned(RANK)
        parts = [moe_jax.parameter(shape, tensor, first + e, sizes, scale) for e in range(count)]
        return sharded(jnp.stack(parts))

    hidden, ffn = shape.hidden, shape.ffn
    inputs = {
        "tokens": sharded(moe_jax.parameter(shape, moe_data.TOKENS, RANK, (shape.tokens, hidden), 1.0)),
        "logits": sharded(jnp.asarray(moe_data.logits(shape, RANK))),
        "gate_up": params(moe_data.GATE_UP, (2 * ffn, hidden), moe_data.weight_scale(hidden)),
        "down": params(moe_data.DOWN, (hidden, ffn), moe_data.weight_scale(ffn)),
    }
    return inputs, sharded(moe_jax.parameter(shape, moe_data.GRAD_OUT, RANK, (shape.tokens, hidden), 1.0))


def epx_layer(group, shape, num_rows, capacity, zero_unused):
    def layer(inputs):
        params = {name: value for name, value in inputs.items() if name not in ("tokens", "logits")}
        selected, topk_idx = jax.lax.top_k(inputs["logits"], shape.top_k)
        weights = jax.nn.softmax(selected, axis=-1)
        plan, token = epx.jax.prepare(group, topk_idx.astype(jnp.int32), epx.jax.first_token(), zero_unused=zero_unused)
        rows, row_weights, token = epx.jax.dispatch(plan, inputs["tokens"], weights, token, num_rows=num_rows)
        result = moe_jax.padded_experts(params, rows, plan.counts, capacity)
        out, token = epx.jax.combine(plan, result, row_weights, token)
        return epx.jax.finish(out, token)

    return layer


def compile_layer(layer, mesh, inputs, grad_out):
    def forward_backward(inputs, grad_out):
        out, backward = jax.vjp(layer, inputs)
        return out, backward(grad_out)[0]

    spec = PartitionSpec("ranks")
    function = jax.jit(jax.shard_map(forward_backward, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = function.lower(inputs, grad_out).compile()
    jax.block_until_ready(compiled(inputs, grad_out))
    return lambda: compiled(inputs, grad_out)


def enqueued_us(run, count=5):
    """The time of `count` calls that are enqueued one after another, divided by their number, in microseconds."""
    begin = time.perf_counter()
    for _ in range(count):
        results = run()  # frees those of the call before, once the device has made them
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) / count * 1e6


def distance(one, other):
    """The largest distance of two trees of arrays by tensor, relative to the tensor's norm; of the first entries of this rank's
    shards, at most 8 of their first dimension."""
    worst = 0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        a, b = (numpy.asarray(each.addressable_data(0)[:8], numpy.float32) for each in (a, b))
        worst = max(worst, float(numpy.linalg.norm(a - b) / numpy.linalg.norm(b)))
    return worst


def layers(group, shape, mesh, dtype, rounds):
    inputs, grad_out = make_inputs(shape, mesh, dtype)
    num_rows, fullest = moe_jax.received_rows(shape)
    exchange = "ragged" if ON_GPU else "gather"
    runs = {}
    for pad in moe_jax.PAD_ROWS:
        capacity = -(-fullest // pad) * pad
        if f"native, padded to {capacity}" in runs:
            continue
        for kind, layer in {
            "native": moe_jax.make_layer(shape, num_rows, capacity, exchange),
            "epx": epx_layer(group, shape, num_rows, capacity, True),
            "epx, zero_unused=False": epx_layer(group, shape, num_rows, capacity, False),
        }.items():
            runs[f"{kind}, padded to {capacity}"] = compile_layer(layer, mesh, inputs, grad_out)
    first, second = list(runs.values())[:2]
    say(f"relative distance of epx's results from the native ones: {distance(second(), first()):.1e}")
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name] += [enqueued_us(run) for _ in range(3)]
    say(
        f"layer of {shape.tokens} tokens, hidden {shape.hidden}, ffn {shape.ffn}, {shape.experts} experts, top-{shape.top_k}, "
        f"{num_rows} rows, forward and backward, us:"
    )
    for name, each in times.items():
        say(f"  {name}: {median_us(each)}")
    best = {
        kind: min(statistics.median(each) for name, each in times.items() if name.startswith(kind))
        for kind in ("native", "epx")
    }
    say(f"  best native / best epx: {best['native'] / best['epx']:.3f}")
    group.check()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in dict(tokens=4096, hidden=7168, ffn=2048, experts=256, top_k=8, rounds=4, few_tokens=128).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--only-calls", action="store_true", help="measure no layers")
    options = parser.parse_args()
    jax_ranks.join()
    jax.devices()
    jax.config.update("jax_default_matmul_precision", None)
    dtype = jnp.bfloat16
    shape = moe_data.Shape(RANKS, options.tokens, options.hidden, options.ffn, options.experts, options.top_k)
    mesh = jax.make_mesh((RANKS,), ("ranks",), axis_types=(AxisType.Auto,))
    start = time.perf_counter()
    with epx.jax._cuda.current(jax.local_devices()[0]):  # loads NCCL
        loading = time.perf_counter() - start
    config = dict(
        num_experts=options.experts,
        max_tokens_per_rank=options.tokens,
        hidden_dim=options.hidden,
        max_top_k=options.top_k,
        max_alignment=1,
        max_token_dtype="bfloat16",
        transport="nccl" if ON_GPU else "host",
    )
    group = epx.jax.make_group(mesh, "ranks", **config)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    second = epx.jax.make_group(mesh, "ranks", **config)
    second_seconds = time.perf_counter() - start
    second.destroy()
    say(
        f"import jax {JAX_SECONDS:.2f} s, import epx.jax {IMPORT_SECONDS:.2f} s, first group {seconds:.2f} s, "
        f"of which loading NCCL took {loading:.2f} s; a second one {second_seconds:.2f} s"
    )
    say(f"jax {jax.__version__}, {jax.local_devices()[0].device_kind}, {RANKS} ranks, median (least to most)")
    few = moe_data.Shape(RANKS, options.few_tokens, options.hidden, options.ffn, options.experts, options.top_k)
    overhead(group, few, dtype)
    overhead(group, shape, dtype)
    if not options.only_calls:
        layers(group, shape, mesh, dtype, options.rounds)
    group.destroy()


if __name__ == "__main__":
    main()
