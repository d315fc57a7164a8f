#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small MoE language model in JAX, trained on a text with epx and, step by step beside it, with JAX's own collectives: from
the same parameters, on the same batches. Those are ragged_all_to_all on GPUs of one machine, and all_to_all of padded rows
between machines and on CPUs, where XLA has no ragged one. Prints both losses and step times, and draws the curves.

examples/jax_moe.py --processes 2                  # on GPUs where there are enough, else on CPUs; one process for each device

On several machines start each process with --coordinator HOST:PORT --process NUMBER.
"""

import argparse
import functools
import glob
import math
import socket
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import epx.jax

MAX_DIFFERENCE = 1e-3
AXIS = "ep"
# From JAX 0.11 on XLA refuses ragged_all_to_all between processes unless this allows it to send and receive through NCCL.
RAGGED_OPTIONS = {"xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": True}


def known_options(options):
    """Returns these compiler options, or none where this XLA does not know one of them. In XLA_FLAGS, which stay the user's, a
    flag that XLA does not know ends the process."""
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return {}
    return options


def route(gate_weight, tokens, top_k):
    """Returns the experts of each token and their weights, [T, K]."""
    logits, experts = jax.lax.top_k(tokens @ gate_weight.T, top_k)
    return experts.astype(jnp.int32), jax.nn.softmax(logits, axis=-1)


def run_experts(layer, rows, counts):
    """SwiGLU of rows that are ordered by expert, of which expert e has counts[e]. Rows behind the last expert's become zero."""
    gate, up = jnp.split(jax.lax.ragged_dot(rows, layer["gate_up"], counts), 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, layer["down"], counts)


class Epx:
    """The MoE layer on epx."""

    compiler_options = {}

    def __init__(self, group, top_k):
        self.group, self.top_k = group, top_k

    def layer(self, gate_weight, layer, tokens, token):
        topk_idx, weights = route(gate_weight, tokens, self.top_k)
        plan, token = epx.jax.prepare(self.group, topk_idx, token)
        rows, row_weights, token = epx.jax.dispatch(plan, tokens, weights, token)
        return epx.jax.combine(plan, run_experts(layer, rows, plan.counts), row_weights, token)

    finish = staticmethod(epx.jax.finish)


