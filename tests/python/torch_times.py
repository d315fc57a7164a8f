# SPDX-License-Identifier: Apache-2.0
"""Measures epx.torch under epx_test_launch: what an eager operator costs the host beside the C call, and, on GPUs
(EPX_TEST_DEVICE=cuda), what it costs in a CUDA graph, and the layer beside the C block and beside both variants of
examples/native/moe_torch.py. docs/python.md and docs/decisions/0015 have figures of it."""

import ctypes
import os
import pathlib
import statistics
import sys
import time

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples" / "native"))
import torch

begin_import = time.perf_counter()
import epx
import epx.moe
import epx.torch

IMPORT_SECONDS = time.perf_counter() - begin_import
import torch_model
from epx import _moe_structs, _structs
from torch_model import DEVICE, ON_GPU, RANK, RANKS, on_device

CODES = {torch.float32: 1, torch.bfloat16: 3, torch.int32: 4, torch.int64: 5}


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


def view(tensor):
    return ctypes.pointer(_structs.Tensor(tensor.data_ptr(), CODES[tensor.dtype], tensor.dim(), tuple(tensor.shape)))


def host_us(function, count=100, repetitions=9):
    """The least mean of a call's time on the host, in microseconds, of `repetitions` runs of `count` calls; GPUs are idle at
    first."""
    best = float("inf")
    for _ in range(repetitions):
        torch_model.wait()
        begin = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - begin) / count)
        torch_model.wait()
    return best * 1e6


def graph_us(function, args=None, count=20, repetitions=50):
    """The median time of a call in a CUDA graph of `count` calls, in microseconds, between events around the replay. `args` are
    those of a C call, which get the stream that is captured."""
    function()  # loads kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if args is not None:
            args.stream = torch.cuda.current_stream().cuda_stream
        for _ in range(count):
            function()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    del graph
    return statistics.median(times)


