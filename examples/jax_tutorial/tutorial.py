#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""epx.flax.MoEBlock beside a native flax block, under jit on a mesh of EP x FSDP with one process for each device: both
against a dense layer in float64, and the times of forward and of forward and backward. The page is docs/jax-tutorial.md.

tutorial.py                        # on GPUs where there are two or four, else 4 processes on CPU devices; prints one table
tutorial.py --ep 2 --fsdp 1        # a mesh of this size
tutorial.py --write                # puts what it prints into docs/jax-tutorial.md, too

The exit status is 0 where both blocks agree with the dense layer. Needs epx, jax, flax and scipy.
"""

import argparse
import functools
import glob
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import native_block
import numpy
import reference
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import epx.flax
import epx.jax

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "jax-tutorial.md"
BEGIN, END = "<!-- jax_tutorial: output -->\n", "<!-- jax_tutorial: end of output -->\n"
AXES = "fsdp", "ep"
# Tokens of each device, H, F, E and K of what is timed.
SIZES = {
    "cpu": dict(tokens=256, hidden=128, ffn=256, experts=8, top_k=2),
    "cuda": dict(tokens=4096, hidden=4096, ffn=2048, experts=32, top_k=4),
}
CHECK = dict(tokens=24, ffn=48, top_k=2)  # of what is compared; H and E follow from the mesh
# Largest differences from the dense layer, divided by the largest element. On GPUs ragged_dot may round float32 to TF32.
MAX_DIFFERENCE = {"cpu": 1e-4, "cuda": 1e-2}
# What both blocks are, here: a field of each kind that TransformerEngine's block has.
OPTIONS = dict(
    score_function="sigmoid",
    renormalize=True,
    use_expert_bias=True,
    apply_weights_early=True,
    use_bias=True,
    aux_loss_coeff=1e-2,
    fsdp_axis="fsdp",
)


def make_blocks(mesh, device, sizes, dtype):
    """Both blocks by name, and the group, which the caller destroys."""
    align = 16
    group = epx.jax.make_group(
        mesh,
        "ep",
        num_experts=sizes.experts,
        max_tokens_per_rank=sizes.tokens,
        hidden_dim=sizes.hidden,
        max_top_k=sizes.top_k,
        max_alignment=align,
        max_token_dtype=dtype,
        transport="nccl" if device == "cuda" else "host",
    )
    fields = dict(
        num_experts=sizes.experts, ffn_dim=sizes.ffn, top_k=sizes.top_k, dtype=dtype, param_dtype=dtype, **OPTIONS
    )
    native = native_block.NativeBlock(mesh, is_ragged=device == "cuda", **fields)
    return {"epx": epx.flax.MoEBlock(group, mesh, align=align, **fields), "native": native}, group


def loss_of(block, params, inputs, grad_out):
    """sum(out * grad_out) and the load-balance loss: a scalar that has the layer's gradients for this grad_out."""
    out, state = block.apply({"params": params}, inputs, mutable="losses")
    return jnp.sum(out.astype(jnp.float32) * grad_out) + state["losses"]["load_balance"], out


class Program:
    """A block, compiled: its forward, and its forward and backward."""

    def __init__(self, name, block, inputs, grad_out):
        options = dict(compiler_options=getattr(block, "compiler_options", None))
        loss = functools.partial(loss_of, block)
        self.name, self.arguments = name, (inputs, grad_out)
        self._forward = jax.jit(lambda params, inputs, _: block.apply({"params": params}, inputs), **options)
        self._both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), **options)

    def forward(self, params):
        return self._forward(params, *self.arguments)

    def both(self, params):
        return self._both(params, *self.arguments)


