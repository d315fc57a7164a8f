#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An MoE layer on JAX's collectives: ragged_all_to_all and ragged_dot under shard_map, in one process that has all GPUs. With a
process for each GPU, XLA wants a compiler option for ragged_all_to_all: see RAGGED_OPTIONS of examples/jax_moe.py.

--variant usual is the layer as it is usually written. --variant best sends 64 updates to each peer, which XLA copies side by
side, and computes the experts as one batched product over rows padded to the fullest expert, rounded up to a multiple of 16 or
of 128 rows: whichever takes less time. Without GPUs (JAX_PLATFORMS=cpu
and XLA_FLAGS=--xla_force_host_platform_device_count=P) it is for correctness only; XLA has no ragged_all_to_all there, and
--exchange gather takes its place by an all-gather with the same result. See docs/moe.md for what is timed.
"""
import argparse
import functools
import importlib.metadata
import time

import jax
import jax.numpy as jnp
import moe_data
import moe_measure
import numpy
from jax.sharding import NamedSharding, PartitionSpec as P

UPDATES_PER_PEER = 64
PAD_ROWS = (16, 128)  # the padded batch has a multiple of so many rows for each expert; the fastest of these is taken


def parameter(shape, tensor, expert, sizes, scale):
    """moe_data.expert_params() of one tensor, computed on the device."""
    keys = numpy.array(moe_data.stream_keys(shape.seed, tensor, expert), dtype=numpy.uint32)
    return make_parameter(keys, sizes, scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def make_parameter(keys, sizes, scale):
    def mix32(x):
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    words = mix32(mix32(jnp.arange(numpy.prod(sizes), dtype=jnp.uint32) + keys[0]) ^ keys[1])
    values = ((words >> 8).astype(jnp.int32) - (1 << 23)).astype(jnp.float32) * jnp.float32(2.0**-23 * scale)
    return values.reshape(sizes).astype(jnp.bfloat16)


def sharded(mesh, parts):
    """Returns one array whose shard on device r is parts(r)."""
    shards = []
    for rank, device in enumerate(mesh.devices.flat):
        with jax.default_device(device):
            shards.append(jax.device_put(parts(rank), device))
    sizes = (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(sizes, NamedSharding(mesh, P("ranks")), shards)


def make_inputs(shape, mesh):
    def params(tensor, sizes, scale):
        def of_rank(rank):
            first, count = shape.owned(rank)
            return jnp.stack([parameter(shape, tensor, first + e, sizes, scale) for e in range(count)])
        return sharded(mesh, of_rank)

    hidden, ffn = shape.hidden, shape.ffn
    inputs = {
        "tokens": sharded(mesh, lambda rank: parameter(shape, moe_data.TOKENS, rank, (shape.tokens, hidden), 1.0)),
        "logits": sharded(mesh, lambda rank: jnp.asarray(moe_data.logits(shape, rank))),
        "gate_up": params(moe_data.GATE_UP, (2 * ffn, hidden), moe_data.weight_scale(hidden)),
        "down": params(moe_data.DOWN, (hidden, ffn), moe_data.weight_scale(ffn)),
    }
    if shape.biases:
        inputs["gate_up_bias"] = params(moe_data.GATE_UP_BIAS, (2 * ffn,), moe_data.BIAS_SCALE)
        inputs["down_bias"] = params(moe_data.DOWN_BIAS, (hidden,), moe_data.BIAS_SCALE)
    grad_out = sharded(mesh, lambda rank: parameter(shape, moe_data.GRAD_OUT, rank, (shape.tokens, hidden), 1.0))
    return inputs, grad_out


def received_rows(shape):
    """Returns the most rows that any rank receives, and the most that any expert does, with this routing. A program with
    static shapes has to bound them; the baseline is given the exact bounds."""
    counts = sum(numpy.bincount(moe_data.topk(moe_data.logits(shape, rank), shape.top_k).ravel(), minlength=shape.experts)
                 for rank in range(shape.ranks))
    owned = [shape.owned(rank) for rank in range(shape.ranks)]
    return max(int(counts[first:first + count].sum()) for first, count in owned), int(counts.max())


class RaggedExchange:
    """Rows to each peer and back: send_counts [P, ...] of all ranks by (source, target)."""

    def __init__(self, shape, updates, exchange):
        self.ranks, self.updates, self.exchange = shape.ranks, updates, exchange

    def split(self, sizes, offsets):
        """Splits each peer's rows into updates of nearly equal sizes."""
        if self.updates == 1:
            return sizes, offsets
        ends = sizes[:, None] * jnp.arange(self.updates + 1) // self.updates
        return (ends[:, 1:] - ends[:, :-1]).reshape(-1), (offsets[:, None] + ends[:, :-1]).reshape(-1)

    def __call__(self, rows, counts, num_rows):
        """counts [P, P]: rows from each rank to each rank; rows are sorted by target, and arrive sorted by source."""
        me = jax.lax.axis_index("ranks")
        before_target = jnp.cumsum(counts, axis=1) - counts  # where a source's rows for a target begin at the source
        before_source = jnp.cumsum(counts, axis=0) - counts  # and at the target
        if self.exchange == "gather":
            all_rows = jax.lax.all_gather(rows, "ranks")  # [P, rows, H]
            source = jnp.repeat(jnp.arange(self.ranks), counts[:, me], total_repeat_length=num_rows)
            index = jnp.arange(num_rows) - before_source[source, me] + before_target[source, me]
            in_use = jnp.arange(num_rows) < counts[:, me].sum()
            return jnp.where(in_use[:, None], all_rows[source, jnp.where(in_use, index, 0)], 0)
        send_sizes, input_offsets = self.split(counts[me], before_target[me])
        _, output_offsets = self.split(counts[me], before_source[me])
        recv_sizes, _ = self.split(counts[:, me], before_source[:, me])
        output = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
        return jax.lax.ragged_all_to_all(rows, output, *(x.astype(jnp.int32) for x in (
            input_offsets, send_sizes, output_offsets, recv_sizes)), axis_name="ranks")