class Native:
    """The same layer on JAX's collectives: routes are sorted by expert, travel to the experts' ranks, are sorted by expert
    there, and travel back."""

    def __init__(self, num_ranks, top_k, is_ragged):
        self.num_ranks, self.top_k, self.is_ragged = num_ranks, top_k, is_ragged
        self.compiler_options = known_options(RAGGED_OPTIONS) if is_ragged else {}

    def layer(self, gate_weight, layer, tokens, token):
        topk_idx, weights = route(gate_weight, tokens, self.top_k)
        num_experts, num_local = len(gate_weight), len(gate_weight) // self.num_ranks
        routes = topk_idx.reshape(-1)
        by_expert = jnp.argsort(routes, stable=True)
        counts = jax.lax.all_gather(jnp.bincount(routes, length=num_experts), AXIS)  # [P, E]
        by_rank = counts.reshape(self.num_ranks, self.num_ranks, num_local).sum(2)  # [P, P]: from, to
        arriving = jax.lax.dynamic_slice_in_dim(counts, jax.lax.axis_index(AXIS) * num_local, num_local, 1)
        num_rows = self.num_ranks * len(routes)  # the most that may arrive
        rows = self.exchange(tokens[by_expert // self.top_k], by_rank, num_rows)
        # Rows have come by rank and then by expert; the experts want them by expert, and rows that are not in use last.
        expert = jnp.repeat(jnp.tile(jnp.arange(num_local), self.num_ranks), arriving.ravel(), total_repeat_length=num_rows)
        expert = jnp.where(jnp.arange(num_rows) < arriving.sum(), expert, num_local)
        by_local_expert = jnp.argsort(expert, stable=True)
        outs = run_experts(layer, rows[by_local_expert], arriving.sum(0))
        leaving = jnp.zeros_like(outs).at[by_local_expert].set(outs, unique_indices=True)
        returned = self.exchange(leaving, by_rank.T, len(routes))
        outs = jnp.zeros_like(returned).at[by_expert].set(returned, unique_indices=True)
        return jnp.einsum("tkh,tk->th", outs.reshape(*topk_idx.shape, -1), weights), token

    def exchange(self, rows, counts, num_rows):
        """counts[source, target] rows travel; they are ordered by target, and arrive ordered by source, as [num_rows, H]."""
        me = jax.lax.axis_index(AXIS)
        at_source = jnp.cumsum(counts, axis=1) - counts  # where a source's rows for a target begin at the source
        at_target = jnp.cumsum(counts, axis=0) - counts  # and at the target
        if self.is_ragged:
            sizes = (at_source[me], counts[me], at_target[me], counts[:, me])
            out = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
            return jax.lax.ragged_all_to_all(rows, out, *(each.astype(jnp.int32) for each in sizes), axis_name=AXIS)
        capacity = min(len(rows), num_rows)  # of a pair of ranks
        target, place = places(counts[me], len(rows))
        blocks = jnp.zeros((self.num_ranks, capacity, rows.shape[1]), rows.dtype)
        blocks = blocks.at[target, place].set(rows, mode="drop")
        blocks = jax.lax.all_to_all(blocks, AXIS, 0, 0)
        source, place = places(counts[:, me], num_rows)
        return blocks.at[source, place].get(mode="fill", fill_value=0)

    @staticmethod
    def finish(results, token):
        del token
        return results


def places(sizes, num_rows):
    """The part that each of num_rows rows belongs to, and its place there, when sizes[p] rows of part p follow each other.
    Rows behind the last part have the part len(sizes), which does not exist."""
    row = jnp.arange(num_rows)
    part = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    return part, row - (jnp.cumsum(sizes) - sizes)[jnp.minimum(part, len(sizes) - 1)]


def make_parameters(options):
    """Parameters as numpy arrays, the same on all processes: those that all of them have, and experts, which are divided."""
    random = numpy.random.default_rng(options.seed)
    hidden, ffn, experts = options.hidden, options.ffn, options.experts

    def matrix(*sizes):  # [..., inputs, outputs]
        return (random.standard_normal(sizes) / math.sqrt(sizes[-2])).astype(numpy.float32)

    def norm():
        return {"scale": numpy.ones(hidden, numpy.float32), "bias": numpy.zeros(hidden, numpy.float32)}

    shared = {
        "embedding": random.standard_normal((256, hidden)).astype(numpy.float32),
        "positions": (0.02 * random.standard_normal((options.context, hidden))).astype(numpy.float32),
        "blocks": [
            {
                "norm1": norm(),
                "norm2": norm(),
                "qkv": matrix(hidden, 3 * hidden),
                "out": matrix(hidden, hidden),
                "gate": matrix(hidden, experts).T.copy(),
            }
            for _ in range(options.layers)
        ],
        "norm": norm(),
        "head": matrix(hidden, 256),
    }
    divided = [
        {"gate_up": matrix(experts, hidden, 2 * ffn), "down": matrix(experts, ffn, hidden)} for _ in range(options.layers)
    ]
    return {"shared": shared, "experts": divided}


def normalize(parameters, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * parameters["scale"] + parameters["bias"]


def attend(block, heads, x):
    batch, context, hidden = x.shape
    q, k, v = jnp.moveaxis((x @ block["qkv"]).reshape(batch, context, 3, heads, hidden // heads), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(hidden // heads)
    scores = jnp.where(jnp.tril(jnp.ones((context, context), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ block["out"]


def loss_of(moe, heads, parameters, batch):
    """The mean loss of this rank's bytes, [B, context + 1]: each predicts the next one."""
    shared, token = parameters["shared"], epx.jax.first_token()
    x = shared["embedding"][batch[:, :-1]] + shared["positions"]
    for block, experts in zip(shared["blocks"], parameters["experts"]):
        x = x + attend(block, heads, normalize(block["norm1"], x))
        flat = normalize(block["norm2"], x).reshape(-1, x.shape[-1])
        out, token = moe.layer(block["gate"], experts, flat, token)
        x = x + out.reshape(x.shape)
    logits = jax.nn.log_softmax(normalize(shared["norm"], x) @ shared["head"])
    loss = -jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1).mean()
    return moe.finish(loss, token)


def adamw(options, parameters, gradients, state):
    step = state["step"] + 1
    rate = options.learning_rate * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["second"], gradients)
    parameters = jax.tree.map(
        lambda p, m, v: p * (1 - 0.01 * options.learning_rate) - rate * m / (jnp.sqrt(v) + 1e-8), parameters, first, second
    )
    return parameters, {"step": step, "first": first, "second": second}


class Trainer:
    def __init__(self, moe, options, mesh):
        by_part = {"shared": PartitionSpec(), "experts": PartitionSpec(AXIS)}
        by_state = {"step": PartitionSpec(), "first": by_part, "second": by_part}
        self.losses, self.times = [], []

        def place(spec, tree):
            sharding = NamedSharding(mesh, spec)
            make = lambda whole: jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
            return jax.tree.map(make, tree)

        whole = make_parameters(options)
        zeros = jax.tree.map(numpy.zeros_like, whole)
        self.parameters, first, second = (
            {part: place(by_part[part], tree[part]) for part in tree} for tree in (whole, zeros, zeros)
        )
        self.state = {"step": place(PartitionSpec(), numpy.zeros((), numpy.float32)), "first": first, "second": second}

        def step_of_rank(parameters, state, batch):
            loss, gradients = jax.value_and_grad(functools.partial(loss_of, moe, options.heads))(parameters, batch)
            # The mean over the ranks: experts have the gradients of all ranks' tokens already, the rest is summed here.
            gradients["shared"] = jax.lax.psum(gradients["shared"], AXIS)
            gradients = jax.tree.map(lambda gradient: gradient / options.processes, gradients)
            parameters, state = adamw(options, parameters, gradients, state)
            return parameters, state, jax.lax.psum(loss, AXIS) / options.processes

        sharded = jax.shard_map(
            step_of_rank,
            mesh=mesh,
            in_specs=(by_part, by_state, PartitionSpec(AXIS)),
            out_specs=(by_part, by_state, PartitionSpec()),
            check_vma=False,
        )
        self.compiled = jax.jit(sharded, donate_argnums=(0, 1), compiler_options=moe.compiler_options)

    def step(self, batch):
        begin = time.perf_counter()
        self.parameters, self.state, loss = self.compiled(self.parameters, self.state, batch)
        self.losses.append(float(loss))  # which waits for the step
        self.times.append(time.perf_counter() - begin)


def show_progress(step, steps, trainers):
    losses = ", ".join(f"{name} {trainer.losses[-1]:.4f}" for name, trainer in trainers.items())
    if sys.stderr.isatty():
        done = 30 * step // steps
        print(
            f"\r[{'#' * done}{'.' * (30 - done)}] {step}/{steps} loss: {losses} ",
            end="\n" if step == steps else "",
            file=sys.stderr,
            flush=True,
        )
    elif step % max(steps // 10, 1) == 0:
        print(f"step {step}/{steps} loss: {losses}", file=sys.stderr, flush=True)


def draw(file, trainers):
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"{file} is not drawn: there is no matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    for width, (name, trainer) in zip((5, 1.5), trainers.items()):
        axes.plot(range(1, len(trainer.losses) + 1), trainer.losses, linewidth=width, alpha=0.8, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    print(f"{file} is drawn")


def train(options):
    on_gpu = options.device == "cuda"
    jax.config.update("jax_platforms", options.device)
    jax.config.update("jax_default_matmul_precision", "highest")  # float32, also where GPUs could round more
    local = [options.process % options.processes_here] if on_gpu else None
    jax.distributed.initialize(options.coordinator, options.processes, options.process, local_device_ids=local)
    mesh = jax.make_mesh((options.processes,), (AXIS,), axis_types=(AxisType.Auto,))
    group = epx.jax.make_group(
        mesh,
        AXIS,
        num_experts=options.experts,
        max_tokens_per_rank=options.batch * options.context,
        hidden_dim=options.hidden,
        max_top_k=options.top_k,
        max_alignment=1,
        max_token_dtype="float32",
        transport="nccl" if on_gpu else "host",
    )
    is_ragged = on_gpu and options.processes_here == options.processes
    native = "ragged_all_to_all" if is_ragged else "all_to_all"
    trainers = {
        "epx": Trainer(Epx(group, options.top_k), options, mesh),
        native: Trainer(Native(options.processes, options.top_k, is_ragged), options, mesh),
    }
    with open(options.text, "rb") as file:
        text = numpy.frombuffer(file.read(), numpy.uint8).astype(numpy.int32)
    random = numpy.random.default_rng(1000 * options.seed + options.process)
    for step in range(1, options.steps + 1):
        starts = random.integers(len(text) - options.context, size=options.batch)
        mine = numpy.stack([text[start : start + options.context + 1] for start in starts])
        batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXIS)), mine)
        for name in trainers if step % 2 else reversed(trainers):  # neither is always the first
            trainers[name].step(batch)
        group.check()
        if options.process == 0:
            show_progress(step, options.steps, trainers)
    difference = max(abs(one - other) / other for one, other in zip(*(trainer.losses for trainer in trainers.values())))
    if options.process == 0:
        for name, trainer in trainers.items():
            median = statistics.median(trainer.times[len(trainer.times) // 10 :])
            losses = f"loss {trainer.losses[0]:.4f} -> {trainer.losses[-1]:.4f}"
            print(f"{name}: {losses}, {1000 * median:.2f} ms for each step (median)")
        print(f"largest relative difference of the losses: {difference:.2e} (at most {MAX_DIFFERENCE:g} is expected)")
        draw(options.plot, trainers)
    group.destroy()
    jax.distributed.shutdown()
    return 0 if difference <= MAX_DIFFERENCE else 1


def start_processes(options):
    """Starts a process for each device of this machine, and waits for them. One that fails has the others ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--coordinator", address, "--device", options.device]
    processes = [subprocess.Popen([*command, "--process", str(number)]) for number in range(options.processes)]
    try:
        while any(process.poll() is None for process in processes) and not any(process.returncode for process in processes):
            time.sleep(0.05)
        if any(process.returncode for process in processes):
            time.sleep(5)  # the others may have something to say too
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return max(abs(process.returncode) for process in processes)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="devices, each with its own process (default: %(default)s)")
    parser.add_argument("--coordinator", help="HOST:PORT where process 0 listens; without it all processes are started here")
    parser.add_argument("--process", type=int, default=0, help="with --coordinator: the number of this one, from 0")
    parser.add_argument("--processes-here", type=int, help="GPUs of each machine (default: all processes have one machine)")
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="the file to learn (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plot", default="jax_moe.png", help="where the loss curves are drawn (default: %(default)s)")
    numbers = dict(steps=200, layers=2, hidden=64, heads=4, ffn=128, experts=8, top_k=2, context=64, batch=8, seed=1)
    for name, default in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="(default: %(default)s)")
    options = parser.parse_args()
    options.processes_here = options.processes_here or options.processes
    if options.experts % options.processes:
        parser.error(f"--experts is {options.experts}; JAX shards evenly, so {options.processes} processes must divide it")
    if options.device == "auto":
        options.device = "cuda" if len(glob.glob("/dev/nvidia[0-9]*")) >= options.processes_here else "cpu"
    return options


if __name__ == "__main__":
    OPTIONS = parse_options()
    sys.exit(train(OPTIONS) if OPTIONS.coordinator else start_processes(OPTIONS))