class Layers:
    """Both blocks at one size, with parameters and inputs, which are the same for both."""

    def __init__(self, mesh, device, sizes, dtype, seed):
        self.sizes = sizes
        self.blocks, self.group = make_blocks(mesh, device, sizes, dtype)
        self.random = numpy.random.default_rng(seed)
        shape = mesh.size, sizes.tokens, sizes.hidden
        place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        variables = jax.eval_shape(self.blocks["epx"].init, jax.random.key(0), jnp.zeros(shape, dtype))
        shardings = nn.get_sharding(variables, mesh)["params"]

        def draw(shape, dtype, scale, sharding):
            """The same array on all processes, of which each keeps what its device holds, and the array itself."""
            array = scale * self.random.standard_normal(shape, numpy.float32)
            placed = jax.make_array_from_callback(shape, sharding, lambda index: jnp.asarray(array[index], dtype))
            return placed, array

        self.inputs, self.whole_inputs = draw(shape, dtype, 1.0, place)
        self.grad_out, self.whole_grad_out = draw(shape, jnp.float32, 1.0, place)
        self.params, self.whole_params = {}, {}
        for name, leaf in jax.eval_shape(nn.unbox, variables)["params"].items():
            scale = leaf.shape[-2] ** -0.5 if name in ("gate_kernel", "wi", "wo") else 0.1
            self.params[name], self.whole_params[name] = draw(leaf.shape, leaf.dtype, scale, shardings[name])
        self.programs = [Program(name, block, self.inputs, self.grad_out) for name, block in self.blocks.items()]

    def destroy(self):
        self.group.check()
        self.group.destroy()


def check(layers, mesh):
    """Returns the largest difference of each block's outputs and gradients from the dense layer, relative to the largest
    element."""
    options = layers.blocks["epx"]
    wanted = reference.run(options, layers.whole_params, layers.whole_inputs, layers.whole_grad_out)
    loss = (wanted.out * layers.whole_grad_out).sum() + wanted.loss
    gradients = {"inputs": wanted.grad_inputs, **wanted.grads}
    wanted = {"loss": loss, "out": wanted.out} | {f"gradient of {name}": array for name, array in gradients.items()}
    gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
    differences = {}
    for program in layers.programs:
        (loss, out), (grads, grad_inputs) = program.both(layers.params)
        gradients = {f"gradient of {name}": array for name, array in {"inputs": grad_inputs, **grads}.items()}
        found = jax.block_until_ready(gather({"loss": loss, "out": out, **gradients}))
        for name, want in wanted.items():
            got = numpy.asarray(found[name].addressable_data(0), numpy.float64)
            scale = max(numpy.abs(want).max(), 1e-6)  # that of expert_bias is zero
            differences.setdefault(name, {})[program.name] = float(numpy.abs(got - want).max() / scale)
    return differences


def measure(layers, calls):
    """Returns {program: {"forward", "both"}}: milliseconds, the median of the calls on the slowest process. The programs
    take turns; a call has ended when all arrays of its result are there."""
    times = {program.name: {"forward": [], "both": []} for program in layers.programs}
    for number in range(calls + 2):
        for program in layers.programs if number % 2 else reversed(layers.programs):
            for name in ("forward", "both"):
                multihost_utils.sync_global_devices("before a call")
                begin = time.perf_counter()
                jax.block_until_ready(getattr(program, name)(layers.params))
                if number >= 2:  # the first compile, and warm up
                    times[program.name][name].append(1000 * (time.perf_counter() - begin))
    medians = [statistics.median(each) for of_program in times.values() for each in of_program.values()]
    slowest = iter(numpy.asarray(multihost_utils.process_allgather(numpy.array(medians))).reshape(-1, len(medians)).max(0))
    return {name: {which: float(next(slowest)) for which in of_program} for name, of_program in times.items()}


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def report(options, mesh, differences, times):
    names = list(times)
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind if options.device == 'cuda' else 'CPU device'}"
    where = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    shape = (
        f"{options.tokens} tokens for each device, H {options.hidden}, F {options.ffn}, E {options.experts}, "
        f"K {options.top_k}"
    )
    rows = [[name, *(f"{of_block[block]:.1e}" for block in names)] for name, of_block in differences.items()]
    for which, label in (("forward", "forward, ms"), ("both", "forward and backward, ms")):
        rows.append([label, *(f"{times[block][which]:.2f}" for block in names)])
    note = "These are times of CPUs, which say nothing of GPUs.\n" if options.device == "cpu" else ""
    return (
        f"{devices}, mesh {where}, jax {jax.__version__}, flax {flax.__version__}.\n"
        f"Timed: {shape}, {options.dtype}.\n{note}\n" + table(["difference from float64, or time", *names], rows) + "\n"
    )