def ragged_experts(params, rows, counts):
    def product(rows, weights):
        return jax.lax.ragged_dot(rows, weights.swapaxes(1, 2), counts)

    expert = jnp.repeat(jnp.arange(counts.shape[0]), counts, total_repeat_length=rows.shape[0])
    pre_act = product(rows, params["gate_up"])
    if "gate_up_bias" in params:
        pre_act = pre_act + params["gate_up_bias"][expert]
    gate, up = jnp.split(pre_act, 2, axis=-1)
    result = product(jax.nn.silu(gate) * up, params["down"])
    return result + params["down_bias"][expert] if "down_bias" in params else result


def padded_experts(params, rows, counts, capacity):
    num_experts = counts.shape[0]
    expert = jnp.repeat(jnp.arange(num_experts), counts, total_repeat_length=rows.shape[0])
    begin = jnp.cumsum(counts) - counts
    in_use = jnp.arange(rows.shape[0]) < counts.sum()
    place = jnp.where(in_use, expert * capacity + jnp.arange(rows.shape[0]) - begin[expert], num_experts * capacity)
    batch = jnp.zeros((num_experts * capacity, rows.shape[1]), rows.dtype).at[place].set(rows, mode="drop")
    batch = batch.reshape(num_experts, capacity, -1)
    pre_act = jnp.einsum("erh,efh->erf", batch, params["gate_up"])
    if "gate_up_bias" in params:
        pre_act = pre_act + params["gate_up_bias"][:, None]
    gate, up = jnp.split(pre_act, 2, axis=-1)
    result = jnp.einsum("erf,ehf->erh", jax.nn.silu(gate) * up, params["down"])
    if "down_bias" in params:
        result = result + params["down_bias"][:, None]
    return result.reshape(num_experts * capacity, -1).at[place].get(mode="fill", fill_value=0)