def overhead():
    hidden = 1024
    alone = epx.bootstrap.local()
    if ON_GPU:
        torch.zeros(1, device=DEVICE)  # makes CUDA's context
        version = ".".join(map(str, torch.cuda.nccl.version()))
        say(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, NCCL {version}")
    begin = time.perf_counter()
    group = epx.torch.Group(alone, **torch_model.config(num_experts=4, hidden_dim=hidden, max_top_k=2))
    say(f"import epx.torch after torch: {IMPORT_SECONDS:.2f} s, first group, of one rank: {time.perf_counter() - begin:.2f} s")
    idx = on_device(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    tokens, weights = on_device(torch.ones(2, hidden)), on_device(torch.ones(2, 2))
    plan = epx.torch.prepare(group, idx)
    rows, row_weights = epx.torch.dispatch(plan, tokens, weights, num_rows=4)
    memory, layer = plan.handle_mem, _structs.Layer(2, 1)

    def c_call(name, *tensors):
        struct, struct_size, function = _structs.CALLS[name]
        args = struct(
            struct_size,
            layer,
            memory.data_ptr(),
            memory.numel(),
            None,
            *[t if t is None else view(t) for t in tensors],
        )
        handle, pointer = group.handle, ctypes.byref(args)

        def run():
            if function(handle, pointer):
                raise RuntimeError(_structs.epx_last_error().decode())

        run.args = args
        return run

    out = torch.empty_like(tokens)
    leaf, row_leaf = tokens.clone().requires_grad_(), rows.clone().requires_grad_()
    ones, row_ones = torch.ones_like(tokens), torch.ones_like(rows)
    dispatched, _ = epx.torch.dispatch(plan, leaf, weights, num_rows=4)
    combined = epx.torch.combine(plan, row_leaf, row_weights)
    grads = torch.empty_like(tokens), torch.empty_like(rows), torch.empty_like(weights)
    base_leaf = tokens.clone().requires_grad_()
    base = base_leaf.view_as(base_leaf)
    for name, c, op, with_grad, backward, c_backward in (
        (
            "dispatch",
            c_call("dispatch", tokens, weights, rows, row_weights),
            lambda: epx.torch.dispatch(plan, tokens, weights, num_rows=4),
            lambda: epx.torch.dispatch(plan, leaf, weights, num_rows=4),
            lambda: torch.autograd.grad(dispatched, leaf, row_ones, retain_graph=True),
            c_call("dispatch_bwd", rows, None, grads[0], None),
        ),
        (
            "combine",
            c_call("combine", rows, row_weights, out),
            lambda: epx.torch.combine(plan, rows, row_weights),
            lambda: epx.torch.combine(plan, row_leaf, row_weights),
            lambda: torch.autograd.grad(combined, row_leaf, ones, retain_graph=True),
            c_call("combine_bwd", tokens, None, row_weights, grads[1], None),
        ),
        (
            "prepare",
            c_call(
                "prepare",
                idx,
                plan.counts,
                plan.offsets,
                plan.global_counts,
                plan.info,
                None,
                None,
            ),
            lambda: epx.torch.prepare(group, idx),
            None,
            None,
            None,
        ),
    ):
        times = [host_us(each) if each else None for each in (c, op, with_grad, c_backward, backward)]
        line = f"{name}: C call {times[0]:.1f} us, operator +{times[1] - times[0]:.1f}"
        if with_grad:
            line += f", recording a gradient +{times[2] - times[0]:.1f}"
            line += f"; backward: C call {times[3]:.1f}, +{times[4] - times[3]:.1f}"
        say(line)
        if ON_GPU:
            say(f"{name} in a CUDA graph: C call {graph_us(c, c.args):.2f} us, operator {graph_us(op):.2f}")
    empty = host_us(lambda: torch.autograd.grad(base, base_leaf, ones, retain_graph=True))
    say(f"torch.autograd.grad through a view, for comparison: {empty:.1f} us")
    group.check()


def layers():
    import moe_data
    import moe_torch

    options = os.environ.get("EPX_TIMES_SHAPE", "4096,7168,2048,256,8")
    tokens_per_rank, hidden, ffn, experts, top_k = map(int, options.split(","))
    torch_model.start_process_group("nccl", device_id=DEVICE)
    shape = moe_data.Shape(RANKS, tokens_per_rank, hidden, ffn, experts, top_k)
    native = moe_torch.Layer(shape, RANK, DEVICE, True)
    native.rank_of_expert_on_host = native.rank_of_expert.cpu()
    generator = torch.Generator(DEVICE).manual_seed(RANK)
    tokens, grad_out = (torch.randn(tokens_per_rank, hidden, device=DEVICE, generator=generator).bfloat16() for _ in range(2))
    logits = torch.randn(tokens_per_rank, experts, device=DEVICE, generator=generator)
    tokens.requires_grad_()
    logits.requires_grad_()
    rows = tokens_per_rank * top_k * 5 // 4  # uniform routing
    group = epx.torch.Group(
        num_experts=experts,
        max_tokens_per_rank=tokens_per_rank,
        hidden_dim=hidden,
        max_top_k=top_k,
        max_alignment=16,
        max_recv_tokens_per_rank=rows,
        max_token_dtype="bfloat16",
        transport="nccl",
    )
    router, sizes = epx.moe.Router(top_k), epx.moe.Ffn(hidden, ffn)
    layer = epx.torch.MoELayer(group, router=router, ffn=sizes, dtype=torch.bfloat16, seed=None)
    with torch.no_grad():
        layer.first_weight.copy_(native.gate_up)
        layer.down_weight.copy_(native.down)
    leaves = {
        "native": [tokens, logits, native.gate_up, native.down],
        "epx": [tokens, logits, layer.first_weight, layer.down_weight],
    }

    def steps(forward, parameters):
        def forward_only():
            with torch.no_grad():
                return forward()

        def forward_backward():
            for leaf in parameters:
                leaf.grad = None
            forward().backward(grad_out)

        return forward_only, forward_backward

    c_forward, c_backward = c_block(layer, tokens, logits, grad_out)
    programs = {
        "all_to_all_single, usual": steps(lambda: native.forward(tokens, logits, False), leaves["native"]),
        "all_to_all_single, best": steps(lambda: native.forward(tokens, logits, True), leaves["native"]),
        "epx.torch.MoELayer": steps(lambda: layer(tokens, logits=logits), leaves["epx"]),
        "C block": (c_forward, lambda: (c_forward(), c_backward())),
    }
    rounds, iterations = 3, 7
    say(
        f"T {tokens_per_rank}, H {hidden}, F {ffn}, E {experts}, K {top_k}, bf16, {RANKS} GPUs; "
        f"the slowest rank's median of {rounds * iterations} calls, us"
    )
    for parts in programs.values():
        for run in parts:
            run()  # loads kernels and compiles
    for words, pause in ("pauses of 60 ms between calls", 0.06), ("no pauses", 0.0):
        times = {(name, part): [] for name in programs for part in range(2)}
        for _ in range(rounds):
            for name, parts in programs.items():
                for part, run in enumerate(parts):
                    times[name, part] += moe_torch.timed(run, iterations, DEVICE, pause)
        medians = {key: statistics.median(each) for key, each in times.items()}
        for name in programs:
            say(f"{words}: {name}: forward {medians[name, 0]:.0f}, forward and backward {medians[name, 1]:.0f}")
        own = medians["epx.torch.MoELayer", 1]
        best = min(medians[name, 1] for name in programs if name.startswith("all_to_all"))
        beside_c = 100 * (own / medians["C block", 1] - 1)
        say(f"{words}: forward and backward: {best / own:.2f} x the native path, {beside_c:+.1f} % beside the C block")
    with torch.no_grad():
        wanted = native.forward(tokens, logits, True).float()
        difference = (wanted - layer(tokens, logits=logits).float()).norm() / wanted.norm()
        say(f"relative difference of the outputs: {float(difference):.1e}")
    group.check()
    layer.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def c_block(layer, tokens, logits, grad_out):
    """The block's two calls on tensors that were allocated before."""
    first, down = layer.first_weight.detach(), layer.down_weight.detach()
    keep = [torch.empty_like(each) for each in (tokens.detach(), logits.detach(), tokens.detach(), first, down)]
    out, grad_logits, grad_tokens, grad_first, grad_down = keep
    size = ctypes.sizeof(_moe_structs.FfnParams)
    params = _moe_structs.FfnParams(struct_size=size, gate_up_weight=view(first), down_weight=view(down))
    grads = _moe_structs.FfnParams(struct_size=size, gate_up_weight=view(grad_first), down_weight=view(grad_down))
    cuda = (ctypes.c_int64 * 6)(
        48, torch.cuda.current_stream().cuda_stream or 0, 0, 0, 0, 0
    )  # an epx_moe_cuda with a stream alone
    forward = _moe_structs.BlockFwdArgs(
        struct_size=ctypes.sizeof(_moe_structs.BlockFwdArgs),
        cuda=ctypes.addressof(cuda),
        tokens=view(tokens.detach()),
        logits=view(logits.detach()),
        params=ctypes.pointer(params),
        out=view(out),
    )
    backward = _moe_structs.BlockBwdArgs(
        struct_size=ctypes.sizeof(_moe_structs.BlockBwdArgs),
        cuda=ctypes.addressof(cuda),
        params=ctypes.pointer(params),
        grad_out=view(grad_out),
        grad_tokens=view(grad_tokens),
        grad_logits=view(grad_logits),
        grads=ctypes.pointer(grads),
    )

    def check(status):
        if status:
            raise RuntimeError(_structs.epx_last_error().decode())

    kept = (keep, cuda, params, grads)
    return (
        lambda: check(_moe_structs.epx_moe_block_fwd(layer._memory.value, forward)) or kept and None,
        lambda: check(_moe_structs.epx_moe_block_bwd(layer._memory.value, backward)) or kept and None,
    )


if __name__ == "__main__":
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if RANK == 0 or ON_GPU:
        overhead()
    if ON_GPU:
        layers()