def run(options):
    """What each process does."""
    jax.config.update("jax_platforms", options.device)
    jax.config.update("jax_default_matmul_precision", "highest")  # float32 is float32 on GPUs too
    local = [options.process] if options.device == "cuda" else None
    count = options.fsdp * options.ep
    jax.distributed.initialize(options.coordinator, count, options.process, local, initialization_timeout=options.limit_s)
    mesh = jax.make_mesh((options.fsdp, options.ep), AXES, axis_types=2 * (jax.sharding.AxisType.Auto,))

    sizes = types.SimpleNamespace(hidden=16 * options.fsdp, experts=4 * options.ep, **CHECK)
    small = Layers(mesh, options.device, sizes, "float32", seed=1)
    differences = check(small, mesh)
    small.destroy()
    worst = max(max(of_block.values()) for of_block in differences.values())
    is_right = worst <= MAX_DIFFERENCE[options.device]
    if is_right:
        large = Layers(mesh, options.device, options, options.dtype, seed=2)
        times = measure(large, options.calls)
        large.destroy()
        if options.process == 0:
            options.report.write_text(report(options, mesh, differences, times), encoding="utf-8")
    elif options.process == 0:
        print(
            f"the largest difference is {worst:.1e}; it must be {MAX_DIFFERENCE[options.device]:g} at most", file=sys.stderr
        )
        print(differences, file=sys.stderr)
    jax.distributed.shutdown()
    return 0 if is_right else 1


def start_processes(options):
    """Starts a process for each device, and returns the largest exit status and the report. At the time limit, or soon
    after one has failed, the others are ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    deadline = time.monotonic() + options.limit_s
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory, "report")
        command = [sys.executable, *sys.argv, "--coordinator", address, "--report", str(file), "--device", options.device]
        command += ["--fsdp", str(options.fsdp), "--ep", str(options.ep), "--process"]
        try:
            for number in range(options.fsdp * options.ep):  # XLA writes to their standard output
                processes.append(subprocess.Popen([*command, str(number)], stdout=subprocess.DEVNULL))
            while any(process.poll() is None for process in processes):
                if any(process.returncode for process in processes):
                    deadline = min(deadline, time.monotonic() + 10)  # the others may have something to say too
                if time.monotonic() > deadline:
                    print(f"tutorial.py: ended what still ran, after a failure or {options.limit_s} s", file=sys.stderr)
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    return max(abs(process.returncode) for process in processes), text


def written(page, output):
    """The page with the output between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + output + END + after


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ep", type=int, help="devices along the EP axis (default: 2)")
    parser.add_argument("--fsdp", type=int, help="devices along the FSDP axis (default: 2, and 1 on two or three GPUs)")
    for name in ("tokens", "hidden", "ffn", "experts", "top_k"):
        text = ", ".join(f"{sizes[name]} on {device}" for device, sizes in SIZES.items())
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=f"(default: {text})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of what is timed (default: bfloat16 on cuda)")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each (default: %(default)s)")
    parser.add_argument(
        "--limit-s", type=int, default=300, help="the longest that all of it may take (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="put the output into the page")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)  # what the processes are told
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    if options.device == "auto":
        options.device = "cuda" if gpus >= 2 else "cpu"
    options.ep = options.ep or 2
    options.fsdp = options.fsdp or (1 if options.device == "cuda" and gpus < 4 else 2)
    for name, size in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    for name, size, divisor in (("experts", options.experts, options.ep), ("hidden", options.hidden, options.fsdp)):
        if size % divisor:
            parser.error(f"--{name} is {size}; the {divisor} devices of its axis must divide it")
    return options


def main():
    options = parse_options()
    if options.coordinator:
        return run(options)
    status, output = start_processes(options)
    print(output, end="", flush=True)
    if options.write and not status:
        options.page.write_text(written(options.page.read_text(encoding="utf-8"), output), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