def make_layer(shape, num_rows, capacity, exchange_name):
    """`capacity` rows for each expert of a padded batch; None: the usual variant."""
    exchange = RaggedExchange(shape, UPDATES_PER_PEER if capacity else 1, exchange_name)
    owned = [shape.owned(rank) for rank in range(shape.ranks)]
    if len({count for _, count in owned}) != 1:
        raise SystemExit(f"--experts is {shape.experts} on {shape.ranks} devices; JAX shards evenly, so they must divide them")
    num_local = owned[0][1]

    def layer(inputs):
        tokens, logits = inputs["tokens"], inputs["logits"]
        params = {name: value for name, value in inputs.items() if name not in ("tokens", "logits")}
        me = jax.lax.axis_index("ranks")
        selected, topk_idx = jax.lax.top_k(logits, shape.top_k)
        weights = jax.nn.softmax(selected, axis=-1)

        routes = topk_idx.reshape(-1)
        by_expert = jnp.argsort(routes, stable=True)
        counts = jax.lax.all_gather(jnp.bincount(routes, length=shape.experts), "ranks")  # [P, E]
        by_rank = counts.reshape(shape.ranks, shape.ranks, num_local).sum(2)               # [P, P]
        arriving = jax.lax.dynamic_slice_in_dim(counts, me * num_local, num_local, 1)      # [P, E_l]

        received = exchange(tokens[by_expert // shape.top_k], by_rank, num_rows)
        local_expert = jnp.repeat(jnp.tile(jnp.arange(num_local), shape.ranks), arriving.reshape(-1),
                                  total_repeat_length=num_rows)
        local_expert = jnp.where(jnp.arange(num_rows) < arriving.sum(), local_expert, num_local)  # unused rows come last
        by_local_expert = jnp.argsort(local_expert, stable=True)
        rows, local_counts = received[by_local_expert], arriving.sum(0)
        if capacity:
            result = padded_experts(params, rows, local_counts, capacity)
        else:
            result = ragged_experts(params, rows, local_counts)
        leaving = jnp.zeros_like(result).at[by_local_expert].set(result, unique_indices=True)
        returned = exchange(leaving, by_rank.T, routes.shape[0])
        by_route = jnp.zeros_like(returned).at[by_expert].set(returned, unique_indices=True)
        return jnp.einsum("tkh,tk->th", by_route.reshape(-1, shape.top_k, shape.hidden), weights.astype(returned.dtype))

    return layer


CALLS = 5
SLOW_S = 0.2  # a call that takes longer is timed alone, and 5 times


def wall_s(run, calls):
    """Returns the time of `calls` calls that are enqueued one after another, divided by their number."""
    begin = time.perf_counter()
    for _ in range(calls):
        result = run()  # frees the result of the call before, once the device has made it
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def timed(run, iterations, pause_s=0.0):
    """Returns times in microseconds. JAX shows no events: a time is that of CALLS calls enqueued one after another, and
    waited for together, divided by their number; after a pause, or where a call is slow, that of one call."""
    is_slow = wall_s(run, 1) > SLOW_S
    if not pause_s and not is_slow:
        wall_s(run, CALLS)  # warms up
    times = []
    for _ in range(min(iterations, 5) if is_slow else iterations):
        if pause_s:
            time.sleep(pause_s)
        times.append(wall_s(run, 1 if pause_s or is_slow else CALLS) * 1e6)
    return times


class Candidate:
    """The layer with one capacity, compiled."""

    def __init__(self, shape, mesh, inputs, grad_out, num_rows, capacity, exchange):
        self.capacity, self.inputs, self.grad_out = capacity, inputs, grad_out
        layer = jax.shard_map(make_layer(shape, num_rows, capacity, exchange), mesh=mesh, in_specs=P("ranks"),
                              out_specs=P("ranks"), check_vma=False)

        def forward_backward(inputs, grad_out):
            out, backward = jax.vjp(layer, inputs)
            return out, backward(grad_out)[0]

        self.compiled_forward, self.compiled_both = jax.jit(layer), jax.jit(forward_backward)
        jax.block_until_ready(self.forward_backward())

    def forward(self):
        return self.compiled_forward(self.inputs)

    def forward_backward(self):
        return self.compiled_both(self.inputs, self.grad_out)


def capacities(variant, fullest):
    """Returns the capacities to try, by how they came about; the usual variant has none."""
    return {f"padded to {pad} rows": -(-fullest // pad) * pad for pad in PAD_ROWS} if variant == "best" else {"": None}


def fastest(candidates):
    """Returns the candidate whose forward and backward take the least time, and all times in microseconds."""
    if len(candidates) == 1:
        return next(iter(candidates.values())), {}
    times = {name: min(timed(candidate.forward_backward, 3)) for name, candidate in candidates.items()}
    return candidates[min(times, key=times.get)], times


def dump(arguments, shape, candidate):
    out, grads = candidate.forward_backward()
    for name, value in {"out": out, **{f"grad_{name}": grad for name, grad in grads.items()}}.items():
        for rank, shard in enumerate(sorted(value.addressable_shards, key=lambda shard: shard.index[0].start or 0)):
            part = shard.data
            rows = moe_measure.dumped_rows(shape, part.shape, arguments)
            part = part if rows is None else part.reshape(-1, part.shape[-1])[rows]
            moe_data.dump(arguments.dump, f"jax-{arguments.variant}", rank, {name: numpy.asarray(part.astype(jnp.float32))})


def version_of(package):
    try:
        return {package: importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    moe_data.add_shape_options(parser)
    parser.add_argument("--ranks", type=int, required=True, help="devices to use")
    parser.add_argument("--variant", choices=("usual", "best"), default="usual")
    parser.add_argument("--exchange", choices=("ragged", "gather"), default="ragged", help="gather: for CPUs")
    moe_measure.add_options(parser)
    arguments = parser.parse_args()

    pacer = moe_measure.Pacer(arguments.paced)
    pacer.begin()
    if len(jax.devices()) < arguments.ranks:
        raise SystemExit(f"--ranks is {arguments.ranks}, but JAX sees {len(jax.devices())} devices")
    shape = moe_data.shape_of(arguments, arguments.ranks)
    mesh = jax.make_mesh((shape.ranks,), ("ranks",), devices=jax.devices()[:shape.ranks])
    inputs, grad_out = make_inputs(shape, mesh)
    num_rows, fullest = received_rows(shape)
    tried = capacities(arguments.variant, fullest)
    compiled = {capacity: Candidate(shape, mesh, inputs, grad_out, num_rows, capacity, arguments.exchange)
                for capacity in set(tried.values())}
    candidate, times = fastest({name: compiled[capacity] for name, capacity in tried.items()})
    jax.block_until_ready(candidate.forward())
    pacer.end()

    def line(run):
        return lambda iterations, pause_s: timed(run, iterations, pause_s)

    name = f"jax-{arguments.variant}"
    layers = moe_measure.measure_in_rounds(
        arguments, pacer, {name: {"fwd": line(candidate.forward), "fwd+bwd": line(candidate.forward_backward)}}, shape)
    pacer.begin()
    if arguments.dump:
        dump(arguments, shape, candidate)
    versions = {"jax": jax.__version__} | version_of("jaxlib") | version_of("nvidia-nccl-cu13")
    moe_measure.report(arguments.json, name, versions, shape, layers, candidates_us={name: times} if times else {},
                       capacity=candidate.capacity, fullest_expert_rows=fullest)
    pacer.end()


if __name__ == "__main__":
    main()
